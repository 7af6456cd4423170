"""The process of one contestant, started by a contest: `python -m benchmarks.contestant <spec>`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.spec import Spec
from benchmarks.turns import Turns, keep_freed_memory

FLOAT32_ROUNDING = 1e-5
"""Largest relative error of a product of this size that is float32's own."""


def main() -> int:
    """Competes as the spec file says."""
    spec = Spec.read(Path(sys.argv[1]))
    os.environ["HF_DATASETS_CACHE"] = str(Path(spec.folder) / "datasets")
    turns = Turns(spec.device)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    facts: dict[str, Any] = {"threads": torch.get_num_threads()}
    if spec.contestant == "trl_tuned":
        facts["keeps_freed_memory"] = keep_freed_memory()
        facts["float32_products"] = fastest_exact_precision()
    turns.facts(**facts)
    if spec.contestant.startswith("trl"):
        from benchmarks import trl_trainers

        trl_trainers.compete(spec, turns)
    else:
        from benchmarks import ours

        ours.compete(spec, turns)
    return 0


def fastest_exact_precision() -> str:
    """Sets and returns the fastest setting of float32 products that still rounds to float32.

    "medium" hands them to oneDNN, which on a processor with matrix tiles (AMX) computes them in
    bfloat16: faster, and not the same loss and gradient.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 256, 256, generator=generator)
    exact = left.double() @ right.double()
    torch.set_float32_matmul_precision("medium")
    error = float(((left @ right) - exact).abs().max() / exact.abs().max())
    if error > FLOAT32_ROUNDING:
        torch.set_float32_matmul_precision("highest")
    return torch.get_float32_matmul_precision()


if __name__ == "__main__":
    sys.exit(main())
