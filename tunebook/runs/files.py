"""Files that survive a kill at any moment: JSON replaced whole, JSON lines appended whole.

Every string written is redacted, and lone surrogates become U+FFFD. JSON has no NaN, so non-finite
floats are written as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`; null means unknown.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from tunebook.errors import ConfigError, RunError
from tunebook.runs.redaction import redact, redact_values

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class StorageError(RunError):
    """The disk did not take what a run had to write; what was there before is intact."""

    code = "storage"
    category = "system"
    exit_code = 1


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an operating-system error while `path` is written into one that names it."""
    try:
        yield
    except OSError as error:
        free = _free_bytes(path)
        room = "" if free is None else f" ({free:,} bytes free there)"
        raise StorageError(
            f"{path}: cannot be written: {error.strerror or error}{room}. Free some space or make "
            "the folder writable, then resume the run; nothing already recorded is lost."
        ) from error


def without_surrogates(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def to_jsonable(value: Any) -> Any:
    """The value in the types JSON has; non-finite floats as strings.

    Raises:
        TypeError: a value that has no place in a record, for example a tensor.
    """
    if isinstance(value, Enum):
        return to_jsonable(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return _finite_or_text(float(value))
    if isinstance(value, PurePath):
        return without_surrogates(str(value))
    if is_dataclass(value) and not isinstance(value, type):
        return to_jsonable(asdict(value))
    if isinstance(value, Mapping):
        return {_key(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [to_jsonable(item) for item in value]
    raise TypeError(f"a {type(value).__name__} cannot be written to a run's files: {value!r}")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """The value as redacted JSON text."""
    plain = redact_values(to_jsonable(value), os.environ)
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent)


def as_float(value: Any) -> float | None:
    """A number as it was before it was written: `"NaN"` becomes NaN; None stays None."""
    if isinstance(value, str):
        return NON_FINITE[value]
    return None if value is None else float(value)


def replace_text(path: Path, text: str) -> None:
    """Writes a whole file so that a reader sees the old or the new one, never a part.

    Raises:
        StorageError: it could not be written; the old file is intact.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def replace_json(path: Path, value: Any) -> None:
    """Writes a value as a whole JSON file, as `replace_text` does."""
    replace_text(path, to_json(value, indent=2) + "\n")


def replace_lines(path: Path, values: Sequence[Any]) -> None:
    """Writes values as a whole JSON-lines file, as `replace_text` does."""
    replace_text(path, "".join(to_json(value) + "\n" for value in values))


def append_line(path: Path, value: Any, *, sync: bool) -> None:
    """Appends a value as one whole line, after removing a line that a killed writer left torn.

    Args:
        sync: wait until the line is on the disk.

    Raises:
        StorageError: it could not be appended; the file holds whole lines only.
    """
    line = (to_json(value) + "\n").encode("utf-8")
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            end = _end_of_whole_lines(descriptor)
            os.ftruncate(descriptor, end)
            try:
                _write_at(descriptor, line, end)
            except OSError:
                os.ftruncate(descriptor, end)
                raise
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Removes what writers that were killed have left half written in a folder.

    Call it where nobody else writes there.
    """
    for path in folder.glob(".*.tmp*"):
        with writing(path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def sync_file(path: Path) -> None:
    """Waits until what was appended to a file is on the disk; no file, nothing to wait for."""
    with writing(path):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_text(path: Path, text: str) -> None:
    """Appends redacted text to a log for people."""
    with writing(path), path.open("ab") as file:
        file.write(redact(without_surrogates(text), os.environ).encode("utf-8"))


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        RunError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise RunError(f"{path}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read as JSON: {error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a torn last line is ignored, no file is an empty one.

    Raises:
        RunError: a whole line is not a JSON object, which only damage from outside can cause.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error
    values: list[dict[str, Any]] = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise RunError(f"{path}:{number}: the line is damaged: {error}") from error
        if not isinstance(value, dict):
            raise RunError(f"{path}:{number}: the line is damaged: not a JSON object")
        values.append(value)
    return values


def _finite_or_text(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _key(key: Any) -> str:
    return without_surrogates(str(key.value if isinstance(key, Enum) else key))


def _end_of_whole_lines(descriptor: int) -> int:
    """Offset behind the last newline, read backwards."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 4096)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)


def _free_bytes(path: Path) -> int | None:
    try:
        stats = os.statvfs(path.parent)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize


def check_writable(folder: Path, named: str) -> None:
    """Makes a folder where there is none, and returns if a file can be written in it.

    Args:
        folder: to write in.
        named: what a person asked for, for the message.

    Raises:
        ConfigError: no file can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{named}: cannot be written there: {error.strerror}") from error
