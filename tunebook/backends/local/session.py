"""One adapter, or the full weights, being trained on this machine.

Legend: B rows, T tokens.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tunebook.backends.base import Future, Generator, LossFn
from tunebook.backends.local import checkpoint, optimizers
from tunebook.backends.local.allocator import GIVE_BACK_EVERY, give_back_freed_memory
from tunebook.backends.local.base_model import BaseModel
from tunebook.backends.local.checkpoint import CheckpointState
from tunebook.backends.local.engine.engine import Engine, Job
from tunebook.backends.local.execution import MicroBatch, check_units, micro_batches
from tunebook.backends.local.export import export_adapter, export_full_model
from tunebook.backends.local.fit import check_fits
from tunebook.backends.local.generator import LocalGenerator
from tunebook.backends.local.logprobs import (
    collate,
    collate_columns,
    supervised,
    target_logprobs,
)
from tunebook.backends.local.queue import Joint, Lane, OperationQueue
from tunebook.backends.local.vllm_generator import AdapterPublisher, VllmGenerator
from tunebook.backends.local.weights import (
    AdapterWeights,
    TrainedWeights,
    check_finite,
    layer_names,
    snapshot,
)
from tunebook.columns import required_columns
from tunebook.errors import BackendError, CheckpointError, NonFiniteError
from tunebook.losses import loss_and_metrics
from tunebook.types import CheckpointRef, Datum, Metrics, OptimizerParams


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What a session takes from its backend."""

    directory: Path
    """Checkpoints go here."""
    micro_batch_tokens: int
    max_seq_len: int | None
    export_name: str
    """What an exported adapter calls its base model."""
    load_tokenizer: Callable[[], PreTrainedTokenizerBase]
    publisher: AdapterPublisher | None = None
    """Hands published adapters to vLLM; None = torch samples."""


INDEPENDENT = "the loss does not depend on the log-probs it was given"


@dataclass(slots=True)
class _Losses:
    """A loss function and the sums of what it returned for the parts of one operation."""

    loss_fn: LossFn
    names: Sequence[str]
    """Of the columns it reads."""
    totals: Metrics = field(default_factory=lambda: {"loss": 0.0})


class LocalSession:
    """One adapter (or the full weights) being trained; see `tunebook.backends.base.Session`."""

    def __init__(
        self,
        name: str,
        *,
        base: BaseModel,
        engine: Engine | None,
        weights: TrainedWeights,
        queue: OperationQueue,
        settings: SessionSettings,
        on_close: Callable[[], None],
    ) -> None:
        self.name = name
        self.step = 0
        """Optimizer steps that the weights have seen."""
        self._base = base
        self._engine = engine
        self._weights = weights
        self._queue = queue
        self._settings = settings
        self._on_close = on_close
        self._lane = Lane(name)
        self._optimizer: optimizers.Optimizer | None = None
        self._has_gradient = False
        self._version = 0
        self._generator: Callable[[], LocalGenerator | None] = lambda: None

    @property
    def pads(self) -> bool:
        """Whether rows of a micro-batch are computed as long as the longest of them."""
        return self._engine is None and not self._base.streams

    @property
    def trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._weights.parameters.values())

    def forward(self, data: Sequence[Datum]) -> Future[list[Tensor]]:
        rows = list(data)
        engine = self._engine
        if engine is None:
            return self._queue.submit(self._lane, "forward", lambda: self._forward(rows))
        joint: Joint[Job, list[Tensor]] = Joint(
            kind="forward",
            begin=lambda: self._begin_job(engine, rows, score=None, rows_per_unit=1),
            run=lambda jobs: self._run_jobs(engine, jobs),
            finish=lambda job: [job.logprobs[row] for row in range(len(rows))],
            drop=lambda: None,
        )
        return self._queue.submit(self._lane, "forward", joint)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: LossFn, *, rows_per_unit: int = 1
    ) -> Future[Metrics]:
        rows = list(data)
        engine = self._engine
        if engine is None:
            return self._queue.submit(
                self._lane,
                "forward_backward",
                lambda: self._forward_backward(rows, loss_fn, rows_per_unit=rows_per_unit),
            )
        losses = _Losses(loss_fn, required_columns(loss_fn))
        joint: Joint[Job, Metrics] = Joint(
            kind="forward_backward",
            begin=lambda: self._begin_job(
                engine,
                rows,
                score=lambda numbers, logprobs: self._score(
                    [rows[number] for number in numbers], logprobs, losses
                ),
                rows_per_unit=rows_per_unit,
            ),
            run=lambda jobs: self._run_jobs(engine, jobs),
            finish=lambda job: self._finish_job(job, losses),
            drop=self._clear_gradients,
        )
        return self._queue.submit(self._lane, "forward_backward", joint)

    def optim_step(self, params: OptimizerParams) -> Future[Metrics]:
        return self._queue.submit(self._lane, "optim_step", lambda: self._optim_step(params))

    def publish_weights(self) -> Future[Generator]:
        return self._queue.submit(self._lane, "publish_weights", self._publish_weights)

    def save(self, name: str) -> Future[CheckpointRef]:
        return self._queue.submit(self._lane, "save", lambda: self._save(name))

    def export(self, ref: CheckpointRef, directory: Path) -> Path:
        return export_checkpoint(self._base, ref, directory, self._settings)

    def discard(self, ref: CheckpointRef) -> None:
        checkpoint.discard(ref, self._settings.directory)

    def close(self) -> None:
        if self._lane.closed:
            return
        self._queue.close_lane(self._lane)
        self._weights.drop_gradients()
        for parameter in self._weights.parameters.values():
            parameter.requires_grad_(False)
        self._optimizer = None
        if self._settings.publisher is not None:
            self._settings.publisher.close()
        self._on_close()

    def restore(self, ref: CheckpointRef, *, with_optimizer: bool) -> None:
        """Takes over a checkpoint of the same base and adapter shape.

        Raises:
            CheckpointError: incomplete, or of another base or adapter.
        """
        state = checkpoint.read_state(ref.path)
        check_fits(state, self._base, self._weights.lora, layer_names(self._weights), path=ref.path)
        self.load_weights(checkpoint.read_weights(ref.path, state), path=ref.path)
        if not with_optimizer:
            return
        self.step = state.step
        if state.optimizer is not None:
            self._optimizer = self._make_optimizer(state.optimizer)
            optimizers.load_optimizer_state(
                self._optimizer,
                self._weights.parameters,
                checkpoint.read_optimizer(ref.path, state),
                untouched=state.untouched,
                path=ref.path / checkpoint.OPTIMIZER_FILE,
            )
        if self._weights.generator is not None:
            if state.random is None:
                raise CheckpointError(
                    f"{ref.path}: trained without lora.dropout, so it cannot be continued exactly "
                    "with it; start from its weights only"
                )
            checkpoint.unpack_random_state(self._weights.generator, state.random)

    def load_weights(self, tensors: dict[str, Tensor], *, path: Path) -> None:
        """Copies tensors into the parameters.

        Raises:
            CheckpointError: names or shapes differ.
        """
        parameters = self._weights.parameters
        checkpoint.check_tensors(parameters, tensors, path=path)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])

    def _forward(self, data: list[Datum]) -> list[Tensor]:
        check_data(data, self._base, self._settings.max_seq_len)
        logprobs: list[Tensor] = [torch.empty(0)] * len(data)
        with torch.no_grad(), self._weights.applied(dropout=False), self._explaining_memory():
            for micro_batch in self._plan(data, rows_per_unit=1):
                rows = [data[row] for row in micro_batch.rows]
                batch = collate(rows, num_columns=micro_batch.num_columns, device=self._base.device)
                logprobs_BT = target_logprobs(self._base, batch, fill=math.nan).cpu()
                for row, row_logprobs in zip(micro_batch.rows, logprobs_BT, strict=True):
                    # A copy: a view would keep the padded batch alive.
                    logprobs[row] = row_logprobs[: data[row].num_scored].clone()
        return logprobs

    def _forward_backward(
        self, data: list[Datum], loss_fn: LossFn, *, rows_per_unit: int
    ) -> Metrics:
        check_data(data, self._base, self._settings.max_seq_len)
        losses = _Losses(loss_fn, required_columns(loss_fn))
        with self._weights.applied(dropout=True), self._dropping_gradients_on_failure():
            for micro_batch in self._plan(data, rows_per_unit=rows_per_unit):
                rows = [data[row] for row in micro_batch.rows]
                batch = collate(rows, num_columns=micro_batch.num_columns, device=self._base.device)
                replay = None if self._weights.generator is None else self._weights.replay
                logprobs_BT = target_logprobs(self._base, batch, fill=0.0, replay=replay)
                loss = self._loss(rows, logprobs_BT, losses)
                if loss is not None:
                    loss.backward()
            self._weights.collect_gradients()
        self._has_gradient = True
        return losses.totals

    def _begin_job(
        self,
        engine: Engine,
        rows: list[Datum],
        *,
        score: Callable[[Sequence[int], Tensor], Tensor | None] | None,
        rows_per_unit: int,
    ) -> Job:
        check_data(rows, self._base, self._settings.max_seq_len)
        assert isinstance(self._weights, AdapterWeights)
        check_units(len(rows), rows_per_unit=rows_per_unit)
        return Job(
            rows=rows,
            adapter=self._weights.applied_to(engine.decoder),
            score=score,
            rows_per_unit=rows_per_unit,
        )

    def _run_jobs(self, engine: Engine, jobs: list[Job]) -> None:
        with self._explaining_memory():
            engine.run(jobs, max_tokens=self._settings.micro_batch_tokens)

    def _score(self, rows: list[Datum], logprobs: Tensor, losses: "_Losses") -> Tensor | None:
        """The gradient of the loss with respect to log-probs `[B, T]`; None = it is 0."""
        leaf = logprobs.detach().requires_grad_()
        with torch.enable_grad():
            # A copy, so that a loss may write into what it is given.
            loss = self._loss(rows, leaf.clone(), losses)
        if loss is None:
            return None
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if gradient is None:
            raise BackendError(INDEPENDENT)
        return gradient

    def _finish_job(self, job: Job, losses: "_Losses") -> Metrics:
        if job.error is not None:
            raise job.error
        assert isinstance(self._weights, AdapterWeights) and job.adapter is not None
        if job.has_gradient:
            self._weights.add_gradients(job.adapter)
        self._has_gradient = True
        return losses.totals

    def _loss(self, rows: list[Datum], logprobs_BT: Tensor, losses: "_Losses") -> Tensor | None:
        """The loss of some rows, added to the totals; None where no row carries weight."""
        columns = collate_columns(
            rows, losses.names, num_columns=logprobs_BT.shape[1], device=logprobs_BT.device
        )
        returned = losses.loss_fn(logprobs_BT, **columns)
        loss, metrics = loss_and_metrics(losses.loss_fn, returned)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteError(
                f"session {self.name!r}, step {self.step + 1}: the loss is {value}; the gradient "
                "was dropped and no step is taken. Look at the rows of this step, or lower "
                "optimizer.learning_rate"
            )
        for name, metric in {"loss": value, **metrics}.items():
            losses.totals[name] = losses.totals.get(name, 0.0) + metric
        if loss.requires_grad:
            return loss
        if any(supervised(datum).any() for datum in rows):
            raise BackendError(INDEPENDENT)
        return None

    def _optim_step(self, params: OptimizerParams) -> Metrics:
        optimizers.check_params(params)
        if not self._has_gradient:
            raise BackendError(
                f"session {self.name!r}: optim_step without a forward_backward since the last one"
            )
        kind = optimizers.kind_of(params)
        if kind == optimizers.MUON and self._weights.lora is not None:
            raise BackendError(
                "optimizer.kind=muon needs full weights (lora=null): the factors of an adapter are "
                "not the matrices it is made for; use adamw"
            )
        if self._optimizer is None:
            self._optimizer = self._make_optimizer(kind)
        optimizers.require_kind(self._optimizer, params)

        parameters = self._weights.parameters
        norm = optimizers.gradient_norm(parameters)
        if not math.isfinite(norm):
            self._clear_gradients()
            raise NonFiniteError(
                f"session {self.name!r}, step {self.step + 1}: the gradient norm is {norm}; the "
                "update was not applied and later steps are refused"
            )
        self._keep_published_weights()
        optimizers.clip_gradients(parameters, norm=norm, max_norm=params.max_grad_norm)
        optimizers.apply_step(self._optimizer, params)
        self._clear_gradients()
        self.step += 1
        if self._engine is not None and self.step % GIVE_BACK_EVERY == 0:
            give_back_freed_memory()
        return {"grad_norm": norm}

    def _publish_weights(self) -> Generator:
        if self._settings.publisher is not None:
            return self._publish_to_vllm(self._settings.publisher)
        self._version += 1
        generator = LocalGenerator(
            version=self._version,
            base=self._base,
            engine=self._engine,
            weights=self._weights,
            queue=self._queue,
            lane=self._lane,
            current_version=lambda: self._version,
            batch_tokens=4 * self._settings.micro_batch_tokens,
            max_seq_len=self._settings.max_seq_len,
            load_tokenizer=self._settings.load_tokenizer,
        )
        self._generator = weakref.ref(generator)
        return generator

    def _publish_to_vllm(self, publisher: AdapterPublisher) -> Generator:
        lora = self._weights.lora
        assert lora is not None
        tokenizer = self._settings.load_tokenizer()
        adapter = publisher.publish(
            self._version + 1,
            lambda folder: export_adapter(
                self._base.model,
                snapshot(self._weights),
                folder,
                lora=lora,
                targets=layer_names(self._weights),
                base_name=self._settings.export_name,
                tokenizer=tokenizer,
            ),
        )
        self._version += 1
        generator = VllmGenerator(
            vllm=publisher.engine,
            adapter=adapter,
            version=self._version,
            base=self._base,
            weights=self._weights,
            queue=self._queue,
            lane=self._lane,
            current_version=lambda: self._version,
            batch_tokens=4 * self._settings.micro_batch_tokens,
            max_seq_len=publisher.max_seq_len,
            load_tokenizer=self._settings.load_tokenizer,
        )
        # vLLM has its own copy, but prompts are scored and answers streamed by torch.
        self._generator = weakref.ref(generator)
        return generator

    def _keep_published_weights(self) -> None:
        # They are copied when they are about to change, and only if somebody can still sample.
        generator = self._generator()
        if generator is not None and generator.values is None:
            generator.values = snapshot(self._weights)

    def _save(self, name: str) -> CheckpointRef:
        if self._has_gradient:
            raise BackendError(
                f"session {self.name!r}: save({name!r}) between forward_backward and optim_step, "
                "the gradient would be lost"
            )
        checkpoint.check_name(name)
        check_finite(self._weights, action=f"save {name!r}")
        folder = self._settings.directory / name
        optimizer_tensors: dict[str, Tensor] = {}
        untouched: tuple[str, ...] = ()
        if self._optimizer is not None:
            parameters = self._weights.parameters
            optimizer_tensors = optimizers.optimizer_state(self._optimizer, parameters)
            untouched = optimizers.without_state(self._optimizer, parameters)
        checkpoint.save_checkpoint(
            folder,
            weights=self._weights.parameters,
            optimizer=optimizer_tensors,
            state=CheckpointState(
                step=self.step,
                optimizer=self._optimizer.kind if self._optimizer else None,
                untouched=untouched,
                lora=self._weights.lora,
                targets=layer_names(self._weights),
                base_name=self._base.name,
                base_fingerprint=self._base.fingerprint,
                random=checkpoint.pack_random_state(self._weights.generator),
            ),
        )
        return CheckpointRef(name=name, location=str(folder), has_optimizer=True)

    def _make_optimizer(self, kind: str) -> optimizers.Optimizer:
        if kind == optimizers.ADAMW:
            return optimizers.make_adamw(self._weights.parameters)
        tables = optimizers.look_up_tables(self._base.model, self._base.head)
        return optimizers.make_muon(self._weights.parameters, not_matrices=tables)

    def _plan(self, data: list[Datum], *, rows_per_unit: int) -> list[MicroBatch]:
        return micro_batches(
            [datum.num_scored for datum in data],
            rows_per_unit=rows_per_unit,
            max_tokens=self._settings.micro_batch_tokens,
        )

    def _clear_gradients(self) -> None:
        self._weights.drop_gradients()
        self._has_gradient = False

    @contextmanager
    def _dropping_gradients_on_failure(self) -> Iterator[None]:
        try:
            with self._explaining_memory():
                yield
        except BaseException:
            self._clear_gradients()
            raise

    @contextmanager
    def _explaining_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"out of memory on {self._base.device}: lower backend.micro_batch_tokens "
                f"(now {self._settings.micro_batch_tokens}) or max_seq_len"
            ) from error


def check_data(data: Sequence[Datum], base: BaseModel, max_seq_len: int | None) -> None:
    """Returns if rows can go through a model.

    Args:
        data: the rows.
        base: the model.
        max_seq_len: of the model, tokens; None = not known.

    Raises:
        BackendError: a row is too long, of another tokenizer, or has no good temperature.
    """
    for row, datum in enumerate(data):
        if max_seq_len is not None and datum.num_scored > max_seq_len:
            raise BackendError(
                f"row {row} has {datum.num_scored} tokens, {base.name} takes {max_seq_len}; "
                "lower max_seq_len"
            )
        if datum.tokens.min() < 0 or datum.tokens.max() >= base.vocab_size:
            raise BackendError(
                f"row {row} holds a token id outside 0..{base.vocab_size - 1}: the tokenizer does "
                f"not belong to {base.name}"
            )
        temperature = datum.columns.get("temperature", 1.0)
        if not isinstance(temperature, Real) or not 0 < temperature < math.inf:
            raise BackendError(
                f"row {row} has the temperature {temperature!r}; the column `temperature` is one "
                "number above 0"
            )


def export_checkpoint(
    base: BaseModel, ref: CheckpointRef, directory: Path, settings: SessionSettings
) -> Path:
    """Writes a checkpoint as a PEFT adapter or a full model; returns where.

    Args:
        base: the model it is over.
        ref: the checkpoint.
        directory: where to.
        settings: of the session.
    """
    state = checkpoint.read_state(ref.path)
    tensors = checkpoint.read_weights(ref.path, state)
    tokenizer = settings.load_tokenizer()
    if state.lora is None:
        return export_full_model(base, tensors, directory, tokenizer=tokenizer)
    return export_adapter(
        base.model,
        tensors,
        directory,
        lora=state.lora,
        targets=state.targets,
        base_name=settings.export_name,
        tokenizer=tokenizer,
    )
