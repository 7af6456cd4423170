"""Files that survive a kill: whole JSON, whole lines, no NaN, no lone surrogate."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tunebook.runs import files


def test_non_finite_floats_are_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.replace_json(path, {"a": math.nan, "b": [math.inf, -math.inf], "c": None, "d": 1.5})
    strict = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert strict == {"a": "NaN", "b": ["Infinity", "-Infinity"], "c": None, "d": 1.5}
    restored = files.as_float(strict["a"])
    assert restored is not None and math.isnan(restored)
    assert files.as_float(strict["b"][1]) == -math.inf
    assert files.as_float(None) is None


def test_numpy_numbers_are_numbers_and_tensors_are_refused() -> None:
    assert files.to_json({"a": np.float32(0.5), "b": np.int64(3)}) == '{"a": 0.5, "b": 3}'
    with pytest.raises(TypeError, match="ndarray"):
        files.to_jsonable(np.zeros(2))


@pytest.mark.parametrize(
    ("text", "written"),
    [("a\ud800b", "a\ufffdb"), ("\ud83d\ude00", "\U0001f600"), ("\udc00", "\ufffd"), ("é", "é")],
)
def test_lone_surrogates_become_the_replacement_character(
    tmp_path: Path, text: str, written: str
) -> None:
    files.append_line(tmp_path / "a.jsonl", {text: text}, sync=True)
    assert files.read_lines(tmp_path / "a.jsonl") == [{written: written}]


def test_line_separators_inside_text_do_not_split_a_line(tmp_path: Path) -> None:
    value = {"text": "a\u2028b\x85c\nd\re"}
    files.append_line(tmp_path / "a.jsonl", value, sync=False)
    files.append_line(tmp_path / "a.jsonl", {"n": 2}, sync=False)
    assert files.read_lines(tmp_path / "a.jsonl") == [value, {"n": 2}]


@pytest.mark.parametrize("torn", [b'{"n": 2', b'{"n": 2}', b"\x00\x00", b"x" * 10_000])
def test_a_torn_last_line_is_ignored_and_removed_by_the_next_append(
    tmp_path: Path, torn: bytes
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + torn)
    assert files.read_lines(path) == [{"n": 1}]
    files.append_line(path, {"n": 3}, sync=True)
    assert path.read_bytes() == b'{"n": 1}\n{"n": 3}\n'


def test_a_file_that_is_one_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n":')
    assert files.read_lines(path) == []
    files.append_line(path, {"n": 1}, sync=True)
    assert files.read_lines(path) == [{"n": 1}]


@pytest.mark.parametrize("damage", [b"not json\n", b"[1]\n", b"\n"])
def test_damage_inside_a_file_is_located(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + damage + b'{"n": 3}\n')
    with pytest.raises(files.RunError, match=r"a\.jsonl:2: the line is damaged"):
        files.read_lines(path)


def test_a_full_disk_keeps_the_old_file_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    files.replace_json(path, {"n": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(files.StorageError, match=r"run\.json: cannot be written: No space left.*"):
        files.replace_json(path, {"n": 2})
    assert json.loads(path.read_text()) == {"n": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]


def test_a_disk_that_fills_within_a_line_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    files.append_line(path, {"n": 1}, sync=True)
    pwrite = os.pwrite
    calls: list[int] = []

    def fills(descriptor: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            return pwrite(descriptor, data[:4], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fills)
    with pytest.raises(files.StorageError, match=r"a\.jsonl"):
        files.append_line(path, {"n": 2}, sync=True)
    assert path.read_bytes() == b'{"n": 1}\n'
    assert len(calls) == 2


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(files.StorageError, match=r"file/a\.json: cannot be written"):
        files.replace_json(file / "a.json", {})


WRITER = """
import sys
from pathlib import Path
from tunebook.runs import files
path = Path(sys.argv[1])
start = len(files.read_lines(path))
for number in range(start, start + 10**6):
    files.append_line(path, {"n": number, "text": "x" * 3000}, sync=False)
    files.replace_json(path.with_name("state.json"), {"n": number})
"""


def test_kill_9_in_the_middle_of_appends_leaves_no_gap_and_no_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for round_number in range(4):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        goal = len(files.read_lines(path)) + 20 + 7 * round_number
        deadline = time.monotonic() + 20
        while len(files.read_lines(path)) < goal:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.003)
        process.send_signal(signal.SIGKILL)
        process.wait()
        numbers = [line["n"] for line in files.read_lines(path)]
        assert numbers == list(range(len(numbers)))
        state = files.read_json(tmp_path / "state.json")["n"]
        assert len(numbers) - 2 <= state <= len(numbers) - 1


FILLER = """
import resource, sys
from pathlib import Path
from tunebook.runs import files
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
path = Path(sys.argv[1])
try:
    for number in range(1000):
        files.append_line(path, {"n": number, "text": "x" * 300}, sync=True)
except files.StorageError as error:
    print(number, error)
try:
    files.replace_json(path.with_name("state.json"), {"text": "x" * 6000})
except files.StorageError as error:
    print(error)
"""


def test_a_file_that_the_system_lets_grow_no_further_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    files.replace_json(tmp_path / "state.json", {"n": 1})
    done = subprocess.run(
        [sys.executable, "-c", FILLER, str(path)], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    number, message = first.split(" ", 1)
    assert message.startswith(f"{path}: cannot be written: File too large")
    assert [line["n"] for line in files.read_lines(path)] == list(range(int(number)))
    assert path.read_bytes().endswith(b"\n")
    assert "state.json" in second
    assert files.read_json(tmp_path / "state.json") == {"n": 1}
    assert {one.name for one in tmp_path.iterdir()} == {"a.jsonl", "state.json"}
