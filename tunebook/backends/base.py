"""The protocol between a recipe and whatever computes: local torch or a hosted service.

Calls on one session take effect in call order. `result()` only waits. An exception surfaces at
`result()` and makes later results of that session raise too. An operation is never resubmitted: a
second `forward_backward` would add its gradient twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from tunebook.types import (
    CheckpointRef,
    Completion,
    Datum,
    Estimate,
    LoraConfig,
    Metrics,
    OptimizerParams,
    SamplingParams,
    Workload,
)

if TYPE_CHECKING:
    from torch import Tensor

T_co = TypeVar("T_co", covariant=True)

LossFn: TypeAlias = "Callable[..., tuple[Tensor, Mapping[str, Tensor]]]"
"""`loss(logprobs, *, <columns>) -> (scalar, metrics)`, hyper-parameters bound by functools.partial.

`logprobs` and per-token columns are `[B, T]`, per-sequence columns `[B]`. The scalar and every
metric are sums whose divisor is in `token_weights`, so the value of a step is the sum over its
micro-batches.
"""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do, known before anything is opened."""

    max_sessions: int
    has_generator: bool
    full_weight: bool
    optimizers: frozenset[str]
    losses: frozenset[str] | None
    """Names of the losses it can compute; None = any Python function."""
    max_seq_len: int | None
    """Tokens; None = no limit of its own."""
    temperature: bool
    """Reads the column `temperature` of a datum; see `Session.forward`."""
    stop_ids: bool = True
    """Completions can end at token ids, not at strings only."""
    bills: bool = False
    """An hour of it costs money: `estimate` asks the price, takes no time, and is part of
    `prepare`."""
    files: bool = True
    """Its checkpoints are folders of this machine; False = the service keeps them by an id."""
    lora_alpha: float | None = None
    """Of all its adapters, whatever a config says; None = as the config says."""
    lora_dropout: bool = True
    """Its adapters can have dropout."""


class Future(Protocol[T_co]):
    """The result of an operation that was submitted or queued."""

    def result(self) -> T_co:
        """Waits for the operation and returns its value, or raises what it raised."""
        ...


class Generator(Protocol):
    """Samples from the weights of one publish."""

    @property
    def version(self) -> int:
        """Counts the publishes of its session, from 1."""
        ...

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, num_samples: int
    ) -> Future[list[list[Completion]]]:
        """Draws `num_samples` completions for each prompt.

        Raises:
            StaleGenerator: the session has published again since.
        """
        ...


class Session(Protocol):
    """One adapter (or the full weights) being trained."""

    @property
    def trainable_parameters(self) -> int | None:
        """Number of parameters that an optimizer step changes; None = the service does not say."""
        ...

    def forward(self, data: Sequence[Datum]) -> Future[list["Tensor"]]:
        """Log-probs of the target tokens, `[T_i]` float32 each, without gradients or dropout.

        Where a datum has `token_weights`, positions of weight 0 are not computed and are NaN. Where
        it has the column `temperature`, one float above 0, they are those of
        softmax(logits / temperature), which is what a sampler at this temperature draws from.
        """
        ...

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: LossFn, *, rows_per_unit: int = 1
    ) -> Future[Metrics]:
        """Adds the gradient of `loss_fn` over `data`; returns `loss` and its metrics, summed.

        The log-probs that the loss is given follow the column `temperature` as in `forward`.

        Args:
            data: rows of this step, or a part of them.
            loss_fn: see `LossFn`.
            rows_per_unit: consecutive rows that must meet in one micro-batch (preference pairs: 2).
        """
        ...

    def optim_step(self, params: OptimizerParams) -> Future[Metrics]:
        """Applies the gradient and clears it; returns `grad_norm` (before clipping).

        Raises:
            NonFiniteError: at `result()`; nothing was applied and later steps are refused.
        """
        ...

    def publish_weights(self) -> Future[Generator]:
        """A generator over the weights as they are now; earlier generators become stale."""
        ...

    def save(self, name: str) -> Future[CheckpointRef]:
        """Saves all that is needed to go on: weights, optimizer state, random state."""
        ...

    def export(self, ref: CheckpointRef, directory: Path) -> Path:
        """Writes the weights of a checkpoint as a PEFT adapter or full HF model; returns where.

        The folder also holds the tokenizer, so that it loads by itself.
        """
        ...

    def discard(self, ref: CheckpointRef) -> None:
        """Deletes a checkpoint that this session saved; a checkpoint already gone is no error."""
        ...

    def close(self) -> None:
        """Frees what the session holds; a second call does nothing."""
        ...


class Backend(Protocol):
    """One base model (locally) or one model resource (remotely)."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; answers without opening anything."""
        ...

    def estimate(self, workload: Workload) -> Estimate:
        """What the workload will take; creates nothing that lasts or bills."""
        ...

    def check(self, lora: LoraConfig | None, start: CheckpointRef | None) -> int | None:
        """Number of parameters that would be trained, if the model can be trained so at all.

        None = not known before a session is opened. Loads no weights and opens nothing, so what
        needs weights to be seen is left to `open_session`: another base of the same architecture,
        damaged files.

        Args:
            lora: the adapter; None = full weights.
            start: what `open_session` is going to restore; None = nothing.

        Raises:
            ConfigError: the adapter does not fit the model, or the model cannot be trained.
            CheckpointError: `start` is not there, or of another adapter.
        """
        ...

    def open_session(
        self,
        name: str,
        lora: LoraConfig | None,
        *,
        directory: Path,
        restore: CheckpointRef | None = None,
        with_optimizer: bool = True,
    ) -> Session:
        """Opens a session.

        Args:
            name: unique among the open sessions.
            lora: the adapter; None trains the full weights.
            directory: where checkpoints go if this backend keeps them as files; what saves that
                were cut short have left there is removed.
            restore: a checkpoint, or a PEFT adapter, to begin from.
            with_optimizer: restore optimizer state and step as well; False takes weights only.
        """
        ...

    def close(self) -> None:
        """Stops an owned resource, detaches from a borrowed one; a second call does nothing."""
        ...
