"""Loads the rows of a run: reads every source, checks every row, and leaves nothing unsaid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunebook.config import DataConfig, OnBadRow, RowFormat, SourceConfig
from tunebook.data.duplicates import conflicting_ids, num_repeats
from tunebook.data.formats import (
    FORMATS_OF_KIND,
    USE_OF_FORMAT,
    num_system_messages,
    row_has_text,
    rows_of,
)
from tunebook.data.json_values import BadRow, WrongKind, to_json_value, type_name
from tunebook.data.readers import RawRow
from tunebook.data.rows import Kind, LoadedRows, Row, SourceInfo, fingerprint_of
from tunebook.data.sources import (
    check_source,
    read_source,
    settings_of,
    source_name,
    source_place,
    sources_of,
)
from tunebook.data.turns import Reading
from tunebook.errors import ConfigError, DataError, EmptyDataError, NoTextError, RowProblem, listed

NUM_IDS_LISTED = 5


def load_rows(data: DataConfig, *, kind: Kind, unsized_limit: int | None = None) -> LoadedRows:
    """The checked rows of every source of `data`, in source order.

    Args:
        data: `data` of a config; `data.eval` is left to `load_eval_rows`.
        kind: what the recipe trains on.
        unsized_limit: rows to take from a function whose result has no length.

    Raises:
        ConfigError: settings that do not fit each other or the columns.
        DataError: bad rows with `on_bad_row=fail`, or no good row at all.
        EmptyDataError: a source without a row.
        NoTextError: no message of any row holds text.
    """
    _check_format(data, kind)
    found = [
        _load_source(
            source, reading=_reading(data, kind, index, key=key), unsized_limit=unsized_limit
        )
        for index, (key, source) in enumerate(sources_of(data))
    ]
    return _joined(found, data)


def load_eval_rows(data: DataConfig, *, kind: Kind) -> LoadedRows | None:
    """The checked rows of `data.eval`, or None when eval rows are held out of the training rows.

    They are read like the training rows, but may lack `id_column` and `group_column`, which only
    the holding out needs.

    Raises:
        ConfigError, DataError, EmptyDataError, NoTextError: as `load_rows`.
    """
    if not data.eval.is_given:
        unread = settings_of(data.eval)
        if unread:
            raise ConfigError(
                f"data.eval.{unread[0]} is set, but no eval rows are named. Name them with "
                "data.eval.path, data.eval.hub or data.eval.function, or leave data.eval alone to "
                "hold out a split of the training rows."
            )
        return None
    _check_format(data, kind)
    check_source("data.eval", data.eval)
    reading = replace(_reading(data, kind, 0, key="data.eval"), id_column=None, group_column=None)
    return _joined([_load_source(data.eval, reading=reading)], data)


@dataclass(slots=True)
class _Source:
    """What came of one source."""

    config: SourceConfig
    reading: Reading
    rows: list[Row] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    num_read: int = 0
    num_wrong_kind: int = 0
    names: set[str] = field(default_factory=set)
    """Columns that any row has, by the names of the source."""


def _check_format(data: DataConfig, kind: Kind) -> None:
    allowed = FORMATS_OF_KIND[kind]
    if data.format is not RowFormat.auto and data.format not in allowed:
        raise ConfigError(
            f"data.format={data.format}: this recipe trains on {kind} rows, so the format is auto "
            f"or {' or '.join(allowed)}. {data.format} rows are for "
            f"{USE_OF_FORMAT[data.format]}."
        )


def _reading(data: DataConfig, kind: Kind, source: int, *, key: str) -> Reading:
    return Reading(
        key=key,
        kind=kind,
        format=data.format,
        source=source,
        mask=data.mask,
        system_prompt=data.system_prompt,
        id_column=data.id_column,
        group_column=data.group_column,
    )


def _load_source(
    source: SourceConfig, *, reading: Reading, unsized_limit: int | None = None
) -> _Source:
    found = _Source(source, reading)
    for raw in read_source(source, key=reading.key, unsized_limit=unsized_limit):
        found.num_read += 1
        try:
            found.rows += _rows_of_raw(raw, found)
        except BadRow as bad:
            found.num_wrong_kind += isinstance(bad, WrongKind)
            found.problems.append(RowProblem(raw.file, raw.line, bad.field, bad.reason))
        except RecursionError:
            found.problems.append(RowProblem(raw.file, raw.line, "", "is nested too deeply"))
    if found.num_read == 0:
        raise EmptyDataError(
            f"0 rows in {source_place(source)} ({reading.key}). Nothing can be trained on an empty "
            "source."
        )
    _check_columns(found)
    if found.num_wrong_kind == found.num_read:
        raise DataError(
            f"{source_place(source)}: none of the {found.num_read} rows is for this recipe. "
            f"The first {found.problems[0].reason}.",
            found.problems,
        )
    return found


def _rows_of_raw(raw: RawRow, found: _Source) -> list[Row]:
    if raw.unreadable is not None:
        raise BadRow("", raw.unreadable)
    values = to_json_value(raw.value, "")
    if not isinstance(values, dict):
        raise BadRow("", f"row must be an object, this is {type_name(values)}")
    found.names.update(values)
    values = _renamed(values, found.config.columns, key=found.reading.key)
    return rows_of(values, found.reading, file=raw.file, line=raw.line, prune=raw.from_arrow)


def _renamed(values: dict[str, Any], columns: dict[str, str], *, key: str) -> dict[str, Any]:
    """The row by our names; a renamed column hides one that had our name before."""
    if not columns:
        return values
    for ours, theirs in columns.items():
        if theirs not in values:
            raise BadRow(
                theirs,
                f"is missing, but {key}.columns reads {ours} from it; "
                f"the columns are {', '.join(values)}",
            )
    taken = set(columns.values())
    kept = {key: value for key, value in values.items() if key not in taken}
    return {**kept, **{ours: values[theirs] for ours, theirs in columns.items()}}


def _check_columns(found: _Source) -> None:
    """Refuses a column name in the config that not one row has."""
    if not found.names:
        return
    key, columns = found.reading.key, found.config.columns
    for ours, theirs in columns.items():
        if theirs not in found.names:
            raise ConfigError(
                f"{key}.columns.{ours}={theirs}: no row of {source_place(found.config)} has a "
                f"column {theirs!r}. Its columns are: {', '.join(sorted(found.names))}."
            )
    names = sorted((found.names - set(columns.values())) | set(columns))
    for setting in ("id_column", "group_column"):
        name = getattr(found.reading, setting)
        if name is not None and name not in names:
            raise ConfigError(
                f"data.{setting}={name}: no row of {source_place(found.config)} has that column. "
                f"Its columns are: {', '.join(names)}."
            )


def _joined(found: Sequence[_Source], data: DataConfig) -> LoadedRows:
    problems = [problem for one in found for problem in one.problems]
    num_read = sum(one.num_read for one in found)
    if problems and data.on_bad_row is not OnBadRow.skip:
        raise DataError(_bad_rows(problems, num_read), problems)
    for one in found:
        if not one.rows:
            raise DataError(
                f"{source_place(one.config)} ({one.reading.key}): every row was skipped, so "
                f"nothing of it is left. {_bad_rows(one.problems, one.num_read)}",
                one.problems,
            )
    rows = [row for one in found for row in one.rows]
    _check_system_messages(rows, data)
    if not any(map(row_has_text, rows)):
        places = ", ".join(source_place(one.config) for one in found)
        settings = ", ".join(f"{one.reading.key}.columns" for one in found)
        raise NoTextError(
            f"{places}: {len(rows)} rows, but no message of any row has text: every content is "
            f"empty or white space. Check which columns hold the text ({settings})."
        )
    return LoadedRows(
        rows=rows,
        problems=problems,
        warnings=_warnings(rows, problems, found, data),
        sources=[
            SourceInfo(
                name=source_name(one.config),
                rows=len(one.rows),
                weight=one.config.weight,
                fingerprint=fingerprint_of(row.content_hash for row in one.rows),
            )
            for one in found
        ],
        num_read=num_read,
    )


def _bad_rows(problems: Sequence[RowProblem], num_read: int) -> str:
    return "\n".join(
        [
            f"{len(problems)} of {num_read} rows cannot be used:",
            *listed(problems),
            "Repair these rows, or set data.on_bad_row=skip to train without them.",
        ]
    )


def _check_system_messages(rows: Sequence[Row], data: DataConfig) -> None:
    if data.system_prompt is None:
        return
    already = [row for row in rows if num_system_messages(row) > 1]
    if already:
        raise ConfigError(
            f"data.system_prompt is set, but {len(already)} of {len(rows)} rows already have a "
            f"system message (the first is {already[0].file}:{already[0].line}). Set "
            "data.system_prompt=null, or remove the system messages from the rows."
        )


def _warnings(
    rows: Sequence[Row],
    problems: Sequence[RowProblem],
    found: Sequence[_Source],
    data: DataConfig,
) -> list[str]:
    warnings = []
    if problems:
        warnings.append(
            f"{len(problems)} bad rows were skipped (data.on_bad_row=skip); the first: "
            f"{problems[0]}"
        )
    unread = sum((one.reading.unread for one in found), Counter[str]())
    if unread:
        shown = ", ".join(f"{key} ({count})" for key, count in sorted(unread.items()))
        warnings.append(f"message keys that nothing reads, with their counts: {shown}")
    for one in found:
        names = _unread_columns(one, data)
        if names:
            warnings.append(
                f"columns of {source_place(one.config)} that nothing reads: {', '.join(names)}"
            )
    conflicts = conflicting_ids(rows)
    if conflicts:
        shown = "; ".join(
            f"{row_id} at {', '.join(f'{row.file}:{row.line}' for row in same)}"
            for row_id, same in list(conflicts.items())[:NUM_IDS_LISTED]
        )
        hidden = len(conflicts) - NUM_IDS_LISTED
        more = f" and {hidden} more" if hidden > 0 else ""
        warnings.append(f"ids with more than one content: {len(conflicts)} ({shown}{more})")
    repeats = num_repeats(rows)
    if repeats:
        told = (
            "1 row repeats an earlier row exactly; it is kept"
            if repeats == 1
            else f"{repeats} rows repeat an earlier row exactly; they are kept"
        )
        warnings.append(told)
    return warnings


def _unread_columns(found: _Source, data: DataConfig) -> list[str]:
    """Columns that are in no token; a reward may read every column of a prompt row."""
    if found.reading.kind is Kind.prompt:
        return []
    names = {name for row in found.rows for name in row.columns}
    return sorted(names - {"id", data.id_column, data.group_column})
