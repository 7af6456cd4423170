"""Experiment trackers, which may fail, hang or be unreachable without hurting a run."""

from __future__ import annotations

import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from tunebook.display import script_command
from tunebook.errors import ConfigError
from tunebook.runs.attempts import ending_of
from tunebook.runs.directory import RunDir
from tunebook.runs.metrics import as_number
from tunebook.runs.record import STATE_OF_STOP_REASON, RunState, StopReason
from tunebook.runs.redaction import redact, redact_config, redact_values

QUEUE_SIZE = 10_000
"""Points that wait for a slow tracker; further ones are left out of it."""
SLOW_CALL_S = 20.0
"""Seconds after which a call to a tracker is reported as hanging."""
INIT_WAIT_S = 20.0
"""Seconds that a tracker may take to begin; the process may wait that long when it ends."""
FINISH_WAIT_S = 30.0
"""Seconds that the end of a run waits for a tracker."""
WANDB_UPLOAD_S = 20.0
"""Seconds that W&B may go on uploading at the end, also while the process exits."""
WHERE_ALL_IS = "Training goes on; metrics.jsonl in the run directory holds every value."


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker learns about a run."""

    path: Path
    recipe: str
    name: str
    """Name of the run's folder."""
    tracker_id: str
    """Stays the same over all attempts, so that a resumed run goes on as one."""
    attempt: int
    config: Mapping[str, Any]
    """Redacted."""


class Tracker(Protocol):
    """Where metrics go besides the run directory."""

    def check(self) -> None:
        """Finds out, while preparing and without a question to anybody, whether it can start.

        Raises:
            ConfigError: a login is missing or refused; the message says what to do.
        """
        ...

    def start(self, run: TrackedRun) -> None:
        """Begins, or goes on with, the tracker's own run."""
        ...

    def log(self, metrics: Mapping[str, float | int | None], step: int) -> None:
        """Takes the metrics of a step; steps never go back."""
        ...

    def finish(self, stop_reason: StopReason) -> None:
        """Ends the tracker's own run."""
        ...


class Feed:
    """Hands metrics to a tracker on a thread of its own; no call here ever waits for it."""

    def __init__(
        self, tracker: Tracker, run: TrackedRun, *, after_step: int, warn: Callable[[str], None]
    ) -> None:
        """Starts the thread.

        Args:
            tracker: called on the thread only, one call at a time.
            run: given to its `start`.
            after_step: steps up to here were sent by an earlier attempt and are not sent again.
            warn: called at most once, on the thread of whoever logs.
        """
        self._tracker = tracker
        self._last_step = after_step
        self._skip_through = after_step
        self._warn = warn
        self._warned = False
        self._problem: str | None = None
        self._busy_since: float | None = None
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_SIZE)
        self._calls.put(lambda: tracker.start(run))
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queues the metrics of a step.

        Args:
            step: optimizer steps made; what an earlier attempt sent, or a step back, is left out.
            metrics: numbers; None = unknown.
        """
        self._report_problem()
        if step < self._last_step or step <= self._skip_through:
            return
        self._last_step = step
        values = {key: as_number(value) for key, value in metrics.items()}
        self._submit(lambda: self._tracker.log(values, step))

    def finish(self, stop_reason: StopReason) -> None:
        """Lets the tracker end its run, for at most `FINISH_WAIT_S` seconds."""
        self._submit(lambda: self._tracker.finish(stop_reason))
        self._submit(None)
        self._thread.join(FINISH_WAIT_S)
        if self._thread.is_alive() and self._problem is None:
            self._problem = f"did not finish within {FINISH_WAIT_S:.0f} s"
        self._report_problem()

    def _submit(self, call: Callable[[], None] | None) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._problem = self._problem or "is too slow to take every value"

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            self._busy_since = time.monotonic()
            try:
                call()
            except Exception as error:  # Whatever a tracker raises is reported, never fatal.
                text = " ".join(f"{type(error).__name__}: {error}".split())
                self._problem = f"failed and is off for the rest of this run ({text})"
                return
            self._busy_since = None

    def _report_problem(self) -> None:
        since = self._busy_since
        if self._problem is None and since is not None and time.monotonic() - since > SLOW_CALL_S:
            self._problem = f"has not answered for {SLOW_CALL_S:.0f} s"
        if self._problem is not None and not self._warned:
            self._warned = True
            name = type(self._tracker).__name__
            self._warn(redact(f"{name} {self._problem}. {WHERE_ALL_IS}", os.environ))


class NoFeed:
    """Stands in for a feed where no tracker is configured."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes metrics and does nothing with them."""


@contextmanager
def tracking(
    tracker: Tracker | None, run: RunDir, *, warn: Callable[[str], None]
) -> Iterator[Feed | NoFeed]:
    """A feed of the run's metrics to a tracker for a block inside `run.attempt(...)`.

    The end of the block ends the tracker's run with the outcome of ours, on every way out.

    Args:
        tracker: None = none; its `check` has passed.
        run: its config is written.
        warn: shows one sentence to the person; called at most once.
    """
    if tracker is None:
        yield NoFeed()
        return
    if "id" not in run.record.tracker:
        run.set_tracker({"id": f"{run.record.recipe}-{run.record.id}"})
    tracked = TrackedRun(
        path=run.path,
        recipe=run.record.recipe,
        name=run.path.name,
        tracker_id=run.record.tracker["id"],
        attempt=len(run.record.attempts),
        config=redact_config(run.read_config(), os.environ),
    )
    feed = Feed(tracker, tracked, after_step=run.superseded_step(), warn=warn)
    try:
        yield feed
    except BaseException as error:
        feed.finish(ending_of(error)[0])
        raise
    outcome = run.record.outcome
    feed.finish(StopReason.COMPLETED if outcome is None else outcome.stop_reason)


class WandbMode(StrEnum):
    """How W&B is used."""

    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


class WandbTracker:
    """Weights & Biases; its files lie in `wandb/` of the run directory."""

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        mode: str = "online",
        group: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        """Only keeps the settings.

        Args:
            project: W&B project.
            entity: W&B user or team; None = the login's own.
            mode: online, offline (for `wandb sync` later; opens no connection) or disabled.
            group: W&B group, for example of a sweep.
            tags: W&B tags.

        Raises:
            ConfigError: an unknown mode.
        """
        if mode not in list(WandbMode):
            allowed = ", ".join(WandbMode)
            raise ConfigError(f"tracker.mode={mode}: must be one of {allowed}")
        self.project = project
        self.entity = entity
        self.mode = WandbMode(mode)
        self.group = group
        self.tags = tags
        self._run: Any = None

    def check(self) -> None:
        """Finds and tries a W&B login in online mode; asks nobody and waits seconds at most.

        A W&B that cannot be reached is no reason not to train: the run then warns once.

        Raises:
            ConfigError: no login, or one that W&B refuses.
        """
        if self.mode is not WandbMode.ONLINE:
            return
        wandb = _import_wandb()
        try:
            found = wandb.login(prompt=False, verify=True)
        except wandb.errors.AuthenticationError as error:
            if not _answers(wandb.setup().settings.base_url):
                return
            reason = redact(" ".join(str(error).split()), os.environ).rstrip(".")
            raise ConfigError(f"W&B refuses the login: {reason}. {_wandb_help()}") from error
        if not found:
            raise ConfigError(f"W&B has no login on this machine. {_wandb_help()}")

    def start(self, run: TrackedRun) -> None:
        """Begins the W&B run, or goes on with it when this is a later attempt."""
        wandb = _import_wandb()
        public = redact_values(
            {"project": self.project, "group": self.group, "tags": self.tags}, os.environ
        )
        self._run = wandb.init(
            **public,
            entity=self.entity,
            job_type=run.recipe,
            name=run.name,
            id=run.tracker_id,
            resume="allow",
            dir=str(run.path),
            config=dict(run.config),
            mode=self.mode.value,
            reinit="create_new",  # a sweep has several runs in one process
            # Command line, environment and console may hold secrets: none of them is sent.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_machine_info=True,
                init_timeout=INIT_WAIT_S,
                finish_timeout=WANDB_UPLOAD_S,
            ),
        )
        self._run.config.update({"attempt": run.attempt}, allow_val_change=True)

    def log(self, metrics: Mapping[str, float | int | None], step: int) -> None:
        """Logs the known values of a step, unless W&B already has later ones."""
        if step >= self._run.step:
            known = {key: value for key, value in metrics.items() if value is not None}
            self._run.log(known, step=step)

    def finish(self, stop_reason: StopReason) -> None:
        """Ends the W&B run; it shows as failed unless ours succeeded."""
        self._run.summary["stop_reason"] = stop_reason.value
        succeeded = STATE_OF_STOP_REASON[stop_reason] is RunState.SUCCEEDED
        self._run.finish(exit_code=0 if succeeded else 1)


def _wandb_help() -> str:
    wandb = script_command("wandb", module="wandb")
    return (
        f"Set WANDB_API_KEY or run `{wandb} login`; or go without a login by "
        "tracker.mode=offline, or without W&B by tracker=none."
    )


def _answers(url: str) -> bool:
    """Whether a web server answers at all, with whatever status."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _import_wandb() -> Any:
    """The wandb module, without its own telemetry, which would go out even in offline mode."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    return wandb
