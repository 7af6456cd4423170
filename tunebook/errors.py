"""Errors a person can act on: each message is one clear paragraph, shown without a traceback."""

from collections.abc import Sequence
from dataclasses import dataclass


class TunebookError(Exception):
    """An error whose message says what is wrong and what to do.

    `code` is stable and machine-readable; `category` is one of input, capacity, service, numeric,
    system; `exit_code` is what the command line exits with.
    """

    code = "error"
    category = "system"
    exit_code = 1


class ConfigError(TunebookError, ValueError):
    """A configuration that cannot run: names the key, the value and the allowed set."""

    code = "config"
    category = "input"
    exit_code = 2


@dataclass(frozen=True, slots=True)
class RowProblem:
    """One thing wrong with one row of a source."""

    file: str
    line: int
    """1-based physical line in a text file; 1-based row number in any other source."""
    field: str
    """Path of the field, for example `messages[1].content`; empty for the whole row."""
    reason: str
    """What is wrong and what to do about it."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where}: {self.field}: {self.reason}" if self.field else f"{where}: {self.reason}"


SHOWN_PROBLEMS = 20
SHOWN_WHOLE = 3
SHOWN_LINES = 10


def listed(problems: Sequence[RowProblem]) -> list[str]:
    """The problems as indented lines: 20 different ones, each with its first places."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for problem in problems:
        groups.setdefault((problem.file, problem.field, problem.reason), []).append(problem.line)
    lines: list[str] = []
    for (file, field, reason), places in list(groups.items())[:SHOWN_PROBLEMS]:
        whole, others = places[:SHOWN_WHOLE], places[SHOWN_WHOLE:]
        lines += [f"  {RowProblem(file, line, field, reason)}" for line in whole]
        if others:
            shown = ", ".join(map(str, others[:SHOWN_LINES]))
            unshown = len(others) - SHOWN_LINES
            more = f" and {unshown} more" if unshown > 0 else ""
            lines.append(f"    the same in line {shown}{more}")
    if len(groups) > SHOWN_PROBLEMS:
        lines.append(f"  and {len(groups) - SHOWN_PROBLEMS} more kinds of problems")
    return lines


class DataError(TunebookError, ValueError):
    """Data that cannot be trained on; `problems` locates each bad row."""

    code = "data"
    category = "input"
    exit_code = 2

    def __init__(self, message: str, problems: Sequence[RowProblem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class EmptyDataError(DataError):
    """A source without a single row."""

    code = "data_empty"


class NoTextError(DataError):
    """Rows are there, but no message of them holds any text."""

    code = "data_no_text"


class NothingSupervisedError(DataError):
    """Rows and text are there, but no token would carry loss."""

    code = "data_nothing_supervised"


class NonFiniteError(TunebookError, RuntimeError):
    """A loss or a gradient that is NaN or infinite; the update was not applied."""

    code = "non_finite"
    category = "numeric"


class RewardError(TunebookError, RuntimeError):
    """A reward that failed where it was told to end the run, or that cannot be run at all.

    The message holds the traceback of the reward.
    """

    code = "reward"


class BackendError(TunebookError, RuntimeError):
    """A backend that cannot do what was asked of it."""

    code = "backend"


class StaleGenerator(BackendError):
    """A generator was asked to sample after its session had published newer weights."""

    code = "stale_generator"


class CheckpointError(TunebookError, RuntimeError):
    """A checkpoint that is missing, incomplete, or does not fit the model."""

    code = "checkpoint"


class RunError(TunebookError, RuntimeError):
    """A run directory that cannot be used as asked."""

    code = "run"
    category = "input"
    exit_code = 2


class RunCancelled(TunebookError):
    """A run that was cancelled before it made a step: it has no model and no checkpoint."""

    code = "cancelled"
    category = "input"
    exit_code = 130


class RunEndedError(RunError):
    """A run that has ended cannot be cancelled."""

    code = "run_ended"


class RunFinalizingError(RunError):
    """A run that writes its model already is not interrupted any more."""

    code = "run_finalizing"
    exit_code = 5


class WaitTimeout(TunebookError, TimeoutError):
    """A run has not ended within the time that somebody was willing to wait; it goes on."""

    code = "wait_timeout"
    exit_code = 124


class AdmissionError(ConfigError):
    """A run that would exceed one of its `limits`; nothing was started."""

    code = "over_limit"
    category = "capacity"
