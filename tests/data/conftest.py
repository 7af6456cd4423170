"""What the tests of loading share: a config with every setting that has no default."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.config import DataConfig, Mask, OnBadRow, OnBlankAnswer, OnLongRow, RowFormat

CASES = Path(__file__).parents[1] / "inputs" / "cases"


@pytest.fixture(scope="session")
def make_data() -> Callable[..., DataConfig]:
    def make(path: str | Path | None = None, **settings: Any) -> DataConfig:
        values = {
            "path": None if path is None else str(path),
            "format": RowFormat.auto,
            "mask": Mask.all_assistant,
            "on_bad_row": OnBadRow.fail,
            "on_long_row": OnLongRow.truncate,
            "on_blank_answer": OnBlankAnswer.error,
        }
        return DataConfig(**{**values, **settings})

    return make


@pytest.fixture(scope="session")
def cases() -> Path:
    return CASES


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("TUNEBOOK_HOME", str(folder))
    return folder
