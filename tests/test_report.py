"""What is printed about a plan and a run."""

import io
import math
import shlex
import struct
from pathlib import Path

import pytest
from rich.console import Console

from tunebook import curves, report
from tunebook.display import tunebook_command
from tunebook.runs import Evaluation, Preparation, RunDir, StopReason, files, shown_state
from tunebook.runs.starting import typed_override

PLAN = {
    "recipe": "sft",
    "name": "demo",
    "model": "some/model",
    "start_from": "runs/sft/first",
    "backend": "local",
    "loss": "cross_entropy",
    "data": ["one.jsonl", "two"],
    "max_seq_len": 1024,
    "rows_read": 1160,
    "rows_skipped": 2,
    "train": {
        "rows": 152,
        "kept": 144,
        "truncated": 3,
        "dropped": {"no token carries loss": 6, "longer than max_seq_len": 2},
        "tokens": 45678,
    },
    "eval": {"rows": 8, "kept": 8, "truncated": 0, "dropped": {}, "tokens": 900},
    "split": {"rule": "hash", "exact_duplicates_across": 0, "normalised_duplicates_across": 1},
    "supervised_tokens": 12345,
    "token_histogram": [
        {"low": 1, "high": 100, "count": 90},
        {"low": 101, "high": 200, "count": 54},
        {"low": 201, "high": 300, "count": 0},
    ],
    "batch_size": 8,
    "steps_per_epoch": 19,
    "planned_steps": 57,
    "epochs": 3.0,
    "unused_rows_per_epoch": 4,
    "checkpoint_steps": [20, 40, 57],
    "eval_steps": [20, 40, 57],
    "learning_rate": [1e-4, 2e-4, 1e-4, 0.0],
    "lora": {"rank": 16, "target_modules": ["q_proj", "v_proj"], "rslora": False},
    "trainable_parameters": 1000,
    "total_parameters": 50000,
    "estimate": {
        "seconds": 310,
        "train_tokens": 137034,
        "peak_memory_bytes": 2**31,
        "price": None,
        "basis": "one measured step",
    },
    "downgrades": ["early_stopping:disabled:no_eval_set"],
    "warnings": ["76 rows were lost"],
    "hash": "3fa9c1",
}


def test_a_plan_says_everything() -> None:
    text = report.plan_text(PLAN)
    for part in (
        "1,160 read, 2 skipped as unusable",
        "152 rows, 144 kept, 3 truncated",
        "6 dropped: no token carries loss",
        "2 dropped: longer than max_seq_len",
        "4 rows unused per epoch",
        "duplicates across splits: 0 exact, 1 but for case",
        "start from      runs/sft/first",
        "backend         local",
        "loss            cross_entropy",
        "data            one.jsonl, two",
        "45,678 in the train rows, 12,345 supervised, at most 1,024 a row",
        "57 planned, 19 an epoch, 8 rows each",
        "evaluate, save  after step 20, 40, 57",
        "first 0.0001 → peak 0.0002 → last 0",
        "rank 16, target_modules q_proj+v_proj, rslora false",
        "1,000 trainable of 50,000 (2.00%)",
        "5 min 10 s, 137,034 train tokens, 2.00 GiB peak memory (one measured step)",
        "early stopping: disabled (no eval set) [early_stopping:disabled:no_eval_set]",
        "76 rows were lost",
        "3fa9c1",
    ):
        assert part in text, part
    bars = [line.split() for line in text.splitlines() if "█" in line and "-" in line.split()[0]]
    assert bars == [["1-100", "█" * 30, "90"], ["101-200", "█" * 18, "54"]]


def test_a_plan_in_ascii_is_ascii() -> None:
    text = report.plan_text(PLAN, unicode=False, width=60)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize("plan", [{}, dict.fromkeys(PLAN), {**PLAN, "lora": None}])
def test_unknown_parts_of_a_plan_are_left_out(plan: dict) -> None:
    text = report.plan_text(plan)
    assert "None" not in text
    assert ("full weights" in text) == ("lora" in plan)


def test_each_missing_part_of_a_plan_is_tolerated() -> None:
    for key in PLAN:
        assert "None" not in report.plan_text({**PLAN, key: None}), key
    for key in ("train", "eval", "split", "estimate"):
        part = PLAN[key]
        assert isinstance(part, dict)
        report.plan_text({**PLAN, key: dict.fromkeys(part)})


def test_many_steps_are_shortened() -> None:
    text = report.plan_text({"checkpoint_steps": list(range(10, 210, 10))})
    assert "after step 10, 20, 30, ..., 190, 200 (20 times)" in text


def finished(
    tmp_path: Path, reason: StopReason = StopReason.COMPLETED, plan: dict | None = None
) -> RunDir:
    run = RunDir.create(tmp_path / "with space", "sft", "x")
    run.write_config({"plan": plan or {"epochs": 3, "max_steps": None}})
    with run.attempt(planned_steps=57, downgrades=["a_b:c:d_e"]):
        for step in range(1, 41):
            extra = {"eval/loss": 4.0 - step / 20} if step % 20 == 0 else {}
            values = {"train/loss": 5.0 - step / 10, "train/tokens": 500, "time/step_s": 0.5}
            run.log_metrics(step, {**values, **extra})
        run.set_evaluation(Evaluation("eval/loss", "down", 2.0, 40, 2.0, 40, 2, 40, False))
        (run.model_dir / "adapter_config.json").write_text("{}")
        run.set_model_available(True)
        run.finish(reason, steps=40)
    return run


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (StopReason.COMPLETED, "succeeded: all epochs are done (40 of 57 planned steps)"),
        (StopReason.MAX_STEPS, "succeeded: plan.max_steps is reached"),
        (StopReason.EARLY_STOPPING, "stopped early, the evaluation no longer improved"),
        (StopReason.CANCELLED, "was cancelled after 40 of 57 planned steps"),
        (StopReason.FAILED, "failed after 40 of 57 planned steps"),
    ],
)
def test_the_summary_says_why_it_stopped(tmp_path: Path, reason: StopReason, words: str) -> None:
    assert words in report.summary_text(finished(tmp_path, reason))


def test_the_summary_says_what_is_best_and_what_is_next(tmp_path: Path) -> None:
    run = finished(tmp_path)
    text = report.summary_text(run, width=400)
    for part in (
        "eval/loss 2.0000 at step 40 (first 3.0000 at step 20, -33.3%)",
        "the model is from step 40",
        "eval/loss 2.0000 at step 40, 2 evaluations",
        "4.9000 at first, 1.0000 at last",
        "1,000 tokens/s",
        "a b: c (d e) [a_b:c:d_e]",
        str(run.model_dir),
        f"{tunebook_command()} sft 'resume=\"{run.path}\"' plan.epochs=4",
        f"peft.AutoPeftModelForCausalLM.from_pretrained('{run.model_dir}')",
        f"{tunebook_command()} runs show '{run.path}'",
    ):
        assert part in text, part


def test_paths_and_commands_are_never_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(tmp_path)
    command = f"  {tunebook_command()} sft 'resume=\"{run.path}\"' plan.epochs=4"
    assert command in report.summary_text(run, width=40).splitlines()
    console = Console(width=40, file=io.StringIO())
    report.render_summary(console, run)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue().splitlines()
    assert command in printed
    assert [line for line in printed if line != line.rstrip()] == []
    monkeypatch.chdir(tmp_path)
    short = run.path.relative_to(tmp_path)
    assert f"  {tunebook_command()} sft 'resume=\"{short}\"' plan.epochs=4" in report.summary_text(
        run
    )


@pytest.mark.parametrize("folder", ["plain/x.y-z", "a b", "a=b", 'q"uote', "it's", "a,b", "{x}"])
def test_the_resume_command_reaches_hydra_as_the_path(folder: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (argument,) = shlex.split(typed_override("resume", folder))
    (override,) = OverridesParser.create().parse_overrides([argument])
    assert override.value() == folder


def test_the_next_length_follows_max_steps(tmp_path: Path) -> None:
    run = finished(tmp_path, StopReason.MAX_STEPS, {"epochs": None, "max_steps": 40})
    assert "plan.max_steps=80" in report.summary_text(run, width=400)


def test_a_failed_run_says_why_and_a_fresh_one_that_it_is_fresh(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    assert "has not started" in report.summary_text(run)
    with (
        pytest.raises(ValueError),
        run.attempt(planned_steps=3),
    ):
        raise ValueError("the reason")
    text = report.summary_text(run)
    assert "failed after 0 of 3 planned steps" in text
    assert "ValueError: the reason [internal]" in text
    assert "resume=" not in text


def test_a_run_that_is_only_prepared_says_how_to_start_it(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    assert "To start it" not in report.summary_text(run)
    run.set_preparation(Preparation.VERIFIED)
    lines = report.summary_text(run).splitlines()
    assert f"  {tunebook_command()} sft resume={run.path}" in lines
    assert lines[0].startswith("run         #1") and lines[1].startswith("folder      ")


def test_offline_wandb_files_are_named_with_the_command_that_sends_them(tmp_path: Path) -> None:
    run = finished(tmp_path)
    assert "W&B" not in report.summary_text(run)
    folders = [run.path / "wandb" / f"offline-run-2026010{day}_030405-x" for day in (1, 2)]
    for folder in folders:
        folder.mkdir(parents=True)
    lines = report.summary_text(run, width=40).splitlines()
    assert [line for line in lines if line.startswith("W&B files   ")] == [
        f"W&B files   {folder}" for folder in folders
    ]
    (sync,) = (line for line in lines if " sync " in line)
    assert sync.endswith(f"wandb sync '{folders[0]}' '{folders[1]}'")


def test_a_secret_name_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sentinel-value")
    assert "sentinel" not in report.plan_text({"recipe": "sft", "name": "x sentinel-value"})


@pytest.mark.parametrize(("steps", "drawn"), [(3, False), (4, True)])
def test_few_steps_draw_no_curve(tmp_path: Path, steps: int, drawn: bool) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    for step in range(1, steps + 1):
        run.log_metrics(step, {"train/loss": 1.0})
    console = Console(width=80, file=io.StringIO())
    report.render_summary(console, run)
    assert isinstance(console.file, io.StringIO)
    assert ("┤" in console.file.getvalue()) == drawn


def test_rendering_a_summary_draws_the_curve(tmp_path: Path) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    report.render_summary(console, finished(tmp_path))
    text = console.export_text()
    assert "train loss" in text and "● eval loss" in text and "step 1" in text


def test_samples_are_shown_as_they_are() -> None:
    before = [{"prompt": "[bold]x[/bold] \ud800", "completion": "a\x1b[31m\n" + "y" * 900}]
    after = [{"prompt": "ignored", "completion": "😀"}]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.samples_table(before, after))
    text = console.export_text()
    assert "[bold]x[/bold] \ufffd" in text
    assert "\\x1b[31m" in text and "\x1b" not in text
    assert "😀" in text
    assert "expected" not in text
    assert 150 < text.count("y") <= 200


def test_samples_with_expected_answers_have_a_column_for_them() -> None:
    table = report.samples_table(
        [{"prompt": "p", "completion": "1", "expected": "2"}], [{"prompt": "p", "completion": "2"}]
    )
    assert [column.header for column in table.columns] == ["prompt", "before", "after", "expected"]


def test_samples_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError):
        report.samples_table([{"prompt": "p", "completion": "1"}], [])


FALLING = [(step, 3.0 - step / 50) for step in range(101)]


def test_a_falling_curve_falls_on_the_screen() -> None:
    text = curves.loss_curve(FALLING, [(0, 3.0), (100, 1.0)], width=60, height=10, unicode=False)
    lines = text.splitlines()
    drawing = [line.split("|", 1)[-1].split("+", 1)[-1] for line in lines[:10]]
    columns = [[line.find(mark) for line in drawing] for mark in "*"]
    starts = [start for start in columns[0] if start >= 0]
    assert starts == sorted(starts)
    assert len(starts) >= 9
    assert lines[0].startswith("3 +o") and lines[9].startswith("1 +") and lines[9].endswith("o")
    assert lines[11].split() == ["step", "0", "100"]
    assert "** train loss" in lines[12] and "o eval loss" in lines[12]
    assert max(map(len, lines)) == 60
    assert text.isascii()


def test_a_braille_curve_holds_every_column() -> None:
    text = curves.loss_curve(FALLING, width=40, height=5)
    drawing = [line[4:] for line in text.splitlines()[:5]]
    filled = {x for line in drawing for x, mark in enumerate(line) if 0x2800 < ord(mark) < 0x2900}
    assert len(filled) >= 34


@pytest.mark.parametrize(
    ("train", "evals"),
    [
        ([(1, 2.0)], []),
        ([(1, 2.0), (2, 2.0)], []),
        ([], [(5, 1.0)]),
        ([(1, math.nan), (2, 1.0), (3, math.inf)], [(3, math.nan)]),
        ([(1, 0.0)], []),
        ([(step, float(step % 7)) for step in range(5000)], []),
    ],
)
@pytest.mark.parametrize("unicode", [True, False])
def test_odd_curves_are_drawn(train: list, evals: list, unicode: bool) -> None:
    lines = curves.loss_curve(train, evals, width=50, height=6, unicode=unicode).splitlines()
    assert len(lines) == 9
    assert max(map(len, lines)) <= 50


def test_no_curve_without_a_loss() -> None:
    assert curves.loss_curve([(1, math.nan)]) == "no loss has been recorded"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0.0, 1.0], "▁█"),
        ([1.0, 1.0], "██"),
        ([0.0, 0.0], "▁▁"),
        ([], ""),
        ([5.0], "█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparklines(values: list[float], line: str) -> None:
    assert curves.sparkline(values) == line
    assert curves.sparkline(values, unicode=False).isascii()


def test_a_sparkline_is_resampled_with_both_ends() -> None:
    line = curves.sparkline([1.0, *[0.0] * 998, 1.0], width=10)
    assert line == "█▁▁▁▁▁▁▁▁█"


@pytest.mark.parametrize("num_steps", [0, 1, 40])
def test_a_picture_is_written(tmp_path: Path, num_steps: int) -> None:
    rows = [
        {
            "step": step,
            "train/loss": 3.0 / step,
            "train/learning_rate": 1e-4,
            "eval/loss": 1.0 if step % 20 == 0 else None,
        }
        for step in range(1, num_steps + 1)
    ]
    best = Evaluation("eval/loss", "down", 1.0, 20, 1.0, 40, 2, 20, False)
    path = curves.plot_curves(rows, tmp_path / "new" / "c.png", title="t", evaluation=best)
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == (1200, 750)


def test_a_picture_shows_accuracy_below_the_loss(tmp_path: Path) -> None:
    rows = [{"step": n, "train/loss": 0.6, "train/accuracy": 0.5, "eval/accuracy": 0.7}
            for n in range(1, 9)]  # fmt: skip
    path = curves.plot_curves(rows, tmp_path / "c.png", title="t")
    assert struct.unpack(">II", path.read_bytes()[16:24]) == (1200, 1050)


def test_a_plan_of_pairs_says_pairs() -> None:
    text = report.plan_text({**PLAN, "unit": "pairs", "reference": "the policy at the start"})
    for part in (
        "152 pairs, 144 kept, 3 answers truncated",
        "4 pairs unused per epoch",
        "45,678 in the train pairs, 12,345 supervised, at most 1,024 a prompt and answer",
        "57 planned, 19 an epoch, 8 pairs each",
        "reference       the policy at the start",
    ):
        assert part in text, part


def test_a_summary_says_what_else_the_best_evaluation_found(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "dpo", None)
    with run.attempt(planned_steps=2):
        for step, accuracy in ((1, 0.9), (2, 0.8)):
            run.log_metrics(
                step, {"eval/loss": 0.5 * step, "eval/accuracy": accuracy, "eval/margin": 0.25}
            )
        run.set_evaluation(Evaluation("eval/loss", "down", 0.5, 1, 1.0, 2, 2, 1, True))
        run.finish(StopReason.COMPLETED, steps=2)
    text = report.summary_text(run)
    assert "beside it   eval/accuracy 0.9000, eval/margin 0.2500 at step 1" in text


def test_smoothing_averages_over_the_past() -> None:
    points = [(1, 1.0), (2, 3.0), (3, 5.0)]
    assert curves.smoothed(points, 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]


def test_a_running_mean_is_called_one() -> None:
    rows = [{"step": step, "train/loss": 3.0 - step / 50} for step in range(1, 41)]
    assert "train loss, smoothed" in curves.curve_of_run(rows, unicode=False)
    assert "smoothed" not in curves.curve_of_run(rows[:9], unicode=False)


def test_what_was_interrupted_before_a_checkpoint_can_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise files.StorageError("killed")

    run = RunDir.create(tmp_path, "sft", None)
    run.write_config({"model": {"name": "m"}})
    with pytest.raises(ZeroDivisionError), run.attempt(planned_steps=3):
        monkeypatch.setattr(files, "replace_json", killed)  # so that nothing says how it ended
        raise ZeroDivisionError
    run = RunDir.open(run.path)
    assert shown_state(run) == "interrupted"
    text = report.summary_text(run, width=400)
    assert "To begin again, as no checkpoint was saved:" in text
    resume = shlex.quote(f'resume="{run.path}"')
    assert any(
        line.endswith((f" sft {resume}", f" sft resume={run.path}")) for line in text.splitlines()
    )


def test_a_dry_run_is_called_one(tmp_path: Path) -> None:
    for dry_run, state in ((True, "dry run"), (False, "pending")):
        run = RunDir.create(tmp_path, "sft", None)
        assert shown_state(run) == "pending"
        run.write_config({"dry_run": dry_run})
        assert shown_state(run) == state
