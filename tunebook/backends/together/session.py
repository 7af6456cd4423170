"""One adapter (or the full weights) being trained on the service."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebook.backends.base import Future, Generator, LossFn
from tunebook.backends.together.generator import TogetherGenerator
from tunebook.backends.together.link import MAX_ROWS, Link, logprobs_in
from tunebook.backends.together.losses import (
    built_in,
    differentiated,
    differs,
    evaluated,
    forward_samples,
)
from tunebook.backends.together.queue import Finish, Operation, RemoteQueue, Start
from tunebook.backends.together.samples import marks_of
from tunebook.columns import loss_name
from tunebook.errors import BackendError, ConfigError
from tunebook.types import (
    AdamParams,
    CheckpointRef,
    Datum,
    LoraConfig,
    Metrics,
    MuonParams,
    OptimizerParams,
)

if TYPE_CHECKING:
    from torch import Tensor

SYNCHRONOUS = "WEIGHT_SYNC_TYPE_SYNCHRONOUS"


class TogetherSession:
    """One session on the service; see `tunebook.backends.base.Session`."""

    def __init__(
        self,
        name: str,
        lora: LoraConfig | None,
        queue: RemoteQueue,
        *,
        at: str | None,
        own_losses: bool,
        has_generator: bool,
        max_seq_len: int | None,
        download: Callable[[str, Path], Path],
        open_at: Callable[[CheckpointRef], TogetherSession],
        on_close: Callable[[], None],
    ) -> None:
        """
        Args:
            name: of the session.
            lora: the adapter; None = full weights.
            queue: of its operations.
            at: checkpoint whose weights it begins with.
            own_losses: use the losses of the service where they mean the same.
            has_generator: whether the resource samples.
            max_seq_len: tokens that a row may have; None = not known.
            download: writes an inference checkpoint into a folder; returns it.
            open_at: opens another session at a checkpoint.
            on_close: called once.
        """
        self.name = name
        self._lora = lora
        self._queue = queue
        self._num_changes = 0
        """Calls that change the weights or are on the way to it."""
        self._at = (at, 0)
        """A checkpoint, and the number of such calls before it."""
        self._own_losses = own_losses
        self._has_generator = has_generator
        self._max_seq_len = max_seq_len
        self._download = download
        self._open_at = open_at
        self._on_close = on_close
        self._closed = False
        self._said: set[str] = set()
        self._publishes = 0
        self._published: Start | None = None
        self._moved = False
        """The weights have changed since the last publish that is settled."""
        self._generator: Callable[[], TogetherGenerator | None] = lambda: None

    @property
    def trainable_parameters(self) -> None:
        return None

    def forward(self, data: Sequence[Datum]) -> Future[list[Tensor]]:
        rows = list(data)

        async def start(link: Link) -> Finish:
            self._check(rows)
            sent = await link.forward(rows)

            async def finish() -> list[Tensor]:
                import torch

                found = logprobs_in([await each.output() for each in sent], rows)
                return [
                    torch.from_numpy(np.where(marks_of(datum) != 0, each, np.float32(math.nan)))
                    for datum, each in zip(rows, found, strict=True)
                ]

            return finish

        return self._queue.call(Operation("forward", start, changes=False))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: LossFn, *, rows_per_unit: int = 1
    ) -> Future[Metrics]:
        rows = list(data)
        if rows_per_unit < 1 or len(rows) % rows_per_unit:
            raise BackendError(
                f"{len(rows)} rows are no whole number of units of {rows_per_unit} rows"
            )

        async def start(link: Link) -> Finish:
            self._check(rows)
            size = MAX_ROWS // rows_per_unit * rows_per_unit
            parts = [rows[first : first + size] for first in range(0, len(rows), size)]
            finishes = [
                await self._start_part(link, part, loss_fn, rows_per_unit) for part in parts
            ]

            async def finish() -> Metrics:
                totals: Metrics = {"loss": 0.0}
                for each in finishes:
                    for name, value in (await each()).items():
                        totals[name] = totals.get(name, 0.0) + value
                return totals

            return finish

        self._num_changes += 1
        return self._queue.call(Operation("forward_backward", start, changes=True))

    def optim_step(self, params: OptimizerParams) -> Future[Metrics]:
        arguments = optimizer_arguments(params)

        async def start(link: Link) -> Finish:
            sent = await link.small("optim_step", **arguments)

            async def finish() -> Metrics:
                return metrics_of_step(await sent.output())

            return finish

        def settled(metrics: Metrics) -> Metrics:
            self._moved = True
            return metrics

        self._num_changes += 1
        return self._queue.call(Operation("optim_step", start, changes=True, settled=settled))

    def publish_weights(self) -> Future[Generator]:
        self._publishes += 1
        version = self._publishes
        weights = [0]

        async def start(link: Link) -> Finish:
            self._check_samples()
            sent = await link.small("weights_sync", weight_sync_type=SYNCHRONOUS)

            async def finish() -> None:
                weights[0] = int((await sent.output()).weights_version)

            return finish

        def settled(_: None) -> TogetherGenerator:
            generator = TogetherGenerator(
                version,
                self._queue,
                weights_version=lambda: weights[0],
                newest=lambda: self._publishes,
            )
            self._moved, self._published = False, start
            self._generator = weakref.ref(generator)
            return generator

        return self._queue.call(Operation("publish_weights", start, changes=True, settled=settled))

    def save(self, name: str) -> Future[CheckpointRef]:
        num_changes = self._num_changes

        async def start(link: Link) -> Finish:
            sent = await link.small("training_checkpoint")

            async def finish() -> str:
                return (await sent.output()).checkpoint.id

            return finish

        def settled(checkpoint_id: str) -> CheckpointRef:
            self._at = (checkpoint_id, num_changes)
            self._move_base(checkpoint_id)
            return CheckpointRef(name=name, location=checkpoint_id, has_optimizer=True)

        return self._queue.call(Operation("save", start, changes=False, settled=settled))

    def export(self, ref: CheckpointRef, directory: Path) -> Path:
        """Downloads the weights of a checkpoint; see `Session.export`.

        Only what a session holds can be made a download, so where this one has gone on since,
        another one is opened at the checkpoint.
        """
        if (ref.location, self._num_changes) != self._at:
            if self._lora is None:
                raise BackendError(
                    f"{ref.name}: the weights of a full-weight checkpoint can be downloaded only "
                    "from a session that was opened at it; open one with restore="
                )
            other = self._open_at(ref)
            try:
                return other.export(ref, directory)
            finally:
                other.close()

        async def start(link: Link) -> Finish:
            sent = await link.small("inference_checkpoint")

            async def finish() -> str:
                return (await sent.output()).checkpoint.id

            return finish

        made: Future[str] = self._queue.call(Operation("export", start, changes=False))
        return self._download(made.result(), directory)

    def discard(self, ref: CheckpointRef) -> None:
        """Does nothing: the service has no call that deletes a checkpoint."""
        del ref

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._queue.close()
        self._on_close()

    async def _start_part(
        self, link: Link, rows: list[Datum], loss_fn: LossFn, rows_per_unit: int
    ) -> Finish:
        own = built_in(loss_fn, rows) if self._own_losses else None
        self._say_way(loss_fn, own.config["type"] if own else None)
        if own is not None:
            sent = await link.forward_backward(own.config, own.samples)

            async def finish_own() -> Metrics:
                output = await sent.output()
                logprobs = logprobs_in([output], rows)
                metrics = await asyncio.to_thread(evaluated, rows, logprobs, loss_fn)
                self._compare(loss_fn, output.loss, metrics["loss"])
                return metrics

            return finish_own
        outputs = [await each.output() for each in await link.forward(rows)]
        gradients, metrics = await asyncio.to_thread(
            differentiated,
            rows,
            logprobs_in(outputs, rows),
            loss_fn,
            rows_per_unit=rows_per_unit,
        )
        custom = await link.custom_forward_backward(forward_samples(rows), gradients)

        async def finish_custom() -> Metrics:
            await custom.output()
            return metrics

        return finish_custom

    def _say_way(self, loss_fn: LossFn, kind: str | None) -> None:
        name = loss_name(loss_fn)
        way = f"by the service as {kind}" if kind else "in two passes"
        if f"{name} {way}" in self._said:
            return
        self._said.add(f"{name} {way}")
        text = f"session {self.name!r}: the loss {name} is computed {way}"
        dropout = self._lora.dropout if self._lora else 0.0
        inexact = kind is None and dropout > 0
        if inexact:
            text += (
                f". With lora.dropout={dropout:g} its gradient is only nearly exact: the first "
                "pass has no dropout, the second one has"
            )
        self._queue.note("loss_computed", text, shown=inexact, loss=name, way=kind or "two_passes")

    def _compare(self, loss_fn: LossFn, theirs: float, ours: float) -> None:
        if not differs(theirs, ours) or "differs" in self._said:
            return
        self._said.add("differs")
        self._queue.note(
            "loss_differs",
            f"session {self.name!r}: the service says that the loss {loss_name(loss_fn)} is "
            f"{theirs:.6g} where its formula gives {ours:.6g}, so it divides by something else and "
            "clipping and weight decay act otherwise. backend.losses=two_passes computes it here",
            service=theirs,
            formula=ours,
        )

    def _move_base(self, checkpoint_id: str) -> None:
        """Lets a session that takes the place of this one begin from a checkpoint."""
        sampling = self._generator() is not None
        if sampling and self._moved:
            return  # Weights older than the checkpoint are sampled from; it does not hold them.
        again = [self._published] if sampling and self._published is not None else []
        self._queue.move_base(checkpoint_id, again)

    def _check_samples(self) -> None:
        if not self._has_generator:
            raise ConfigError(
                "this resource trains only; for samples set backend.generator_replicas=1, or "
                "samples.num_prompts=0 for none"
            )

    def _check(self, data: Sequence[Datum]) -> None:
        for row, datum in enumerate(data):
            if self._max_seq_len is not None and datum.num_scored > self._max_seq_len:
                raise BackendError(
                    f"row {row} has {datum.num_scored} tokens, the service takes "
                    f"{self._max_seq_len}; lower max_seq_len"
                )
            if datum.columns.get("temperature", 1.0) != 1.0:
                raise BackendError(
                    f"row {row} has the temperature {datum.columns['temperature']!r}; the service "
                    "trains log-probs of temperature 1 only"
                )


def metrics_of_step(output: Any) -> Metrics:
    """What our server tells of an optimizer step; the hosted service only numbers it."""
    metrics = (output.model_extra or {}).get("metrics") or {}
    return {name: float(value) for name, value in metrics.items()}


def optimizer_arguments(params: OptimizerParams) -> dict[str, Any]:
    """Every setting of a step as the service takes it; its defaults are none of ours."""
    if isinstance(params, MuonParams):
        return {
            "muon_params": {
                "learning_rate": params.learning_rate,
                "momentum": params.momentum,
                "newton_schulz_steps": params.newton_schulz_steps,
                "weight_decay": params.weight_decay,
                "grad_clip_norm": params.max_grad_norm,
                "adam": _adam(params.adam),
            }
        }
    return {"adam_params": _adam(params)}


def _adam(params: AdamParams) -> dict[str, float]:
    return {
        "learning_rate": params.learning_rate,
        "beta1": params.beta1,
        "beta2": params.beta2,
        "eps": params.eps,
        "weight_decay": params.weight_decay,
        "grad_clip_norm": params.max_grad_norm,
    }
