"""`--multirun`: all trials prepared first, trained together, recorded, and resumed."""

import hashlib
import json
import sys

import pytest

from recipes import grpo, sft
from tunebook.errors import ConfigError
from tunebook.launch import run_recipe
from tunebook.runs import RunDir, cancellation
from tunebook.sweeps.display import SweepDisplay
from tunebook.sweeps.record import SweepDir
from tunebook.sweeps.sweep import run_sweep

SMALL = (
    "--multirun", "data.limit=24", "eval.fraction=0.2", "eval.min_rows=1", "plan.batch_size=8",
    "plan.checkpoint_every=1", "samples.num_prompts=0",
)  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(*arguments, recipe=sft):
    name = recipe.__name__.rpartition(".")[2]
    return run_recipe(name, recipe.prepare, recipe.train, list(arguments))


def sweep_in(folder):
    [path] = (folder / "runs" / "sweeps").iterdir()
    return SweepDir.open(path)


def states(sweep):
    return [trial.state.value for trial in sweep.trials]


def digest(folder):
    """Every file below a folder by the hash of what it holds."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def test_every_value_is_a_trial_and_a_run(here, capsys):
    assert run(*SMALL, "optimizer.learning_rate=1e-4,1e-2", "lora.rank=2,4") == 0
    sweep = sweep_in(here)
    assert states(sweep) == ["succeeded"] * 4
    assert [trial.label for trial in sweep.trials] == [
        f"learning_rate={rate} rank={rank}" for rate in (0.0001, 0.01) for rank in (2, 4)
    ]
    runs = [sweep.run_of(trial) for trial in sweep.trials]
    for trial, each in zip(sweep.trials, runs, strict=True):
        assert each.record.model_available
        assert each.record.plan_hash == trial.plan_hash
        assert trial.value == each.record.evaluation.best
        assert trial.metric == "eval/loss"
        assert each.read_config()["sweep"] == {
            "max_at_once": None, "max_cost": None, "resume": None, "halving": {"rungs": [], "keep": 0.5},
        }  # fmt: skip
    assert len({json.dumps(each.read_split()) for each in runs}) == 1
    assert sorted(path.name for path in sweep.path.iterdir()) == [
        ".lock", "report.html", "sweep.json",
    ]  # fmt: skip
    assert sorted(path.name for path in here.iterdir()) == ["runs"]
    out = capsys.readouterr().out
    assert "trial 3 (learning_rate=0.01 rank=4): succeeded" in out
    assert "\r" not in out


LOSS = """
def broken(logprobs, *, token_weights, on):
    factor = float("nan") if token_weights.numel() > 20 and on == {bad} else 1.0
    return -(logprobs * token_weights).sum() * factor, {{}}
"""


def test_a_failed_trial_is_the_only_one_that_a_resume_trains(here, capsys):
    """Case 95: exit code, the table of four states, and nothing of the others is touched."""
    (here / "swept_loss.py").write_text(LOSS.format(bad=2))
    command = (*SMALL, "loss._target_=swept_loss.broken", "loss.on=0,1,2,3")
    assert run(*command) == 1
    out = capsys.readouterr().out
    sweep = sweep_in(here)
    assert states(sweep) == ["succeeded", "succeeded", "failed", "succeeded"]
    assert "loss is nan" in sweep.trials[2].why
    assert all(f"{number}      on={number}" in out for number in range(4))
    folders = [sweep.run_of(trial).path for trial in sweep.trials]
    before = [digest(folder) for folder in folders]

    resume = f"sweep.resume={sweep.path}"
    assert run(*command[:-1], "loss.on=0,1,5,3", resume) == 2
    assert "trial 2 was" in capsys.readouterr().err
    assert run(*command[:-1], "loss.on=0,1,2", resume) == 2
    assert "4 trials, not 3" in capsys.readouterr().err
    assert run(*command, "sweep.halving={rungs: [1], keep: 0.5}", resume) == 2
    assert "sweep.halving differs" in capsys.readouterr().err
    assert run("--multirun", resume, "dry_run=true") == 0
    assert "4 trials of sft, 3 of them over already" in capsys.readouterr().out
    assert [digest(folder) for folder in folders] == before

    (here / "swept_loss.py").write_text(LOSS.format(bad=9))
    del sys.modules["swept_loss"]
    assert run("--multirun", resume) == 0
    sweep = SweepDir.open(sweep.path)
    assert states(sweep) == ["succeeded"] * 4
    assert sweep.trials[2].why is None
    assert len(sweep.run_of(sweep.trials[2]).record.attempts) == 2
    for number in (0, 1, 3):
        assert digest(folders[number]) == before[number]
    after = digest(folders[2])
    assert run(*command, resume) == 0
    assert digest(folders[2]) == after
    del sys.modules["swept_loss"]


def test_what_is_wrong_with_any_trial_is_said_before_any_is_trained(here, capsys):
    code = run(*SMALL, "lora.rank=2,-1,-2", "data.path=null,nowhere.jsonl")
    err = capsys.readouterr().err
    assert code == 2
    assert "Nothing was trained." in err
    assert "lora.rank=-1" in err and "lora.rank=-2" in err
    assert list(here.iterdir()) == []
    code = run(*SMALL, "data.path=nowhere.jsonl,elsewhere.jsonl")
    err = capsys.readouterr().err
    assert code == 2
    assert "nowhere.jsonl" in err and "elsewhere.jsonl" in err
    assert list(here.iterdir()) == []


def test_a_dry_run_leaves_nothing(here, capsys):
    assert run(*SMALL, "seed=1,2", "dry_run=true") == 0
    out = capsys.readouterr().out
    assert "2 trials of sft" in out and "nothing was trained" in out
    assert list(here.iterdir()) == []


def test_limits_hold_for_every_trial(here, capsys):
    code = run(*SMALL, "plan.epochs=null", "plan.max_steps=3,1000000", "limits.max_seconds=60")
    err = capsys.readouterr().err
    assert code == 2
    assert "limits.max_seconds=60" in err and "trial 1 (max_steps=1000000)" in err
    assert list(here.iterdir()) == []


def test_a_trial_can_be_cancelled_while_the_others_go_on(here, monkeypatch, capsys):
    """By what `tunebook runs cancel` writes; a resume of the sweep trains it to its end."""
    made = SweepDisplay.stepped

    def cancel(display, trial, report):
        if trial.number == 1 and report.step == 1:
            assert cancellation.request(trial.run.path, len(trial.run.record.attempts))
        made(display, trial, report)

    monkeypatch.setattr(SweepDisplay, "stepped", cancel)
    assert run(*SMALL, "seed=0,1") == 1
    sweep = sweep_in(here)
    assert states(sweep) == ["succeeded", "cancelled"]
    assert sweep.run_of(sweep.trials[1]).record.outcome.steps == 1
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert run("--multirun", f"sweep.resume={sweep.path}") == 0
    assert states(SweepDir.open(sweep.path)) == ["succeeded", "succeeded"]


def test_settings_of_a_sweep_need_one(here, capsys):
    assert run("sweep.max_at_once=2") == 2
    assert "--multirun" in capsys.readouterr().err
    assert run("--multirun", "hydra/launcher=basic", "seed=1", "sweep.max_at_once=2") == 2
    assert "hydra/launcher=tunebook" in capsys.readouterr().err
    assert run("--multirun", "seed=1", "sweep.resume=nowhere") == 2
    assert "no sweep" in capsys.readouterr().err


def test_other_bases_and_full_weights_get_backends_of_their_own(here):
    """Two models in one sweep, and full weights beside adapters."""
    lora = "lora={rank: 2, alpha: 4, dropout: 0.0, target_modules: all-linear, seed: 0, rslora: false},null"
    assert (
        run(*SMALL, "plan.epochs=null", "plan.max_steps=1", lora, "backend.dtype=float32,bfloat16")
        == 0
    )
    sweep = sweep_in(here)
    assert states(sweep) == ["succeeded"] * 4
    full = [sweep.run_of(trial).model_dir / "model.safetensors" for trial in sweep.trials]
    assert [path.is_file() for path in full] == [False, False, True, True]


def test_a_file_names_the_trials_of_grpo(here):
    (here / "conf" / "sweep").mkdir(parents=True)
    (here / "conf" / "sweep" / "mine.yaml").write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      lora.rank: 2,4\n"
    )
    code = run(
        "--config-dir=conf", "--multirun", "sweep=mine", "sweep.max_at_once=1", "data.limit=12",
        "eval.fraction=0.2", "eval.min_rows=1", "plan.batch_size=4", "plan.epochs=null",
        "plan.max_steps=1", "rollout.group_size=4", "rollout.max_new_tokens=8", recipe=grpo,
    )  # fmt: skip
    assert code == 0
    sweep = sweep_in(here)
    assert [trial.label for trial in sweep.trials] == ["rank=2", "rank=4"]
    assert states(sweep) == ["succeeded"] * 2
    assert sweep.trials[0].metric == "eval/reward"
    ranks = [
        RunDir.open(sweep.run_of(each).path).read_config()["lora"]["rank"] for each in sweep.trials
    ]
    assert ranks == [2, 4]


def test_a_sweep_in_python_is_that_of_the_command_line(here, capsys):
    common = [*SMALL[1:], "plan.epochs=null", "plan.max_steps=2"]
    jobs = [[f"optimizer.learning_rate={rate}", *common] for rate in ("1e-4", "1e-2")]
    made = run_sweep("sft", sft.prepare, sft.train, jobs)
    assert made.path == sweep_in(here).path and states(made) == ["succeeded"] * 2
    assert [trial.label for trial in made.trials] == [
        "learning_rate=1e-4",
        "learning_rate=1e-2",
    ]
    assert run("--multirun", f"sweep.resume={made.path}") == 0  # nothing is missing
    assert [trial.run for trial in SweepDir.open(made.path).trials] == [
        trial.run for trial in made.trials
    ]


def test_in_python_too_nothing_is_trained_where_a_job_cannot_run(here, capsys):
    with pytest.raises(ConfigError, match="nothing was trained"):
        run_sweep("sft", sft.prepare, sft.train, [[*SMALL[1:]], [*SMALL[1:], "max_seq_len=100000"]])
    assert not (here / "runs").exists() or not list((here / "runs").glob("s*/*"))
