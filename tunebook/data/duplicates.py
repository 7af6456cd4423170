"""Finds rows that repeat each other, exactly or but for case, spacing and end punctuation."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunebook.data.rows import Row

# Quotation marks and full-width forms stand as escapes: they look alike.
SENTENCE_MARKS = ".,;:!?\"'`()[]{}\u2026\u201c\u201d\u2018\u2019\u00ab\u00bb\u3001\u3002"
NUM_LISTED = 5


@dataclass(frozen=True, slots=True)
class DuplicateReport:
    """Rows of the eval side that the training side holds as well."""

    exact: tuple[tuple[Row, Row], ...]
    """(eval row, the first training row that says the same, whatever is trained of either)."""
    normalised: tuple[tuple[Row, Row], ...]
    """(eval row, the first training row with the same normalised text), exact ones left out."""

    def lines(self) -> list[str]:
        """What to show a person: the counts, and the first few places of each kind."""
        return [
            _line("exact duplicates", self.exact),
            _line("duplicates but for case, spacing and punctuation", self.normalised),
        ]


def cross_split_duplicates(train: Sequence[Row], evaluation: Sequence[Row]) -> DuplicateReport:
    """The eval rows that also stand in the training rows, exactly or normalised."""
    by_hash: dict[str, Row] = {}
    by_text: dict[str, Row] = {}
    for row in train:
        by_hash.setdefault(row.text_hash, row)
        by_text.setdefault(normalised_key(row), row)
    exact, normalised = [], []
    for row in evaluation:
        if row.text_hash in by_hash:
            exact.append((row, by_hash[row.text_hash]))
        elif (key := normalised_key(row)) in by_text:
            normalised.append((row, by_text[key]))
    return DuplicateReport(tuple(exact), tuple(normalised))


def normalised_key(row: Row) -> str:
    """A hash that is equal for rows whose texts differ only in case, spacing, Unicode form and
    sentence punctuation at the ends of words, so 3.5 and 35, or 3 * 4 and 3 / 4, stay apart.

    It covers roles, contents, reasoning and tool calls; of a prompt row only the prompt, since the
    same prompt on both sides gives the answer away.
    """
    turns = [*row.messages, *row.chosen, *row.rejected]
    parts: list[object] = [row.kind, len(row.messages), len(row.chosen)]
    for turn in turns:
        parts += [turn["role"], normalised_text(turn["content"])]
        parts.append(normalised_text(turn.get("reasoning_content", "")))
        parts.append(turn.get("tool_calls"))
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def normalised_text(text: str) -> str:
    """The text in lower case and NFKC, its words free of sentence marks, one space between."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    bare = (word.strip(SENTENCE_MARKS) for word in words)
    return " ".join(word for word in bare if word)


def num_repeats(rows: Iterable[Row]) -> int:
    """How many rows repeat the content of an earlier row."""
    seen: set[str] = set()
    count = 0
    for row in rows:
        count += row.content_hash in seen
        seen.add(row.content_hash)
    return count


def conflicting_ids(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Ids that stand for more than one content, each with the first row of every content.

    Two sources may number their rows alike, and the pairs of one row of scored samples share its
    id; neither is a conflict.
    """
    first: dict[tuple[int, str], dict[str, Row]] = {}
    for row in rows:
        if row.id is not None:
            first.setdefault((row.source, row.id), {}).setdefault(row.content_hash, row)
    found: dict[str, list[Row]] = {}
    for (_, row_id), contents in first.items():
        places = {(row.file, row.line) for row in contents.values()}
        if len(places) > 1:
            found.setdefault(row_id, []).extend(contents.values())
    return found


def _line(what: str, pairs: Sequence[tuple[Row, Row]]) -> str:
    if not pairs:
        return f"{what} across the split: 0"
    shown = [f"{one.file}:{one.line} = {two.file}:{two.line}" for one, two in pairs[:NUM_LISTED]]
    more = f" and {len(pairs) - NUM_LISTED} more" if len(pairs) > NUM_LISTED else ""
    return f"{what} across the split: {len(pairs)} (eval = train: {', '.join(shown)}{more})"
