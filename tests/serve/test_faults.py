import re
import time

import httpx
import pytest
import together

from tests.serve.toy import Toy, serving
from tunebook.errors import ConfigError
from tunebook.serve.faults import NO_FAULTS, read_faults

STEP = "/v1/rl/training-sessions/s/operations/optim-step"


def plan_of(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return read_faults(path)


def counts_of(plan, kind="sample", up_to=1000):
    return [count for count in range(1, up_to + 1) if plan.operation_fault(kind, count)]


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("at: 3", [3]),
        ("at: [9, 2]", [2, 9]),
        ("every: 4", [4, 8, 12]),
        ("every: 4, times: 2", [4, 8]),
        ("times: 2", [1, 2]),
        ("kind: sample", list(range(1, 13))),
        ("kind: optim-step", []),
    ],
)
def test_scripted_rules(tmp_path, when, expected):
    plan = plan_of(tmp_path, f"faults: [{{fault: internal_error, {when}}}]")
    assert counts_of(plan, up_to=12) == expected


def test_random_rules_are_a_function_of_the_seed(tmp_path):
    def plan(seed, more=""):
        return plan_of(
            tmp_path, f"seed: {seed}\nfaults: [{{fault: non_finite, share: 0.33{more}}}]"
        )

    hit = counts_of(plan(1))
    assert counts_of(plan(1)) == hit
    assert 280 < len(hit) < 380
    assert counts_of(plan(2)) != hit
    assert counts_of(plan(1), "optim-step") != hit  # each kind has its own draw
    assert counts_of(plan(1, ", times: 3")) == hit[:3]


def test_the_first_rule_that_fires_wins(tmp_path):
    plan = plan_of(
        tmp_path,
        """
        faults:
          - {fault: out_of_memory, kind: forward-backward, at: 2}
          - {fault: slow_operation, delay_s: 0.5}
        """,
    )
    first, second = (plan.operation_fault("forward-backward", count) for count in (1, 2))
    assert first is not None and second is not None
    assert (first.status, first.code, first.delay_s) == (None, None, 0.5)
    assert (second.status, second.code) == ("FAILED", "RESOURCE_EXHAUSTED")
    assert "fault of this server's plan" in second.message


@pytest.mark.parametrize(
    ("fault", "where", "event", "status", "code"),
    [
        ("resource_capacity", "resource", "create", "ERROR", "CAPACITY_WAIT_TIMEOUT"),
        ("resource_failed_start", "resource", "create", "ERROR", "PROVISIONING_FAILED"),
        ("resource_lost", "resource", "operation", "ERROR", "RESOURCE_UNAVAILABLE"),
        ("session_capacity", "session", "create", "ERROR", "RESOURCE_AT_CAPACITY"),
        ("session_expiry", "session", "operation", "EXPIRED", "TIMED_OUT"),
        ("session_failed", "session", "operation", "ERROR", "SESSION_FAILED"),
    ],
)
def test_faults_of_resources_and_sessions(tmp_path, fault, where, event, status, code):
    plan = plan_of(tmp_path, f"faults: [{{fault: {fault}, at: 2}}]")
    ask = {"resource": plan.resource_fault, "session": plan.session_fault}
    found = ask[where](event, 2)
    assert found is not None
    assert (found.name, found.status, found.code) == (fault, status, code)
    assert ask[where](event, 1) is None
    other = {"create": "operation", "operation": "create"}[event]
    assert ask[where](other, 2) is None
    assert ask[{"resource": "session", "session": "resource"}[where]](event, 2) is None


def test_slow_starts(tmp_path):
    text = "faults: [{fault: resource_slow_start, delay_s: 2}, {fault: session_slow_start, delay_s: 3}]"
    plan = plan_of(tmp_path, text)
    resource, session = plan.resource_fault("create", 1), plan.session_fault("create", 1)
    assert resource is not None and session is not None
    assert (resource.delay_s, session.delay_s) == (2, 3)
    assert resource.status is session.status is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan.yaml: faults is missing"),
        ("- a", "is no mapping with the keys"),
        ("seed: 1", "faults is missing"),
        ("faults: 3", "faults: 3 is not a list of rules"),
        ("faults: []\nsede: 1", "sede: no such key. Did you mean seed?"),
        ("faults: []\nseed: -1", "seed: -1 is not a whole number from 0"),
        ("faults: []\nmax_in_a_row: 0", "max_in_a_row: 0 is not a whole number from 1"),
        ("faults: [7]", "plan.yaml: faults[0]: 7 is no mapping"),
        ("faults: [{at: 1}]", "faults[0].fault is missing"),
        ("faults: [{fault: drop_befor}]", "Did you mean drop_before?"),
        ("faults: [{fault: [1]}]", "faults[0].fault: [1] is not one of"),
        ("faults: [{fault: status}]", "faults[0].status is missing: give a status from 400"),
        ("faults: [{fault: status, status: 200}]", "status: 200 is not a status from 400 to 599"),
        ("faults: [{fault: status, status: true}]", "status: True is not a status"),
        ("faults: [{fault: delay}]", "delay_s is missing"),
        ("faults: [{fault: delay, delay_s: .inf}]", "delay_s: inf is not a number of seconds"),
        ("faults: [{fault: drop_after, delay_s: 1}]", "delay_s: no such key"),
        ("faults: [{fault: drop_after, at: 1, share: 0.5}]", "at and share are given: keep one"),
        ("faults: [{fault: drop_after, share: 1.5}]", "share: 1.5 is not a number above 0"),
        ("faults: [{fault: drop_after, at: 0}]", "at: 0 is not a count from 1"),
        ("faults: [{fault: drop_after, at: []}]", "at: [] is not a count from 1"),
        ("faults: [{fault: drop_after, every: 0.5}]", "every: 0.5 is not a whole number from 1"),
        ("faults: [{fault: drop_after, times: 0}]", "times: 0 is not a whole number from 1"),
        ("faults: [{fault: drop_after, path: 3}]", "path: 3 is not a pattern of paths"),
        ("faults: [{fault: drop_after, method: post}]", "method: 'post' is not a method"),
        ("faults: [{fault: non_finite, kind: forward}]", "kind: 'forward' is not one of forward-b"),
        ("faults: [{fault: non_finite}, {fault: status, status: 1}]", "faults[1].status: 1"),
        ("faults: [", "cannot be read as YAML"),
        ("faults: [{fault: delay, fault: delay}]", "cannot be read as YAML"),
        ("faults: ${nowhere}", "cannot be read as YAML"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        plan_of(tmp_path, text)
    assert "plan.yaml" in str(caught.value)


def test_a_plan_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        read_faults(tmp_path / "none.yaml")


def test_without_rules_nothing_happens():
    toy = Toy()
    with serving(toy.app(NO_FAULTS)) as url:
        assert httpx.post(url + STEP, json={}).json()["output"] == {"step": "1"}
    assert toy.log == []


def test_status_faults(tmp_path):
    toy = Toy()
    plan = plan_of(
        tmp_path,
        """
        faults:
          - {fault: status, status: 429, retry_after_s: 1.5, at: 1}
          - {fault: status, status: 503, at: 2}
        """,
    )
    with serving(toy.app(plan)) as url, httpx.Client(base_url=url) as client:
        first, second, third = (client.post(STEP, content=b"x" * 300_000) for _ in range(3))
    assert (first.status_code, second.status_code, third.status_code) == (429, 503, 200)
    assert (first.headers["retry-after"], first.headers["retry-after-ms"]) == ("2", "1500")
    assert "retry-after" not in second.headers
    assert first.json()["error"]["code"] == "injected_fault"
    assert toy.steps == toy.requests == 1
    assert toy.log == [f"fault: status (1) for POST {STEP}", f"fault: status (2) for POST {STEP}"]


@pytest.mark.parametrize(("fault", "steps"), [("drop_before", 1), ("drop_after", 2)])
def test_dropped_connections(tmp_path, fault, steps, caplog):
    toy = Toy()
    plan = plan_of(tmp_path, f"faults: [{{fault: {fault}, at: 1}}]")
    with serving(toy.app(plan)) as url, httpx.Client(base_url=url) as client:
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError)):
            client.post(STEP, json={})
        assert client.post(STEP, json={}).status_code == 200
    assert toy.steps == steps
    assert caplog.messages == []  # the server itself sees nothing unusual


def test_a_delay(tmp_path):
    toy = Toy()
    with serving(toy.app(plan_of(tmp_path, "faults: [{fault: delay, delay_s: 0.2}]"))) as url:
        start = time.monotonic()
        assert httpx.post(url + STEP, json={}).status_code == 200
        assert time.monotonic() - start >= 0.2


def test_filters_of_path_and_method(tmp_path):
    toy = Toy()
    plan = plan_of(
        tmp_path,
        """
        faults:
          - {fault: status, status: 500, path: "*/sample"}
          - {fault: status, status: 501, method: GET}
          - {fault: status, status: 502, path: "*/optim-step", method: POST, at: 2}
        """,
    )
    with serving(toy.app(plan)) as url, httpx.Client(base_url=url) as client:
        assert client.get("/health").status_code == 200  # not part of the API
        assert client.get(STEP).status_code == 501
        assert client.post(STEP.replace("optim-step", "sample")).status_code == 500
        assert [client.post(STEP).status_code for _ in range(3)] == [200, 502, 200]


def test_so_many_in_a_row_and_no_more(tmp_path):
    toy = Toy()
    plan = plan_of(tmp_path, "max_in_a_row: 2\nfaults: [{fault: status, status: 500}]")
    with serving(toy.app(plan)) as url, httpx.Client(base_url=url) as client:
        one, two = {"Idempotency-Key": "1"}, {"Idempotency-Key": "2"}
        keys = [one, two, one, one, two, two, one]
        answers = [client.post(STEP, headers=key).status_code for key in keys]
    assert answers == [500, 500, 500, 200, 500, 200, 500]


def test_the_same_requests_meet_the_same_faults(tmp_path):
    plan = plan_of(
        tmp_path,
        """
        seed: 3
        faults:
          - {fault: status, status: 500, share: 0.2}
          - {fault: status, status: 429, retry_after_s: 0.01, share: 0.2}
        """,
    )

    def answers():
        with serving(Toy().app(plan)) as url, httpx.Client(base_url=url) as client:
            return [client.post(STEP).status_code for _ in range(60)]

    first = answers()
    assert answers() == first
    assert {200, 429, 500} == set(first)


def steps_with_the_sdk(tmp_path, text, steps, max_retries=7):
    """What the toy and the client counted when the real client made some steps."""
    toy = Toy()
    with (
        serving(toy.app(plan_of(tmp_path, text))) as url,
        together.Together(base_url=url, api_key="any", max_retries=max_retries) as client,
    ):
        submit = client.post_training.operations.optim_step
        done = [submit("s", idempotency_key=f"key-{index}") for index in range(steps)]
    return toy, [int(operation.output.step) for operation in done]


def test_the_real_client_gets_through_lost_and_refused_requests(tmp_path):
    """No step is lost or made twice, though answers are lost after the work was done."""
    text = """
    max_in_a_row: 6
    seed: 11
    faults:
      - {fault: drop_after, at: 4}
      - {fault: drop_before, at: 8}
      - {fault: status, status: 429, retry_after_s: 0.001, share: 0.3}
      - {fault: status, status: 503, retry_after_s: 0.001, share: 0.3}
    """
    toy, steps = steps_with_the_sdk(tmp_path, text, 40)
    assert steps == list(range(1, 41))
    assert toy.steps == 40
    assert len(toy.log) >= (40 + len(toy.log)) / 3  # of all requests
    assert toy.requests == 41  # the work of the lost answer was not done again


def test_the_real_client_waits_as_long_as_it_is_told(tmp_path):
    """Case 109."""
    start = time.monotonic()
    text = "faults: [{fault: status, status: 429, retry_after_s: 0.4, times: 2}]"
    assert steps_with_the_sdk(tmp_path, text, 1)[1] == [1]
    assert 0.8 <= time.monotonic() - start < 4.0


def test_the_real_client_gives_up_in_the_end(tmp_path):
    text = "faults: [{fault: status, status: 429, retry_after_s: 0.001}]"
    with pytest.raises(together.RateLimitError):
        steps_with_the_sdk(tmp_path, text, 1)


def test_the_real_client_does_not_repeat_what_is_wrong_for_good(tmp_path):
    text = "faults: [{fault: status, status: 400, times: 1}]"
    with pytest.raises(together.BadRequestError):
        steps_with_the_sdk(tmp_path, text, 1)
