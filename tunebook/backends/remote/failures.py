"""What a service refuses or fails at, as errors that say what to do."""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.resources import ServiceError


@dataclass(frozen=True, slots=True)
class Duty:
    """What an error of a service means for us."""

    category: str
    recoverable: bool
    """A new session from the last checkpoint can go on."""
    action: str


class RemoteError(ServiceError):
    """The service refused or failed; `code` is its own word in lower case."""

    def __init__(self, message: str, *, code: str, duty: Duty) -> None:
        super().__init__(f"{message}. {duty.action}")
        self.code = code.lower()
        self.category = duty.category
        self.recoverable = duty.recoverable


class StalledError(ServiceError):
    """Nothing came back for `backend.stall_timeout`; the service may still be at it."""

    code = "stalled"
    exit_code = 75


INTERNAL_ERROR = Duty(
    "service",
    True,
    "Set backend.recover=1 to go on from the last checkpoint; if it comes again, report the "
    "ids and the time to the service",
)
UNREACHABLE = Duty("service", False, "See whether the service is up, then resume the run")


def broken_answer(what: str) -> RemoteError:
    """Of a service that answered with something that cannot be.

    Args:
        what: the operation and what came back.
    """
    return RemoteError(f"{what}", code="INTERNAL_ERROR", duty=INTERNAL_ERROR)
