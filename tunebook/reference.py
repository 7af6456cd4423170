"""Log-probs of the reference policy, scored once and kept with the run.

Legend: M trained tokens of a datum, T its scored tokens.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tunebook.display import counting
from tunebook.errors import NonFiniteError
from tunebook.evaluate import batches
from tunebook.runs.files import read_json, replace_json, sync_file, sync_folder, writing
from tunebook.split import Side
from tunebook.types import Datum, FloatArray

if TYPE_CHECKING:
    from tunebook.backends.base import Session
    from tunebook.data.rows import Row
    from tunebook.render import RenderedRows

MARK = "reference.json"
ROWS_PER_CALL = 64
"""Data per `forward` call; bounds memory, changes nothing else."""


@dataclass(frozen=True)
class ReferenceLogprobs:
    """What the reference policy gives the data of one side, read from disk when asked for."""

    values: npt.NDArray[np.float32]
    """`[all M]`, mapped from the file: the trained tokens of all data, one datum after another."""
    starts: npt.NDArray[np.int64]
    """`[num_data + 1]`, where those of each datum begin."""

    def column(self, datum: int, mask: FloatArray) -> FloatArray:
        """The column of a datum, `[T]`: its log-probs where the mask is not 0, else 0."""
        column = np.zeros(len(mask), dtype=np.float32)
        column[mask != 0] = self.values[self.starts[datum] : self.starts[datum + 1]]
        return column


def read_reference(
    directory: Path, sides: Mapping[Side, RenderedRows], *, fingerprint: str
) -> dict[Side, ReferenceLogprobs] | None:
    """What `write_reference` put there; None where nothing is, nothing whole, or that of other data
    or weights.

    Args:
        directory: of the reference.
        sides: the data that were scored.
        fingerprint: as it was given to `write_reference`.
    """
    mark = directory / MARK
    if not mark.is_file() or read_json(mark) != {"fingerprint": fingerprint}:
        return None
    try:
        found = {side: _mapped(directory, side, data) for side, data in sides.items()}
    except (OSError, ValueError, EOFError):
        return None  # A crash of the machine can leave files of any length.
    return None if any(len(each.values) != each.starts[-1] for each in found.values()) else found


def write_reference(
    directory: Path,
    sides: Mapping[Side, RenderedRows],
    rows: Mapping[Side, Sequence[Row]],
    session: Session,
    *,
    fingerprint: str,
) -> dict[Side, ReferenceLogprobs]:
    """Scores all data with the session's weights as they are, and keeps the log-probs.

    The folder appears whole or not at all, so a run that was killed meanwhile scores again.

    Args:
        directory: to be made.
        sides: the data to score.
        rows: that they were made from, for messages.
        session: at the weights that are the reference; forward only, without dropout.
        fingerprint: of data and weights.

    Raises:
        NonFiniteError: a log-prob that is NaN or infinite; names the row.
        StorageError: the disk did not take it.
    """
    for left in directory.parent.glob(f".{directory.name}.*.tmp"):
        shutil.rmtree(left)  # of an attempt that was killed
    new = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}.tmp")
    with writing(new):
        new.mkdir(parents=True)
    try:
        total, done = sum(len(data) for data in sides.values()), 0
        with counting("scoring with the reference policy") as progress:
            for side, data in sides.items():
                path = new / f"{side.value}.npy"
                with writing(path):
                    _write_header(path, int(data.supervised.sum()))
                for scored in _scored(session, data, rows[side]):
                    with writing(path), path.open("ab") as file:
                        file.write(np.concatenate(scored).tobytes())
                    done += len(scored)
                    progress(done, total)
                sync_file(path)
        replace_json(new / MARK, {"fingerprint": fingerprint})
        with writing(directory):
            shutil.rmtree(directory, ignore_errors=True)  # of other data or weights
            os.replace(new, directory)
            sync_folder(directory.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return {side: _mapped(directory, side, data) for side, data in sides.items()}


def _write_header(path: Path, length: int) -> None:
    header = {"descr": np.dtype(np.float32).str, "fortran_order": False, "shape": (length,)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)


def _scored(
    session: Session, data: RenderedRows, rows: Sequence[Row]
) -> Iterator[list[FloatArray]]:
    """Log-probs `[M]` of the trained tokens of each datum, in the order of the data."""
    for batch in batches(data, ROWS_PER_CALL):
        sent = [Datum(each.tokens, {"token_weights": each.mask}) for each in batch]
        found: list[FloatArray] = []
        for each, logprobs in zip(batch, session.forward(sent).result(), strict=True):
            trained = logprobs.float().cpu().numpy()[each.mask != 0]
            if not np.isfinite(trained).all():
                row = rows[each.row]
                raise NonFiniteError(
                    f"{row.file}:{row.line}: before any training, the model gives a token of this "
                    f"row the log-prob {trained[~np.isfinite(trained)][0]}. Look at the row, and "
                    "try backend.dtype=float32"
                )
            found.append(trained)
        yield found


def _mapped(directory: Path, side: Side, data: RenderedRows) -> ReferenceLogprobs:
    starts = np.concatenate([[0], np.cumsum(data.supervised, dtype=np.int64)])
    return ReferenceLogprobs(np.load(directory / f"{side.value}.npy", mmap_mode="r"), starts)
