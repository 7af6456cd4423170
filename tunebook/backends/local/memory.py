"""Memory that can still be allocated."""

from pathlib import Path

import torch

TRAINED_BYTES = 20
"""Of a parameter that is trained: itself, its gradient, two moments, and a published copy."""
SHARE_OF_ADAPTERS = 0.3
"""Of the free memory; the base and the activations need the rest."""


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    return min((free for free in (_free_of_machine(), _free_of_group()) if free), default=None)


def adapters_that_fit(device: torch.device, parameters: int) -> int | None:
    """Adapters that can be trained at once; at least 1, None where the system does not tell.

    Args:
        device: of all of them.
        parameters: of each.
    """
    free = free_memory(device)
    if free is None or parameters == 0:
        return None
    return max(int(SHARE_OF_ADAPTERS * free / (TRAINED_BYTES * parameters)), 1)


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_of_group() -> int | None:
    """What the limit of a container leaves."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except OSError:
        return None
    return None if limit == "max" else int(limit) - used
