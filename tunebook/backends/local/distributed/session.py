"""The session and the generator of a sharded model, in process 0, which checks before all compute.

Legend: B rows, T tokens.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tunebook.backends.base import Future, Generator, LossFn
from tunebook.backends.local import checkpoint, optimizers
from tunebook.backends.local.checkpoint import CheckpointState
from tunebook.backends.local.completions import check_sampling, end_token_ids, room_for
from tunebook.backends.local.distributed.member import Member
from tunebook.backends.local.distributed.sampling import RowToSample, SamplingTask
from tunebook.backends.local.distributed.sharding import ShardedModel
from tunebook.backends.local.distributed.team import pickled
from tunebook.backends.local.execution import check_units
from tunebook.backends.local.export import check_all_finite
from tunebook.backends.local.fit import check_fits
from tunebook.backends.local.generator import cache_argument
from tunebook.backends.local.queue import Lane, OperationQueue
from tunebook.backends.local.session import SessionSettings, check_data, export_checkpoint
from tunebook.columns import loss_name
from tunebook.errors import BackendError, CheckpointError, NonFiniteError, StaleGenerator
from tunebook.types import (
    CheckpointRef,
    Completion,
    Datum,
    Metrics,
    OptimizerParams,
    SamplingParams,
)


class ShardedSession:
    """One adapter (or the full weights) trained in several processes; see `Session`.

    Its checkpoints are those of one process: whole tensors, which any number of processes restores.
    """

    def __init__(
        self,
        name: str,
        *,
        member: Member,
        queue: OperationQueue,
        settings: SessionSettings,
        on_close: Callable[[], None],
    ) -> None:
        self.name = name
        self.step = 0
        """Optimizer steps that the weights have seen."""
        self._member = member
        self._queue = queue
        self._settings = settings
        self._on_close = on_close
        self._lane = Lane(name)
        self._has_gradient = False
        self._version = 0
        self._generator: Callable[[], ShardedGenerator | None] = lambda: None

    @property
    def pads(self) -> bool:
        """Whether rows of a micro-batch are computed as long as the longest of them."""
        return not self._model.base.streams

    @property
    def trainable_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.sharded.values())

    def forward(self, data: Sequence[Datum]) -> Future[list[Tensor]]:
        rows = list(data)
        return self._queue.submit(self._lane, "forward", lambda: self._forward(rows))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: LossFn, *, rows_per_unit: int = 1
    ) -> Future[Metrics]:
        rows = list(data)
        return self._queue.submit(
            self._lane,
            "forward_backward",
            lambda: self._forward_backward(rows, loss_fn, rows_per_unit),
        )

    def optim_step(self, params: OptimizerParams) -> Future[Metrics]:
        return self._queue.submit(self._lane, "optim_step", lambda: self._optim_step(params))

    def publish_weights(self) -> Future[Generator]:
        return self._queue.submit(self._lane, "publish_weights", self._publish_weights)

    def save(self, name: str) -> Future[CheckpointRef]:
        return self._queue.submit(self._lane, "save", lambda: self._save(name))

    def export(self, ref: CheckpointRef, directory: Path) -> Path:
        return export_checkpoint(self._model.base, ref, directory, self._settings)

    def discard(self, ref: CheckpointRef) -> None:
        checkpoint.discard(ref, self._settings.directory)

    def close(self) -> None:
        if self._lane.closed:
            return
        self._queue.close_lane(self._lane)
        self._on_close()

    def restore(self, ref: CheckpointRef, *, with_optimizer: bool) -> None:
        """Takes over a checkpoint of the same base and adapter shape.

        Raises:
            CheckpointError: incomplete, or of another base or adapter.
        """
        state, model = checkpoint.read_state(ref.path), self._model
        check_fits(state, model.base, model.lora, model.targets, path=ref.path)
        self.load_weights(checkpoint.read_weights(ref.path, state), path=ref.path)
        if not with_optimizer:
            return
        self.step = state.step
        if state.optimizer is not None:
            self._load_optimizer(ref, state, state.optimizer)
        if model.generator is not None:
            if state.random is None:
                raise CheckpointError(
                    f"{ref.path}: trained without lora.dropout, so it cannot be continued exactly "
                    "with it; start from its weights only"
                )
            checkpoint.unpack_random_state(model.generator, state.random)
            self._member.call("load_random_state", model.generator.get_state())

    def load_weights(self, tensors: dict[str, Tensor], *, path: Path) -> None:
        """Spreads whole tensors over the processes.

        Raises:
            CheckpointError: names or shapes differ.
        """
        checkpoint.check_tensors(self._model.sharded, tensors, path=path)
        layout = {name: tensor.shape for name, tensor in tensors.items()}
        self._member.call("load_weights", layout, tensors=tensors)

    @property
    def _model(self) -> ShardedModel:
        return self._member.loaded

    @property
    def _where(self) -> str:
        return f"session {self.name!r}, step {self.step + 1}"

    def _load_optimizer(self, ref: CheckpointRef, state: CheckpointState, kind: str) -> None:
        path = ref.path / checkpoint.OPTIMIZER_FILE
        if kind != optimizers.ADAMW:
            raise CheckpointError(
                f"{path}: holds the state of {kind}, which several processes do not compute; go on "
                "in one process, or start from its weights only"
            )
        tensors = checkpoint.read_optimizer(ref.path, state)
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self._member.call(
            "load_optimizer", kind, layout, tuple(state.untouched), path, tensors=tensors
        )

    def _forward(self, data: list[Datum]) -> list[Tensor]:
        check_data(data, self._model.base, self._settings.max_seq_len)
        return self._member.call("forward", data)

    def _forward_backward(self, data: list[Datum], loss_fn: LossFn, rows_per_unit: int) -> Metrics:
        check_data(data, self._model.base, self._settings.max_seq_len)
        check_units(len(data), rows_per_unit=rows_per_unit)
        require_sendable(loss_fn)
        try:
            totals = self._member.call(
                "forward_backward", data, loss_fn, rows_per_unit, self._where
            )
        except BaseException:
            self._has_gradient = False
            raise
        self._has_gradient = True
        return totals

    def _optim_step(self, params: OptimizerParams) -> Metrics:
        optimizers.check_params(params)
        if not self._has_gradient:
            raise BackendError(
                f"session {self.name!r}: optim_step without a forward_backward since the last one"
            )
        if optimizers.kind_of(params) != optimizers.ADAMW:
            raise BackendError(
                "optimizer.kind=muon needs whole matrices, which several processes do not have; "
                "use adamw, or one process"
            )
        keep = self._generator() is not None
        norm = self._member.call("optim_step", params, keep)
        self._has_gradient = False
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"{self._where}: the gradient norm is {norm}; the update was not applied and later "
                "steps are refused"
            )
        self.step += 1
        return {"grad_norm": norm}

    def _publish_weights(self) -> Generator:
        self._member.call("publish")
        self._version += 1
        generator = ShardedGenerator(
            version=self._version,
            member=self._member,
            queue=self._queue,
            lane=self._lane,
            current_version=lambda: self._version,
            settings=self._settings,
        )
        self._generator = weakref.ref(generator)
        return generator

    def _save(self, name: str) -> CheckpointRef:
        if self._has_gradient:
            raise BackendError(
                f"session {self.name!r}: save({name!r}) between forward_backward and optim_step, "
                "the gradient would be lost"
            )
        checkpoint.check_name(name)
        model, folder = self._model, self._settings.directory / name
        weights, optimizer, untouched = self._member.call("gather_state")
        check_all_finite(weights, folder)
        checkpoint.save_checkpoint(
            folder,
            weights=weights,
            optimizer=optimizer,
            state=CheckpointState(
                step=self.step,
                optimizer=self._member.optimizer.kind if self._member.optimizer else None,
                untouched=untouched,
                lora=model.lora,
                targets=tuple(model.targets),
                base_name=model.base.name,
                base_fingerprint=model.base.fingerprint,
                random=checkpoint.pack_random_state(model.generator),
            ),
        )
        return CheckpointRef(name=name, location=str(folder), has_optimizer=True)


class ShardedGenerator:
    """Samples from the weights of one publish in several processes; see `Generator`."""

    def __init__(
        self,
        *,
        version: int,
        member: Member,
        queue: OperationQueue,
        lane: Lane,
        current_version: Callable[[], int],
        settings: SessionSettings,
    ) -> None:
        self.version = version
        self._member = member
        self._queue = queue
        self._lane = lane
        self._current_version = current_version
        self._settings = settings

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, num_samples: int
    ) -> Future[list[list[Completion]]]:
        rows = [list(prompt) for prompt in prompts]
        return self._queue.submit(
            self._lane,
            "sample",
            lambda: self._sample(rows, params, num_samples),
            poisons=False,  # Sampling changes nothing, so training can go on.
        )

    def _sample(
        self, prompts: list[list[int]], params: SamplingParams, num_samples: int
    ) -> list[list[Completion]]:
        if self._current_version() != self.version:
            raise StaleGenerator(
                f"this generator holds version {self.version} of session {self._lane.name!r}, "
                f"which has published version {self._current_version()} since"
            )
        check_sampling(params, num_samples)
        base = self._member.loaded.base
        cache_argument(base.model if base.logits_rule is None else base.body)
        tokenizer = self._settings.load_tokenizer()
        strings = tuple(stop for stop in params.stop if isinstance(stop, str))
        ids = {stop for stop in params.stop if isinstance(stop, int)}
        entropy: Any = np.random.SeedSequence().entropy
        limit = self._settings.max_seq_len
        rooms = [
            room_for(base, prompt, index=index, max_seq_len=limit)
            for index, prompt in enumerate(prompts)
        ]
        task = SamplingTask(
            rows=[
                RowToSample(prompt, min(params.max_tokens, room), (index, sample))
                for index, (prompt, room) in enumerate(zip(prompts, rooms, strict=True))
                for sample in range(num_samples)
            ],
            params=params,
            seed=entropy if params.seed is None else params.seed,
            stop_ids=frozenset(end_token_ids(base, tokenizer) | ids),
            strings=strings,
            tokenizer=tokenizer if strings else None,
            batch_tokens=4 * self._settings.micro_batch_tokens,
        )
        completions = [row.completion(self.version) for row in self._member.call("sample", task)]
        return [
            completions[first : first + num_samples]
            for first in range(0, len(completions), num_samples)
        ]


def require_sendable(loss_fn: LossFn) -> None:
    """Returns if the other processes can get a loss.

    Raises:
        BackendError: they cannot import it.
    """
    try:
        pickled(loss_fn)
    except BackendError as error:
        raise BackendError(
            f"the loss {loss_name(loss_fn)!r} cannot be sent to the other processes; make it a "
            "function at the top level of a module, or a functools.partial of one (not a lambda "
            f"or a function inside a function). {error}"
        ) from error
