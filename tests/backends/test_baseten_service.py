"""What of backend=baseten needs no SDK: waiting for a place, its control plane, and who says what is missing."""

import http.client
import sys

import httpx
import pytest

from tests.resources.test_commands import call
from tunebook.backends.baseten import BasetenBackend
from tunebook.backends.baseten.capacity import jittered, waits_for
from tunebook.backends.baseten.sdk import loops_sdk
from tunebook.backends.baseten.service import ATTEMPTS, LONGEST_WAIT_S, BasetenService
from tunebook.errors import ConfigError
from tunebook.resources import ServiceError

FULL = {"reason": "loops_capacity"}


@pytest.mark.parametrize(
    ("status", "headers", "details", "seconds"),
    [
        (429, {"Retry-After": "20"}, FULL, 20.0),
        (429, {"retry-after": "0"}, FULL, 0.0),
        (429, {"Retry-After": "900"}, FULL, 60.0),
        (429, {}, FULL, None),
        (429, {"Retry-After": "soon"}, FULL, None),
        (429, {"Retry-After": "nan"}, FULL, None),
        (429, {"Retry-After": "20"}, {"reason": "rate_limit"}, None),
        (429, {"Retry-After": "20"}, None, None),
        (429, {"Retry-After": "20"}, {**FULL, "limit": "org_cap"}, None),
        (403, {"Retry-After": "20"}, FULL, None),
        (503, {"Retry-After": "20"}, FULL, None),
    ],
)
def test_only_a_full_pool_is_waited_for(status, headers, details, seconds):
    """L2, L3."""
    body = {"error": "no", **({} if details is None else {"details": details})}
    assert waits_for(httpx.Response(status, headers=headers, json=body)) == seconds


def test_an_answer_that_is_no_json_is_not_waited_for():
    response = httpx.Response(429, headers={"Retry-After": "20"}, text="<html>")
    assert waits_for(response) is None


def test_waits_are_never_below_what_is_asked_nor_above_a_minute():
    for asked_s in (0.0, 1.0, 20.0, 59.0, 60.0):
        for refusals in range(1, 11):
            waits = [jittered(asked_s, refusals) for _ in range(50)]
            assert asked_s <= min(waits) and max(waits) <= LONGEST_WAIT_S
    assert jittered(1.0, 5) > 2.0 * 2**4 * 0.99
    assert len({jittered(10.0, 1) for _ in range(10)}) > 1


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="about older ones")
def test_an_older_python_is_told_what_to_install_where(monkeypatch):
    monkeypatch.setenv("BASETEN_API_KEY", "bt_key")
    with pytest.raises(ConfigError, match=r"Python 3\.12 or newer.*tunebook\[baseten\]"):
        BasetenBackend(model="m", service_model="m")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="about newer ones")
def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "baseten", None)
    with pytest.raises(ConfigError, match=r"pip install 'tunebook\[baseten\]'"):
        loops_sdk()


def test_a_service_of_the_environment_is_asked(tmp_path, monkeypatch):
    """Without its SDK; nobody is at home at that address."""
    monkeypatch.setattr("tunebook.backends.baseten.service.FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path))
    monkeypatch.setenv("LOOPS_BASE_URL", "http://127.0.0.1:9")
    done = call("list")
    assert done.exit_code == 1
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr("tunebook.backends.baseten.service.FIRST_WAIT_S", 0.001)
    return BasetenService("http://127.0.0.1:9")


@pytest.mark.parametrize(
    "error", [http.client.IncompleteRead(b"{"), http.client.BadStatusLine("nonsense")], ids=repr
)
def test_an_answer_that_breaks_off_is_an_error_of_the_service(service, monkeypatch, error):
    asked = []

    def urlopen(request, timeout):
        asked.append(request.full_url)
        raise error

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    with pytest.raises(ServiceError, match="cannot be reached"):
        service.list_live()
    assert len(asked) == ATTEMPTS


@pytest.mark.parametrize(
    "answer",
    [{}, [], {"runs": None}, {"runs": [{"id": "r"}]}, {"runs": [{"status": "ACTIVE"}]}],
    ids=repr,
)
def test_an_answer_of_another_shape_is_an_error_of_the_service(service, monkeypatch, answer):
    monkeypatch.setattr(service, "ask", lambda path: answer)
    with pytest.raises(ServiceError, match="no list of runs"):
        service.list_live()
