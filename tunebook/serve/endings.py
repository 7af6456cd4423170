"""How resources move on, and how resources and sessions end."""

from __future__ import annotations

from tunebook.serve.records import Problem, Resource, ResourceStatus, SessionStatus
from tunebook.serve.state import Lane, State


def advance(state: State) -> None:
    """Moves waiting resources on: one that trains full weights has to wait for another such."""
    with state.lock:
        now = state.settings.now()
        live = list(state.resources.values())
        taken = any(
            not one.lora_enabled and one.status is not ResourceStatus.PENDING for one in live
        )
        for resource in live:
            if resource.status is ResourceStatus.PENDING and (resource.lora_enabled or not taken):
                resource.status = ResourceStatus.CREATING
                state.save(resource)
                taken = taken or not resource.lora_enabled
            if resource.status is ResourceStatus.CREATING and now >= resource.due_at:
                resource.status = ResourceStatus.READY
                resource.last_activity = now
                state.save(resource)


def end_session(state: State, lane: Lane, becomes: SessionStatus) -> None:
    """Has the worker end a session after what it is computing; nothing else of it runs."""
    if lane.ending is not None:
        return
    lane.ending = becomes
    lane.session.status, lane.session.becomes = SessionStatus.STOPPING, becomes
    state.save(lane.session)
    state.work.notify_all()


def settle_stopped(state: State, identity: str) -> None:
    """Ends a resource that is to stop once none of its sessions holds anything."""
    with state.lock:
        resource = state.resources.get(identity)
        if (
            resource is not None
            and resource.status is ResourceStatus.STOPPING
            and not state.lanes_of(resource)
        ):
            resource.status = ResourceStatus.STOPPED
            state.save(resource)
            advance(state)


def fail_resource(state: State, resource: Resource, code: str, message: str) -> None:
    """Puts a resource, and its sessions, into their error state."""
    with state.lock:
        resource.status = ResourceStatus.ERROR
        resource.error = Problem(code, message, state.settings.now())
        for lane in state.lanes_of(resource):
            lane.session.error = Problem("RESOURCE_UNAVAILABLE", message, state.settings.now())
            end_session(state, lane, SessionStatus.ERROR)
        state.save(resource)
        advance(state)
