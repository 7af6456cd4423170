"""The states of resources and sessions, on a clock of the test's own and without an engine."""

import dataclasses

import pytest

from tunebook.serve import resources, sessions
from tunebook.serve.endings import advance, fail_resource, settle_stopped
from tunebook.serve.errors import ApiError
from tunebook.serve.faults import FaultPlan, Rule
from tunebook.serve.operations import Limits
from tunebook.serve.rates import PRESETS
from tunebook.serve.records import Resource, Session, SessionStatus
from tunebook.serve.state import Settings, State
from tunebook.serve.store import Store


class Clock:
    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def state(tmp_path, clock):
    settings = Settings(model="m", home=tmp_path, token=None, max_sessions=2, now=clock)
    store = Store(tmp_path / "server.sqlite")
    yield State(settings, store, Limits(vocab_size=100, max_seq_len=16), ("head",))
    store.close()


def create(state, **settings):
    return resources.create_resource(state, {"base_model": "m", **settings})


def open_session(state, resource, **settings):
    """A session as the worker would leave it."""
    session = sessions.create_session(state, {"model_resources_id": resource.id, **settings})
    if session.status is SessionStatus.CREATING:
        session.status = SessionStatus.RUNNING
        state.save(session)
    return session


def end(state, session):
    """What the worker does to a session that is to end."""
    lane = state.lanes.pop(session.id)
    session.status = lane.ending
    state.save(session)
    settle_stopped(state, session.resources_id)


def test_a_resource_is_ready_at_once_and_told_so(state, clock):
    wire = resources.resource_wire(state, create(state))
    assert wire["status"] == "MODEL_RESOURCES_STATUS_READY"
    assert wire["compute_config"]["num_generator_replicas"] == 1  # T9
    assert wire["inactive_timeout"] == 3600 and wire["lora_enabled"] is True
    assert wire["created_at"] == "1970-01-12T13:46:40.000000Z"
    assert wire["expires_at"] == "1970-01-12T14:46:40.000000Z"
    assert wire["status_details"] == {} and wire["optimizer_config"] == {"adam": {}}


def test_a_start_can_take_time(state, clock):
    rule = Rule(0, "resource_slow_start", delay_s=60)
    settings = dataclasses.replace(state.settings, faults=FaultPlan(0, None, (rule,)))
    state.settings = settings
    resource = create(state)
    assert resource.status == "CREATING" and resource.to_wire().get("expires_at") is None
    with pytest.raises(ApiError, match="not ready"):
        open_session(state, resource)
    clock.time += 59
    advance(state)
    assert resource.status == "CREATING"
    clock.time += 1
    advance(state)
    assert resource.status == "READY" and resource.last_activity == clock.time


def test_full_weights_wait_for_each_other(state):
    """T3."""
    first, second, third = (create(state, lora_enabled=False) for _ in range(3))
    assert create(state).status == "READY"
    assert first.status == "READY"
    assert resources.resource_wire(state, second)["status_details"] == {"queue_position": 1}
    assert resources.resource_wire(state, third)["status_details"] == {"queue_position": 2}
    resources.stop_resource(state, first.id, force=False)
    assert (first.status, second.status, third.status) == ("STOPPED", "READY", "PENDING")
    resources.stop_resource(state, third.id, force=False)
    assert third.status == "STOPPED"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"base_model": "other"}, "this server has 'm' only"),
        ({"inactive_timeout": 299}, "inactive_timeout"),
        ({"inactive_timeout": 86401}, "inactive_timeout"),
        ({"compute_config": {"num_generator_replicas": 9}}, "num_generator_replicas"),
        ({"compute_config": {"gpu_type": "A100"}}, "gpu_type"),
        ({"base_weights_ref": "x"}, "registry"),
        ({"optimizer_config": {"muon": {}}}, "needs full weights"),
        ({"optimizer_config": {"muon": {}, "adam": {}}}, "exclude"),
        ({"colour": "red"}, "'colour'"),
    ],
)
def test_a_bad_resource_is_refused(state, settings, expected):
    with pytest.raises(ApiError, match=expected):
        create(state, **settings)
    assert not state.resources


def test_a_resource_with_sessions_stops_by_force_only(state):
    """T16."""
    resource = create(state)
    session = open_session(state, resource)
    with pytest.raises(ApiError, match="active") as caught:
        resources.stop_resource(state, resource.id, force=False)
    assert caught.value.status == 400
    resources.stop_resource(state, resource.id, force=True)
    assert (resource.status, session.status) == ("STOPPING", "STOPPING")
    end(state, session)
    assert (resource.status, session.status) == ("STOPPED", "STOPPED")
    with pytest.raises(ApiError, match="STOPPED") as caught:
        resources.stop_resource(state, resource.id, force=True)
    assert caught.value.status == 400  # T17


def test_nothing_for_its_time_stops_a_resource(state, clock):
    """T18: one busy session keeps its idle neighbour alive."""
    resource = create(state, inactive_timeout=300)
    idle, busy = open_session(state, resource), open_session(state, resource)
    clock.time += 200
    state.touch(busy.resources_id)
    clock.time += 299
    resources.expire(state)
    assert resource.status == "READY"
    clock.time += 1
    resources.expire(state)
    assert resource.status == "STOPPING"
    for session in (idle, busy):
        end(state, session)
        assert session.status == "EXPIRED"
    assert resource.status == "STOPPED"


def test_an_extension_moves_the_end_later_never_earlier(state, clock):
    resource = create(state, inactive_timeout=300)
    resources.extend_expiry(state, resource.id, {"seconds": 1000})
    resources.extend_expiry(state, resource.id, {"seconds": 60})
    clock.time += 999
    resources.expire(state)
    assert resource.status == "READY"
    clock.time += 1
    resources.expire(state)
    assert resource.status == "STOPPED"
    with pytest.raises(ApiError, match="not ready"):
        resources.extend_expiry(state, resource.id, {"seconds": 60})
    for seconds in (59, 86401, "x"):
        with pytest.raises(ApiError, match="seconds"):
            resources.extend_expiry(state, resource.id, {"seconds": seconds})


def test_one_session_too_many_is_an_error_of_the_session(state):
    """T24."""
    resource = create(state)
    first, _second = open_session(state, resource), open_session(state, resource)
    third = open_session(state, resource)
    wire = sessions.session_wire(state, third)
    assert wire["status"] == "TRAINING_SESSION_STATUS_ERROR"
    assert wire["error"]["code"] == "TRAINING_SESSION_ERROR_CODE_RESOURCE_AT_CAPACITY"
    sessions.stop_session(state, first.id)
    assert open_session(state, resource).status == "ERROR"  # STOPPING still holds its place.
    end(state, first)
    assert open_session(state, resource).status == "RUNNING"
    full = create(state, lora_enabled=False)
    assert open_session(state, full).status == "RUNNING"
    assert open_session(state, full).status == "ERROR"


def test_a_lost_resource_takes_its_sessions_along(state):
    resource = create(state)
    session = open_session(state, resource)
    fail_resource(state, resource, "RESOURCE_UNAVAILABLE", "lost")
    assert resource.to_wire()["error"]["code"] == "MODEL_RESOURCES_ERROR_CODE_RESOURCE_UNAVAILABLE"
    end(state, session)
    assert session.status == "ERROR" and session.error.code == "RESOURCE_UNAVAILABLE"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lora_config": {"rank": 0}}, "lora_config.rank"),
        ({"lora_config": {"rank": 1000}}, "lora_config.rank"),
        ({"lora_config": {"alpha": 0.5}}, "lora_config.alpha"),
        ({"lora_config": {"dropout": 1}}, "lora_config.dropout"),
        ({"lora_config": {"seed": "x"}}, "lora_config.seed"),
        ({"lora_config": {"targets": []}}, "'targets'"),
        ({"resume_from_checkpoint_id": "ck-1"}, "checkpoint 'ck-1'"),
        ({"load_optimizer": True}, "resume_from_checkpoint_id"),
        ({"metadata": {"wandb": {"colour": "red"}}}, "'colour'"),
        ({"display_name": 3}, "display_name"),
        ({"model_resources_id": "../x"}, "model resource"),
    ],
)
def test_a_bad_session_is_refused(state, settings, expected):
    resource = create(state)
    with pytest.raises(ApiError, match=expected):
        open_session(state, resource, **{"model_resources_id": resource.id, **settings})


def test_name_and_metadata_change_by_what_is_given(state):
    metadata = {"wandb": {"project": "p", "run_id": "1"}}
    session = open_session(state, create(state), display_name="a", metadata=metadata)
    change = {"metadata": {"wandb": {"run_id": "", "group": "g"}}}
    wire = sessions.session_wire(state, sessions.update_session(state, session.id, change))
    assert wire["display_name"] == "a"
    assert wire["metadata"] == {"wandb": {"project": "p", "group": "g"}}
    cleared = sessions.update_session(state, session.id, {"display_name": ""})
    assert "display_name" not in sessions.session_wire(state, cleared)


def submit(state, session, *, key="k", body=b"{}", kind="optim-step"):
    return sessions.submit(state, session.id, kind, key=key, body=body, payload=None)


def test_a_key_makes_one_operation(state):
    """T45: also when the session has ended."""
    session = open_session(state, create(state))
    first = submit(state, session)
    assert submit(state, session).id == first.id
    assert submit(state, session, key="other").id != first.id
    with pytest.raises(ApiError, match="used before") as caught:
        submit(state, session, body=b'{"adam_params": {}}')
    assert caught.value.status == 422
    assert len(state.lanes[session.id].queue) == 2
    sessions.stop_session(state, session.id)
    assert submit(state, session).id == first.id
    with pytest.raises(ApiError, match="not running") as caught:
        submit(state, session, key="third")
    assert caught.value.status == 400  # T34
    neighbour = open_session(state, create(state))
    assert submit(state, neighbour).id != first.id  # Keys are a session's own.


@pytest.mark.parametrize("key", [None, "", "x" * 256, "a\nb"])
def test_a_key_is_needed(state, key):
    session = open_session(state, create(state))
    with pytest.raises(ApiError, match="Idempotency-Key"):
        submit(state, session, key=key)


def test_without_a_generator_nothing_is_sampled(state):
    resource = create(state, compute_config={"num_generator_replicas": 0})
    session = open_session(state, resource)
    body = b'{"weight_sync_type": "WEIGHT_SYNC_TYPE_SYNCHRONOUS"}'
    with pytest.raises(ApiError, match="no generator"):
        submit(state, session, kind="weights-sync", body=body)


def test_the_optimizer_is_that_of_the_resource(state):
    session = open_session(state, create(state))
    with pytest.raises(ApiError, match="trains with adam"):
        submit(state, session, body=b'{"muon_params": {}}')


def test_what_is_written_is_read_again(tmp_path, state):
    resource = create(state)
    session = open_session(state, resource, lora_config={"rank": 3}, display_name="a")
    submit(state, session)
    ended = open_session(state, create(state))
    state.settings.home.joinpath("server.sqlite").stat()
    again = State(state.settings, state.store, state.limits, ())
    assert again.resources.keys() == state.resources.keys()
    assert again.store.find(Session, session.id) == session
    assert again.store.find(Resource, resource.id) == resource
    assert [one.kind for one in again.store.unended_operations(session.id)] == ["optim-step"]
    found, more = again.store.page(Session, after=None, limit=1, keep=lambda one: True)
    assert [one.id for one in found] == [ended.id] and more
    found, more = again.store.page(Session, after=ended.id, limit=1, keep=lambda one: True)
    assert [one.id for one in found] == [session.id] and not more


def test_hosted_rates_say_how_long_to_wait(tmp_path, clock):
    """T43."""
    rates = PRESETS["hosted"]
    settings = Settings(model="m", home=tmp_path, token=None, now=clock, rates=rates)
    store = Store(tmp_path / "rated.sqlite")
    state = State(settings, store, Limits(vocab_size=100, max_seq_len=16), ())
    made = [create(state) for _ in range(5)]
    with pytest.raises(ApiError, match="create-resource") as caught:
        create(state)
    assert caught.value.status == 429 and 0 < int(caught.value.headers["retry-after"]) <= 180
    session = open_session(state, made[0])
    kind, body = "training-checkpoint", b""
    made = [submit(state, session, key=key, kind=kind, body=body) for key in "abcde"]
    with pytest.raises(ApiError, match="training-checkpoint"):
        submit(state, session, key="f", kind=kind, body=body)
    assert submit(state, session, key="a", kind=kind, body=body).id == made[0].id
    store.close()
