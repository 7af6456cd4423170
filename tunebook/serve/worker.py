"""The one thread that computes: it opens, runs and ends the sessions of the server."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tunebook.backends.local.backend import LocalBackend
from tunebook.errors import TunebookError
from tunebook.serve.endings import settle_stopped
from tunebook.serve.errors import log_failure
from tunebook.serve.execution import (
    OperationError,
    Result,
    begin,
    failure_of,
    joint_kind,
    num_tokens,
)
from tunebook.serve.operations import Request, Sample
from tunebook.serve.payloads import Payloads
from tunebook.serve.records import (
    ACTIVE_SESSION,
    Operation,
    OperationStatus,
    Problem,
    Session,
    SessionStatus,
)
from tunebook.serve.sessions import parse
from tunebook.serve.state import Lane, Queued, State
from tunebook.serve.trainee import REPLAYED, SNAPSHOT, Replayed, Trainee

MAX_TOGETHER = 64
"""Operations of one session that run together."""
GATHER_SHARE = 0.05
"""Longest wait for sessions that may join, as a share of the time that the work takes."""
MAX_GATHER_S = 0.05
BUSY_S = 1.0
"""How long after its last operation a session is expected to go on."""


@dataclass(slots=True)
class Started:
    """An operation that the engine has been given."""

    lane: Lane
    trainee: Trainee
    queued: Queued
    finish: Callable[[], Result]


class Worker:
    """Runs the operations of all sessions, those of a session in the order of their submission."""

    def __init__(
        self,
        state: State,
        payloads: Payloads,
        make_backend: Callable[[], LocalBackend],
        on_failure: Callable[[], None],
    ) -> None:
        """Takes the server's state and what computes.

        Args:
            state: of the server; the worker is the only one that runs operations.
            payloads: takes large results.
            make_backend: a backend over the server's model, nothing loaded yet.
            on_failure: called when the worker ends by a fault of its own.
        """
        self.failed = False
        self._state = state
        self._payloads = payloads
        self._make_backend = make_backend
        self._on_failure = on_failure
        self._adapters = make_backend()
        self._full: dict[str, LocalBackend] = {}
        """Backends that train full weights, by resource."""
        self._trainees: dict[str, Trainee] = {}
        self._took_s: dict[str | None, float] = {}
        """How long operations of a kind took, the last time."""
        self._ended_at: dict[str, float] = {}
        """When a session's last operation ended."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        """Takes up the sessions that the store has, and begins."""
        state = self._state
        with state.lock:
            sessions = [s for s in state.store.all(Session) if s.status in ACTIVE_SESSION]
            for session in reversed(sessions):
                lane = Lane(session)
                if session.status is SessionStatus.STOPPING:
                    lane.ending = session.becomes or SessionStatus.STOPPED
                for operation in state.store.unended_operations(session.id):
                    lane.queue.append(Queued(operation, None))
                    state.operations[operation.id] = operation
                state.lanes[session.id] = lane
            for resource in list(state.resources):
                settle_stopped(state, resource)
        self._thread.start()

    def stop(self) -> None:
        """Ends after the operations that are running; the rest goes on after a restart."""
        with self._state.work:
            self._stopping = True
            self._state.work.notify_all()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                with self._state.work:
                    task = self._next()
                    while task is None and not self._stopping:
                        self._state.work.wait()
                        task = self._next()
                    if self._stopping:
                        break
                assert task is not None
                task()
            except Exception as error:
                # What is on disk is whole: a server that starts again goes on from it.
                log_failure("the worker failed, so the server ends", error)
                self.failed = True
                self._on_failure()
                return
        for session_id, trainee in self._trainees.items():
            lane = self._state.lanes[session_id]
            if trainee.wants_snapshot(at_end=True):
                self._save(lane, trainee)
            trainee.close()
        for backend in (self._adapters, *self._full.values()):
            backend.close()

    def _next(self) -> Callable[[], None] | None:
        """What to do now: end sessions, open sessions, then the oldest operation."""
        lanes = self._state.lanes.values()
        for lane in lanes:
            if lane.ending is not None:
                return lambda: self._end(lane)
        now = self._state.settings.now()
        for lane in lanes:
            if lane.session.id not in self._trainees and now >= lane.due_at:
                return lambda: self._open(lane)
        return self._run_oldest if any(lane.queue for lane in lanes) else None

    def _run_oldest(self) -> None:
        """Runs the oldest operation, unless its session has begun to end meanwhile."""
        with self._state.lock:
            waiting = [lane for lane in self._state.lanes.values() if lane.queue]
        first = min(waiting, key=lambda lane: lane.queue[0].operation.seq)
        kind = self._kind(first.queue[0])
        with self._state.work:
            self._gather(kind)
            ready = [
                lane
                for lane in self._state.lanes.values()
                if lane.queue and lane.ending is None and lane.session.id in self._trainees
            ]
        if ready and not self._stopping:
            self._run_operations(ready)

    def _gather(self, kind: str | None) -> None:
        """Gives sessions that were busy a moment ago a moment to join in.

        Clients that train at once and wait for each result would otherwise take turns for good.
        """
        now = time.monotonic()
        deadline = now + min(MAX_GATHER_S, GATHER_SHARE * self._took_s.get(kind, 0.0))

        def late() -> bool:
            return any(
                not lane.queue and now - self._ended_at.get(lane.session.id, 0.0) < BUSY_S
                for lane in self._state.lanes.values()
            )

        while kind is not None and late() and not self._stopping:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._state.work.wait(left)

    def _open(self, lane: Lane) -> None:
        session = lane.session
        trainee = Trainee(
            session, self._backend_of(session), self._state.settings.home, self._completed
        )
        try:
            trainee.open()
        except Exception as error:
            log_failure(f"session {session.id} could not be opened", error)
            trainee.close()
            message = str(error) if isinstance(error, TunebookError) else "it could not be opened"
            self._lose(lane, message)
            return
        self._trainees[session.id] = trainee
        with self._state.lock:
            if session.status is SessionStatus.CREATING:
                session.status = SessionStatus.RUNNING
            self._state.save(session)

    def _backend_of(self, session: Session) -> LocalBackend:
        if session.lora is not None:
            return self._adapters
        if session.resources_id not in self._full:
            self._full[session.resources_id] = self._make_backend()
        return self._full[session.resources_id]

    def _completed(self, session: Session) -> Iterator[Replayed]:
        after = session.saved.progress.seq
        store = self._state.store
        for operation in store.completed_operations(session.id, after=after, kinds=REPLAYED):
            yield Replayed(operation.seq, self._request(Queued(operation, None)))

    def _request(self, queued: Queued) -> Request:
        if queued.request is None:
            body, payload = self._state.store.body(queued.operation.seq)
            queued.request = parse(self._state, queued.operation.kind, body, payload)
        return queued.request

    def _kind(self, queued: Queued) -> str | None:
        """What an operation can run together with; one that cannot be read fails by itself.

        Not to be called with the lock: a large request takes a while to be read.
        """
        try:
            return None if queued.alone else joint_kind(self._request(queued))
        except Exception:  # it is raised, and told, again when it begins
            return None

    def _run_operations(self, waiting: list[Lane]) -> None:
        """Runs the oldest operation, and with it what other sessions have of its kind."""
        first = min(waiting, key=lambda lane: lane.queue[0].operation.seq)
        kind = self._kind(first.queue[0])
        chosen: list[tuple[Lane, Queued]] = []
        for lane in waiting if kind is not None else [first]:
            for _ in range(MAX_TOGETHER if kind is not None else 1):
                # The head stays the head: others only append.
                head = lane.queue[0] if lane.queue else None
                if head is None or (kind is not None and self._kind(head) != kind):
                    break
                with self._state.lock:
                    chosen.append((lane, lane.queue.popleft()))
                    lane.num_running += 1
        chosen.sort(key=lambda one: one[1].operation.seq)
        began = time.monotonic()
        started = [one for one in (self._begin(*each) for each in chosen) if one is not None]
        if started:
            self._state.monitor.together.observe(len(started))
        changing = not all(isinstance(self._request(one.queued), Sample) for one in started)
        broken: set[str] = set()
        undone: list[Started] = []
        for one in started:
            if one.lane.session.id in broken:
                # The engine has dropped it with the one before.
                undone.append(one)
                continue
            failure = self._finish(one)
            if failure is None:
                continue
            if len(started) > 1:
                # What failed may be another's; alone it fails only if it is its own.
                one.queued.alone = True
                undone.append(one)
            else:
                self._fail(one.lane, one.queued, failure)
            if changing:
                broken.add(one.lane.session.id)
        with self._state.lock:
            for one in reversed(undone):
                one.lane.queue.appendleft(one.queued)
                one.lane.num_running -= 1
        seconds = time.monotonic() - began
        self._took_s[kind] = seconds
        for lane in {one.lane.session.id: one.lane for one in started}.values():
            if lane.session.id in broken:
                self._reopen(lane)
            else:
                self._save_if_due(lane, seconds / len(started) if changing else 0.0)

    def _begin(self, lane: Lane, queued: Queued) -> Started | None:
        trainee = self._trainees[lane.session.id]
        operation = queued.operation
        operation.status = OperationStatus.RUNNING
        try:
            self._meet_fault(lane, operation)
            request = self._request(queued)
            finish = begin(trainee, operation, request, self._state.settings.now())
        except Exception as error:
            self._fail(lane, queued, error)
            return None
        return Started(lane, trainee, queued, finish)

    def _meet_fault(self, lane: Lane, operation: Operation) -> None:
        """What the server's plan has happen when this operation runs."""
        state = self._state
        if not state.settings.faults.rules:
            return
        count = state.store.count_operations(operation.kind, up_to=operation.seq)
        fault = state.settings.faults.operation_fault(operation.kind, count)
        if fault is None:
            return
        time.sleep(fault.delay_s)
        if fault.code is not None:
            if fault.code == "NON_FINITE_LOSS" and operation.kind == "optim-step":
                lane.session.non_finite = True
            raise OperationError(fault.code, fault.message)

    def _finish(self, one: Started) -> Exception | None:
        """Waits for an operation and writes what it has come to; its failure is returned."""
        try:
            result = one.finish()
        except Exception as error:
            return error
        self._complete(one, result)
        return None

    def _complete(self, one: Started, result: Result) -> None:
        state, session, operation = self._state, one.lane.session, one.queued.operation
        output = json.dumps(result.output, separators=(",", ":"), allow_nan=False).encode()
        if len(output) > state.settings.inline_output_bytes and result.large:
            output = self._moved_out(session.id, result)
        with state.lock, state.store.transaction():
            operation.status = OperationStatus.COMPLETED
            if result.checkpoint is not None:
                state.store.put(result.checkpoint)
            state.store.end_operation(operation, output=output, now=state.settings.now())
            state.store.put(session)
            one.lane.num_running -= 1
            state.touch(session.resources_id)  # before anybody sees that nothing of it runs
            one.trainee.last_seq = operation.seq
        state.monitor.tokens.add(num_tokens(self._request(one.queued)), kind=operation.kind)
        self._ended(one.queued)

    def _ended(self, queued: Queued) -> None:
        """Says that an operation has ended, once that is written."""
        state, operation = self._state, queued.operation
        state.operations.pop(operation.id, None)
        state.waiters.notify(operation.id)
        self._ended_at[operation.session_id] = time.monotonic()
        state.monitor.operations.add(kind=operation.kind, status=str(operation.status))
        state.monitor.operation_s.observe(time.monotonic() - queued.since, kind=operation.kind)

    def _moved_out(self, session_id: str, result: Result) -> bytes:
        """The output with its large member in a payload."""
        assert result.large is not None
        large = json.dumps({result.large: result.output.pop(result.large)}, allow_nan=False)
        now = self._state.settings.now()
        payload_id = self._payloads.write(session_id, large.encode(), now)
        return json.dumps({**result.output, "payload_id": payload_id}).encode()

    def _fail(self, lane: Lane, queued: Queued, error: Exception) -> None:
        state, operation = self._state, queued.operation
        failure = failure_of(error)
        if failure.code == "INTERNAL_ERROR":
            log_failure(f"operation {operation.id} ({operation.kind}) failed", error)
        with state.lock, state.store.transaction():
            self._write_failure(operation, failure)
            state.store.put(lane.session)
            lane.num_running -= 1
            state.touch(lane.session.resources_id)  # before anybody sees that nothing of it runs
        self._ended(queued)

    def _write_failure(self, operation: Operation, failure: OperationError) -> None:
        operation.status = OperationStatus.FAILED
        operation.error = {
            "code": f"TRAINING_OPERATION_ERROR_CODE_{failure.code}",
            "message": failure.message,
        }
        now = self._state.settings.now()
        self._state.store.end_operation(operation, output=None, now=now)

    def _save_if_due(self, lane: Lane, seconds: float) -> None:
        trainee = self._trainees[lane.session.id]
        trainee.worked(seconds)
        if trainee.wants_snapshot() and not self._save(lane, trainee):
            self._reopen(lane)
        elif trainee.has_new_snapshot:
            self._written(lane, trainee)

    def _save(self, lane: Lane, trainee: Trainee) -> bool:
        """Saves a session, so that what it has done is not done again; whether it worked."""
        try:
            trainee.save_snapshot(trainee.last_seq)
        except TunebookError as error:
            # Nothing is lost yet: what was saved before, and the journal since, are still there.
            log_failure(f"session {lane.session.id} could not be saved", error)
            return False
        self._written(lane, trainee)
        return True

    def _written(self, lane: Lane, trainee: Trainee) -> None:
        state, session = self._state, lane.session
        with state.lock, state.store.transaction():
            state.store.put(session)
            state.store.forget_bodies(session.id, up_to=session.saved.progress.seq)
        trainee.discard_old_snapshots()

    def _reopen(self, lane: Lane) -> None:
        """Makes a session whole after a failure in the engine."""
        self._trainees.pop(lane.session.id).close()
        self._open(lane)

    def _end(self, lane: Lane) -> None:
        """Ends a session; operations of it that wait fail."""
        state, session = self._state, lane.session
        trainee = self._trainees.pop(session.id, None)
        self._ended_at.pop(session.id, None)
        if trainee is not None:
            trainee.close()
        # First: it is on its way to its end already, and whoever sees that can rely on it.
        for folder in (state.settings.home / "sessions" / session.id).glob(f"{SNAPSHOT}*"):
            shutil.rmtree(folder)
        if session.lora is None and session.resources_id in self._full:
            self._full.pop(session.resources_id).close()
        with state.lock, state.store.transaction():
            assert lane.ending is not None
            session.status = lane.ending
            message = f"the session ended before this ran (status: {session.status})"
            unrun = list(lane.queue)
            for queued in unrun:
                self._write_failure(queued.operation, OperationError("SESSION_NOT_ACTIVE", message))
            lane.queue.clear()
            del state.lanes[session.id]
            state.store.forget_bodies(session.id, up_to=2**62)
            state.save(session)
        for queued in unrun:
            self._ended(queued)
        settle_stopped(state, session.resources_id)

    def _lose(self, lane: Lane, message: str) -> None:
        """Ends a session that cannot go on."""
        with self._state.lock:
            lane.session.error = Problem("SESSION_FAILED", message, self._state.settings.now())
            lane.ending = SessionStatus.ERROR
            self._end(lane)
