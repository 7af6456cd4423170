"""The process of one contestant, started by a contest: `python -m benchmarks.contestant <spec>`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from benchmarks.spec import Spec
from benchmarks.turns import Turns, keep_freed_memory


def main() -> int:
    """Competes as the spec file says."""
    spec = Spec.read(Path(sys.argv[1]))
    os.environ["HF_DATASETS_CACHE"] = str(Path(spec.folder) / "datasets")
    turns = Turns(spec.device)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    facts = {"threads": torch.get_num_threads()}
    if spec.contestant == "trl_tuned":
        facts["keeps_freed_memory"] = keep_freed_memory()
        torch.set_float32_matmul_precision("medium")
    turns.facts(**facts)
    if spec.contestant.startswith("trl"):
        from benchmarks import trl_trainers

        trl_trainers.compete(spec, turns)
    else:
        from benchmarks import ours

        ours.compete(spec, turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
