"""Faults a server makes on purpose, so that clients can be tested against them.

    seed: 7              # of the random rules
    max_in_a_row: 5      # answers one request may lose one after another; left out: no limit
    faults:
      - {fault: status, status: 429, retry_after_s: 0.05, share: 0.2}
      - {fault: drop_after, path: "*/optim-step", at: [3, 9]}
      - {fault: out_of_memory, kind: forward-backward, every: 50, times: 2}
      - {fault: session_expiry, at: 20}

A rule counts what it could hit, from 1: `at` names counts, `every` is a period, `share` a
probability drawn from (seed, rule, count), `times` an upper limit; without `at`, `every` and
`share` it hits all. The first rule that fires wins. The same plan and the same requests in the same
order meet the same faults; counts of requests begin again when the server does.
"""

from __future__ import annotations

import asyncio
import difflib
import fnmatch
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPERATION_KINDS = (
    "forward-backward",
    "custom-forward-backward",
    "optim-step",
    "weights-sync",
    "sample",
    "training-checkpoint",
    "inference-checkpoint",
)


@dataclass(frozen=True, slots=True)
class _Known:
    """A fault that a plan may name."""

    event: str
    """What a rule counts: request, run (of an operation), and creations and operations."""
    keys: tuple[str, ...] = ()
    """What a rule says beside the keys of every rule."""
    needed: tuple[str, ...] = ()
    status: str | None = None
    code: str | None = None


_WIRE = ("path", "method")
_FAULTS: dict[str, _Known] = {
    "status": _Known("request", (*_WIRE, "status", "retry_after_s"), ("status",)),
    "drop_before": _Known("request", _WIRE),
    "drop_after": _Known("request", _WIRE),
    "delay": _Known("request", (*_WIRE, "delay_s"), ("delay_s",)),
    "out_of_memory": _Known("run", ("kind",), (), "FAILED", "RESOURCE_EXHAUSTED"),
    "non_finite": _Known("run", ("kind",), (), "FAILED", "NON_FINITE_LOSS"),
    "internal_error": _Known("run", ("kind",), (), "FAILED", "INTERNAL_ERROR"),
    "slow_operation": _Known("run", ("kind", "delay_s"), ("delay_s",)),
    "resource_slow_start": _Known("resource create", ("delay_s",), ("delay_s",)),
    "resource_capacity": _Known("resource create", (), (), "ERROR", "CAPACITY_WAIT_TIMEOUT"),
    "resource_failed_start": _Known("resource create", (), (), "ERROR", "PROVISIONING_FAILED"),
    "resource_lost": _Known("resource operation", (), (), "ERROR", "RESOURCE_UNAVAILABLE"),
    "session_slow_start": _Known("session create", ("delay_s",), ("delay_s",)),
    "session_capacity": _Known("session create", (), (), "ERROR", "RESOURCE_AT_CAPACITY"),
    "session_expiry": _Known("session operation", (), (), "EXPIRED", "TIMED_OUT"),
    "session_failed": _Known("session operation", (), (), "ERROR", "SESSION_FAILED"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to an operation, a resource or a session."""

    name: str
    """As in the plan."""
    status: str | None
    """State it ends in, without the prefix of the wire; None: it works, after `delay_s`."""
    code: str | None
    """Error code, without the prefix of the wire; None where `status` is."""
    message: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a plan."""

    index: int
    fault: str
    at: tuple[int, ...] = ()
    every: int | None = None
    share: float | None = None
    times: int | None = None
    path: str = "/v1/*"
    """Shell pattern of a request's path; what is outside of the API is left alone by default."""
    method: str | None = None
    kind: str | None = None
    status: int = 0
    retry_after_s: float | None = None
    delay_s: float = 0.0

    def is_about(self, event: str, kind: str | None) -> bool:
        return _FAULTS[self.fault].event == event and self.kind in (None, kind)

    def is_about_request(self, method: str, path: str) -> bool:
        known = self.is_about("request", None) and self.method in (None, method)
        return known and fnmatch.fnmatchcase(path, self.path)

    def fires(self, seed: int, count: int, counted: str = "") -> bool:
        """Whether it hits the `count`-th of what it could hit.

        Args:
            counted: what has a count of its own, for example an operation's kind.
        """
        if not self._hits(seed, count, counted):
            return False
        if self.times is None:
            return True
        earlier = 0
        for other in range(1, count):
            earlier += self._hits(seed, other, counted)
            if earlier == self.times:
                return False
        return True

    def _hits(self, seed: int, count: int, counted: str) -> bool:
        if self.at:
            return count in self.at
        if self.every is not None:
            return count % self.every == 0
        if self.share is None:
            return True
        drawn = hashlib.blake2b(f"{seed}/{self.index}/{counted}/{count}".encode(), digest_size=8)
        return int.from_bytes(drawn.digest()) < self.share * 2**64


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a server; a question asked twice gets the same answer."""

    seed: int
    max_in_a_row: int | None
    rules: tuple[Rule, ...]

    def operation_fault(self, kind: str, count: int) -> Fault | None:
        """The fault of the `count`-th operation of this kind, from 1."""
        assert kind in OPERATION_KINDS, kind
        return self._fault("run", count, kind)

    def resource_fault(self, event: str, count: int) -> Fault | None:
        """The fault of the `count`-th `create`, or of the `count`-th `operation` submitted."""
        return self._fault(f"resource {event}", count, None)

    def session_fault(self, event: str, count: int) -> Fault | None:
        """The fault of the `count`-th `create`, or of the `count`-th `operation` submitted."""
        return self._fault(f"session {event}", count, None)

    def _fault(self, event: str, count: int, kind: str | None) -> Fault | None:
        for rule in self.rules:
            if rule.is_about(event, kind) and rule.fires(self.seed, count, kind or ""):
                known = _FAULTS[rule.fault]
                words = rule.fault.replace("_", " ")
                message = f"{words}: a fault of this server's plan"
                return Fault(rule.fault, known.status, known.code, message, rule.delay_s)
        return None


NO_FAULTS = FaultPlan(0, None, ())


class FaultyApp:
    """An ASGI application whose answers get lost, late or replaced, as a plan says.

    It has to be the outermost application of a uvicorn server: to drop a connection it closes the
    transport of the server's own send function, for which the ASGI protocol has no message.
    `log` gets one line for each fault.
    """

    def __init__(self, app: ASGIApp, plan: FaultPlan, log: Callable[[str], None]) -> None:
        self._app = app
        self._plan = plan
        self._log = log
        self._counts: Counter[int] = Counter()
        self._in_a_row: Counter[tuple[str, ...]] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rule = self._rule_for(scope) if scope["type"] == "http" else None
        if rule is None:
            await self._app(scope, receive, send)
            return
        count = self._counts[rule.index]
        self._log(f"fault: {rule.fault} ({count}) for {scope['method']} {scope['path']}")
        if rule.fault == "delay":
            await asyncio.sleep(rule.delay_s)
            await self._app(scope, receive, send)
        elif rule.fault == "status":
            await _answer(send, rule)
        else:
            if rule.fault == "drop_after":
                await self._app(scope, receive, _discard)
            await _drop(receive, send)

    def _rule_for(self, scope: Scope) -> Rule | None:
        """The first rule that fires for a request; every rule about it counts it."""
        about = [
            rule
            for rule in self._plan.rules
            if rule.is_about_request(scope["method"], scope["path"])
        ]
        for rule in about:
            self._counts[rule.index] += 1
        fires = (rule for rule in about if rule.fires(self._plan.seed, self._counts[rule.index]))
        found = next(fires, None)
        if found is None or found.fault == "delay" or self._plan.max_in_a_row is None:
            self._in_a_row.pop(_identity(scope), None)
            return found
        lost = self._in_a_row[_identity(scope)]
        if lost >= self._plan.max_in_a_row:
            del self._in_a_row[_identity(scope)]
            return None
        self._in_a_row[_identity(scope)] += 1
        return found


def _identity(scope: Scope) -> tuple[str, ...]:
    """What a request shares with its retries."""
    headers = dict(scope["headers"])
    key = headers.get(b"idempotency-key", b"").decode("latin-1")
    return scope["method"], scope["path"], key


async def _answer(send: Send, rule: Rule) -> None:
    message = f"status {rule.status}: a fault of this server's plan"
    error = {"message": message, "type": "injected_fault", "param": None, "code": "injected_fault"}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if rule.retry_after_s is not None:
        milliseconds = f"{rule.retry_after_s * 1000:g}"
        headers.append((b"retry-after", str(math.ceil(rule.retry_after_s)).encode()))
        headers.append((b"retry-after-ms", milliseconds.encode()))
    await send({"type": "http.response.start", "status": rule.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _discard(message: Message) -> None:
    """Takes an answer that nobody will see."""


async def _drop(receive: Receive, send: Send) -> None:
    cycle: Any = getattr(send, "__self__", None)
    transport = getattr(cycle, "transport", None)
    if transport is None:
        raise RuntimeError("faults that drop a connection need FaultyApp directly under uvicorn")
    transport.abort()
    while (await receive())["type"] != "http.disconnect":
        pass  # a body that was on its way


def read_faults(path: Path) -> FaultPlan:
    """The plan in a YAML file.

    Raises:
        ConfigError: names the key that is wrong, its value and what is allowed.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"faults: {path} cannot be read as YAML: {reason}") from error
    plan = _checked(content, f"{path}: ", ("seed", "max_in_a_row", "faults"), ("faults",))
    return FaultPlan(
        seed=plan.get("seed", 0),
        max_in_a_row=plan.get("max_in_a_row"),
        rules=tuple(
            _rule(line, index, f"{path}: faults[{index}].")
            for index, line in enumerate(plan["faults"])
        ),
    )


_WHEN = ("at", "every", "share")


def _rule(line: Any, index: int, where: str) -> Rule:
    name = line.get("fault") if isinstance(line, Mapping) else None
    known = _FAULTS.get(name) if isinstance(name, str) else None
    keys = ("fault", *_WHEN, "times", *(known.keys if known else ()))
    rule = _checked(line, where, keys, ("fault", *(known.needed if known else ())))
    when = [key for key in _WHEN if key in rule]
    if len(when) > 1:
        raise ConfigError(f"{where}{when[0]}: {' and '.join(when)} are given: keep one of them")
    at = rule.pop("at", ())
    return Rule(index=index, at=(at,) if isinstance(at, int) else tuple(at), **rule)


def _checked(
    value: Any, where: str, keys: Collection[str], needed: Collection[str]
) -> dict[str, Any]:
    """The mapping, once its keys and their values have been found right."""
    allowed = ", ".join(keys)
    if not isinstance(value, Mapping):
        place = where.rstrip(" .:")
        raise ConfigError(f"{place}: {value!r} is no mapping with the keys {allowed}")
    # The name of a fault decides which keys it has, so that a wrong name is said first.
    for key in sorted(value, key=lambda key: (key != "fault", str(key))):
        if key not in keys:
            raise ConfigError(f"{where}{key}: no such key.{_meant(key, keys)} Keys: {allowed}")
        is_right, wanted = _VALUES[key]
        if not is_right(value[key]):
            meant = _meant(value[key], _FAULTS) if key == "fault" else ""
            raise ConfigError(f"{where}{key}: {value[key]!r} is not {wanted}.{meant}")
    for key in needed:
        if key not in value:
            raise ConfigError(f"{where}{key} is missing: give {_VALUES[key][1]}")
    return dict(value)


def _meant(word: Any, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean {close[0]}?" if close else ""


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


def _are_counts(value: Any) -> bool:
    counts = value if isinstance(value, list) else [value]
    return bool(counts) and all(_is_whole(count, 1) for count in counts)


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "seed": (lambda value: _is_whole(value, 0), "a whole number from 0"),
    "max_in_a_row": (lambda value: _is_whole(value, 1), "a whole number from 1"),
    "faults": (lambda value: isinstance(value, list), "a list of rules"),
    "fault": (lambda value: value in tuple(_FAULTS), f"one of {', '.join(_FAULTS)}"),
    "at": (_are_counts, "a count from 1 or a list of them"),
    "every": (lambda value: _is_whole(value, 1), "a whole number from 1"),
    "share": (lambda value: _is_positive(value) and value <= 1, "a number above 0, at most 1"),
    "times": (lambda value: _is_whole(value, 1), "a whole number from 1"),
    "path": (lambda value: isinstance(value, str), 'a pattern of paths, as "*/optim-step"'),
    "method": (lambda value: isinstance(value, str) and value.isupper(), "a method, as POST"),
    "kind": (lambda value: value in OPERATION_KINDS, f"one of {', '.join(OPERATION_KINDS)}"),
    "status": (lambda value: _is_whole(value, 400) and value <= 599, "a status from 400 to 599"),
    "retry_after_s": (_is_positive, "a number of seconds above 0"),
    "delay_s": (_is_positive, "a number of seconds above 0"),
}
"""Key -> whether a value of it is right, and what would be."""
