"""The data types that every part of tunebook shares. Legend: T scored tokens of a sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
Column: TypeAlias = FloatArray | float
Metrics: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True)
class Datum:
    """One token sequence with the columns that a loss reads.

    Column entry i belongs to `tokens[i + 1]`, the token it scores, so nobody shifts anything.
    """

    tokens: IntArray
    """`[T + 1]` token ids."""
    columns: Mapping[str, Column] = field(default_factory=dict[str, Column])
    """Name -> `[T]` float32 for a per-token column, or one float for the whole sequence.
    `token_weights` carries mask and divisor; where it is 0 no loss may depend on the log-prob."""

    def __post_init__(self) -> None:
        num_scored = len(self.tokens) - 1
        if num_scored < 1:
            raise ValueError(f"a datum needs at least 2 tokens, got {len(self.tokens)}")
        for name, column in self.columns.items():
            if not isinstance(column, int | float) and len(column) != num_scored:
                raise ValueError(
                    f"column {name!r} has {len(column)} entries, but {num_scored} tokens are scored"
                )

    @property
    def num_scored(self) -> int:
        """T, the number of scored tokens."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """A low-rank adapter: every target weight W becomes W + scale * B A."""

    rank: int
    alpha: float
    dropout: float
    """Share of adapter inputs zeroed while training. Masks are drawn per micro-batch, so on local
    torch they change with `backend.micro_batch_tokens`."""
    target_modules: str | tuple[str, ...]
    """`all-linear` (every linear layer of the text decoder) or suffixes of module names."""
    seed: int
    """Seed of the initial A; B starts at 0."""
    rslora: bool
    """Scale by alpha / sqrt(rank) instead of alpha / rank. Source: arXiv:2312.03732."""

    @property
    def scale(self) -> float:
        """The factor in front of B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Every setting of one AdamW step; all are sent at every step, services disagree on defaults.

    Source: arXiv:1711.05101 (decoupled weight decay).
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    """Global gradient norm above which gradients are scaled down; 0 = off."""


@dataclass(frozen=True, slots=True)
class MuonParams:
    """Every setting of one Muon step. Matrices use Muon, all other parameters `adam`.

    Learning rates are scaled to match AdamW's update size (`match_rms_adamw`), so one
    `learning_rate` serves both.
    """

    learning_rate: float
    momentum: float
    newton_schulz_steps: int
    weight_decay: float
    max_grad_norm: float
    adam: AdamParams


OptimizerParams: TypeAlias = AdamParams | MuonParams


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are drawn."""

    max_tokens: int
    temperature: float
    """0 = greedy."""
    top_p: float
    top_k: int
    """0 = off."""
    stop: tuple[str | int, ...]
    """Strings or token ids that end a completion, besides the model's own end tokens."""
    seed: int | None


class StopReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, as the sampler produced it."""

    tokens: IntArray
    """`[N]` sampled ids, the end token included when it was sampled."""
    logprobs: FloatArray
    """`[N]` log-probs (nats) of those ids under the sampling distribution."""
    stop_reason: StopReason
    version: int
    """Version of the weights that produced it."""


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """Names a saved training state: weights, optimizer state, step."""

    name: str
    location: str
    """A folder (local backend) or the service's own identifier."""
    has_optimizer: bool

    @property
    def path(self) -> Path:
        """The folder of a local checkpoint."""
        return Path(self.location)


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run is going to ask of a backend, for an estimate before anything is spent."""

    lengths: Sequence[int]
    """Tokens of every training row."""
    eval_lengths: Sequence[int]
    supervised: Sequence[int]
    """Tokens of every training row that carry loss."""
    batch_size: int
    """Rows of a step: data, of which a preference pair has two."""
    planned_steps: int
    num_evaluations: int
    lora: LoraConfig | None
    sample: Sequence[Datum]
    """Rows of a typical step, for a backend that can measure."""
    scored_lengths: Sequence[int] = ()
    """Tokens of every row that goes forward once before training, for a reference policy."""

    @property
    def train_tokens(self) -> int:
        """Tokens through forward and backward over the whole plan."""
        num_batches = -(-len(self.lengths) // self.batch_size)
        return round(sum(self.lengths) * self.planned_steps / max(1, num_batches))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a workload is expected to take; None = this backend cannot know."""

    seconds: float | None
    train_tokens: int
    """Forward-and-backward tokens over the whole plan."""
    peak_memory_bytes: int | None
    price: float | None
    """US dollars."""
    basis: str
    """How the figures were found, in words: measured on what, or from which formula."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did; `train` yields one a step."""

    step: int
    """From 1."""
    planned_steps: int
    epoch: float
    """Passes over the training rows so far."""
    metrics: Metrics
    """Of the step: `train/loss`, `train/grad_norm`, `train/learning_rate`, `time/step_s`, ..."""
    evaluation: Metrics | None
    """Metrics of the eval split where this step evaluated, else None."""
    checkpoint: CheckpointRef | None
    """Where this step saved, else None."""
    is_best: bool
    """This evaluation is the best so far."""
    notes: tuple[str, ...] = ()
    """Sentences that a person should see now, such as findings of `tunebook.health`."""
