"""Rate limits of the hosted service, as token buckets; the caller passes the clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """How often something may happen."""

    name: str
    """What shares one bucket; actions of the same name draw from the same one."""
    per_s: float
    """Calls a second in the long run."""
    burst: int
    """Calls at once, after a quiet time."""
    owner: str
    """Who has a bucket of its own: `project` or `session`."""


_SAVE = Limit("save checkpoint", 10 / 60, 5, "session")
_OPERATIONS = (
    "forward-backward",
    "forward",
    "custom-forward-backward",
    "optim-step",
    "weights-sync",
)
HOSTED: dict[str, Limit] = {
    "create-resource": Limit("create resource", 20 / 3600, 5, "project"),
    "create-session": Limit("start session", 20 / 60, 5, "project"),
    **{kind: Limit(kind, 20.0, 40, "session") for kind in _OPERATIONS},
    "sample": Limit("sample", 2000.0, 1000, "session"),
    "training-checkpoint": _SAVE,
    "inference-checkpoint": _SAVE,
    "download": Limit("download", 10.0, 20, "project"),
}
"""Action -> the hosted service's published limit. A forward-only pass is `forward`."""

PRESETS: dict[str, Mapping[str, Limit]] = {"none": {}, "hosted": HOSTED}
"""Values of `tunebook serve --rates`."""

_PRUNED_ABOVE = 4096
_ROUNDING_S = 1e-9


class RateLimiter:
    """The buckets of one server.

    A bucket is one number, the time at which it is full again: a call moves it on by the time one
    token takes to come back, and is refused when that would be more than `burst` tokens away.
    """

    def __init__(self, limits: Mapping[str, Limit]) -> None:
        self._limits = limits
        self._full_at: dict[tuple[str, str], float] = {}

    def wait_s(self, action: str, *, project: str, session: str | None, now: float) -> float | None:
        """Seconds until this call would be let through, or None where it is let through now.

        A refused call takes nothing. An action without a limit is always let through.

        Args:
            session: None for an action that belongs to no session.
            now: seconds of a clock that does not go back.
        """
        limit = self._limits.get(action)
        if limit is None:
            return None
        owner = project if limit.owner == "project" else session
        assert owner is not None, f"{action} belongs to a session"
        full_at = max(self._full_at.get((limit.name, owner), now), now)
        wait_s = full_at - now - (limit.burst - 1) / limit.per_s
        if wait_s > _ROUNDING_S:
            return wait_s
        self._full_at[limit.name, owner] = full_at + 1 / limit.per_s
        if len(self._full_at) > _PRUNED_ABOVE:
            self._full_at = {key: at for key, at in self._full_at.items() if at > now}
        return None
