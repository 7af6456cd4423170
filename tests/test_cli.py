"""The `tunebook` command, as a person calls it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tunebook.runs import Evaluation, RunDir, StopReason

HEAVY = ("torch", "transformers", "datasets", "hydra", "omegaconf", "wandb", "matplotlib", "numpy")

FAKE_RECIPE = '''"""Fake tuning, for tests.

More."""

from tunebook.errors import ConfigError


def main(argv):
    print("argv", argv)
    if "fail" in argv:
        raise ConfigError("fail: a key nobody reads")
    if "bug" in argv:
        raise ZeroDivisionError("a bug")
    if "stop" in argv:
        raise KeyboardInterrupt
    return 3 if "three" in argv else None


def inspect_main(overrides, *, html, limit):
    print("inspect", overrides, html, limit)
    return 1
'''


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A folder whose `recipes` package is found before the real one."""
    package = tmp_path / "path" / "recipes"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sft.py").write_text(FAKE_RECIPE)
    (package / "other.py").write_text(FAKE_RECIPE)
    return package.parent


def call(
    *arguments: str, cwd: Path | None = None, first: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    path = [*([str(first)] if first else []), *(str(Path(one).absolute()) for one in sys.path)]
    plain = {k: v for k, v in os.environ.items() if not k.startswith("TUNEBOOK")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "tunebook.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env={**plain, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "100", **environ},
    )


def test_the_version() -> None:
    from tunebook import __version__

    assert call("--version").stdout == f"tunebook {__version__}\n"


def test_help_lists_the_recipes_without_importing_them(recipes: Path) -> None:
    (recipes / "recipes" / "broken.py").write_text(
        '"""Broken, but listed."""\nraise SystemExit(9)\n'
    )
    done = call("--help", first=recipes)
    assert done.returncode == 0
    for part in (
        "sft",
        "other",
        "Fake tuning, for tests.",
        "Broken, but listed.",
        "runs",
        "inspect",
    ):
        assert part in done.stdout


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    script = f"""
import sys
from tunebook.cli import main
try:
    main(["--help"])
except SystemExit:
    print([name for name in {HEAVY!r} if name in sys.modules])
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimizer.learning_rate=1e-4", "data.path=a b.jsonl"],
        ["--cfg", "job"],
        ["--multirun", "seed=1,2"],
        ["-m", "lora.target_modules=[q_proj, v_proj]"],
        ["--help"],
        ["+experiment=x", "~tracker", "name='a=b'", "--config-dir", "d"],
        ["seed=1", "--info", "all", "-cjob", "--debug", "--version"],
        [],
    ],
)
def test_a_recipe_gets_its_arguments_untouched(recipes: Path, arguments: list[str]) -> None:
    done = call("sft", *arguments, first=recipes)
    assert (done.returncode, done.stdout) == (0, f"argv {arguments!r}\n"), done.stderr


@pytest.mark.parametrize(
    ("argument", "code", "message"),
    [
        ("three", 3, ""),
        ("fail", 2, "error: fail: a key nobody reads\n"),
        ("stop", 130, "interrupted\n"),
    ],
)
def test_a_recipe_ends_with_its_code(recipes: Path, argument: str, code: int, message: str) -> None:
    done = call("other", argument, first=recipes)
    assert (done.returncode, done.stderr) == (code, message)


def test_a_bug_shows_its_traceback_and_debug_shows_any(recipes: Path) -> None:
    bug = call("sft", "bug", first=recipes)
    assert bug.returncode == 1 and "Traceback" in bug.stderr and "a bug" in bug.stderr
    for done in (
        call("--debug", "sft", "fail", first=recipes),
        call("sft", "fail", first=recipes, TUNEBOOK_DEBUG="1"),
    ):
        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert done.stderr.endswith("error: fail: a key nobody reads\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "--limit", "-1"],
        ["rewards", "test", "--file", "x", "--hack-rows", "-1"],
        ["runs", "wait", "1", "--timeout", "-1"],
        ["runs", "cancel", "1", "--timeout", "-1"],
        ["runs", "follow", "1", "--after", "-1"],
        ["serve", "--model", "tiny", "--price-per-hour", "-1"],
        ["serve", "--model", "tiny", "--micro-batch-tokens", "0"],
    ],
)
def test_a_number_below_its_least_is_refused(arguments: list[str]) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert f"Invalid value for '{arguments[-2]}'" in done.stderr


def test_inspect_is_the_recipes_own(recipes: Path, tmp_path: Path) -> None:
    done = call("inspect", "seed=1", "--limit", "3", "--html", "x.html", "data=y", first=recipes)
    assert (done.returncode, done.stdout) == (1, "inspect ['seed=1', 'data=y'] x.html 3\n")
    done = call("inspect", "--recipe", "nope", first=recipes)
    assert done.returncode == 2
    assert "no recipe 'nope'; known recipes: other, sft" in done.stderr.replace("\n", " ")


def test_the_help_of_a_recipe_in_a_pipe_is_a_line_for_each_key() -> None:
    lines = call("run", "sft", "--help").stdout.splitlines()
    text = (
        "plan.hash  (null)  Refuse to run unless the plan has this hash (as printed by a dry run)."
    )
    assert text in lines


def test_the_help_of_inspect_says_what_it_takes_and_returns() -> None:
    text = " ".join(call("inspect", "--help").stdout.split())
    for part in ("[KEY=VALUE]...", "train side of the split", "Exit code 1 = errors found"):
        assert part in text, part


def test_an_unknown_command_is_one_clear_line() -> None:
    done = call("sfft")
    assert done.returncode == 2
    assert "No such command 'sfft'" in done.stderr and "Traceback" not in done.stderr


def test_losses_lists_what_each_reads_takes_and_fits(recipes: Path) -> None:
    """The recipes are asked for their columns: here one of SFT, and one that trains on rewards."""
    columns = {
        "sft": ("token_weights",),
        "other": ("token_weights", "sampling_logprobs", "advantages", "reference_logprobs"),
    }
    for name, names in columns.items():
        (recipes / "recipes" / f"{name}.py").write_text(f"{FAKE_RECIPE}\nCOLUMNS = {names!r}\n")
    lines = call("losses", first=recipes).stdout.splitlines()
    cells = [re.split(r"\s{2,}", line) for line in lines]
    assert cells[0] == ["loss", "recipe", "parameters", "columns", "what it is"]
    rows = {row[0]: row for row in cells[1:]}
    assert rows["ppo"][1:] == [
        "other",
        "clip_low=0.8 clip_high=1.2",
        "token_weights, sampling_logprobs, advantages",
        "The clipped surrogate, `-min(r A, clamp(r, clip_low, clip_high) A)`.",
    ]
    assert rows["cross_entropy"][1:3] == ["sft", "token_weights"]
    assert rows["dpo"][1] == "beta=0.1"  # no recipe here gives pairs
    listed = json.loads(call("losses", "--json", first=recipes).stdout)
    assert {one["name"]: one["recipes"] for one in listed}["gspo"] == ["other"]
    narrow = call("losses", first=recipes, COLUMNS="80", FORCE_COLOR="1").stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", narrow).splitlines()
    assert max(map(len, plain)) <= 80
    assert any(line.split() == ["ppo", "other", "clip_low=0.8", "clip_high=1.2"] for line in plain)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for name, rate in (("first", 1e-4), ("second", 2e-4)):
        run = RunDir.create(root, "sft", name)
        run.write_config({"optimizer": {"learning_rate": rate}, "plan": {"epochs": 1}})
        with run.attempt(planned_steps=4):
            for step in range(1, 5):
                run.log_metrics(step, {"train/loss": 1.0 / step, "train/tokens": 10})
            run.log_metrics(4, {"eval/loss": float("nan") if name == "second" else 0.25})
            run.set_evaluation(
                Evaluation("eval/loss", "down", 0.25, 4, float("nan"), 4, 1, None, False)
            )
            run.finish(StopReason.COMPLETED, steps=4)
    RunDir.create(root, "dpo", "third")
    return root


def test_runs_list(root: Path) -> None:
    lines = call("runs", "list", cwd=root.parent).stdout.splitlines()
    assert lines[0].split() == ["number", "id", "run", "state", "steps", "best", "model"]
    assert [line.split()[0] for line in lines[1:]] == ["#1", "#2", "#3"]
    assert "first" in lines[1] and "succeeded" in lines[1] and "4/4" in lines[1]
    assert "pending" in lines[3]
    listed = json.loads(call("runs", "list", "--json", "--root", str(root)).stdout)
    assert [one["number"] for one in listed] == [1, 2, 3]
    assert listed[0]["outcome"]["stop_reason"] == "completed"
    assert listed[0]["evaluation"]["last"] == "NaN"
    assert Path(listed[0]["path"]).is_dir()


def test_a_pipe_gets_whole_lines_at_any_width(root: Path) -> None:
    for arguments in (["list"], ["compare", "1", "2"]):
        narrow, wide = (
            call("runs", *arguments, cwd=root.parent, COLUMNS=columns).stdout
            for columns in ("30", "1000")
        )
        assert narrow == wide != ""


def test_a_narrow_terminal_gets_fewer_columns_and_whole_names(root: Path) -> None:
    names = [f"sft/{path.name}" for path in root.glob("sft/*")]
    seen = []
    for columns in ("200", "100", "80", "20"):
        text = call("runs", "list", cwd=root.parent, COLUMNS=columns, FORCE_COLOR="1").stdout
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
        assert all(any(name in line for line in lines) for name in names)
        assert columns == "20" or max(map(len, lines)) <= int(columns)
        seen.append(next(line.split() for line in lines if "number" in line))
    assert seen[0] == ["number", "id", "run", "state", "steps", "best", "model"]
    assert {"number", "run", "state"} <= set(seen[2])
    assert seen[3] == ["number", "run"]


def test_a_narrow_terminal_compares_line_by_line(tmp_path: Path) -> None:
    paths = [f"/data/{'long-name-' * 12}{number}.jsonl" for number in (1, 2)]
    for path in paths:
        RunDir.create(tmp_path, "sft", None).write_config({"data": {"path": path}})
    text = call(
        "runs", "compare", "1", "2", "--root", str(tmp_path), COLUMNS="80", FORCE_COLOR="1"
    ).stdout
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert lines[:4] == ["config", "data.path", f"  #1  {paths[0]}", f"  #2  {paths[1]}"]


def test_runs_show(root: Path) -> None:
    done = call("runs", "show", "#1", "--root", str(root))
    assert done.returncode == 0
    assert "succeeded: all epochs are done (4 of 4 planned steps)" in done.stdout
    assert "train loss" in done.stdout and "\x1b" not in done.stdout
    shown = json.loads(call("runs", "show", "2", "--json", "--root", str(root)).stdout)
    assert (shown["number"], shown["shown_state"]) == (2, "succeeded")
    ascii_only = call("runs", "show", "1", "--root", str(root), PYTHONIOENCODING="ascii")
    assert ascii_only.returncode == 0 and ascii_only.stdout.isascii()


def test_runs_compare(root: Path) -> None:
    done = call("runs", "compare", "1", "2", "--root", str(root), "--json")
    found = json.loads(done.stdout)
    assert found["differences"] == {"optimizer.learning_rate": [1e-4, 2e-4]}
    assert found["results"]["tokens"] == [40, 40]
    text = call("runs", "compare", "1", "2", "--root", str(root)).stdout
    assert "optimizer.learning_rate" in text and "0.0002" in text and "best eval/loss" in text
    alone = call("runs", "compare", "1", "--root", str(root))
    assert alone.returncode == 2 and "two runs or more" in alone.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "9"], "neither a run directory"),
        (["list", "--root", "missing"], "no such folder"),
        (["data", "1"], "no complete snapshot"),
        (["compare", "1", "3"], "config.yaml: there is no such file"),
    ],
)
def test_what_is_not_there_is_one_paragraph(root: Path, arguments: list[str], message: str) -> None:
    done = call("runs", *arguments, cwd=root.parent)
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_runs_data_pages_through_the_snapshot(root: Path) -> None:
    from tunebook.config import DataConfig, Mask, OnBadRow, OnBlankAnswer, OnLongRow, RowFormat
    from tunebook.data.load import load_rows
    from tunebook.data.rows import Kind
    from tunebook.data.snapshot import write_snapshot

    source = root.parent / "rows.jsonl"
    texts = ["plain one", "with a NEEDLE", "plain three"]
    source.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": text},
                        {"role": "assistant", "content": f"answer to {text}"},
                    ]
                }
            )
            + "\n"
            for text in texts
        )
    )
    config = DataConfig(
        path=str(source),
        format=RowFormat.auto,
        mask=Mask.all_assistant,
        on_bad_row=OnBadRow.fail,
        on_long_row=OnLongRow.truncate,
        on_blank_answer=OnBlankAnswer.error,
    )
    rows = load_rows(config, kind=Kind.conversation).rows
    folder = next(root.glob("sft/*_first")) / "data"
    write_snapshot(folder, train=rows[:2], eval=rows[2:], manifest={})
    source.unlink()
    everything = call("runs", "data", "1", "--root", str(root)).stdout
    assert "user: plain one" in everything and "assistant: answer to with a NEEDLE" in everything
    assert "2 of 2 train rows, from offset 0." in everything
    page = json.loads(
        call("runs", "data", "1", "--root", str(root), "--search", "needle", "--json").stdout
    )
    assert [row["index"] for row in page["rows"]] == [1]
    assert page["total"] is None
    for search, limit, words in (
        ("plain", "25", "1 train row matches 'plain'."),
        ("answer", "1", "The first 1 train rows that match 'answer'.\nMore with --offset 1"),
        ("nothing", "25", "No train row matches 'nothing'."),
    ):
        found = call("runs", "data", "1", "--root", str(root), "--search", search, "--limit", limit)
        assert found.stdout.rstrip().endswith(words)
    first = call("runs", "data", "1", "--root", str(root), "--limit", "1").stdout
    assert "More with --offset 1" in first and "NEEDLE" not in first
    held_out = call("runs", "data", "1", "--root", str(root), "--split", "eval").stdout
    assert "plain three" in held_out and "1 of 1 eval rows" in held_out
    wrong = call("runs", "data", "1", "--root", str(root), "--split", "test")
    assert wrong.returncode == 2 and "split=test" in wrong.stderr
