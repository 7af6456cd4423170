"""Reads data files row by row; a line that cannot be read is a row with a reason, not a crash."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tunebook.data.json_values import parse_json, parse_json_at
from tunebook.errors import DataError, RowProblem

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
MAX_CSV_CELL = 2**31 - 1
NUM_SNIPPET = 60


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as a source holds it, before any check of its content."""

    file: str
    line: int
    value: Any
    unreadable: str | None = None
    """Why there is no value."""
    from_arrow: bool = False
    """Columns are typed, so that a key one row has is there in all rows, as null."""


def is_data_file(path: Path) -> bool:
    """Whether the name ends in a suffix that `read_file` knows."""
    return path.name.lower().endswith(SUFFIXES) and not path.name.startswith(".")


def read_file(path: Path) -> Iterator[RawRow]:
    """The rows of one data file.

    Raises:
        DataError: the file cannot be read at all, or its suffix is unknown.
    """
    name = path.name.lower()
    try:
        if name.endswith((".jsonl", ".jsonl.gz", ".ndjson")):
            yield from _read_jsonl(path)
        elif name.endswith(".json"):
            yield from _read_json(path)
        elif name.endswith((".csv", ".tsv")):
            yield from _read_csv(path, delimiter="\t" if name.endswith(".tsv") else ",")
        elif name.endswith(".parquet"):
            yield from _read_parquet(path)
        else:
            raise DataError(f"{path}: unknown kind of file. Known: {', '.join(SUFFIXES)}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with _open_binary(path) as file:
        start = file.peek(4)[:4]
        encoding = _wide_encoding(start)
        if encoding:
            yield from _read_wide_lines(str(path), file, encoding)
            return
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield _row_of_line(str(path), number, line)


def _open_binary(path: Path) -> io.BufferedReader:
    if path.name.lower().endswith(".gz"):
        return io.BufferedReader(gzip.open(path))  # pyright: ignore[reportArgumentType]
    return path.open("rb")


def _wide_encoding(start: bytes) -> str | None:
    """The encoding that a byte order mark announces, UTF-8 apart."""
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    return None


def _read_wide_lines(file_name: str, file: IO[bytes], encoding: str) -> Iterator[RawRow]:
    number = 0
    try:
        with io.TextIOWrapper(file, encoding=encoding, newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row_of_text(file_name, number, line)
    except UnicodeError as error:
        raise DataError(
            f"{file_name}:{number + 1}: the file announces {encoding.upper()} but does not hold "
            f"it ({error}). Convert it: iconv -f {encoding} -t utf-8 {file_name}"
        ) from error


def _row_of_line(file: str, number: int, line: bytes) -> RawRow:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return RawRow(
            file, number, None, f"not UTF-8 (byte {error.start + 1} of the line); {_convert(file)}"
        )
    if "\x00" in text:
        return RawRow(
            file, number, None, f"holds zero bytes, as UTF-16 without a mark does; {_convert(file)}"
        )
    return _row_of_text(file, number, text)


def _convert(file: str) -> str:
    return f"convert the file: iconv -f <its encoding> -t utf-8 {file}"


def _row_of_text(file: str, number: int, text: str) -> RawRow:
    text = text.strip()
    try:
        return RawRow(file, number, parse_json(text))
    except ValueError as error:
        return RawRow(file, number, None, _not_json(text, error))


def _not_json(text: str, error: ValueError) -> str:
    position = getattr(error, "pos", 0)
    reason = getattr(error, "msg", str(error)).removesuffix(" at")
    start = max(0, min(position, len(text)) - NUM_SNIPPET // 2)
    snippet = text[start : start + NUM_SNIPPET]
    before = "..." if start else ""
    after = "..." if start + NUM_SNIPPET < len(text) else ""
    column = getattr(error, "colno", None)
    where = f" at column {column}" if column else ""
    return f"not valid JSON: {reason}{where}, in {before}{snippet!r}{after}"


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    encoding = _wide_encoding(data[:4]) or "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not {encoding.upper().removesuffix('-SIG')}; {_convert(str(path))}"
        ) from error


def _read_json(path: Path) -> Iterator[RawRow]:
    """Rows of a list of objects, of one object, or of lines that should have been a .jsonl."""
    text = _read_text(path)
    body = text.lstrip()
    if not body:
        return
    start = len(text) - len(body)
    first_line = text.count("\n", 0, start) + 1
    if body[0] == "[":
        yield from _read_json_list(str(path), text, start)
        return
    try:
        row = RawRow(str(path), first_line, parse_json(body))
    except ValueError as error:
        first, newline, _ = body.partition("\n")
        if newline and _is_json(first):
            yield from _read_jsonl(path)
        else:
            line = first_line + getattr(error, "lineno", 1) - 1
            raise _stopped(str(path), line, _not_json(body, error)) from error
        return
    yield row


def _stopped(file: str, line: int, reason: str) -> DataError:
    """For a fault that hides all rows after it, so that skipping one row is not possible."""
    problem = RowProblem(file, line, "", f"{reason}. Nothing after it can be read; repair the file")
    return DataError(f"{problem}.", [problem])


def _read_json_list(file: str, text: str, start: int) -> Iterator[RawRow]:
    position = _skip_space(text, start + 1)
    line, counted = text.count("\n", 0, position) + 1, position
    try:
        more = text[position : position + 1] != "]"
        while more:
            line, counted = line + text.count("\n", counted, position), position
            value, position = parse_json_at(text, position)
            yield RawRow(file, line, value)
            position = _skip_space(text, position)
            more = text[position : position + 1] == ","
            position = _skip_space(text, position + more)
        if text[position : position + 1] != "]":
            raise json.JSONDecodeError("a list of objects needs ',' or ']' here", text, position)
        if text[position + 1 :].strip():
            raise json.JSONDecodeError("text after the list", text, position + 1)
    except ValueError as error:
        line = getattr(error, "lineno", line)
        raise _stopped(file, line, _not_json(text, error)) from error


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _read_csv(path: Path, *, delimiter: str) -> Iterator[RawRow]:
    """Rows of a table with a header line; an empty cell is null."""
    csv.field_size_limit(MAX_CSV_CELL)
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            if header is None:
                if any(cell.strip() for cell in cells):
                    header = _checked_header(path, line, cells)
            elif cells:
                yield _row_of_cells(str(path), line, header, cells)
            line = reader.line_num + 1
    except csv.Error as error:
        raise _stopped(str(path), line, f"not valid CSV: {error}") from error


def _checked_header(path: Path, line: int, cells: list[str]) -> list[str]:
    twice = {cell for cell in cells if cells.count(cell) > 1}
    if twice:
        raise DataError(f"{path}:{line}: the header names {', '.join(sorted(twice))!r} twice")
    return cells


def _row_of_cells(file: str, line: int, header: list[str], cells: list[str]) -> RawRow:
    if len(cells) != len(header):
        return RawRow(
            file, line, None, f"{len(cells)} cells, but the header has {len(header)}; quote commas"
        )
    return RawRow(
        file, line, {name: cell or None for name, cell in zip(header, cells, strict=True)}
    )


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield RawRow(str(path), number, value, from_arrow=True)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
