"""The life of model resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebook.serve.endings import advance, end_session, fail_resource, settle_stopped
from tunebook.serve.errors import ApiError, invalid
from tunebook.serve.records import (
    ENDED_RESOURCE,
    GPU_TYPE,
    Resource,
    ResourceStatus,
    SessionStatus,
    new_id,
)
from tunebook.serve.state import State
from tunebook.serve.values import (
    check_keys,
    read_choice,
    read_flag,
    read_int,
    read_object,
    read_text,
    required,
)

MAX_REPLICAS = 8
SCALINGS = ("UNSPECIFIED", "MATCH_ADAM")


def supported_model(state: State) -> dict[str, Any]:
    """The one model of this server, as the catalogue has it."""
    limits = state.limits
    longest = limits.max_seq_len or 2**20
    return {
        "base_model": state.settings.model,
        "default_gpu_type": GPU_TYPE,
        "compute_configs": [
            {
                "gpu_type": GPU_TYPE,
                "generator_config": {
                    "context_length": longest,
                    "sampling_defaults": {
                        "logprobs": 1,
                        "max_tokens": min(1024, longest),
                        "n": 1,
                        "temperature": 1.0,
                    },
                },
                "trainer_config": {
                    "full": {"max_batch_size": limits.max_samples, "max_seq_length": longest},
                    "lora": {
                        "max_batch_size": limits.max_samples,
                        "max_rank": limits.max_rank,
                        "max_seq_length": longest,
                    },
                },
            }
        ],
    }


def read_resource(state: State, body: Mapping[str, Any]) -> Resource:
    """The resource that a request asks for, not kept yet.

    Raises:
        ApiError: another model, or a setting that is not allowed.
    """
    known = ("base_model", "base_weights_ref", "compute_config", "inactive_timeout")
    check_keys(body, (*known, "lora_enabled", "optimizer_config"), "")
    model = read_text(required(body, "base_model"), "base_model")
    if model != state.settings.model:
        raise invalid("base_model", f"is {model!r}; this server has {state.settings.model!r} only")
    if body.get("base_weights_ref") is not None:
        raise invalid("base_weights_ref", "this server has no model registry")
    compute = read_object(body.get("compute_config") or {}, "compute_config")
    check_keys(compute, ("gpu_type", "num_generator_replicas"), "compute_config")
    if compute.get("gpu_type") is not None:
        read_choice(compute["gpu_type"], {GPU_TYPE: None}, "compute_config.gpu_type")
    replicas = compute.get("num_generator_replicas")
    timeout = body.get("inactive_timeout")
    lora_enabled = body.get("lora_enabled")
    lora_enabled = True if lora_enabled is None else read_flag(lora_enabled, "lora_enabled")
    now = state.settings.now()
    return Resource(
        id=new_id("mr"),
        base_model=model,
        lora_enabled=lora_enabled,
        num_generator_replicas=1
        if replicas is None
        else read_int(replicas, "compute_config.num_generator_replicas", low=0, high=MAX_REPLICAS),
        inactive_timeout=3600
        if timeout is None
        else read_int(timeout, "inactive_timeout", low=300, high=86400),
        optimizer=_read_optimizer(body.get("optimizer_config") or {}, lora_enabled),
        created_at=now,
        updated_at=now,
        status=ResourceStatus.PENDING,
    )


def _read_optimizer(value: Any, lora_enabled: bool) -> dict[str, Any]:
    where = "optimizer_config"
    config = read_object(value, where)
    check_keys(config, ("adam", "muon"), where)
    if config.get("muon") is None:
        check_keys(read_object(config.get("adam") or {}, f"{where}.adam"), (), f"{where}.adam")
        return {"adam": {}}
    if config.get("adam") is not None:
        raise invalid(where, "adam and muon exclude each other")
    if lora_enabled:
        raise invalid(f"{where}.muon", "needs full weights; set lora_enabled to false, or use adam")
    muon = read_object(config["muon"], f"{where}.muon")
    check_keys(muon, ("scaling_strategy",), f"{where}.muon")
    strategies = {f"MUON_SCALING_STRATEGY_{name}": name for name in SCALINGS}
    given = muon.get("scaling_strategy") or "MUON_SCALING_STRATEGY_MATCH_ADAM"
    # The engine scales Muon's updates to the size of Adam's, always.
    read_choice(given, strategies, f"{where}.muon.scaling_strategy")
    return {"muon": {"scaling_strategy": "MUON_SCALING_STRATEGY_MATCH_ADAM"}}


def create_resource(state: State, body: Mapping[str, Any]) -> Resource:
    """A new resource, READY at once unless it has to wait.

    Args:
        state: of the server.
        body: of the request.
    """
    resource = read_resource(state, body)
    state.check_rate("create-resource")
    with state.lock:
        fault = state.settings.faults.resource_fault("create", state.store.count(Resource) + 1)
        if fault is not None:
            resource.due_at = resource.created_at + fault.delay_s
        state.resources[resource.id] = resource
        state.save(resource)
        if fault is not None and fault.code is not None:
            fail_resource(state, resource, fault.code, fault.message)
        advance(state)
    return resource


def queue_position(state: State, resource: Resource) -> int | None:
    """Place among the resources that wait, from 1; None where it does not wait."""
    if resource.status is not ResourceStatus.PENDING:
        return None
    waiting = [r.id for r in state.resources.values() if r.status is ResourceStatus.PENDING]
    return waiting.index(resource.id) + 1 if resource.id in waiting else None


def resource_wire(state: State, resource: Resource) -> dict[str, Any]:
    """JSON of a resource."""
    with state.lock:
        return resource.to_wire(queue_position=queue_position(state, resource))


def extend_expiry(state: State, identity: str, body: Mapping[str, Any]) -> Resource:
    """Keeps a resource for at least some seconds from now.

    Raises:
        ApiError: it is not READY.
    """
    check_keys(body, ("seconds",), "")
    seconds = read_int(required(body, "seconds"), "seconds", low=60, high=86400)
    with state.lock:
        resource = state.resource(identity)
        if resource.status is not ResourceStatus.READY:
            raise invalid("", f"model resource is not ready (current status: {resource.status})")
        until = state.settings.now() + seconds
        resource.extended_until = max(resource.extended_until, until)
        state.save(resource)
        return resource


def stop_resource(state: State, identity: str, *, force: bool) -> Resource:
    """Begins to stop a resource.

    Args:
        state: of the server.
        identity: of the resource.
        force: stop its sessions, too.

    Raises:
        ApiError: it has stopped already, or a session is active.
    """
    with state.lock:
        resource = state.resource(identity)
        if resource.status in ENDED_RESOURCE:
            raise invalid("", f"model resource is not active (current status: {resource.status})")
        lanes = state.lanes_of(resource)
        if lanes and not force and resource.status is not ResourceStatus.STOPPING:
            raise ApiError(
                400,
                f"{len(lanes)} training sessions of this resource are active; stop them first, or "
                "stop with force=true",
                code="sessions_active",
            )
        _end(state, resource, SessionStatus.STOPPED)
        return resource


def _end(state: State, resource: Resource, sessions_become: SessionStatus) -> None:
    resource.status = ResourceStatus.STOPPING
    state.save(resource)
    for lane in state.lanes_of(resource):
        end_session(state, lane, sessions_become)
    settle_stopped(state, resource.id)


def expire(state: State) -> None:
    """Stops resources on which nothing has happened for their time."""
    with state.lock:
        now = state.settings.now()
        for resource in list(state.resources.values()):
            if resource.status is not ResourceStatus.READY or now < resource.expires_at:
                continue
            lanes = state.lanes_of(resource)
            if any(lane.queue or lane.num_running for lane in lanes):
                continue  # What runs counts as activity.
            _end(state, resource, SessionStatus.EXPIRED)
