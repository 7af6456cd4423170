"""A language model as judge, behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from tunebook.errors import ConfigError
from tunebook.reward_values import Unscored

PLACEHOLDER = re.compile(r"\{(question|completion|answer)\}")
SCORE = re.compile(r"score\W{0,5}[:=]\W{0,5}?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OVERLOADED = (408, 409, 425, 429)
SHOWN = 200
"""Characters shown of what a server or a judge said."""


class LLMJudge:
    """The score that a model gives the completion, mapped from `[low, high]` to `[0, 1]`.

    `instructions` are sent as one user message, with `{question}` (the prompt), `{completion}` and
    `{answer}` (the column of the row) filled in; they have to ask for a line `Score: <number>`, of
    which the last counts: reward = (score - low) / (high - low).

    What is no fault of the completion leaves it unscored, never 0, and is counted by its kind:
    `rate_limited` (HTTP 429), `http_error` (5xx and time-outs of the server), `unreachable`,
    `unparsable` (no score, or one outside the range). Requests the server refuses for good (a wrong
    key, an unknown model) raise. Nothing is sent twice; `reward.max_concurrency` and
    `reward.timeout_s` limit the requests. A completion can try to talk the judge round: look at
    what scores high. Scores of most services differ from call to call, even at temperature 0.

    Needs the package httpx2: `pip install 'tunebook[judge]'`.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key_variable: str | None,
        instructions: str,
        low: float,
        high: float,
        request: Mapping[str, Any],
    ) -> None:
        """
        Args:
            base_url: up to but without `/chat/completions`.
            model: as the server calls it.
            api_key_variable: name of the environment variable that holds the key; None = no key.
            instructions: what to judge and how.
            low: score that is reward 0.
            high: score that is reward 1.
            request: further fields of the request, for example max_tokens and temperature.

        Raises:
            ConfigError: the package or the key is missing, or a value cannot be used.
        """
        if find_spec("httpx2") is None:
            raise ConfigError(
                "_target_: needs the package httpx2, which is not installed: "
                "pip install 'tunebook[judge]'"
            )
        if not base_url or not re.match(r"https?://", base_url):
            shown = base_url or "null"
            raise ConfigError(f"base_url={shown}: must be the http(s) address of an endpoint")
        if not model:
            raise ConfigError("model is not given: a model, as the server calls it")
        if "{completion}" not in instructions:
            raise ConfigError("instructions: must contain {completion}, or nothing is judged")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(f"low={low}, high={high}: must be a range of scores, low below high")
        import httpx2  # here, so that no call pays for it with its time

        self._package = httpx2
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._key = "" if api_key_variable is None else _key(api_key_variable)
        self._instructions = instructions
        self._low, self._high = low, high
        self._body = {**request, "model": model}
        self._client: Any = None
        self._loop: Any = None

    async def __call__(
        self, completion: str, *, prompt: Sequence[Mapping[str, Any]], answer: Any = None
    ) -> float:
        if answer is None and "{answer}" in self._instructions:
            raise ValueError("the instructions contain {answer}, but the row has no such column")
        parts = {"question": _question(prompt), "completion": completion, "answer": str(answer)}
        message = PLACEHOLDER.sub(lambda match: parts[match[1]], self._instructions)
        return self._reward(await self._ask(message))

    async def _ask(self, message: str) -> str:
        """The judge's answer.

        Raises:
            Unscored: there is none for now.
            RuntimeError: the server refuses such requests.
        """
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        body = {**self._body, "messages": [{"role": "user", "content": message}]}
        try:
            response = await self._http().post(self._url, json=body, headers=headers)
        except self._package.TransportError as error:
            raise Unscored("unreachable", f"{type(error).__name__}: {error}") from error
        status, text = response.status_code, self._shown(response.text)
        if status >= 500 or status in OVERLOADED:
            kind = "rate_limited" if status == 429 else "http_error"
            raise Unscored(kind, f"HTTP {status}: {text}")
        if status != 200:
            raise RuntimeError(f"the judge at {self._url} refused: HTTP {status}: {text}")
        try:
            content = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise Unscored("unparsable", f"no chat completion: {text}") from error
        return content if isinstance(content, str) else ""

    def _shown(self, text: str) -> str:
        """What a server said, shortened and without the key."""
        return (text.replace(self._key, "[redacted]") if self._key else text)[:SHOWN]

    def _reward(self, said: str) -> float:
        found = SCORE.findall(said)
        if not found:
            raise Unscored("unparsable", f"no line `Score: <number>` in ...{said[-SHOWN:]!r}")
        score = float(found[-1])
        if not self._low <= score <= self._high:
            raise Unscored(
                "unparsable", f"score {score:g} is not from {self._low:g} to {self._high:g}"
            )
        return (score - self._low) / (self._high - self._low)

    def _http(self) -> Any:
        """The client of the running event loop, whose connections are kept."""
        import asyncio

        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._client = self._package.AsyncClient(
                timeout=None
            )  # the scorer's limit is the only one
            self._loop = loop
        return self._client


def _key(variable: str) -> str:
    """The key that an environment variable holds."""
    if not VARIABLE.fullmatch(variable):
        raise ConfigError(
            "api_key_variable: must be the name of an environment variable, never the key itself"
        )
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(
            f"api_key_variable={variable}: the environment variable {variable} is not set; export "
            "it, or set api_key_variable=null where the endpoint needs no key"
        )
    return key


def _question(prompt: Sequence[Mapping[str, Any]]) -> str:
    """The prompt as text: the message of a user who stands alone, else every turn with its role."""
    if len(prompt) == 1:
        return str(prompt[0].get("content") or "")
    return "\n\n".join(f"{turn.get('role')}: {turn.get('content') or ''}" for turn in prompt)
