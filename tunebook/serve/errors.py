"""What a client is told when a request cannot be done."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
SHOWN_VALUE = 80


class ApiError(Exception):
    """An answer other than success: an HTTP status and a body that says what is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "invalid_input",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The JSON body of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(where: str, problem: str) -> ApiError:
    """A refusal of a request's content.

    Args:
        where: path of the field, as in `samples[3].model_input`; empty for the whole body.
        problem: what is wrong with it.
    """
    return ApiError(400, f"{where}: {problem}" if where else problem, param=where or None)


def not_found(what: str, identity: str) -> ApiError:
    """A refusal of an id that names nothing."""
    return ApiError(404, f"there is no {what} {shown(identity)}", code="not_found")


def shown(value: object) -> str:
    """A value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= SHOWN_VALUE else f"{text[:SHOWN_VALUE]}..."


def log(line: str) -> None:
    """Writes a line to standard error."""
    print(f"tunebook serve: {line}", file=sys.stderr, flush=True)


def log_failure(what: str, error: BaseException) -> None:
    """Writes a failure that a client is not told the cause of to standard error."""
    log(f"{what}:")
    traceback.print_exception(error, file=sys.stderr)
