"""What must hold of every rendered row, checked again on the tokens that are trained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from tunebook.config import Mask, OnLongRow
from tunebook.data.rows import Kind
from tunebook.errors import DataError
from tunebook.render.cache import Rendered, RenderedRows
from tunebook.render.chat_template import chat_template_of
from tunebook.render.chunks import written_specials
from tunebook.render.codec import Codec
from tunebook.render.fitting import (
    IDENTICAL_AFTER_TRUNCATION,
    NO_TARGET_AFTER_TRUNCATION,
    NOTHING_SUPERVISED,
)
from tunebook.render.pairs import SIDES, place_pair, side_row
from tunebook.render.placing import Placed, Span, Unusable, place_plain, place_row
from tunebook.render.prompts import render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row

EMPTY_THINK = re.compile(r"<think>\s*</think>")
CUT_CHARACTER = "\ufffd"


class Rule(StrEnum):
    """What is checked."""

    turn_end = "turn end trained"
    prompt_untrained = "prompt untrained"
    prefix = "sampling prompt is a strict prefix"
    round_trip = "tokens decode to the template's text"
    no_weight = "row carries loss"
    begin_token = "begin token once"
    empty_think = "no empty think block"
    special_text = "no text of special tokens"
    stale = "rendered as now"


class Severity(StrEnum):
    """Whether a finding fails a check in CI."""

    error = "error"
    warning = "warning"


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One rule that one row breaks."""

    rule: Rule
    severity: Severity
    file: str
    line: int
    row: int
    datum: int | None
    """Index of the datum; None for a row without one."""
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.severity}: {self.rule}: {self.message}"


def lint_rows(
    rows: Sequence[Row],
    rendered: RenderedRows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int | None = None,
) -> list[LintFinding]:
    """Every rule that a rendered row breaks, in the order of the rows.

    Args:
        rows: those that `rendered` was made from.
        limit: rows to look at, evenly spread; None = all.
    """
    findings: list[LintFinding] = []
    codec = Codec(tokenizer)
    for index in rows_to_lint(len(rows), limit):
        row = rows[index]
        data = rendered.data_of_row(index)
        if not data:
            findings += _lint_left_out(row, index, rendered)
            continue
        for text in written_specials(codec, row):
            message = f"the text {text} in its messages becomes a real special token"
            findings.append(
                LintFinding(
                    Rule.special_text, Severity.warning, row.file, row.line, index, None, message
                )
            )
        if row.kind is Kind.prompt:
            broken = _lint_sampled(row, data[0], rendered, tokenizer)
        elif row.kind is Kind.preference:
            broken = _lint_pair(row, data, rendered, tokenizer, codec)
        else:
            broken = _lint_conversation(row, data, rendered, tokenizer, codec)
        findings += [
            LintFinding(rule, Severity.error, row.file, row.line, index, datum, message)
            for datum, rule, message in broken
        ]
    return findings


def rows_to_lint(num_rows: int, limit: int | None) -> list[int]:
    """Indices of the rows to look at, evenly spread."""
    if limit is None or limit >= num_rows:
        return list(range(num_rows))
    return sorted({i * num_rows // limit for i in range(limit)})


def _lint_left_out(row: Row, index: int, rendered: RenderedRows) -> Iterator[LintFinding]:
    reasons = {
        NOTHING_SUPERVISED: (Severity.error, "no message of it is trained under this mask"),
        NO_TARGET_AFTER_TRUNCATION: (
            Severity.warning,
            "max_seq_len cuts it before the first trained token",
        ),
        IDENTICAL_AFTER_TRUNCATION: (
            Severity.warning,
            "max_seq_len cuts it before its answers differ",
        ),
    }
    for reason, (severity, message) in reasons.items():
        if index in rendered.report.dropped_rows.get(reason, ()):
            yield LintFinding(Rule.no_weight, severity, row.file, row.line, index, None, message)


def _lint_conversation(
    row: Row,
    data: range,
    rendered: RenderedRows,
    tokenizer: PreTrainedTokenizerBase,
    codec: Codec,
) -> Iterator[tuple[int, Rule, str]]:
    mask = Mask(rendered.report.settings["mask"])
    placed = _place(row, tokenizer, mask)
    for datum in data:
        item = rendered[datum]
        match = next((p for p in placed if _is_of(item, p)), None)
        for rule, message in _lint_datum(row, item, match, tokenizer, codec, mask):
            yield datum, rule, message


def _lint_pair(
    row: Row,
    data: range,
    rendered: RenderedRows,
    tokenizer: PreTrainedTokenizerBase,
    codec: Codec,
) -> Iterator[tuple[int, Rule, str]]:
    """Both sides of a pair, each as a conversation; a prompt cut on the left is made whole."""
    template = None if tokenizer.chat_template is None else chat_template_of(tokenizer)
    sides: tuple[Placed | None, Placed | None]
    try:
        sides = place_pair(template, codec, row, blanks_allowed=True).sides
    except Unusable:
        sides = (None, None)  # What cannot be rendered now matches nothing, which is the finding.
    cut_left = rendered.report.settings["on_long_row"] == OnLongRow.truncate_prompt
    completions = (row.chosen, row.rejected)
    for datum, name, placed, completion in zip(data, SIDES, sides, completions, strict=True):
        item = rendered[datum]
        if placed is not None and cut_left and item.truncated:
            item = _made_whole(item, placed)
        match = placed if placed is not None and _is_of(item, placed) else None
        side = side_row(row, completion)
        for rule, message in _lint_datum(side, item, match, tokenizer, codec, Mask.all_assistant):
            yield datum, rule, f"{name}: {message}"


def _made_whole(item: Rendered, placed: Placed) -> Rendered:
    """A datum with the tokens of the prompt that were cut; as it is where its rest is another."""
    num_cut = len(placed.tokens) - len(item.tokens)
    tokens = item.tokens.tolist()
    # All is behind the cut but a begin token, which stays in front of it.
    for first in (0, 1):
        rest = placed.tokens[first + num_cut :]
        if tokens[:first] == placed.tokens[:first] and tokens[first:] == rest:
            return Rendered(
                row=item.row,
                tokens=np.asarray(placed.tokens, dtype=np.int32),
                mask=np.concatenate([np.zeros(num_cut, dtype=np.float32), item.mask]),
                truncated=False,
            )
    return item


def _lint_sampled(
    row: Row, datum: int, rendered: RenderedRows, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, Rule, str]]:
    """What a prompt must be: exactly what a sampler is given."""
    item = rendered[datum]
    try:
        prompt = render_prompt(row.messages, tokenizer, row.tools)
    except DataError:
        prompt = []  # What cannot be rendered now matches nothing, which is the finding.
    if item.tokens.tolist() != prompt:
        yield datum, Rule.stale, "the tokens are not what this row renders to now"
    if item.mask.any():
        yield datum, Rule.prompt_untrained, "a token of the prompt carries loss"


def _place(row: Row, tokenizer: PreTrainedTokenizerBase, mask: Mask) -> list[Placed]:
    try:
        if tokenizer.chat_template is None:
            return place_plain(Codec(tokenizer), row, mask=mask, blanks_allowed=True)
        template = chat_template_of(tokenizer)
        return place_row(template, row, mask=mask, blanks_allowed=True)
    except Unusable:
        # A row that cannot be rendered now matches nothing, which is the finding.
        return []


def _is_of(item: Rendered, placed: Placed) -> bool:
    length = len(item.tokens)
    if item.truncated:
        return length < len(placed.tokens) and item.tokens.tolist() == placed.tokens[:length]
    return item.tokens.tolist() == placed.tokens


def _lint_datum(
    row: Row,
    item: Rendered,
    placed: Placed | None,
    tokenizer: PreTrainedTokenizerBase,
    codec: Codec,
    mask_rule: Mask,
) -> Iterator[tuple[Rule, str]]:
    if placed is None:
        yield Rule.stale, "the tokens are not what this row renders to now"
        return
    mask = np.concatenate([[0.0], item.mask])
    if not mask.any():
        yield Rule.no_weight, "no token of this datum carries loss"
    trains_prompts = mask_rule is Mask.all
    for span, start, end in zip(placed.draft.spans, placed.starts, placed.ends, strict=True):
        if start >= len(item.tokens):
            continue  # Cut off.
        yield from _lint_span(span, start, end, item, mask, placed, codec)
        yield from _lint_prompt(row, span, start, item, tokenizer)
    if not trains_prompts and _weight_outside(mask, placed):
        yield Rule.prompt_untrained, "a token outside the trained turns carries loss"
    yield from _lint_text(item, placed, codec)
    yield from _lint_begin_token(item, placed, tokenizer, codec)
    yield from _lint_empty_think(row, item, mask, placed, codec)


def _lint_span(
    span: Span,
    start: int,
    end: int,
    item: Rendered,
    mask: np.ndarray,
    placed: Placed,
    codec: Codec,
) -> Iterator[tuple[Rule, str]]:
    if end > len(item.tokens):
        return
    last = codec.decode([int(item.tokens[end - 1])])
    if not np.isclose(mask[end - 1], span.weight):
        yield Rule.turn_end, f"messages[{span.index}]: its end {last!r} has no loss"
    if last.strip() not in codec.special_texts:
        yield Rule.turn_end, f"messages[{span.index}]: ends with {last!r}, not an end token"
    if start and not span.end_only and not np.isclose(mask[start], span.weight):
        yield Rule.turn_end, f"messages[{span.index}]: its first token has no loss"


def _lint_prompt(
    row: Row, span: Span, start: int, item: Rendered, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Rule, str]]:
    if span.index == 0:
        return
    try:
        prompt = render_prompt(row.messages[: span.index], tokenizer, row.tools)
    except DataError as error:
        yield Rule.prefix, f"messages[{span.index}]: no sampling prompt can be rendered: {error}"
        return
    same = item.tokens[: len(prompt)].tolist() == prompt
    if not same or len(prompt) != start or len(prompt) >= len(item.tokens):
        yield (
            Rule.prefix,
            f"messages[{span.index}]: a sampler would be given {len(prompt)} tokens that the "
            "training tokens do not begin with",
        )


def _weight_outside(mask: np.ndarray, placed: Placed) -> bool:
    outside = np.ones(len(mask), dtype=bool)
    for start, end in zip(placed.starts, placed.ends, strict=True):
        outside[start:end] = False
    return bool(mask[outside].any())


def _lint_text(item: Rendered, placed: Placed, codec: Codec) -> Iterator[tuple[Rule, str]]:
    decoded = codec.decode(item.tokens.tolist())
    text = placed.draft.text
    # Some tokenizers normalise: then the text is compared after one trip through them.
    wanted = (text, codec.decode(codec.ids(text)))
    if item.truncated:
        decoded = decoded.rstrip(CUT_CHARACTER)
        right = any(candidate.startswith(decoded) for candidate in wanted)
    else:
        right = decoded in wanted
    if not right:
        at = next((i for i, (a, b) in enumerate(zip(decoded, text, strict=False)) if a != b), 0)
        yield Rule.round_trip, f"differs at character {at}: {decoded[at : at + 20]!r}"


def _lint_begin_token(
    item: Rendered, placed: Placed, tokenizer: PreTrainedTokenizerBase, codec: Codec
) -> Iterator[tuple[Rule, str]]:
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    if bos is None or bos_id is None or item.truncated:
        return
    printed = placed.draft.text.count(str(bos))
    found = int(np.count_nonzero(item.tokens == bos_id))
    if found != printed:
        yield Rule.begin_token, f"{found} begin tokens, but {printed} are in the text"
    if printed and placed.draft.text.startswith(str(bos)) and int(item.tokens[0]) != bos_id:
        yield Rule.begin_token, "the begin token is not the first token"
    if len(item.tokens) > 1 and item.tokens[0] == item.tokens[1] == bos_id:
        yield Rule.begin_token, "the begin token stands twice at the start"


def _lint_empty_think(
    row: Row, item: Rendered, mask: np.ndarray, placed: Placed, codec: Codec
) -> Iterator[tuple[Rule, str]]:
    for span, start, end in zip(placed.draft.spans, placed.starts, placed.ends, strict=True):
        reasoned = row.messages[span.index].get("reasoning_content", "").strip()
        trained = [int(t) for t in item.tokens[start:end][mask[start:end] != 0]]
        if reasoned and EMPTY_THINK.search(codec.decode(trained)):
            yield Rule.empty_think, f"messages[{span.index}] has reasoning that is not trained"
