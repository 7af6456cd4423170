"""Baseten's Loops runs, as the ledger, `tunebook resources` and the checks before a run need them.

It is asked without its SDK, so that a run can be deactivated from any Python, and so that a check
makes no session, which the SDK's client does as soon as it is there.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from tunebook.backends.remote.address import checked_address, key_for
from tunebook.resources.live import LiveResource, ServiceError
from tunebook.runs.redaction import redact

KEY_VARIABLE = "BASETEN_API_KEY"
URL_VARIABLE = "LOOPS_BASE_URL"
HOSTED_URL = "https://api.baseten.co"
ACTIVE = "ACTIVE"
TIMEOUT_S = 60.0
ATTEMPTS = 5
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 60.0
AGAIN = (408, 429, 500, 502, 503, 504)
"""Answers after which a question is asked again."""
STOP_TIMEOUT_S = 300.0
STOP_INTERVAL_S = 1.0


class NotThere(ServiceError):
    """The service knows nothing of this name or id."""


class BasetenService:
    """The Loops runs of whoever owns the API key; asks nothing until it is asked."""

    name = "baseten"

    def __init__(self, base_url: str | None = None) -> None:
        """
        Args:
            base_url: None = `LOOPS_BASE_URL`, else the hosted service.

        Raises:
            ConfigError: the key is missing, or the address is none.
        """
        self.base_url = service_url(base_url)
        self.api_key = api_key_for(self.base_url)

    def list_live(self) -> list[LiveResource]:
        """See `ResourceService.list_live`: the runs that are active."""
        path = "/v1/loops/runs"
        try:
            found = [
                LiveResource(
                    id=run["id"],
                    state=run["status"]["name"],
                    what={"session_id": run["session_id"], "base_model": run["base_model"]},
                    created_at=run.get("created_at"),
                )
                for run in self.ask(path)["runs"]
                if run["status"]["name"] == ACTIVE
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise ServiceError(
                f"{self.base_url}{path}: the answer is no list of runs: {error!r}"
            ) from error
        return sorted(found, key=lambda run: run.created_at or "")

    def runs_of(self, session_id: str) -> list[str]:
        """Ids of the active runs of a Loops session."""
        return [run.id for run in self.list_live() if run.what["session_id"] == session_id]

    def stop(self, resource_id: str, *, force: bool) -> None:
        """See `ResourceService.stop`: deactivates a run, whatever is under way on it."""
        del force
        try:
            self.ask(f"/v1/loops/runs/{quote(resource_id, safe='')}/deactivate", post={})
        except NotThere:
            return
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        while any(run.id == resource_id for run in self.list_live()):
            if time.monotonic() > give_up_at:
                raise ServiceError(
                    f"{self.base_url}: run {resource_id} is active still, {STOP_TIMEOUT_S:g} s "
                    "after it was deactivated"
                )
            time.sleep(STOP_INTERVAL_S)

    def ask(
        self,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        post: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The JSON answer to a request that may be repeated.

        Args:
            path: of the control plane.
            query: of the address.
            post: body of a POST; None = a GET.

        Raises:
            NotThere: HTTP 404.
            ServiceError: the service cannot be reached, or refuses.
        """
        address = f"{self.base_url}{path}" + (f"?{urlencode(query)}" if query else "")
        request = urllib.request.Request(
            address,
            data=None if post is None else json.dumps(post).encode(),
            headers={
                "Authorization": f"Api-Key {self.api_key}",
                "Content-Type": "application/json",
            },
        )
        for attempt in range(1, ATTEMPTS + 1):
            wait_s = FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.0)
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in AGAIN or attempt == ATTEMPTS:
                        raise self._refused(path, error) from error
                    wait_s = max(wait_s, retry_after_s(dict(error.headers)) or 0.0)
            except (OSError, ValueError, http.client.HTTPException) as error:
                if attempt == ATTEMPTS:
                    reason = redact(str(error) or repr(error), os.environ)
                    raise ServiceError(f"{self.base_url} cannot be reached: {reason}") from error
            time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    def _refused(self, path: str, error: urllib.error.HTTPError) -> ServiceError:
        try:
            body = error.read().decode(errors="replace").strip()
        except (OSError, http.client.HTTPException):  # cut short; the status says enough
            body = str(error.reason)
        said = redact(body, os.environ)
        text = f"{self.base_url}{path}: HTTP {error.code}: {said}"
        if error.code == 404:
            return NotThere(text)
        if error.code in (401, 403):
            return ServiceError(f"{text}. Check the key in {KEY_VARIABLE}")
        return ServiceError(text)


def service_url(base_url: str | None) -> str:
    """The address of the service; see `tunebook.backends.remote.address.checked_address`."""
    return checked_address(base_url, variable=URL_VARIABLE, hosted=HOSTED_URL)


def api_key_for(base_url: str) -> str:
    """The API key; see `tunebook.backends.remote.address.key_for`."""
    return key_for(base_url, variable=KEY_VARIABLE)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer asks to wait, at most `LONGEST_WAIT_S`; None = it does not."""
    found = {name.lower(): value for name, value in headers.items()}
    try:
        seconds = float(found.get("retry-after") or "")
    except ValueError:
        return None
    return min(max(seconds, 0.0), LONGEST_WAIT_S) if seconds == seconds else None
