"""One session as the engine has it: opened from disk, brought up to date, and run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunebook.backends.local.backend import LocalBackend
from tunebook.backends.local.generator import LocalGenerator
from tunebook.backends.local.session import LocalSession
from tunebook.serve.losses import from_gradients
from tunebook.serve.operations import (
    CustomForwardBackward,
    ForwardBackward,
    OptimStep,
    Request,
)
from tunebook.serve.records import Origin, Progress, Published, Saved, Session
from tunebook.types import CheckpointRef

SNAPSHOT = "snapshot-"
"""Begins the names of folders."""
REPLAYED = ("forward-backward", "custom-forward-backward", "optim-step", "weights-sync")
"""Kinds that change what a session holds."""
SNAPSHOT_SHARE = 0.05
"""Most time that snapshots may take, as a share of the work between them."""
MIN_WORK_S = 1.0
"""Work that is rather done again than saved."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A completed operation that a session needs again."""

    seq: int
    request: Request


class Trainee:
    """A session with its weights.

    After a failure in the engine the weights are opened again from disk and the operations since
    then are done again, so a session is always what its completed operations have made it.
    """

    def __init__(
        self,
        record: Session,
        backend: LocalBackend,
        home: Path,
        read_completed: Callable[[Session], Iterable[Replayed]],
    ) -> None:
        """Opens nothing yet.

        Args:
            record: of the session; its `progress` and what is saved are kept up to date here.
            backend: computes.
            home: of the server; folders of records are relative to it.
            read_completed: operations after the record's snapshot.
        """
        self.record = record
        self._backend = backend
        self.home = home
        self._read_completed = read_completed
        self._session: LocalSession | None = None
        self._sampler: LocalSession | None = None
        self._generator: LocalGenerator | None = None
        self.last_seq = 0
        """Number of the last operation that is in the weights."""
        self.has_new_snapshot = False
        """Whether older snapshots are still to be discarded."""
        self._has_gradient = False
        self._work_s = 0.0
        self._snapshot_s = 0.0

    @property
    def directory(self) -> Path:
        """Where the session keeps its files."""
        return self.home / "sessions" / self.record.id

    @property
    def session(self) -> LocalSession:
        """The engine's session."""
        assert self._session is not None
        return self._session

    def open(self) -> None:
        """Opens the weights and does again what was completed since they were saved."""
        self.close()
        record = self.record
        origin, published = record.saved.origin, record.published
        self._session = self._open(record.id, origin)
        self._has_gradient = False
        if published is not None and published.origin is not None:
            self._open_sampler(published.origin, origin)
        progress = replace(record.saved.progress)
        if progress.seq == 0:
            progress.step = self._session.step
        self.last_seq = progress.seq
        for done in self._read_completed(record):
            self.last_seq = done.seq
            self._do_again(done.request, progress)
            if published is not None and published.origin is None and done.seq == published.seq:
                self._publish()
        record.progress = progress

    def _open(self, name: str, origin: Origin) -> LocalSession:
        restore = None
        if origin.folder is not None:
            folder = self.home / origin.folder
            restore = CheckpointRef(folder.name, str(folder), origin.with_optimizer)
        return self._backend.open_session(
            name,
            self.record.lora,
            directory=self.directory,
            restore=restore,
            with_optimizer=origin.with_optimizer,
        )

    def _open_sampler(self, published: Origin, origin: Origin) -> None:
        """Makes published weights ready to sample: the session's own, or others beside it."""
        if published.folder == origin.folder:
            self._publish()
            return
        sampled = Origin(published.folder, with_optimizer=False)
        self._sampler = self._open(f"{self.record.id}-published", sampled)
        self._generator = _local(self._sampler.publish_weights().result())

    def _publish(self) -> None:
        self._close_sampler()
        self._generator = _local(self.session.publish_weights().result())

    def _close_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def close(self) -> None:
        """Frees what the engine holds; a second call does nothing."""
        self._close_sampler()
        self._generator = None
        if self._session is not None:
            self._session.close()
            self._session = None

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient waits for a step."""
        return self._has_gradient

    @property
    def generator(self) -> LocalGenerator:
        """Samples the published weights."""
        assert self._generator is not None
        return self._generator

    def _do_again(self, request: Request, progress: Progress) -> None:
        session = self.session
        if isinstance(request, CustomForwardBackward):
            session.forward_backward(request.data, from_gradients).result()
            self.passed()
        elif isinstance(request, ForwardBackward) and not request.forward_only:
            session.forward_backward(request.data, request.loss.fn).result()
            self.passed()
        elif isinstance(request, OptimStep):
            session.optim_step(request.params).result()
            self.stepped(progress)

    def stepped(self, progress: Progress) -> None:
        """Counts an optimizer step."""
        self._has_gradient = False
        progress.step += 1
        progress.trainer_step += 1

    def passed(self) -> None:
        """Notes that a gradient was added."""
        self._has_gradient = True

    def sync(self, seq: int) -> int:
        """Publishes the weights as they are now, and sees to it that they are on disk.

        Args:
            seq: number of the operation.
        """
        record = self.record
        version = record.progress.trainer_step
        self._publish()
        origin = None
        if not self._has_gradient:
            if record.saved.progress.trainer_step != version:
                self.save_snapshot(seq)
            origin = record.saved.origin
        record.published = Published(origin, seq, version)
        self.has_new_snapshot = True  # what was published before may have kept one
        return version

    def worked(self, seconds: float) -> None:
        """Counts work that a crash would have to do again."""
        self._work_s += seconds

    def wants_snapshot(self, *, at_end: bool = False) -> bool:
        """Whether now is the time to save: enough work, and nothing that a save would lose.

        Args:
            at_end: the server ends, so that any step is enough.
        """
        published = self.record.published
        if self._has_gradient:
            return False
        # What is published and not in a folder is lost; full weights have no room for both.
        if published is not None and (published.origin is None or self.record.lora is None):
            return False
        saved = self.record.saved.progress
        if saved.trainer_step == self.record.progress.trainer_step:
            return False
        return at_end or self._work_s > max(MIN_WORK_S, self._snapshot_s / SNAPSHOT_SHARE)

    def save_snapshot(self, seq: int) -> None:
        """Saves the session as it is after the operation `seq`; the record then names it."""
        began = time.monotonic()
        name = f"{SNAPSHOT}{seq}"
        self.session.save(name).result()
        origin = Origin(str((self.directory / name).relative_to(self.home)))
        self.record.saved = Saved(origin, replace(self.record.progress, seq=seq))
        self.has_new_snapshot = True
        self._snapshot_s = time.monotonic() - began
        self._work_s = 0.0

    def discard_old_snapshots(self) -> None:
        """Deletes what the record no longer names; called when the record is written."""
        named = {self.record.saved.origin.folder}
        if self.record.published is not None and self.record.published.origin is not None:
            named.add(self.record.published.origin.folder)
        for folder in self.directory.glob(f"{SNAPSHOT}*"):
            if str(folder.relative_to(self.home)) not in named:
                self.session.discard(CheckpointRef(folder.name, str(folder), True))
        self.has_new_snapshot = False


def _local(generator: Any) -> LocalGenerator:
    return generator
