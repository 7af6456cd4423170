"""What became of the rows, counted, and the errors that say so."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from tunebook.config import OnBadRow
from tunebook.data.rows import Kind
from tunebook.errors import DataError, NothingSupervisedError, RowProblem, listed
from tunebook.render.cache import (
    Chunk,
    RenderReport,
)
from tunebook.render.chat_template import DATE, chat_template_of
from tunebook.render.conversation import WARNED_FIXES
from tunebook.render.fitting import (
    BAD_ROW,
    IDENTICAL_AFTER_TRUNCATION,
    NO_TARGET_AFTER_TRUNCATION,
    NOTHING_SUPERVISED,
    TOO_LONG,
    Settings,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row

SHOWN_SPECIALS = 5


class Total:
    """What all chunks say together."""

    def __init__(self) -> None:
        self.dropped_rows: dict[str, list[int]] = {}
        self.problems: list[tuple[int, str, str]] = []
        self.too_long: list[tuple[int, str]] = []
        self.counts: Counter[str] = Counter()
        self.lost_data = 0
        self.blank_answers = 0
        self.truncated = 0
        self.supervised = 0
        self.special_rows: set[int] = set()
        self.special_texts: Counter[str] = Counter()
        self.kept_rows: list[int] = []

    def add(self, chunk: Chunk) -> None:
        """Counts one more chunk."""
        for row, reason in chunk.dropped:
            self.dropped_rows.setdefault(reason, []).append(row)
        for row, _, _ in chunk.problems:
            self.dropped_rows.setdefault(BAD_ROW, []).append(row)
        self.problems += chunk.problems
        self.too_long += chunk.too_long
        self.counts.update(chunk.counts)
        self.lost_data += chunk.lost_data
        self.blank_answers += chunk.blank_answers
        self.special_rows.update(row for row, _ in chunk.special_texts)
        self.special_texts.update(text for _, text in chunk.special_texts)
        self.truncated += int(chunk.arrays["truncated"].sum())
        self.supervised += int(chunk.arrays["supervised"].sum())
        self.kept_rows += np.unique(chunk.arrays["rows"]).tolist()


def raise_problems(
    total: Total, rows: list[Row], tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> None:
    def located(row: int, field: str, reason: str) -> RowProblem:
        return RowProblem(rows[row].file, rows[row].line, field, reason)

    if total.too_long:
        raise _data_error(
            f"longer than {settings.limit}. Raise max_seq_len, or set data.on_long_row="
            + ("skip" if settings.kind is Kind.prompt else "truncate or skip"),
            [located(row, "", reason) for row, reason in total.too_long],
        )
    if total.problems and settings.on_bad_row is OnBadRow.fail:
        raise _data_error(
            "not rendered (data.on_bad_row=skip leaves such rows out)",
            [located(*problem) for problem in total.problems],
        )
    if not total.kept_rows and rows:
        raise _nothing_left(total, rows, tokenizer, settings)


def _data_error(what: str, problems: list[RowProblem]) -> DataError:
    num_rows = len({(problem.file, problem.line) for problem in problems})
    count = "1 row is" if num_rows == 1 else f"{num_rows} rows are"
    return DataError("\n".join([f"{count} {what}:", *listed(problems)]), problems)


def _nothing_left(
    total: Total, rows: list[Row], tokenizer: PreTrainedTokenizerBase, settings: Settings
) -> DataError:
    reasons = {reason: len(indices) for reason, indices in total.dropped_rows.items()}
    counted = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    template = _template_name(tokenizer)
    limit = f"max_seq_len={settings.max_seq_len}"
    advice = {
        NOTHING_SUPERVISED: f"With data.mask={settings.mask} only assistant messages of weight "
        "above 0 are trained: look at the roles and the weight fields, or set data.mask=all.",
        NO_TARGET_AFTER_TRUNCATION: f"{limit} ends before the first answer begins: raise it.",
        IDENTICAL_AFTER_TRUNCATION: f"{limit} ends before the answers differ: raise it.",
        TOO_LONG: f"All are longer than {settings.limit}: raise max_seq_len"
        + (
            ", or set data.on_long_row=truncate."
            if settings.kind is Kind.conversation
            else ", or shorten the rows."
        ),
        BAD_ROW: "No row could be rendered, and data.on_bad_row=skip left them all out: "
        + "; ".join(
            str(RowProblem(rows[row].file, rows[row].line, field, reason))
            for row, field, reason in total.problems[:3]
        ),
    }
    worst = max(reasons, key=lambda reason: reasons[reason])
    if settings.kind is Kind.prompt:
        what = f"None of {len(rows)} prompts can be used, rendered with {template}"
        return DataError(f"{what} ({counted}). {advice[worst]}")
    with_mask = f"{template} and data.mask={settings.mask}"
    what = f"No token of {len(rows)} rows would carry loss, rendered with {with_mask}"
    if settings.kind is Kind.preference:
        what = f"None of {len(rows)} pairs can be trained on, rendered with {template}"
    return NothingSupervisedError(f"{what} ({counted}). {advice[worst]}")


def report_of(
    total: Total,
    rows: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    lengths: dict[str, int],
) -> RenderReport:
    notes: list[str] = []
    if tokenizer.chat_template is not None:
        notes += chat_template_of(tokenizer).profile.notes
    notes += [
        f"{_count(count, 'row')}: {words}"
        for words, count in total.counts.items()
        if words not in WARNED_FIXES
    ]
    if total.blank_answers:
        notes.append(
            f"{_count(total.blank_answers, 'blank answer')}: only the end of the turn is trained"
        )
    if total.lost_data:
        notes.append(
            f"{_count(total.lost_data, 'turn')} left out as too long, of rows that keep others"
        )
    lost = len(rows) - len(total.kept_rows)
    caveats = _caveats(total, tokenizer)
    if 2 * lost > len(rows):
        reasons = ", ".join(f"{len(r)} {name}" for name, r in total.dropped_rows.items())
        mask = f"data.mask={settings.mask}, " if settings.kind is Kind.conversation else ""
        caveats.append(
            f"{lost} of {len(rows)} rows are lost ({reasons}); max_seq_len={settings.max_seq_len}, "
            f"{mask}data.on_long_row={settings.on_long_row}"
        )
    elif settings.kind is Kind.prompt and (long := len(total.dropped_rows.get(TOO_LONG, []))):
        caveats.append(
            f"{_count(long, 'prompt')} left out, longer than {settings.limit}: "
            "a prompt is never cut"
        )
    return RenderReport(
        num_rows=len(rows),
        num_data=lengths["lengths"],
        truncated=total.truncated,
        dropped={reason: len(indices) for reason, indices in total.dropped_rows.items()},
        dropped_rows=total.dropped_rows,
        problems=[],
        notes=notes,
        warnings=caveats,
        kept_rows=total.kept_rows,
        blank_answers=total.blank_answers,
        num_tokens=lengths["tokens"],
        num_supervised=total.supervised,
        settings=settings.to_json(),
    )


def _caveats(total: Total, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What is rendered as the template says, and is yet likely not meant."""
    caveats: list[str] = []
    if tokenizer.chat_template is not None and chat_template_of(tokenizer).prints_date:
        caveats.append(
            f"{_template_name(tokenizer)} prints the date ({DATE}): the tokens depend on the day "
            "they are rendered on, so another day gives another run"
        )
    caveats += [
        f"{_count(count, 'row')}: {words}"
        for words, count in total.counts.items()
        if words in WARNED_FIXES
    ]
    if total.special_texts:
        ranked = total.special_texts.most_common()
        shown = ", ".join(text for text, _ in ranked[:SHOWN_SPECIALS])
        more = f" and {len(ranked) - SHOWN_SPECIALS} others" if len(ranked) > SHOWN_SPECIALS else ""
        caveats.append(
            f"{_count(len(total.special_rows), 'row')}: text of a message becomes special tokens "
            f"({shown}{more}), as if the template had printed them: it can end a turn or begin "
            "another. Remove it from the data"
        )
    return caveats


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template is None:
        return "no chat template"
    return chat_template_of(tokenizer).name
