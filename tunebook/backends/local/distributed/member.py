"""The operations that all processes do together, each on its own rows and its part of the weights.

Every method is called in all processes at once. Within one, the passes through the model and the
exchanges come in the same number and order everywhere: a process with fewer micro-batches computes
empty ones, and one that has an error goes on until all exchange what they found.
Legend: B rows, T tokens.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tunebook.backends.base import LossFn
from tunebook.backends.local import optimizers
from tunebook.backends.local.completions import Sampled
from tunebook.backends.local.distributed.sampling import SamplingTask, sample_rows
from tunebook.backends.local.distributed.sharding import (
    ModelSettings,
    ShardedModel,
    load_sharded_model,
    start,
)
from tunebook.backends.local.distributed.slices import row_slices, sliced_micro_batches
from tunebook.backends.local.distributed.team import Operation, Team
from tunebook.backends.local.execution import MicroBatch
from tunebook.backends.local.logprobs import (
    collate,
    collate_columns,
    supervised,
    target_logprobs,
)
from tunebook.columns import required_columns
from tunebook.errors import BackendError, ConfigError, NonFiniteError
from tunebook.losses import loss_and_metrics
from tunebook.types import Datum, LoraConfig, Metrics, OptimizerParams

EMPTY_ROW = Datum(tokens=np.zeros(2, np.int32), columns={})
"""What a process computes where it has no rows left; it counts for nothing."""


class Member:
    """One process's side of every operation."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.model: ShardedModel | None = None
        self.optimizer: optimizers.Optimizer | None = None
        self.published: dict[str, Tensor] | None = None
        """This process's part of the published weights; None = they have not changed since."""

    def call(self, name: str, *arguments: Any, **own: Any) -> Any:
        """Does an operation in all processes; returns what it returned here, on process 0.

        Args:
            name: of a method.
            arguments: for all processes.
            own: only process 0 gets these.
        """
        operation = Operation(name, arguments)
        return self.team.call(operation, lambda: getattr(self, name)(*arguments, **own))

    def run(self, operation: Operation) -> None:
        """Does what process 0 has sent."""
        getattr(self, operation.name)(*operation.arguments)

    @property
    def loaded(self) -> ShardedModel:
        """The model that is open."""
        assert self.model is not None
        return self.model

    def open(self, settings: ModelSettings, lora: LoraConfig | None) -> None:
        """Loads a model, or makes the one that is loaded as it was when it was new."""
        self.optimizer, self.published = None, None
        kept = self.model
        if kept is not None and lora is not None and (kept.settings, kept.lora) == (settings, lora):
            kept.drop_gradients()
            kept.begin_adapter()
            return
        self.model = None
        error: Exception | None = None
        try:
            device = own_device(settings.device, self.team.local_rank)
            self.model = load_sharded_model(settings, lora, device=device)
        except Exception as failure:
            error = failure
        self.team.agree(error)
        start(self.loaded)

    def release(self) -> None:
        """Frees the model."""
        self.model, self.optimizer, self.published = None, None, None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def forward(self, data: list[Datum]) -> list[Tensor]:
        """Log-probs of all rows on process 0; see `Session.forward`."""
        model, found = self.loaded, []
        with torch.no_grad(), self._explaining_memory():
            for micro_batch in self._own_plan(data, rows_per_unit=1):
                rows, num_columns = rows_of(data, micro_batch)
                logprobs_BT = self._logprobs(rows, num_columns, fill=math.nan).cpu()
                if micro_batch is not None:
                    for row, row_logprobs in zip(micro_batch.rows, logprobs_BT, strict=True):
                        found.append((row, row_logprobs[: data[row].num_scored].numpy().copy()))
        model.settle()
        answers = self.team.gather(found)
        logprobs = dict(pair for answer in answers or [] for pair in answer)
        return [torch.from_numpy(logprobs[row]) for row in sorted(logprobs)]

    def forward_backward(
        self, data: list[Datum], loss_fn: LossFn, rows_per_unit: int, where: str
    ) -> Metrics:
        """Adds the gradient of all rows, and returns the sums over all of them.

        Args:
            data: all rows.
            loss_fn: see `LossFn`.
            rows_per_unit: see `Session.forward_backward`.
            where: session and step, for an error message.
        """
        model = self.loaded
        names = required_columns(loss_fn)
        totals: Metrics = {"loss": 0.0}
        error: Exception | None = None
        with model.drawing_dropout(self.team.rank), self._explaining_memory():
            for micro_batch in self._own_plan(data, rows_per_unit=rows_per_unit):
                rows, num_columns = rows_of(data, micro_batch)
                logprobs_BT = self._logprobs(rows, num_columns, fill=0.0)
                # Depends on the log-probs with gradient 0: every process makes a backward pass.
                loss = torch.where(torch.zeros_like(logprobs_BT, dtype=torch.bool), logprobs_BT, 0)
                loss = loss.sum()
                if micro_batch is not None and error is None:
                    try:
                        columns = collate_columns(
                            rows, names, num_columns=num_columns, device=model.base.device
                        )
                        wanted = any(supervised(datum).any() for datum in rows)
                        value, found = checked_loss(
                            loss_fn, logprobs_BT, columns, wanted=wanted, where=where
                        )
                        loss = loss + value
                        for name, number in found.items():
                            totals[name] = totals.get(name, 0.0) + number
                    except Exception as failure:  # of a user's loss; the others have to know
                        error = failure
                loss.backward()
        if error is not None:
            model.drop_gradients()
        try:
            every = self.team.exchange(totals, error)
        except BaseException:
            model.drop_gradients()
            raise
        summed: Metrics = {}
        for one in every:
            for name, number in one.items():
                summed[name] = summed.get(name, 0.0) + number
        return summed

    def optim_step(self, params: OptimizerParams, keep_published: bool) -> float:
        """The norm of the gradient; where it is finite, the step is made.

        Args:
            params: of this step.
            keep_published: somebody may still sample from the published weights.
        """
        model = self.loaded
        model.collect_gradients()
        gradients = [
            parameter.grad for parameter in model.local.values() if parameter.grad is not None
        ]
        squares = float(sum(gradient.double().square().sum() for gradient in gradients))
        norm = math.sqrt(sum(self.team.exchange(squares, None)))
        if math.isfinite(norm):
            if keep_published and self.published is None:
                self.published = {name: value.clone() for name, value in model.local.items()}
            if self.optimizer is None:
                self.optimizer = optimizers.make_adamw(model.local)
            optimizers.clip_gradients(model.local, norm=norm, max_norm=params.max_grad_norm)
            optimizers.apply_step(self.optimizer, params)
        model.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        """Forgets all gradients."""
        self.loaded.drop_gradients()

    def gather_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[str, ...]]:
        """Whole weights and optimizer state on process 0, in its main memory; empty elsewhere.

        Third, the parameters that no step has reached.
        """
        model = self.loaded
        weights: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        untouched: tuple[str, ...] = ()
        for name, part in model.local.items():
            whole = model.whole(name, part.detach())
            if self.team.leads:
                weights[name] = whole.cpu()
        if self.optimizer is not None:
            untouched = optimizers.without_state(self.optimizer, model.local)
            parts = optimizers.optimizer_state(self.optimizer, model.local)
            for full_name, part in parts.items():
                whole = model.whole(full_name.rpartition(".")[0], part)
                if self.team.leads:
                    state[full_name] = whole.cpu()
        return weights, state, untouched

    def load_weights(
        self, layout: dict[str, torch.Size], tensors: dict[str, Tensor] | None = None
    ) -> None:
        """Takes over weights that process 0 has.

        Args:
            layout: name -> shape of each of them.
            tensors: the weights, in process 0.
        """
        for name, shape in layout.items():
            self.loaded.load(name, self._spread(shape, torch.float32, tensors, name))

    def load_optimizer(
        self,
        kind: str,
        layout: dict[str, tuple[torch.Size, torch.dtype]],
        untouched: tuple[str, ...],
        path: Path,
        tensors: dict[str, Tensor] | None = None,
    ) -> None:
        """Takes over optimizer state that process 0 has; see `load_weights`."""
        model = self.loaded
        assert kind == optimizers.ADAMW
        parts = {
            name: model.part_of(self._spread(shape, dtype, tensors, name)).clone()
            for name, (shape, dtype) in layout.items()
        }
        optimizer = optimizers.make_adamw(model.local)
        error: Exception | None = None
        try:
            optimizers.load_optimizer_state(
                optimizer, model.local, parts, untouched=untouched, path=path
            )
        except Exception as failure:
            error = failure
        self.team.agree(error)
        self.optimizer = optimizer

    def load_random_state(self, state: Tensor) -> None:
        """Takes over the state of the generator of dropout."""
        assert self.loaded.generator is not None
        self.loaded.generator.set_state(state)

    def publish(self) -> None:
        """Makes the weights as they are now the published ones."""
        self.published = None

    def sample(self, task: SamplingTask) -> list[Sampled]:
        """All rows of a task, in order, on process 0; see `Generator.sample`."""
        model = self.loaded
        own = row_slices(
            [len(row.prompt) + row.max_tokens for row in task.rows],
            rows_per_unit=1,
            num_slices=self.team.size,
        )
        current = None
        if self.published is not None:
            current = {name: value.detach().clone() for name, value in model.local.items()}
            self._set_local(self.published)
        try:
            found = sample_rows(model, task, own, team=self.team)
        finally:
            model.settle()
            if current is not None:
                self._set_local(current)
        answers = self.team.gather(found)
        merged = dict(pair for answer in answers or [] for pair in answer)
        return [merged[row] for row in sorted(merged)]

    def _set_local(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.loaded.local[name].copy_(value)

    def _spread(
        self, shape: torch.Size, dtype: torch.dtype, tensors: dict[str, Tensor] | None, name: str
    ) -> Tensor:
        """A tensor of process 0, on the device of every process."""
        device = self.loaded.base.device
        if tensors is None:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        else:
            tensor = tensors[name].to(device=device, dtype=dtype).contiguous()
        dist.broadcast(tensor, src=0)
        return tensor

    def _own_plan(self, data: Sequence[Datum], *, rows_per_unit: int) -> list[MicroBatch | None]:
        """The micro-batches of this process; None = an empty one, while others have more."""
        plans = sliced_micro_batches(
            [datum.num_scored for datum in data],
            rows_per_unit=rows_per_unit,
            max_tokens=self.loaded.settings.micro_batch_tokens,
            num_slices=self.team.size,
        )
        own = plans[self.team.rank]
        return [*own, *[None] * (max(map(len, plans)) - len(own))]

    def _logprobs(self, rows: list[Datum], num_columns: int, *, fill: float) -> Tensor:
        """As `target_logprobs`, and always through the whole model, even if nothing is wanted."""
        model = self.loaded
        wanted = collate(rows, num_columns=num_columns, device=model.base.device)
        computed = wanted
        if not any(supervised(datum).any() for datum in rows):
            selected_BT = torch.zeros_like(wanted.selected)
            selected_BT[0, 0] = True
            computed = replace(wanted, selected=selected_BT)
        replay = model.replay if model.dropout else None
        logprobs_BT = model.run(
            # A copy: FSDP loses its place in the graph if somebody writes into a view.
            lambda: target_logprobs(model.base, computed, fill=fill, replay=replay).clone()
        )
        return torch.where(wanted.selected, logprobs_BT, fill)

    @contextmanager
    def _explaining_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"out of memory on {self.loaded.base.device}: lower backend.micro_batch_tokens "
                f"(now {self.loaded.settings.micro_batch_tokens}) or max_seq_len"
            ) from error


def rows_of(data: Sequence[Datum], micro_batch: MicroBatch | None) -> tuple[list[Datum], int]:
    """The rows of a micro-batch and the longest of them; of None, one that counts for nothing."""
    if micro_batch is None:
        return [EMPTY_ROW], EMPTY_ROW.num_scored
    return [data[row] for row in micro_batch.rows], micro_batch.num_columns


def checked_loss(
    loss_fn: LossFn, logprobs_BT: Tensor, columns: dict[str, Tensor], *, wanted: bool, where: str
) -> tuple[Tensor, Metrics]:
    """The loss of one micro-batch, and `loss` and its metrics as numbers.

    Args:
        loss_fn: see `LossFn`.
        logprobs_BT: `[B, T]`
        columns: those that it reads.
        wanted: any of the log-probs counts.
        where: session and step, for an error message.

    Raises:
        NonFiniteError: the loss is NaN or infinite.
        BackendError: it does not depend on the log-probs.
        ConfigError: it is not what a loss returns.
    """
    loss, metrics = loss_and_metrics(loss_fn, loss_fn(logprobs_BT, **columns))
    value = float(loss.detach())
    if not math.isfinite(value):
        raise NonFiniteError(
            f"{where}: the loss is {value}; the gradient was dropped and no step is taken. Look at "
            "the rows of this step, or lower optimizer.learning_rate"
        )
    if wanted and not loss.requires_grad:
        raise BackendError("the loss does not depend on the log-probs it was given")
    return loss, {"loss": value, **metrics}


def own_device(kind: str, local_rank: int) -> torch.device:
    """The device of this process: each has one of its own.

    Raises:
        ConfigError: there are fewer CUDA devices than processes.
    """
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"{count} CUDA devices for more processes: start at most one process for each "
            "(--nproc-per-node)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
