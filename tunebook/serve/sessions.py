"""The life of training sessions, and what is queued for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tunebook.serve.endings import end_session, fail_resource
from tunebook.serve.errors import ApiError, invalid, not_found
from tunebook.serve.operations import (
    WITH_PAYLOAD,
    ForwardBackward,
    OptimStep,
    Request,
    Sample,
    WeightsSync,
    merged,
    read_request,
)
from tunebook.serve.records import (
    Checkpoint,
    Operation,
    OperationStatus,
    Origin,
    Problem,
    Published,
    Resource,
    ResourceStatus,
    Saved,
    Session,
    SessionStatus,
    new_id,
)
from tunebook.serve.state import Lane, Queued, State
from tunebook.serve.values import (
    INT64,
    check_keys,
    parse_json,
    read_flag,
    read_int,
    read_number,
    read_object,
    read_text,
    required,
)
from tunebook.types import LoraConfig, MuonParams

DEFAULT_RANK = 32
DEFAULT_ALPHA = 64
"""Of the hosted service, alpha whatever the rank."""
MAX_KEY = 255
KEPT_BYTES = 4 * 2**20
"""Larger requests wait on disk."""
WANDB_KEYS = ("entity", "group", "project", "run_id", "run_name", "url")
LORA_KEYS = ("rank", "alpha", "dropout", "seed", "train_unembed")


def create_session(state: State, body: Mapping[str, Any]) -> Session:
    """A new session, which the worker opens; in an error state where there is no room for it.

    Raises:
        ApiError: no such resource, one that is not ready, or settings that do not fit.
    """
    known = ("model_resources_id", "display_name", "load_optimizer", "lora_config", "metadata")
    check_keys(body, (*known, "resume_from_checkpoint_id"), "")
    resources_id = read_text(required(body, "model_resources_id"), "model_resources_id")
    display_name = _optional_text(body, "display_name")
    metadata = _read_metadata(body.get("metadata") or {}, {})
    with state.lock:
        resource = state.resource(resources_id)
        if resource.status is not ResourceStatus.READY:
            raise invalid("", f"model resource is not ready (current status: {resource.status})")
        checkpoint = _read_checkpoint(state, body, resource)
        lora, train_unembed = _read_lora(state, body, resource, checkpoint)
        start = Origin()
        if checkpoint is not None:
            load = body.get("load_optimizer")
            load = True if load is None else read_flag(load, "load_optimizer")
            start = Origin(checkpoint.folder, load and checkpoint.for_training)
        now = state.settings.now()
        session = Session(
            id=new_id("ts"),
            resources_id=resource.id,
            base_model=resource.base_model,
            created_at=now,
            updated_at=now,
            status=SessionStatus.CREATING,
            lora=lora,
            train_unembed=train_unembed,
            start=start,
            saved=Saved(start),
            published=Published(start) if resource.num_generator_replicas > 0 else None,
            display_name=display_name,
            metadata=metadata,
            resume_from=None if checkpoint is None else checkpoint.id,
        )
        state.check_rate("create-session")
        cap = state.settings.max_sessions if resource.lora_enabled else 1
        fault = state.settings.faults.session_fault("create", state.store.count(Session) + 1)
        if len(state.lanes_of(resource)) >= cap:
            message = f"this resource takes {cap} sessions at a time; stop one of them"
            session.error = Problem("RESOURCE_AT_CAPACITY", message, now)
        elif fault is not None and fault.code is not None:
            session.error = Problem(fault.code, fault.message, now)
        if session.error is not None:
            session.status = SessionStatus.ERROR
        else:
            state.lanes[session.id] = Lane(session, due_at=now + fault.delay_s if fault else now)
        state.touch(resource.id)
        state.save(session)
        state.work.notify_all()
    return session


def _read_checkpoint(
    state: State, body: Mapping[str, Any], resource: Resource
) -> Checkpoint | None:
    where = "resume_from_checkpoint_id"
    load = body.get("load_optimizer")
    if body.get(where) is None:
        if load is not None and read_flag(load, "load_optimizer"):
            raise invalid("load_optimizer", f"needs {where}")
        return None
    identity = read_text(body[where], where)
    checkpoint = state.store.find(Checkpoint, identity)
    if checkpoint is None:
        raise not_found("checkpoint", identity)
    if (checkpoint.lora is not None) != resource.lora_enabled:
        kinds = ("full weights", "a LoRA adapter")
        raise invalid(
            where,
            f"is of {kinds[checkpoint.lora is not None]}, the resource trains "
            f"{kinds[resource.lora_enabled]}",
        )
    if load is not None and read_flag(load, "load_optimizer") and not checkpoint.for_training:
        raise invalid("load_optimizer", "an inference checkpoint holds no optimizer state")
    return checkpoint


def _read_lora(
    state: State, body: Mapping[str, Any], resource: Resource, checkpoint: Checkpoint | None
) -> tuple[LoraConfig | None, bool]:
    """The adapter of a session; what a resumed one does not say is that of its checkpoint."""
    where = "lora_config"
    given = read_object(body.get(where) or {}, where)
    if not resource.lora_enabled:
        if given:
            raise invalid(where, "the resource trains full weights")
        return None, False
    check_keys(given, LORA_KEYS, where)
    begun = None if checkpoint is None else checkpoint.lora

    def value(name: str, default: Any) -> Any:
        return default if given.get(name) is None else given[name]

    rank = read_int(
        value("rank", begun.rank if begun else DEFAULT_RANK),
        f"{where}.rank",
        low=1,
        high=state.limits.max_rank,
    )
    alpha = read_int(
        value("alpha", int(begun.alpha) if begun else DEFAULT_ALPHA),
        f"{where}.alpha",
        low=1,
        high=2**31 - 1,
    )
    dropout = read_number(
        value("dropout", begun.dropout if begun else 0.0), f"{where}.dropout", low=0, high=0.99
    )
    seed = read_int(value("seed", 0), f"{where}.seed", low=-INT64, high=INT64 - 1)
    train_unembed = read_flag(
        value("train_unembed", checkpoint.train_unembed if checkpoint else True),
        f"{where}.train_unembed",
    )
    if begun is not None and checkpoint is not None:
        for name, ours, theirs in (
            ("rank", rank, begun.rank),
            ("alpha", alpha, begun.alpha),
            ("train_unembed", train_unembed, checkpoint.train_unembed),
        ):
            if ours != theirs:
                raise invalid(f"{where}.{name}", f"is {ours}, the checkpoint has {theirs}")
        if dropout > 0 and begun.dropout == 0 and body.get("load_optimizer") is not False:
            raise invalid(
                f"{where}.dropout",
                "the checkpoint was trained without; set load_optimizer to false to begin anew",
            )
        seed = begun.seed
    lora = LoraConfig(
        rank=rank,
        alpha=float(alpha),
        dropout=dropout,
        target_modules=state.head_targets if train_unembed else "all-linear",
        seed=seed,
        rslora=False,
    )
    return lora, train_unembed


def _read_metadata(value: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata with what is given put over what was there; empty strings clear."""
    metadata = read_object(value, "metadata")
    check_keys(metadata, ("wandb",), "metadata")
    wandb = read_object(metadata.get("wandb") or {}, "metadata.wandb")
    check_keys(wandb, WANDB_KEYS, "metadata.wandb")
    merged_wandb = dict(before.get("wandb") or {})
    for name, text in wandb.items():
        if text is not None:
            merged_wandb[name] = read_text(text, f"metadata.wandb.{name}")
    kept = {name: text for name, text in merged_wandb.items() if text}
    return {"wandb": kept} if kept else {}


def _optional_text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    return None if value is None else read_text(value, name, max_length=256)


def update_session(state: State, identity: str, body: Mapping[str, Any]) -> Session:
    """Changes name and metadata; what is not given stays."""
    check_keys(body, ("display_name", "metadata"), "")
    with state.lock:
        session = state.session(identity)
        name = _optional_text(body, "display_name")
        if name is not None:
            session.display_name = name or None
        session.metadata = _read_metadata(body.get("metadata") or {}, session.metadata)
        state.save(session)
        return session


def stop_session(state: State, identity: str) -> Session:
    """Begins to stop a session; one that has ended stays as it is."""
    with state.lock:
        session = state.session(identity)
        lane = state.lanes.get(identity)
        if lane is not None:
            end_session(state, lane, SessionStatus.STOPPED)
        return session


def session_wire(state: State, session: Session) -> dict[str, Any]:
    """JSON of a session."""
    with state.lock:
        return session.to_wire(state.store.checkpoints_of(session.id))


def submit(
    state: State, session_id: str, kind: str, *, key: str | None, body: bytes, payload: bytes | None
) -> Operation:
    """The operation that a request asks for, or the one that its key has made before.

    Args:
        state: of the server.
        session_id: of the session.
        kind: of operation.
        key: the client's idempotency key.
        body: JSON; empty where the kind needs none.
        payload: what was uploaded for it.

    Raises:
        ApiError: the request is not in order, or the session takes none.
    """
    if not key or len(key) > MAX_KEY or not key.isprintable():
        raise ApiError(
            400, f"the header Idempotency-Key is needed, 1 to {MAX_KEY} characters", code="no_key"
        )
    digest = hashlib.sha256(kind.encode() + b"\0" + body + b"\0" + (payload or b"")).digest()
    state.session(session_id)
    known = _operation_of_key(state, session_id, key, digest)
    if known is not None:
        return known
    request = parse(state, kind, body, payload)
    with state.lock:
        # Two of the same key may have been read at the same time.
        known = _operation_of_key(state, session_id, key, digest)
        if known is not None:
            return known
        session = state.session(session_id)
        if session.status is not SessionStatus.RUNNING:
            raise ApiError(
                400,
                f"training session is not running (current status: {session.status})",
                code="session_not_active",
            )
        check_fits(state, session, request)
        lane = state.lanes[session_id]
        if len(lane.queue) >= state.settings.max_queued:
            raise ApiError(
                429,
                f"{len(lane.queue)} operations of this session wait already",
                code="too_many_operations",
                headers={"retry-after": "1"},
            )
        forward_only = isinstance(request, ForwardBackward) and request.forward_only
        state.check_rate("forward" if forward_only else kind, session_id)
        operation = Operation(new_id("op"), session_id, 0, kind, OperationStatus.PENDING)
        state.store.add_operation(operation, key=key, digest=digest, body=body, payload=payload)
        state.operations[operation.id] = operation
        kept = request if len(body) + len(payload or b"") <= KEPT_BYTES else None
        lane.queue.append(Queued(operation, kept))
        state.touch(session.resources_id)
        _meet_faults(state, lane, operation.seq)
        state.work.notify_all()
    return operation


def _meet_faults(state: State, lane: Lane, count: int) -> None:
    """What the server's plan has happen when the `count`-th operation is submitted."""
    fault = state.settings.faults.resource_fault("operation", count)
    resource = state.resources.get(lane.session.resources_id)
    if fault is not None and fault.code is not None and resource is not None:
        fail_resource(state, resource, fault.code, fault.message)
        return
    fault = state.settings.faults.session_fault("operation", count)
    if fault is not None and fault.code is not None:
        lane.session.error = Problem(fault.code, fault.message, state.settings.now())
        end_session(state, lane, SessionStatus[fault.status or "ERROR"])


def _operation_of_key(state: State, session_id: str, key: str, digest: bytes) -> Operation | None:
    found = state.store.operation_of_key(session_id, key)
    if found is None:
        return None
    operation, known_digest = found
    if known_digest != digest:
        raise ApiError(
            422,
            f"the Idempotency-Key was used before, for another request (operation {operation.id}); "
            "use a new key for each",
            code="idempotency_key_reused",
        )
    return operation


def parse(state: State, kind: str, body: bytes, payload: bytes | None) -> Request:
    """The operation that a body, with its payload, asks for."""
    content = read_object(parse_json(body) if body else {}, "body")
    if payload is not None:
        if kind not in WITH_PAYLOAD:
            raise invalid("payload_id", f"{kind} takes no payload")
        content = merged(content, parse_json(payload, where="payload"))
    return read_request(kind, content, state.limits)


def payload_of(body: bytes) -> str | None:
    """The id of the payload that a body names."""
    if b'"payload_id"' not in body:
        return None
    given = read_object(parse_json(body), "body").get("payload_id")
    return None if given is None else read_text(given, "payload_id")


def check_fits(state: State, session: Session, request: Request) -> None:
    """Returns if a session's resource can do an operation at all.

    Raises:
        ApiError: it cannot.
    """
    if isinstance(request, Sample | WeightsSync) and session.published is None:
        raise invalid("", "this resource has no generator (num_generator_replicas is 0)")
    if isinstance(request, OptimStep):
        uses_muon = "muon" in state.resource(session.resources_id).optimizer
        if uses_muon != isinstance(request.params, MuonParams):
            raise invalid(
                "", f"this resource trains with {'muon' if uses_muon else 'adam'}; give its params"
            )
