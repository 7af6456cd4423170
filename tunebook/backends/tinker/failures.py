"""What the service and its SDK raise, as errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tunebook.backends.remote.failures import INTERNAL_ERROR, UNREACHABLE, Duty, RemoteError
from tunebook.backends.tinker.package import sdk
from tunebook.runs.redaction import redact

INVALID_INPUT = Duty("input", False, "Correct what it names")
ANSWERS = {
    401: Duty("input", False, "Check the key in TINKER_API_KEY"),
    402: Duty("capacity", False, "Add credit to the account, then resume the run"),
    403: Duty("capacity", False, "The key does not allow it; the text says what"),
    404: Duty("input", False, "There is nothing of this name or id"),
    410: Duty(
        "service",
        True,
        "The session has ended; resume the run, or set backend.recover=1 so that a new one takes "
        "its place",
    ),
    429: Duty("capacity", False, "Wait, then resume the run"),
}
"""HTTP status -> what it means; any other below 500 is INVALID_INPUT."""


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turns errors of the SDK into ours.

    Args:
        what: the request, for the message.
    """
    tinker = sdk()
    try:
        yield
    except tinker.RequestFailedError as error:
        users = error.category == "user"
        raise RemoteError(
            f"{what} failed: {_text(error)} (request {error.request_id})",
            code="INVALID_INPUT" if users else "INTERNAL_ERROR",
            duty=INVALID_INPUT if users else INTERNAL_ERROR,
        ) from error
    except tinker.APIStatusError as error:
        raise _refused(what, error) from error
    except tinker.APIConnectionError as error:
        raise RemoteError(
            f"{what}: the service did not answer: {_text(error.__cause__ or error)}",
            code="unreachable",
            duty=UNREACHABLE,
        ) from error
    except tinker.TinkerError as error:
        raise RemoteError(
            f"{what}: {_text(error)}", code="INVALID_INPUT", duty=INVALID_INPUT
        ) from error
    except (ValueError, RuntimeError) as error:
        # Of a result that cannot be fetched the SDK raises these, around the answer.
        if isinstance(error.__cause__, tinker.APIStatusError):
            raise _refused(what, error.__cause__) from error
        raise


def _refused(what: str, error: Any) -> RemoteError:
    status = error.status_code
    if status >= 500:
        code, duty = "unreachable", UNREACHABLE
    elif status in ANSWERS:
        code, duty = f"http_{status}", ANSWERS[status]
    else:
        code, duty = "INVALID_INPUT", INVALID_INPUT
    return RemoteError(f"{what}: HTTP {status}: {_text(error)}", code=code, duty=duty)


def _text(error: BaseException) -> str:
    return redact(str(error), os.environ)
