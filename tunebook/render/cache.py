"""Rendered rows on disk: written as a stream, read a datum at a time, complete or not there."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunebook.errors import RowProblem
from tunebook.render.chat_template import DATE
from tunebook.types import FloatArray, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row

RENDERER_VERSION = 3
"""Raised with every change that gives other tokens or another mask."""

ARRAYS: dict[str, Any] = {
    "tokens": np.int32,
    "mask": np.float32,
    "lengths": np.int32,
    "rows": np.int32,
    "supervised": np.int32,
    "truncated": np.bool_,
}
REPORT = "report.json"


@dataclass(frozen=True, slots=True)
class Rendered:
    """One datum of one row."""

    row: int
    """Index of the row it came from."""
    tokens: IntArray
    """`[T + 1]`"""
    mask: FloatArray
    """`[T]`, belongs to `tokens[1:]`: 0 = no loss, 1 = loss, other = the message's weight."""
    truncated: bool


@dataclass(slots=True)
class RenderReport:
    """What became of the rows."""

    num_rows: int
    num_data: int
    truncated: int
    """Data that were cut and still carry loss."""
    dropped: dict[str, int]
    """Reason -> rows that are left without a datum."""
    dropped_rows: dict[str, list[int]]
    """Reason -> indices of those rows."""
    problems: list[RowProblem]
    """Of the rows left out because of data.on_bad_row=skip."""
    notes: list[str]
    """How rows were rendered, and what was changed so that the template shows all of them."""
    warnings: list[str]
    """What a person should see before training."""
    kept_rows: list[int]
    blank_answers: int
    """Answers of which only the end of the turn is trained."""
    num_tokens: int
    num_supervised: int
    """Tokens that carry loss."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Mask, length and policies it was rendered with."""


class RenderedRows:
    """The data of a set of rows, read from disk when asked for."""

    def __init__(self, directory: Path, report: RenderReport) -> None:
        self.directory = directory
        self.report = report
        self.lengths: IntArray = np.load(directory / "lengths.npy")
        """`[num_data]` tokens, T + 1."""
        self.supervised: IntArray = np.load(directory / "supervised.npy")
        """`[num_data]` tokens that carry loss."""
        self._rows: IntArray = np.load(directory / "rows.npy")
        self._truncated: npt.NDArray[np.bool_] = np.load(directory / "truncated.npy")
        sizes = {len(self.supervised), len(self._rows), len(self._truncated), report.num_data}
        if sizes != {len(self.lengths)}:
            raise ValueError(f"{directory}: its files hold {sorted(sizes)} data")
        self._starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self._first_byte = {
            name: _first_byte(directory / f"{name}.npy", int(self._starts[-1]))
            for name in ("tokens", "mask")
        }

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, datum: int) -> Rendered:
        if not 0 <= datum < len(self):
            raise IndexError(f"datum {datum} of {len(self)}")
        start, stop = int(self._starts[datum]), int(self._starts[datum + 1])
        return Rendered(
            row=int(self._rows[datum]),
            tokens=self._read("tokens", start, stop),
            mask=self._read("mask", start + 1, stop),
            truncated=bool(self._truncated[datum]),
        )

    def __iter__(self) -> Iterator[Rendered]:
        return (self[datum] for datum in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return RenderedRows, (self.directory, self.report)

    def _read(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        # Read and not mapped: the pages of a map count as the process's own memory.
        dtype = np.dtype(ARRAYS[name])
        offset = self._first_byte[name] + start * dtype.itemsize
        path = self.directory / f"{name}.npy"
        return np.fromfile(path, dtype=dtype, count=stop - start, offset=offset)

    def data_of_row(self, row: int) -> range:
        """Indices of the data of one row; empty for a row that was left out."""
        start, stop = np.searchsorted(self._rows, [row, row + 1])
        return range(int(start), int(stop))


def _first_byte(path: Path, length: int) -> int:
    """Where the values of a .npy file begin.

    Raises:
        ValueError: the file does not hold `length` values.
    """
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        first = file.tell()
    if shape != (length,) or path.stat().st_size != first + length * dtype.itemsize:
        raise ValueError(f"{path}: holds {shape} values, not {length}")
    return first


@dataclass(slots=True)
class Chunk:
    """The rendered data of some rows in a row, as arrays."""

    num_rows: int
    arrays: dict[str, npt.NDArray[Any]]
    """As in `ARRAYS`; tokens and mask are concatenated."""
    dropped: list[tuple[int, str]]
    """(row, reason)"""
    problems: list[tuple[int, str, str]]
    """(row, field, reason)"""
    too_long: list[tuple[int, str]]
    """(row, reason) where a long row is an error."""
    counts: dict[str, int]
    """How often what was done, by the words that say it."""
    lost_data: int
    """Data left out of rows that keep others."""
    blank_answers: int
    special_texts: list[tuple[int, str]]
    """(row, text of a special token in one of its messages)"""


class ArrayWriter:
    """Appends to .npy files, whose headers get the final length when it closes."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, IO[bytes]] = {}
        self.lengths = dict.fromkeys(ARRAYS, 0)
        for name in ARRAYS:
            self._files[name] = (directory / f"{name}.npy").open("wb")
            self._write_header(name)

    def append(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Puts each array behind what its file holds."""
        for name, array in arrays.items():
            self._files[name].write(np.ascontiguousarray(array, dtype=ARRAYS[name]).tobytes())
            self.lengths[name] += len(array)

    def close(self) -> None:
        """Writes the final headers; without it the files hold nothing that can be read."""
        for name, file in self._files.items():
            file.seek(0)
            self._write_header(name)
            file.close()

    def abandon(self) -> None:
        """Closes the files as they are."""
        for file in self._files.values():
            file.close()

    def _write_header(self, name: str) -> None:
        # numpy pads the header so that a longer length fits in the same number of bytes.
        header = {
            "descr": np.dtype(ARRAYS[name]).str,
            "fortran_order": False,
            "shape": (self.lengths[name],),
        }
        np.lib.format.write_array_header_1_0(self._files[name], header)  # pyright: ignore


def render_key(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> str:
    """32 hex digits over everything that changes a token id or a mask."""
    digest = hashlib.sha256()
    for part in (RENDERER_VERSION, settings, _tokenizer_identity(tokenizer)):
        digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    for row in rows:
        # Keys keep their order: templates print tools and arguments as they come.
        content = [row.messages, row.chosen, row.rejected, row.num_prompt, row.plain, row.tools]
        digest.update(json.dumps(content).encode() + b"\n")
    return digest.hexdigest()[:32]


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    import datetime

    import tokenizers
    import transformers

    template = tokenizer.chat_template
    identity: dict[str, Any] = {
        "class": type(tokenizer).__name__,
        "template": template,
        "special": tokenizer.special_tokens_map,
        "added": {str(i): repr(token) for i, token in tokenizer.added_tokens_decoder.items()},
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
    if tokenizer.is_fast:
        identity["backend"] = tokenizer.backend_tokenizer.to_str()  # pyright: ignore
    else:
        identity["vocabulary"] = sorted(tokenizer.get_vocab().items())
        identity["name"] = tokenizer.name_or_path
    if DATE in str(template):
        identity["date"] = datetime.date.today().isoformat()
    return identity


def read_rendered(directory: Path, rows: Sequence[Row]) -> RenderedRows | None:
    """What an earlier call rendered, or None when it is not there or not whole."""
    rendered = read_frozen(directory, rows)
    if rendered is None and (directory / REPORT).is_file():
        # A crash of the machine can leave files of any length; rendering again replaces them.
        shutil.rmtree(directory, ignore_errors=True)
    return rendered


def read_frozen(directory: Path, rows: Sequence[Row]) -> RenderedRows | None:
    """What `link_rendered` put in a folder, or None when it is not there, damaged or of other rows.

    The folder is left as it is. That the rows are the ones it was made from is for the caller to
    know: only their number is compared.
    """
    path = directory / REPORT
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        problems = [
            RowProblem(rows[row].file, rows[row].line, where, reason)
            for row, where, reason in values.pop("problems")
        ]
        report = RenderReport(problems=problems, **values)
        rendered = RenderedRows(directory, report)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, EOFError):
        return None
    return rendered if report.num_rows == len(rows) else None


def link_rendered(rendered: RenderedRows, directory: Path) -> None:
    """Makes `directory` a complete copy of the rendered files: hard links, or copies where the
    file system cannot link.

    It is there whole or not at all; a folder that stood there is replaced.
    """
    if directory.exists() and directory.samefile(rendered.directory):
        return
    new = new_directory(directory)
    try:
        for name in (*(f"{array}.npy" for array in ARRAYS), REPORT):
            _link_or_copy(rendered.directory / name, new / name)
        if directory.exists():
            directory.rename(new / "replaced")
            shutil.rmtree(new / "replaced")
        new.rename(directory)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        # Another file system, or one without links. What else is wrong, copying says.
        shutil.copyfile(source, target)


def write_report(
    directory: Path, report: RenderReport, problems: list[tuple[int, str, str]]
) -> None:
    """Writes the report of a directory of arrays; problems keep the row, not its location."""
    values = {**asdict(report), "problems": problems}
    (directory / REPORT).write_text(json.dumps(values), encoding="utf-8")


def new_directory(target: Path) -> Path:
    """An empty folder beside `target`, to be renamed to it when it is complete."""
    directory = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    directory.mkdir(parents=True)
    return directory


def put_in_place(directory: Path, target: Path) -> None:
    """Renames a complete folder; where another process was first, its folder stays."""
    try:
        directory.rename(target)
    except OSError:
        if not (target / REPORT).is_file():
            raise
        shutil.rmtree(directory)
