"""What the service and its SDK raise, as errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tunebook.backends.remote.failures import (
    INTERNAL_ERROR,
    UNREACHABLE,
    Duty,
    RemoteError,
)
from tunebook.errors import NonFiniteError, TunebookError
from tunebook.runs.redaction import redact

CODE_PREFIX = "TRAINING_OPERATION_ERROR_CODE_"


DUTIES = {
    "INVALID_INPUT": Duty("input", False, "Correct what it names"),
    "RESOURCE_EXHAUSTED": Duty(
        "capacity", False, "Lower max_seq_len or plan.batch_size: the rows do not fit its memory"
    ),
    "TIMEOUT": Duty(
        "service", True, "Set backend.recover=1 to go on from the last checkpoint by itself"
    ),
    "SESSION_NOT_ACTIVE": Duty(
        "service",
        True,
        "The session expired, was stopped or was lost; resume the run, or set backend.recover=1 so "
        "that a new session takes its place",
    ),
    "AT_CAPACITY": Duty(
        "capacity",
        True,
        "The resource takes no more sessions: close one, or make a resource of your own with "
        "backend.model_resources_id=null",
    ),
    "RESOURCE_LOST": Duty(
        "service", True, "The resource has stopped or failed; resume the run on a new one"
    ),
    "INTERNAL_ERROR": INTERNAL_ERROR,
}
ANSWERS = {
    401: Duty("input", False, "Check the key in TOGETHER_API_KEY"),
    402: Duty("capacity", False, "Add credit: the balance has to cover four hours of the resource"),
    403: Duty("capacity", False, "The key or the GPU quota does not allow it; the text says which"),
    404: Duty("input", False, "There is nothing of this name or id"),
    429: Duty("capacity", False, "Wait, or raise backend.retry_budget"),
}
"""HTTP status -> what it means; any other below 500 is INVALID_INPUT."""


def failed_operation(name: str, error: Any, *, where: str) -> TunebookError:
    """What a failed operation raises.

    Args:
        name: of the operation.
        error: the service's own, with `code` and `message`.
        where: ids that support asks for.
    """
    code = str(getattr(error, "code", None) or "INTERNAL_ERROR").removeprefix(CODE_PREFIX)
    said = redact(str(getattr(error, "message", None) or "no reason given"), os.environ)
    if code == "NON_FINITE_LOSS":
        return NonFiniteError(
            f"{name}: {said} ({where}). The update was not applied and the session takes no more; "
            "look at the rows of this step, lower optimizer.learning_rate, and go on from the last "
            "checkpoint"
        )
    duty = DUTIES.get(code, DUTIES["INTERNAL_ERROR"])
    return RemoteError(f"{name} failed with {code}: {said} ({where})", code=code, duty=duty)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turns errors of the SDK into ours.

    Args:
        what: the request, for the message.
    """
    from together import APIConnectionError, APIStatusError

    try:
        yield
    except APIStatusError as error:
        raise _refused(what, error) from error
    except APIConnectionError as error:
        reason = redact(str(error.__cause__ or error), os.environ)
        raise RemoteError(
            f"{what}: the service did not answer: {reason}", code="unreachable", duty=UNREACHABLE
        ) from error


def _refused(what: str, error: Any) -> RemoteError:
    status = error.status_code
    said = redact(_message(error), os.environ)
    if status in (400, 404) and "session" in said and ("not running" in said or status == 404):
        code, duty = "SESSION_NOT_ACTIVE", DUTIES["SESSION_NOT_ACTIVE"]
    elif status >= 500:
        code, duty = "unreachable", UNREACHABLE
    elif status in ANSWERS:
        code, duty = f"http_{status}", ANSWERS[status]
    else:
        code, duty = "INVALID_INPUT", DUTIES["INVALID_INPUT"]
    return RemoteError(f"{what}: HTTP {status}: {said}", code=code, duty=duty)


def _message(error: Any) -> str:
    """The sentence in the answer's body, or all that there is of it."""
    body = error.body
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return inner["message"]
    return str(error)
