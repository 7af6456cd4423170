"""What a contestant is told: one JSON file that the parent writes and the child reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunebook.types import LoraConfig

RANK = 16
ALPHA = 32
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = LoraConfig(rank=RANK, alpha=ALPHA, dropout=0.0, target_modules=LINEARS, seed=0, rslora=False)
BETA = 0.1
GROUP_SIZE = 8
NEW_TOKENS = 64
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}


@dataclass(frozen=True)
class Spec:
    """One contestant's part in one case."""

    contestant: str
    """`ours`, `plain`, `trl` or `trl_tuned`."""
    case: str
    """`sft`, `dpo` or `grpo`."""
    model: str
    """As `tunebook.models.resolve_model` takes it."""
    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """`fp32` or `bf16`."""
    steps: int
    """Optimizer steps, the warm-up step included."""
    learning_rates: tuple[float, ...]
    """One for each adapter; TRL trains one."""
    adapter: str
    """Folder of the PEFT adapter that everybody starts from."""
    workload: str
    """JSON file with the tokens of every step."""
    folder: str
    """The contestant's own scratch folder."""
    threads: int
    """Of torch; 0 = torch's own choice."""
    checkpointing: bool
    """TRL recomputes activations in the backward pass."""
    trl_bf16: str
    """`autocast` over float32 weights, which is TRL's default, or bfloat16 `weights`."""
    micro_batch: int
    """Rows (pairs) that `trl_tuned` computes at once."""

    @property
    def gradients(self) -> Path:
        """Where the adapter gradient of the warm-up step goes."""
        return Path(self.folder) / "gradients.npz"

    def write(self) -> Path:
        """Writes the file that `read` reads; returns its path."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "spec.json"
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Spec:
        """The spec in a file."""
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values["learning_rates"] = tuple(values["learning_rates"])
        return cls(**values)


def read_workload(spec: Spec) -> dict[str, Any]:
    """The workload of a contestant; see `benchmarks.workload`."""
    return json.loads(Path(spec.workload).read_text(encoding="utf-8"))
