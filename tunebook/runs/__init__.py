"""The durable record of a run: directory, attempts, metrics, checkpoints, listing."""

from tunebook.runs.attempts import is_being_trained, shielded, terminable
from tunebook.runs.checkpoints import (
    Checkpoint,
    best_checkpoint,
    checkpoints_to_discard,
    newest_checkpoint,
)
from tunebook.runs.directory import NoStepsError, RunDir, only_writer
from tunebook.runs.files import StorageError
from tunebook.runs.listing import compare_runs, find_run, list_runs, shown_state
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
from tunebook.runs.redaction import contains_secret, redact, redact_config

__all__ = [
    "Attempt",
    "AttemptState",
    "Checkpoint",
    "Evaluation",
    "Failure",
    "NoStepsError",
    "Outcome",
    "Preparation",
    "RunDir",
    "RunRecord",
    "RunState",
    "StopReason",
    "StorageError",
    "Timing",
    "best_checkpoint",
    "checkpoints_to_discard",
    "compare_runs",
    "contains_secret",
    "find_run",
    "is_being_trained",
    "list_runs",
    "newest_checkpoint",
    "only_writer",
    "redact",
    "redact_config",
    "shielded",
    "shown_state",
    "terminable",
]
