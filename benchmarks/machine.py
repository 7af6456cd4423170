"""What the figures were measured on: machine, versions, command, date."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy")


def circumstances() -> dict[str, Any]:
    """Everything beside the figures that a reader needs to judge or repeat them."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python -m benchmarks " + shlex.join(shown_arguments(sys.argv[1:])),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": versions(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def shown_arguments(arguments: list[str]) -> list[str]:
    """Arguments as they may be published: of a path only its last part."""
    return [Path(each).name if Path(each).is_absolute() else each for each in arguments]


def versions() -> dict[str, str]:
    """Package -> version of those that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, memory, and GPU if there is one."""
    import torch

    described: dict[str, Any] = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    memory = Path("/proc/meminfo")
    if memory.exists():
        described["memory_gib"] = round(int(memory.read_text().split()[1]) / 2**20, 1)
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def processor() -> str:
    """Name of the processor."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
