"""What Loops and its SDK raise, as errors that say what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tunebook.backends.baseten.sdk import loops_sdk
from tunebook.backends.remote.failures import INTERNAL_ERROR, UNREACHABLE, Duty, RemoteError
from tunebook.errors import NonFiniteError, TunebookError
from tunebook.runs.redaction import redact

INVALID_INPUT = Duty("input", False, "Correct what it names")
OUT_OF_MEMORY = Duty(
    "capacity", False, "Lower max_seq_len or plan.batch_size: the rows do not fit its memory"
)
RUN_LOST = Duty(
    "service",
    True,
    "The trainer has ended or was replaced; resume the run, or set backend.recover=1 so that a new "
    "one takes its place",
)
STILL_RUNNING = Duty(
    "service",
    False,
    "It may be at it still, so nothing was sent again; resume the run from its last checkpoint",
)
ORG_CAP = Duty(
    "capacity",
    False,
    "Waiting does not help: deactivate a run of your organization, see `tunebook resources list`",
)
NOT_SCHEDULED = Duty(
    "capacity", False, "Try again later, or ask for less: a shorter max_seq_len, another model"
)
ANSWERS = {
    401: Duty("input", False, "Check the key in BASETEN_API_KEY"),
    403: Duty(
        "capacity", False, "The key or the quota of trainers does not allow it; the text says which"
    ),
    404: Duty("input", False, "There is nothing of this name or id, or it was deactivated"),
    429: NOT_SCHEDULED,
}
"""HTTP status -> what it means; any other below 500 is INVALID_INPUT."""
OF_CLASS = {
    "ValueError": ("INVALID_INPUT", INVALID_INPUT),
    "TypeError": ("INVALID_INPUT", INVALID_INPUT),
    "KeyError": ("INVALID_INPUT", INVALID_INPUT),
    "ValidationError": ("INVALID_INPUT", INVALID_INPUT),
    "FileNotFoundError": ("NOT_FOUND", ANSWERS[404]),
    "OutOfMemoryError": ("RESOURCE_EXHAUSTED", OUT_OF_MEMORY),
}
"""Class that a failed operation names -> code and duty; any other is INTERNAL_ERROR."""
NON_FINITE = ("NonFiniteError", "FloatingPointError")


class CapacityError(RemoteError):
    """The shared pool had no place, however long we waited; `response` is its last answer."""

    def __init__(self, message: str, *, duty: Duty, response: Any = None) -> None:
        super().__init__(message, code="CAPACITY", duty=duty)
        self.response = response


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turns errors of the SDK into ours.

    Args:
        what: the request, for the message.
    """
    import httpx

    loops = loops_sdk()
    try:
        yield
    except loops.RemoteOpError as error:
        raise failed_operation(what, error) from error
    except loops.UnknownRequestError as error:
        raise _lost(what, error) from error
    except (loops.ServerShutdownError, loops.SamplerTerminatedError) as error:
        raise _lost(what, error) from error
    except httpx.HTTPStatusError as error:
        raise refused(what, error.response, _text(error)) from error
    except (TimeoutError, httpx.TimeoutException) as error:
        raise RemoteError(
            f"{what}: nothing came back in time: {_text(error)}", code="timeout", duty=STILL_RUNNING
        ) from error
    except httpx.TransportError as error:
        raise RemoteError(
            f"{what}: the service did not answer: {_text(error)}",
            code="unreachable",
            duty=UNREACHABLE,
        ) from error
    except TunebookError:
        raise
    except RuntimeError as error:  # of a deployment that has failed or was preempted
        raise _lost(what, error) from error
    except ValueError as error:  # of what the SDK does not send
        raise RemoteError(
            f"{what}: {_text(error)}", code="INVALID_INPUT", duty=INVALID_INPUT
        ) from error


def failed_operation(what: str, error: Any) -> Exception:
    """What an operation raises that the service accepted and that failed there.

    Args:
        what: the request, for the message.
        error: the SDK's, with `error_class`; its text holds the ids that support asks for.
    """
    kind = str(error.error_class or "")
    if kind in NON_FINITE:
        return NonFiniteError(
            f"{what}: {_text(error)}. The update was not applied; look at the rows of this step, "
            "lower optimizer.learning_rate, and go on from the last checkpoint"
        )
    code, duty = OF_CLASS.get(kind, ("INTERNAL_ERROR", INTERNAL_ERROR))
    return RemoteError(f"{what} failed with {kind or code}: {_text(error)}", code=code, duty=duty)


def refused(what: str, response: Any, said: str) -> RemoteError:
    """What a request raises that the service refused.

    Args:
        what: the request, for the message.
        response: the answer.
        said: the SDK's words for it.
    """
    status = response.status_code
    text = f"{what}: {said}"
    if status == 429:
        details = details_of(response)
        duty = ORG_CAP if details.get("limit") == "org_cap" else NOT_SCHEDULED
        return CapacityError(text, duty=duty, response=response)
    if status >= 500:
        return RemoteError(text, code="unreachable", duty=UNREACHABLE)
    if status in ANSWERS:
        return RemoteError(text, code=f"http_{status}", duty=ANSWERS[status])
    return RemoteError(text, code="INVALID_INPUT", duty=INVALID_INPUT)


def details_of(response: Any) -> Mapping[str, Any]:
    """`details` in the body of an answer; empty where there are none."""
    try:
        body = response.json()
    except ValueError:
        return {}
    details = body.get("details") if isinstance(body, dict) else None
    return details if isinstance(details, dict) else {}


def _lost(what: str, error: Exception) -> RemoteError:
    return RemoteError(f"{what}: {_text(error)}", code="RUN_LOST", duty=RUN_LOST)


def _text(error: Exception) -> str:
    # What stands behind the ? of an address can be all that it takes to read a file.
    text = re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", str(error) or repr(error))
    return redact(text, os.environ)
