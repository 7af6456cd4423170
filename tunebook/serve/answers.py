"""Reads requests and writes answers: bodies within limits, JSON out, errors as JSON."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tunebook.serve.errors import ApiError, invalid
from tunebook.serve.values import parse_json, read_int, read_object

BODY_S = 300.0
"""Longest time that a body may take to arrive."""
PAGE = 20
MAX_PAGE = 100


class Json(Response):
    """A JSON answer; ASCII, so that any string can be said."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of a value; bytes are JSON already."""
        if isinstance(content, bytes):
            return content
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def error_answer(error: ApiError) -> Json:
    """The answer that tells of an error."""
    return Json(error.body(), status_code=error.status, headers=error.headers)


async def body_parts(request: Request, *, max_bytes: int) -> AsyncIterator[bytes]:
    """The pieces of a body.

    Raises:
        ApiError: it is larger than allowed, or does not come.
    """
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    received = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                received += len(part)
                if received > max_bytes:
                    raise _too_large(max_bytes)
                yield part
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_S:g} s", code="slow") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the body ended early", code="disconnected") from error


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {max_bytes} bytes; send fewer samples, or upload a payload",
        code="too_large",
    )


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The whole body."""
    return b"".join([part async for part in body_parts(request, max_bytes=max_bytes)])


async def read_json(request: Request, *, max_bytes: int) -> Mapping[str, Any]:
    """The object in the body; an empty body is an empty object."""
    body = await read_body(request, max_bytes=max_bytes)
    return read_object(parse_json(body), "body") if body.strip() else {}


def check_token(request: Request, token: str | None) -> None:
    """Returns if the request shows a bearer token, the right one where one is set.

    Raises:
        ApiError: it does not.
    """
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    given = given.strip()
    if kind.lower() != "bearer" or not given:
        raise ApiError(401, "the header `Authorization: Bearer <token>` is needed", code="no_token")
    if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
        raise ApiError(401, "the token is not the one of this server", code="bad_token")


def page_limit(request: Request) -> int:
    """Records of a page, as the query has it."""
    given = request.query_params.get("limit")
    return PAGE if given is None else read_int(given, "limit", low=1, high=MAX_PAGE)


def statuses(request: Request, known: type[StrEnum], prefix: str) -> set[str] | None:
    """The states that are asked for; None = all of them.

    Args:
        request: with `status`, several names being joined by commas.
        known: enum of the states.
        prefix: of their names on the wire.
    """
    given = ",".join(request.query_params.getlist("status"))
    if not given:
        return None
    names = {f"{prefix}{one}": str(one) for one in known}
    found: set[str] = set()
    for name in given.split(","):
        if name not in names:
            raise invalid("status", f"is {name[:60]!r}, must be one of {', '.join(names)}")
        found.add(names[name])
    return found


def query_flag(request: Request, name: str) -> bool:
    """A boolean of the query; absent = False."""
    given = request.query_params.get(name)
    if given in (None, "false", "False", "0"):
        return False
    if given in ("true", "True", "1"):
        return True
    raise invalid(name, f"is {given[:60]!r}, must be true or false")


def page_wire(records: list[dict[str, Any]], limit: int, *, more: bool) -> dict[str, Any]:
    """A page of records as JSON."""
    cursor = records[-1]["id"] if more and records else ""
    return {"data": records, "meta": {"has_more": more, "limit": limit, "next_cursor": cursor}}
