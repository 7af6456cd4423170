"""What the server remembers: resources, sessions, operations, checkpoints, and their JSON.

Names on the wire carry a prefix (`TRAINING_SESSION_STATUS_RUNNING`); here they are short.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from tunebook.types import LoraConfig

GPU_TYPE = "B200-SXM"
CREATED_BY = "local"


class ResourceStatus(StrEnum):
    """States of a resource, in order; ERROR can follow any but the last."""

    PENDING = "PENDING"
    CREATING = "CREATING"
    READY = "READY"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    ERROR = "ERROR"


class SessionStatus(StrEnum):
    """States of a session; EXPIRED and ERROR can follow RUNNING."""

    CREATING = "CREATING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    EXPIRED = "EXPIRED"
    ERROR = "ERROR"


class OperationStatus(StrEnum):
    """States of an operation, in order; the last two are ends."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


WAITING_RESOURCE = (ResourceStatus.PENDING, ResourceStatus.CREATING)
ENDED_RESOURCE = (ResourceStatus.STOPPED, ResourceStatus.ERROR)
ACTIVE_SESSION = (SessionStatus.CREATING, SessionStatus.RUNNING, SessionStatus.STOPPING)
ENDED_OPERATION = (OperationStatus.COMPLETED, OperationStatus.FAILED)


@dataclass(slots=True)
class Problem:
    """Why something is in an error state."""

    code: str
    """Short: CAPACITY_WAIT_TIMEOUT."""
    message: str
    occurred_at: float


@dataclass(slots=True)
class Resource:
    """Where sessions run. Times are seconds since the epoch."""

    id: str
    base_model: str
    lora_enabled: bool
    num_generator_replicas: int
    inactive_timeout: int
    optimizer: dict[str, Any]
    created_at: float
    updated_at: float
    status: ResourceStatus
    due_at: float = 0.0
    """When a waiting resource moves on."""
    last_activity: float = 0.0
    extended_until: float = 0.0
    error: Problem | None = None

    @property
    def expires_at(self) -> float:
        """When it stops if nothing happens."""
        return max(self.last_activity + self.inactive_timeout, self.extended_until)

    def to_wire(self, *, queue_position: int | None = None) -> dict[str, Any]:
        """JSON as the service has it."""
        details = {} if queue_position is None else {"queue_position": queue_position}
        wire = {
            "id": self.id,
            "base_model": self.base_model,
            "compute_config": {
                "num_generator_replicas": self.num_generator_replicas,
                "gpu_type": GPU_TYPE,
            },
            "created_at": timestamp(self.created_at),
            "created_by": CREATED_BY,
            "inactive_timeout": self.inactive_timeout,
            "lora_enabled": self.lora_enabled,
            "optimizer_config": self.optimizer,
            "status": f"MODEL_RESOURCES_STATUS_{self.status}",
            "status_details": details,
            "updated_at": timestamp(self.updated_at),
        }
        if self.status is ResourceStatus.READY:
            wire["expires_at"] = timestamp(self.expires_at)
        return _with_error(wire, self.error, "MODEL_RESOURCES_ERROR_CODE_")


@dataclass(frozen=True, slots=True)
class Origin:
    """Weights that a session can be opened with."""

    folder: str | None = None
    """Relative to the home; None = a fresh adapter, or the base itself."""
    with_optimizer: bool = True


@dataclass(slots=True)
class Progress:
    """What a session has done up to one operation, apart from its weights."""

    seq: int = 0
    """Operations up to this number are in it."""
    step: int = 0
    """Durable counter, which a resume restores."""
    trainer_step: int = 0
    """Optimizer steps of this session."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The newest weights of a session on disk, and what they have seen."""

    origin: Origin
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True, slots=True)
class Published:
    """The weights that are sampled."""

    origin: Origin | None
    """None = not on disk: those of the moment of the operation `seq`."""
    seq: int = 0
    version: int = 0
    """Optimizer steps of the session that they have seen."""


@dataclass(slots=True)
class Session:
    """One adapter, or the full weights, being trained."""

    id: str
    resources_id: str
    base_model: str
    created_at: float
    updated_at: float
    status: SessionStatus
    lora: LoraConfig | None
    train_unembed: bool
    start: Origin
    saved: Saved
    published: Published | None
    """None = there is no generator."""
    display_name: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    resume_from: str | None = None
    error: Problem | None = None
    progress: Progress = field(default_factory=Progress)
    becomes: SessionStatus | None = None
    """What it ends as, once it is to end; a server that starts again has to know."""
    non_finite: bool = False
    """Whether a step met a gradient that is no number, after which none is taken."""

    def to_wire(self, checkpoints: list[Checkpoint]) -> dict[str, Any]:
        """JSON as the service has it."""
        version = 0 if self.published is None else self.published.version
        wire: dict[str, Any] = {
            "id": self.id,
            "base_model": self.base_model,
            "created_at": timestamp(self.created_at),
            "created_by": CREATED_BY,
            "inference_checkpoints": [c.to_short_wire() for c in checkpoints if not c.for_training],
            "metadata": self.metadata,
            "model_resources_id": self.resources_id,
            "policy_state": {
                "applied_weights_version": str(version),
                "pending_publish": False,
                "target_weights_version": str(version),
                "trainer_step": str(self.progress.trainer_step),
            },
            "status": f"TRAINING_SESSION_STATUS_{self.status}",
            "step": str(self.progress.step),
            "training_checkpoints": [c.to_short_wire() for c in checkpoints if c.for_training],
            "updated_at": timestamp(self.updated_at),
        }
        if self.display_name:
            wire["display_name"] = self.display_name
        if self.lora is not None:
            wire["lora_config"] = {
                "rank": self.lora.rank,
                "alpha": int(self.lora.alpha),
                "dropout": self.lora.dropout,
                "seed": str(self.lora.seed),
                "train_unembed": self.train_unembed,
            }
        if self.resume_from is not None:
            wire["resume_from_checkpoint_id"] = self.resume_from
        return _with_error(wire, self.error, "TRAINING_SESSION_ERROR_CODE_")


@dataclass(slots=True)
class Operation:
    """One operation of a session, without its body and its output."""

    id: str
    session_id: str
    seq: int
    """Ascending over all sessions."""
    kind: str
    status: OperationStatus
    error: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        """Whether it has completed or failed."""
        return self.status in ENDED_OPERATION


@dataclass(slots=True)
class Checkpoint:
    """A saved session."""

    id: str
    session_id: str
    base_model: str
    created_at: float
    step: int
    for_training: bool
    folder: str
    """Relative to the home."""
    lora: LoraConfig | None
    train_unembed: bool

    def to_short_wire(self) -> dict[str, Any]:
        """JSON as a session lists it."""
        return {"id": self.id, "created_at": timestamp(self.created_at), "step": str(self.step)}

    def to_wire(self) -> dict[str, Any]:
        """JSON as the service has it."""
        kind = "TRAINING" if self.for_training else "INFERENCE"
        wire = {
            **self.to_short_wire(),
            "base_model": self.base_model,
            "session_id": self.session_id,
            "type": f"CHECKPOINT_TYPE_{kind}",
        }
        if self.lora is not None:
            wire["lora_rank"] = self.lora.rank
        return wire


def new_id(prefix: str) -> str:
    """A new id, which nobody can guess."""
    return f"{prefix}-{secrets.token_hex(16)}"


def timestamp(seconds: float) -> str:
    """RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def to_plain(record: Any) -> dict[str, Any]:
    """A record as JSON values."""
    return dataclasses.asdict(record)


def resource_from(plain: Mapping[str, Any]) -> Resource:
    """The resource that `to_plain` gave."""
    return Resource(
        **{
            **plain,
            "status": ResourceStatus(plain["status"]),
            "error": _optional(Problem, plain["error"]),
        }
    )


def session_from(plain: Mapping[str, Any]) -> Session:
    """The session that `to_plain` gave."""
    return Session(
        **{
            **plain,
            "status": SessionStatus(plain["status"]),
            "becomes": SessionStatus(plain["becomes"]) if plain.get("becomes") else None,
            "lora": lora_from(plain["lora"]),
            "error": _optional(Problem, plain["error"]),
            "progress": Progress(**plain["progress"]),
            "start": Origin(**plain["start"]),
            "saved": Saved(
                Origin(**plain["saved"]["origin"]), Progress(**plain["saved"]["progress"])
            ),
            "published": _published_from(plain["published"]),
        }
    )


def checkpoint_from(plain: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint that `to_plain` gave."""
    return Checkpoint(**{**plain, "lora": lora_from(plain["lora"])})


def lora_from(plain: Mapping[str, Any] | None) -> LoraConfig | None:
    """The adapter that `to_plain` gave; JSON has no tuples."""
    if plain is None:
        return None
    targets = plain["target_modules"]
    return LoraConfig(
        **{**plain, "target_modules": targets if isinstance(targets, str) else tuple(targets)}
    )


def _published_from(plain: Mapping[str, Any] | None) -> Published | None:
    if plain is None:
        return None
    return Published(_optional(Origin, plain["origin"]), plain["seq"], plain["version"])


def _optional(kind: Any, plain: Mapping[str, Any] | None) -> Any:
    return None if plain is None else kind(**plain)


def _with_error(wire: dict[str, Any], error: Problem | None, prefix: str) -> dict[str, Any]:
    if error is not None:
        wire["error"] = {
            "code": prefix + error.code,
            "message": error.message,
            "occurred_at": timestamp(error.occurred_at),
        }
    return wire
