"""The durable record of a run, and what other processes do with it.

`start`, `wait`, `follow`, `events`, `cancel`, `retry` and `run_status` take a run directory, which
is the only handle there is: a path can be saved, shared and used from any process.
"""

from tunebook.runs.attempts import is_being_trained, shielded, terminable
from tunebook.runs.checkpoints import (
    Checkpoint,
    best_checkpoint,
    checkpoints_to_discard,
    newest_checkpoint,
)
from tunebook.runs.control import Cancellation, Event, cancel, events, follow, wait
from tunebook.runs.directory import NoStepsError, RunDir, only_writer
from tunebook.runs.files import StorageError
from tunebook.runs.listing import RunPage, compare_runs, find_run, list_runs, page_runs
from tunebook.runs.record import (
    Attempt,
    AttemptState,
    Evaluation,
    Failure,
    Outcome,
    Preparation,
    RunRecord,
    RunState,
    StopReason,
    Timing,
)
from tunebook.runs.redaction import contains_secret, redact, redact_config, redacted_output
from tunebook.runs.starting import NoCheckpointError, Started, retry, start
from tunebook.runs.status import RunStatus, observed, run_status, shown_state

__all__ = [
    "Attempt",
    "AttemptState",
    "Cancellation",
    "Checkpoint",
    "Evaluation",
    "Event",
    "Failure",
    "NoCheckpointError",
    "NoStepsError",
    "Outcome",
    "Preparation",
    "RunDir",
    "RunPage",
    "RunRecord",
    "RunState",
    "RunStatus",
    "Started",
    "StopReason",
    "StorageError",
    "Timing",
    "best_checkpoint",
    "cancel",
    "checkpoints_to_discard",
    "compare_runs",
    "contains_secret",
    "events",
    "find_run",
    "follow",
    "is_being_trained",
    "list_runs",
    "newest_checkpoint",
    "observed",
    "only_writer",
    "page_runs",
    "redact",
    "redact_config",
    "redacted_output",
    "retry",
    "run_status",
    "shielded",
    "shown_state",
    "start",
    "terminable",
    "wait",
]
