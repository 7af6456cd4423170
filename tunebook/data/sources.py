"""Opens what a source names: files, folders, globs, packaged files, Hub datasets, functions."""

from __future__ import annotations

import glob
import importlib
import math
import os
from collections.abc import Iterable, Iterator, Sized
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from tunebook.config import DataConfig, SourceConfig
from tunebook.data.readers import SUFFIXES, RawRow, is_data_file, read_file
from tunebook.errors import ConfigError, DataError, EmptyDataError
from tunebook.models import packaged_path

WAYS = ("path", "hub", "function")
HUB_KEYS = ("subset", "split", "revision")
SAVED_WHOLE, SAVED_SPLITS = "state.json", "dataset_dict.json"
SAVED_MARKS = (SAVED_WHOLE, SAVED_SPLITS)
SOURCE_KEYS = tuple(setting.name for setting in fields(SourceConfig))


def sources_of(data: DataConfig) -> list[tuple[str, SourceConfig]]:
    """Every source with the config key it stands under, checked.

    Raises:
        ConfigError: not exactly one way in, a key that this way in does not read, or a bad number.
    """
    found: list[tuple[str, SourceConfig]] = [("data", data)]
    if data.sources:
        taken = settings_of(data)
        if taken:
            raise ConfigError(
                f"data.sources and data.{taken[0]} are both set. Put {taken[0]} into each entry of "
                f"data.sources, or drop data.sources."
            )
        found = [(f"data.sources[{i}]", source) for i, source in enumerate(data.sources)]
    for key, source in found:
        check_source(key, source)
    return found


def check_source(key: str, source: SourceConfig) -> None:
    """Refuses a source that names no rows, or names them twice, or has a setting nobody reads.

    Raises:
        ConfigError: in those cases, and for a number out of range.
    """
    ways = [way for way in WAYS if getattr(source, way) is not None]
    if len(ways) != 1:
        others = " or data.sources" if key == "data" else ""
        problem = f"{' and '.join(f'{key}.{way}' for way in ways)} are set" if ways else "none is"
        raise ConfigError(
            f"{key}: exactly one of {key}.path, {key}.hub and {key}.function{others} names the "
            f"rows, but {problem}. Set one and leave the others null."
        )
    for name in HUB_KEYS:
        if getattr(source, name) is not None and source.hub is None:
            raise ConfigError(f"{key}.{name} is only read with {key}.hub; leave it null")
    if source.function_args and source.function is None:
        raise ConfigError(f"{key}.function_args is only read with {key}.function; leave it empty")
    if source.limit is not None and source.limit < 1:
        raise ConfigError(f"{key}.limit={source.limit}: must be at least 1 row, or null for all")
    if not (math.isfinite(source.weight) and source.weight > 0):
        raise ConfigError(f"{key}.weight={source.weight}: must be a number above 0")


def settings_of(source: SourceConfig) -> list[str]:
    """The settings of one source that are not at rest."""
    resting = SourceConfig()
    return [key for key in SOURCE_KEYS if getattr(source, key) != getattr(resting, key)]


def source_name(source: SourceConfig) -> str:
    """The source as a person configured it."""
    return source.path or source.hub or source.function or ""


def source_place(source: SourceConfig) -> str:
    """Where the source is: an absolute path where it is a path, else its name."""
    if source.path is None or source.path.startswith("pkg://"):
        return source_name(source)
    return _absolute(source.path)


def source_identity(source: SourceConfig) -> dict[str, Any]:
    """What makes it this dataset and no other: where it is, not what it holds now."""
    if source.path is not None:
        return {"path": source_place(source)}
    if source.hub is not None:
        local = Path(source.hub).expanduser().is_dir()
        hub = _absolute(source.hub) if local else source.hub
        return {"hub": hub, "subset": source.subset, "split": source.split or "train"}
    return {"function": source.function, "function_args": dict(source.function_args)}


def read_source(
    source: SourceConfig, *, key: str, unsized_limit: int | None = None
) -> Iterator[RawRow]:
    """The rows of a source, `source.limit` at most.

    Args:
        source: a source that `sources_of` gave.
        key: where it stands in the config, for messages.
        unsized_limit: rows to take from a function whose result has no length.

    Raises:
        ConfigError: nothing there by that name, or a result without a length and no limit.
        EmptyDataError: a folder or glob without a data file.
        DataError: a file or Hub dataset that cannot be read.
    """
    limit = source.limit
    if source.path is not None:
        rows = (row for path in data_files(source.path, key=key) for row in read_file(path))
    elif source.hub is not None:
        rows = _read_hub(source, key=key)
    else:
        items = _call_function(source, key=key)
        if not isinstance(items, Sized) and limit is None:
            limit = unsized_limit
            if limit is None:
                raise ConfigError(
                    f"{key}.function={source.function} returns rows without a length, so epochs "
                    "cannot be planned. Set plan.max_steps (and leave plan.epochs null), or take "
                    f"a fixed number of rows with {key}.limit."
                )
        rows = _read_items(source, items, key=key)
    return rows if limit is None else islice(rows, limit)


def data_files(path: str, *, key: str) -> list[Path]:
    """The data files that a path, folder, glob or `pkg://` address names, sorted.

    A folder stands for the files directly in it, and hidden files are left out of folders; a glob
    with `**` descends.

    Raises:
        ConfigError: nothing there, a single file of an unknown kind, or a saved dataset.
        EmptyDataError: a folder or glob without a data file.
    """
    found = packaged_path(path) if path.startswith("pkg://") else Path(_absolute(path))
    if any((found / name).exists() for name in SAVED_MARKS):
        raise ConfigError(
            f"{key}.path={path}: datasets' save_to_disk wrote this folder; name it with "
            f"{key}.hub instead"
        )
    if found.is_dir():
        files = sorted(item for item in found.iterdir() if item.is_file() and is_data_file(item))
        if not files:
            raise EmptyDataError(
                f"0 rows in {found}: the folder holds no data file ({', '.join(SUFFIXES)} are "
                "read; use a glob with ** to descend)"
            )
        return files
    if found.exists():
        if not is_data_file(found):
            raise ConfigError(
                f"{key}.path={path}: unknown kind of file. Known: {', '.join(SUFFIXES)}"
            )
        return [found]
    if glob.has_magic(path):
        matches = [Path(match) for match in sorted(glob.glob(str(found), recursive=True))]
        files = [match for match in matches if match.is_file() and is_data_file(match)]
        if not files:
            raise EmptyDataError(
                f"0 rows in {found}: no data file matches ({', '.join(SUFFIXES)} are read)"
            )
        return files
    raise ConfigError(
        f"{key}.path={path}: no such file or folder ({found}). "
        "Relative paths start from the directory you are in."
    )


def _absolute(path: str) -> str:
    return os.path.abspath(Path(path).expanduser())


def _read_hub(source: SourceConfig, *, key: str) -> Iterator[RawRow]:
    """The rows of a Hub dataset, or of a local folder in Hub layout or from `save_to_disk`."""
    import datasets

    assert source.hub is not None
    folder = Path(source.hub).expanduser()
    split = source.split or "train"
    try:
        if (folder / SAVED_SPLITS).is_file():
            dataset = datasets.load_from_disk(folder)[split]
        elif (folder / SAVED_WHOLE).is_file():
            dataset = datasets.load_from_disk(folder)
        else:
            dataset = datasets.load_dataset(
                str(folder) if folder.is_dir() else source.hub,
                source.subset,
                split=split,
                revision=source.revision,
            )
    except Exception as error:  # the client raises its own, requests', pyarrow's and OS errors
        reason = " ".join(str(error).split())[:400]
        raise DataError(
            f"{key}.hub={source.hub} (subset {source.subset}, split {split}, revision "
            f"{source.revision}) cannot be loaded: {type(error).__name__}: {reason}. Check the "
            "names, that this machine reaches the Hub, and for a private dataset that HF_TOKEN is "
            f"set; or download it and name the files with {key}.path."
        ) from error
    for number, value in enumerate(dataset, start=1):
        yield RawRow(source.hub, number, value, from_arrow=True)


def _call_function(source: SourceConfig, *, key: str) -> Iterable[Any]:
    assert source.function is not None
    function = _import_dotted(source.function, key=key)
    try:
        items = function(**source.function_args)
    except Exception as error:
        raise _function_failed(source, error, key=key) from error
    if isinstance(items, str | bytes | dict) or not isinstance(items, Iterable):
        raise ConfigError(
            f"{key}.function={source.function} returned a {type(items).__name__}; "
            "it must return rows: a list or an iterator of dicts"
        )
    return items


def _import_dotted(path: str, *, key: str) -> Any:
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{key}.function={path}: write it as package.module.function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key}.function={path}: {module_name} cannot be imported ({error}). Install it, or "
            "put the folder that holds it on PYTHONPATH."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}.function={path}: {module_name} has no function {name!r}")
    return function


def _read_items(source: SourceConfig, items: Iterable[Any], *, key: str) -> Iterator[RawRow]:
    assert source.function is not None
    iterator = iter(items)
    number = 0
    while True:
        number += 1
        try:
            value = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise _function_failed(source, error, key=key, at=f" at row {number}") from error
        yield RawRow(source.function, number, value)


def _function_failed(
    source: SourceConfig, error: Exception, *, key: str, at: str = ""
) -> DataError:
    return DataError(
        f"{key}.function={source.function} raised {type(error).__name__}{at}: {error}. "
        f"It was called with {key}.function_args={source.function_args}."
    )
