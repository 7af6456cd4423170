"""Waiting for a place in the shared pool of trainers and samplers.

Release 0.32.0 of the SDK raises the first refusal, so waiting is done here. Only one of the
refusals goes away by itself: HTTP 429 with `Retry-After` and `details.reason` loops_capacity.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tunebook.backends.baseten.failures import NOT_SCHEDULED, CapacityError, details_of
from tunebook.backends.baseten.sdk import loops_sdk
from tunebook.backends.baseten.service import LONGEST_WAIT_S, retry_after_s

ATTEMPTS = 10
FIRST_WAIT_S = 2.0
POOL_FULL = "loops_capacity"


class Patience:
    """How often and how long one request waits for a place."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """
        Args:
            say: told every wait.
        """
        self._say = say
        self._refusals = 0

    def wait_s(self, error: Exception, what: str) -> float:
        """Seconds until the next attempt after a failed one: never below what the answer asks for.

        Args:
            error: what the attempt raised.
            what: the request, for messages.

        Raises:
            CapacityError: it was the last attempt.
            Exception: the error, where waiting does not help.
        """
        # A release of the SDK that waits itself says so by this error.
        waited = getattr(loops_sdk(), "LoopsCapacityError", None)
        if waited is not None and isinstance(error, waited):
            raise CapacityError(f"{what}: {error}", duty=NOT_SCHEDULED) from error
        response = getattr(error, "response", None)
        asked_s = waits_for(response)
        if asked_s is None:
            raise error
        self._refusals += 1
        if self._refusals >= ATTEMPTS:
            raise CapacityError(
                f"{what}: the pool had no place in {ATTEMPTS} attempts: {error}",
                duty=NOT_SCHEDULED,
                response=response,
            ) from error
        wait_s = jittered(asked_s, self._refusals)
        self._say(f"{what}: the pool is full; attempt {self._refusals + 1} in {wait_s:.0f} s")
        return wait_s


def waits_for(response: Any) -> float | None:
    """Seconds that an answer of a full pool asks to wait; None = it is another answer."""
    if response is None or response.status_code != 429:
        return None
    details = details_of(response)
    if details.get("reason") != POOL_FULL or details.get("limit") == "org_cap":
        return None
    return retry_after_s(response.headers)


def jittered(asked_s: float, refusals: int) -> float:
    """Seconds to wait: longer after each refusal, not the same for all that were refused.

    Args:
        asked_s: at least this.
        refusals: so far, from 1.
    """
    backoff_s = FIRST_WAIT_S * 2.0 ** (refusals - 1)
    return min(max(asked_s, backoff_s) * random.uniform(1.0, 1.5), LONGEST_WAIT_S)
