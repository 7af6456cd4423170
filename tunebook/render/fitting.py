"""What of a rendered row fits into `max_seq_len`: whole, cut, left out or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunebook.config import Mask, OnBadRow, OnBlankAnswer, OnLongRow
from tunebook.data.rows import Kind
from tunebook.render.pairs import SIDES, PlacedPair
from tunebook.render.placing import Placed
from tunebook.render.prompts import PlacedPrompt

NOTHING_SUPERVISED = "nothing_supervised"
NO_TARGET_AFTER_TRUNCATION = "no_target_after_truncation"
IDENTICAL_AFTER_TRUNCATION = "identical_after_truncation"
TOO_LONG = "too_long"
BAD_ROW = "bad_row"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything but rows and tokenizer that decides what is rendered."""

    kind: Kind
    mask: Mask | None
    """None = nothing carries loss: the rows are prompts."""
    max_seq_len: int
    """Tokens of the longest datum."""
    on_long_row: OnLongRow
    on_blank_answer: OnBlankAnswer | None
    """None = no answer is rendered."""
    on_bad_row: OnBadRow

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def limit(self) -> str:
        """The limit in words."""
        if self.kind is Kind.prompt:
            return f"the {self.max_seq_len} tokens that max_seq_len leaves for a prompt"
        return f"max_seq_len={self.max_seq_len}"


@dataclass(frozen=True, slots=True)
class Fitted:
    """One datum of a row."""

    tokens: list[int]
    """`[T + 1]`"""
    mask: list[float]
    """`[T + 1]`, aligned with `tokens`; the first is never scored."""
    truncated: bool
    blank_answers: int
    """Answers of which only the end of the turn is trained."""
    words: frozenset[str]
    """How it was rendered, and what was changed for that, in words."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The data of a row, or why it has none."""

    data: tuple[Fitted, ...]
    left_out: str | None = None
    """Why there are no data; None = there are some."""
    refused: tuple[str, ...] = ()
    """What is too long, where that is an error."""
    num_lost: int = 0
    """Data that were left out of a row that keeps others."""


def fit_conversation(placed: list[Placed], settings: Settings) -> Fit:
    """The data of a conversation that carry loss within the limit."""
    data: list[Fitted] = []
    refused: list[str] = []
    reason = NOTHING_SUPERVISED
    for item in placed:
        if not any(item.mask[1:]):
            continue
        if len(item.tokens) <= settings.max_seq_len:
            data.append(_whole(item))
            continue
        if settings.on_long_row is OnLongRow.error:
            refused.append(_too_long("", len(item.tokens), settings))
        if settings.on_long_row is not OnLongRow.truncate:
            reason = TOO_LONG
            continue
        cut = _cut_right(item, settings.max_seq_len)
        if any(cut.mask[1:]):
            data.append(cut)
        else:
            reason = NO_TARGET_AFTER_TRUNCATION
    return Fit(tuple(data), None if data else reason, tuple(refused), len(placed) - len(data))


def fit_pair(pair: PlacedPair, settings: Settings, *, bos_id: int | None) -> Fit:
    """The two data of a pair, chosen first, or none: it never loses one side alone.

    Args:
        pair: both sides in tokens.
        settings: limit and policy. `truncate_prompt` takes the same tokens out of both prompts, so
            that the sides still differ in the answer only.
        bos_id: the begin token, which stays where the prompt begins with it; None = there is none.
    """
    limit = settings.max_seq_len
    lengths = [len(side.tokens) for side in pair.sides]
    if max(lengths) <= limit:
        return Fit(tuple(_whole(side) for side in pair.sides))
    if settings.on_long_row is OnLongRow.truncate:
        return _cut_pair_right(pair, limit)
    if settings.on_long_row is OnLongRow.truncate_prompt:
        return _cut_prompts_left(pair, max(lengths) - limit, bos_id)
    refused = tuple(
        _too_long(f"{name} ", length, settings)
        for name, length in zip(SIDES, lengths, strict=True)
        if length > limit and settings.on_long_row is OnLongRow.error
    )
    return Fit((), TOO_LONG, refused)


def fit_prompt(prompt: PlacedPrompt, settings: Settings) -> Fit:
    """The datum of a prompt, which is never cut."""
    length = len(prompt.tokens)
    if length > settings.max_seq_len:
        is_error = settings.on_long_row is OnLongRow.error
        return Fit((), TOO_LONG, (_too_long("", length, settings),) if is_error else ())
    words = frozenset(fix.value for fix in prompt.fixes)
    return Fit((Fitted(prompt.tokens, [0.0] * length, False, 0, words),))


def _cut_pair_right(pair: PlacedPair, limit: int) -> Fit:
    chosen, rejected = (_cut_right(side, limit) for side in pair.sides)
    if not (any(chosen.mask[1:]) and any(rejected.mask[1:])):
        return Fit((), NO_TARGET_AFTER_TRUNCATION)
    if chosen.tokens == rejected.tokens:
        return Fit((), IDENTICAL_AFTER_TRUNCATION)
    return Fit((chosen, rejected))


def _cut_prompts_left(pair: PlacedPair, excess: int, bos_id: int | None) -> Fit:
    """Both sides without `excess` tokens of what they share, if a token of the prompt is left."""
    first = int(bos_id is not None and pair.chosen.tokens[0] == bos_id)
    left = min(len(prompt) for prompt in pair.prompts) - excess
    if first + excess > pair.num_shared or left < 1:
        return Fit((), TOO_LONG)
    data = [
        _fitted(
            side,
            [*side.tokens[:first], *side.tokens[first + excess :]],
            [*side.mask[:first], *side.mask[first + excess :]],
        )
        for side in pair.sides
    ]
    return Fit(tuple(data))


def _whole(placed: Placed) -> Fitted:
    return _fitted(placed, placed.tokens, placed.mask)


def _cut_right(placed: Placed, limit: int) -> Fitted:
    return _fitted(placed, placed.tokens[:limit], placed.mask[:limit])


def _fitted(placed: Placed, tokens: list[int], mask: list[float]) -> Fitted:
    draft = placed.draft
    return Fitted(
        tokens=tokens,
        mask=mask,
        truncated=len(tokens) < len(placed.tokens),
        blank_answers=sum(span.end_only for span in draft.spans),
        words=frozenset({draft.method.value, *(fix.value for fix in draft.fixes)}),
    )


def _too_long(what: str, length: int, settings: Settings) -> str:
    return f"{what}is {length} tokens long, more than {settings.limit}"
