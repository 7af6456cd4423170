"""One adapter (or the full weights) being trained on a service."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebook.backends.base import Future, Generator, LossFn
from tunebook.backends.remote.failures import broken_answer
from tunebook.backends.remote.generator import RemoteGenerator
from tunebook.backends.remote.lease import Leases
from tunebook.backends.remote.link import Finish, Link, Pass
from tunebook.backends.remote.losses import (
    ServiceLoss,
    built_in,
    differentiated,
    differs,
    evaluated,
)
from tunebook.backends.remote.queue import Operation, RemoteQueue, Start
from tunebook.backends.remote.rows import marks_of
from tunebook.columns import loss_name
from tunebook.errors import BackendError
from tunebook.runs.attempts import shielded
from tunebook.types import (
    CheckpointRef,
    Datum,
    FloatArray,
    LoraConfig,
    Metrics,
    OptimizerParams,
)

if TYPE_CHECKING:
    from torch import Tensor


class RemoteSession:
    """One session on a service; see `tunebook.backends.base.Session`."""

    def __init__(
        self,
        name: str,
        lora: LoraConfig | None,
        queue: RemoteQueue[Any],
        *,
        at: str | None,
        losses: Mapping[str, ServiceLoss],
        stop_ids: bool,
        max_seq_len: int | None,
        download: Callable[[str, Path], Path],
        open_at: Callable[[CheckpointRef], RemoteSession],
        delete: Callable[[str], None],
        leases: Leases,
        on_close: Callable[[], None],
    ) -> None:
        """
        Args:
            name: of the session.
            lora: the adapter; None = full weights.
            queue: of its operations.
            at: checkpoint whose weights it begins with.
            losses: of the service that may be used, by our names; empty = two passes for all.
            stop_ids: whether the service stops at token ids.
            max_seq_len: tokens that a row may have; None = not known.
            download: writes weights that were saved for it into a folder; returns it.
            open_at: opens another session at a checkpoint, to download it.
            delete: deletes a checkpoint, by its place; one that is gone is no error.
            leases: of its checkpoints.
            on_close: called once.
        """
        self.name = name
        self._lora = lora
        self._queue = queue
        self._num_changes = 0
        """Calls that change the weights or are on the way to it."""
        self._at = (at, 0)
        """A checkpoint, and the number of such calls before it."""
        self._losses = losses
        self._stop_ids = stop_ids
        self._max_seq_len = max_seq_len
        self._download = download
        self._open_at = open_at
        self._delete = delete
        self._leases = leases
        self._on_close = on_close
        self._closed = False
        self._said: set[str] = set()
        self._publishes = 0
        self._published: Start | None = None
        self._moved = False
        """The weights have changed since the last publish that is settled."""
        self._holds_gradient = False
        """A gradient is settled that no step has applied yet."""
        self._generator: Callable[[], RemoteGenerator | None] = lambda: None

    @property
    def trainable_parameters(self) -> int | None:
        return None

    def forward(self, data: Sequence[Datum]) -> Future[list[Tensor]]:
        rows = list(data)

        async def start(link: Link) -> Finish:
            self._check(rows)
            finish_forward = await link.forward(rows)

            async def finish() -> list[Tensor]:
                import torch

                found = _logprobs_of(rows, await finish_forward())
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
            units = max(1, (link.max_rows or len(rows)) // rows_per_unit)
            size = units * rows_per_unit
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

        def settled(metrics: Metrics) -> Metrics:
            self._holds_gradient = True
            return metrics

        self._num_changes += 1
        return self._queue.call(Operation("forward_backward", start, changes=True, settled=settled))

    def optim_step(self, params: OptimizerParams) -> Future[Metrics]:
        async def start(link: Link) -> Finish:
            return await link.optim_step(params)

        def settled(metrics: Metrics) -> Metrics:
            self._moved, self._holds_gradient = True, False
            return metrics

        self._num_changes += 1
        return self._queue.call(Operation("optim_step", start, changes=True, settled=settled))

    def publish_weights(self) -> Future[Generator]:
        self._publishes += 1
        version = self._publishes
        published: list[Any] = [None]

        async def start(link: Link) -> Finish:
            finish_publish = await link.publish()

            async def finish() -> None:
                published[0] = await finish_publish()

            return finish

        def settled(_: None) -> RemoteGenerator:
            generator = RemoteGenerator(
                version,
                self._queue,
                published=lambda: published[0],
                newest=lambda: self._publishes,
                stop_ids=self._stop_ids,
            )
            self._moved, self._published = False, start
            self._generator = weakref.ref(generator)
            return generator

        return self._queue.call(Operation("publish_weights", start, changes=True, settled=settled))

    def save(self, name: str) -> Future[CheckpointRef]:
        self._leases.renew_old()
        num_changes = self._num_changes

        async def start(link: Link) -> Finish:
            return await link.save(name)

        def settled(location: str) -> CheckpointRef:
            self._at = (location, num_changes)
            self._leases.begin(location)
            self._move_base(location)
            return CheckpointRef(name=name, location=location, has_optimizer=True)

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
            return await link.save_for_download(ref.name)

        self._leases.renew(ref.location)
        made: Future[str] = self._queue.call(Operation("export", start, changes=False))
        return self._download(made.result(), directory)

    def discard(self, ref: CheckpointRef) -> None:
        """Deletes a checkpoint, as far as the service has a call that does."""
        self._leases.end(ref.location)
        self._delete(ref.location)

    def close(self) -> None:
        if self._closed:
            return
        with shielded():  # a session that is closed halfway would go on billing
            self._closed = True
            try:
                self._queue.close()
            finally:
                self._on_close()

    async def _start_part(
        self, link: Link, rows: list[Datum], loss_fn: LossFn, rows_per_unit: int
    ) -> Finish:
        own = built_in(loss_fn, rows, self._losses)
        self._say_way(loss_fn, own.name if own else None)
        if own is not None:
            finish_pass = await link.forward_backward(own, rows)

            async def finish_own() -> Metrics:
                found: Pass = await finish_pass()
                logprobs = _logprobs_of(rows, found.logprobs)
                metrics = await asyncio.to_thread(evaluated, rows, logprobs, loss_fn)
                self._compare(loss_fn, found.loss, metrics["loss"])
                return metrics

            return finish_own
        logprobs = _logprobs_of(rows, await (await link.forward(rows))())
        gradients, metrics = await asyncio.to_thread(
            differentiated, rows, logprobs, loss_fn, rows_per_unit=rows_per_unit
        )
        finish_backward = await link.backward(rows, gradients)

        async def finish_custom() -> Metrics:
            await finish_backward()
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

    def _compare(self, loss_fn: LossFn, theirs: float | None, ours: float) -> None:
        if theirs is None or not differs(theirs, ours) or "differs" in self._said:
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
        if self._holds_gradient:
            return  # A checkpoint does not hold it, and the step to come needs it.
        sampling = self._generator() is not None
        if sampling and self._moved:
            return  # Weights older than the checkpoint are sampled from; it does not hold them.
        again = [self._published] if sampling and self._published is not None else []
        self._queue.move_base(checkpoint_id, again)

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


def _logprobs_of(data: Sequence[Datum], found: list[FloatArray]) -> list[FloatArray]:
    """What came back, if it is as long as the rows.

    Raises:
        RemoteError: it is not.
    """
    if [len(each) for each in found] != [datum.num_scored for datum in data]:
        raise broken_answer(
            f"the service returned log-probs of {len(found)} rows for {len(data)}, or of other "
            "lengths"
        )
    return found
