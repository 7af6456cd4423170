"""`tunebook report` and `tunebook runs watch`."""

import io
from contextlib import ExitStack

import pytest
from rich.console import Console

from recipes import sft
from tests.reports.made import SETTINGS, finish, made_sweep
from tests.reports.reading import Page
from tunebook.cli import main
from tunebook.compose import compose
from tunebook.errors import ConfigError
from tunebook.launch import failure_text, start_run
from tunebook.reports import watch
from tunebook.runs import Evaluation, RunDir, StopReason
from tunebook.text_tables import as_text


def said(capsys, *arguments):
    with pytest.raises(SystemExit) as raised:
        main([*map(str, arguments)])
    captured = capsys.readouterr()
    return raised.value.code or 0, captured.out, captured.err


def test_a_report_is_written_anew_with_pictures(tmp_path, capsys):
    run = finish(RunDir.create(tmp_path / "runs", "sft", None))
    code, out, _ = said(capsys, "report", "1", "--root", tmp_path / "runs")
    assert (code, out) == (0, f"{run.path / 'report.html'}\n")
    (run.path / "report.html").write_text("old")
    code, out, _ = said(capsys, "report", run.path, "--png")
    assert code == 0 and "<svg" in (run.path / "report.html").read_text()
    assert out.splitlines()[1:] == [
        str(run.path / "figures" / f"{name}.png")
        for name in ("loss", "learning_rate", "throughput", "grad_norm")
    ]


def test_a_sweep_has_its_report_and_those_of_its_runs(tmp_path, capsys):
    sweep = made_sweep(tmp_path, rates=(1e-4, 1e-3), ranks=(4,))
    code, out, _ = said(capsys, "report", sweep.path.name, "--root", tmp_path / "runs", "--png")
    assert code == 0
    assert out.splitlines()[0] == str(sweep.path / "report.html")
    assert (sweep.path / "figures" / "metric.png").is_file()
    run = sweep.run_of(sweep.trials[0])
    assert run is not None and (run.path / "report.html").is_file()


def test_what_is_neither_is_said(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    code, _, err = said(capsys, "report", "nothing", "--root", tmp_path / "runs")
    assert code == 2 and "nothing" in err


def test_watching_a_run_that_has_ended_shows_it_once(tmp_path, capsys):
    run = finish(RunDir.create(tmp_path / "runs", "sft", None), reason=StopReason.CANCELLED)
    code, out, _ = said(capsys, "runs", "watch", run.path)
    assert code == 3
    for part in (
        "cancelled",
        "step 60 of 60, 100%",
        "tokens/s",
        "eval/loss",
        "train loss, smoothed",
        "events",
    ):
        assert part in out, part
    assert "left" not in out


def test_watching_goes_on_until_the_run_has_ended(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path, "sft", None)
    run.write_plan({"planned_steps": 2})
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    looks = []
    with ExitStack() as training:
        training.enter_context(run.attempt(planned_steps=2))

        def go_on(_):
            looks.append(len(looks) + 1)
            if looks[-1] <= 2:
                run.log_metrics(looks[-1], {"train/loss": 1.0, "time/step_s": 3.0})
            else:
                run.finish(StopReason.COMPLETED, steps=2)
                training.close()

        monkeypatch.setattr(watch.time, "sleep", go_on)
        watch.watch_run(run.path, console, poll_s=1.0)
    text = console.file.getvalue()
    assert looks == [1, 2, 3]
    assert "step 0 of 2, 0%" in text and "step 1 of 2, 50%" in text
    assert "3 s a step, about 3.0 s left" in text
    assert text.rstrip().rfind("succeeded") > text.rfind("running")


def test_watching_a_sweep(tmp_path, capsys):
    sweep = made_sweep(tmp_path, rates=(1e-4, 1e-3), ranks=(4,))
    code, out, _ = said(capsys, "runs", "watch", sweep.path)
    assert code == 0
    assert "learning_rate=0.0001 rank=4" in out and "failed" in out


@pytest.fixture
def own(tmp_path):
    """A finished run of a recipe that is no command."""
    config = compose("sft", {**SETTINGS, "runs_dir": str(tmp_path / "runs")})
    return finish(start_run("mine", sft.prepare(config)))


def test_a_run_of_a_recipe_of_ones_own_has_a_report_and_no_command_that_is_none(own, capsys):
    code, out, err = said(capsys, "report", own.path)
    assert (code, out, err) == (0, f"{own.path / 'report.html'}\n", "")
    text = Page(own.path / "report.html").text
    assert "All keys" in text and "What departs from the defaults" not in text
    assert f"# the program of your own recipe 'mine', with resume={own.path}" in text
    assert f"mine resume={own.path}" not in text
    code, out, _ = said(capsys, "runs", "show", own.path)
    assert code == 0 and f"with resume={own.path} plan.max_steps=120" in out
    assert f"mine resume={own.path}" not in failure_text(own)


@pytest.mark.parametrize("command", [["resume"], ["retry"], ["retry", "--detach"]])
def test_a_recipe_of_ones_own_goes_on_from_its_own_program(tmp_path, capsys, command):
    config = compose("sft", {**SETTINGS, "runs_dir": str(tmp_path / "runs")})
    run = finish(start_run("mine", sft.prepare(config)), reason=StopReason.CANCELLED)
    before = (run.path / "run.json").read_text()
    code, _, err = said(capsys, "runs", command[0], run.path, *command[1:])
    assert code == 2
    assert "its recipe 'mine' is none that tunebook has (dpo, grpo, sft)" in err
    assert f"from its own program, with resume={run.path} in its config" in err
    assert (run.path / "run.json").read_text() == before


def test_a_run_is_not_taken_on_by_another_recipe(own):
    task = sft.prepare(compose("sft", {"resume": str(own.path)}))
    with pytest.raises(ConfigError, match=r"is a run of the recipe 'mine', so 'sft' cannot go on"):
        start_run("sft", task)
    assert start_run("mine", task).path == own.path


def test_a_run_without_a_plan_shows_its_state_before_its_first_step(tmp_path, capsys):
    run = RunDir.create(tmp_path / "runs", "sft", None)
    text = as_text(watch.run_view(run.path, Console(width=80, file=io.StringIO())), 80)
    assert "step 0" in text
    run.set_evaluation(Evaluation("eval/loss", "down", 0.5, 1, 0.5, 1, 1, 1, False))
    text = as_text(watch.run_view(run.path, Console(width=80, file=io.StringIO())), 80)
    assert "eval/loss 0.5000 @ 1, 1 evaluation\n" in text
