"""Trials of a sweep on a service: one resource for all, a session each, the numbers of local runs."""

import pytest

from recipes import sft
from tests.backends.remote.test_recipes import remote
from tests.backends.services import check_same, configured
from tests.running import train_all
from tests.sweeps.launchers import launcher
from tests.sweeps.running import reopened, train_together
from tests.sweeps.test_multirun import SMALL, run, sweep_in
from tunebook.config import SweepConfig
from tunebook.opening import build_backend
from tunebook.resources import Ledger
from tunebook.runs import RunDir, RunState, compare_runs
from tunebook.runs.listing import COST
from tunebook.sweeps.compare import compare_sweep
from tunebook.sweeps.sweep import groups, trials_at_once
from tunebook.sweeps.trial import Trial

__all__ = ["launcher"]
CHANGES = ({"seed": 1}, {"lora__rank": 2}, {"optimizer__learning_rate": 1e-2})


def test_three_trials_share_a_resource(server, tmp_path):
    configs = [remote("sft", tmp_path, server, **changes) for changes in CHANGES]
    trials, _ = train_together(configs, at_once=2)
    assert [trial.state for trial in trials] == ["succeeded"] * 3, [each.why for each in trials]
    assert len(Ledger.of_user().entries()) == 1
    assert len(groups(trials)) == 1
    for trial, changes in zip(trials, CHANGES, strict=True):
        _, alone = train_all(configured("sft", tmp_path / "local", **changes))
        check_same(reopened(trial), alone)


def test_jobs_of_a_launcher_train_on_one_resource(
    server, resource_id, tmp_path, monkeypatch, launcher
):
    """Each job is a process of its own, as on several machines; the numbers are those of here."""
    monkeypatch.chdir(tmp_path)
    shared = f"backend.model_resources_id={resource_id}"
    settings = ["backend=together", f"backend.base_url={server.url}", shared]
    assert run(*SMALL, *launcher, *settings, "seed=1,2") == 0
    [one, two] = sorted(
        (RunDir.open(path.parent) for path in (tmp_path / "runs" / "sft").glob("*/run.json")),
        key=lambda each: each.read_config()["seed"],
    )
    assert Ledger.of_user().entries() == []  # attached, so nothing was made
    assert one.metrics() != two.metrics()
    for each, seed in ((one, 1), (two, 2)):
        assert each.record.state is RunState.SUCCEEDED
        assert each.read_config()["backend"]["model_resources_id"] == resource_id
        here = tmp_path / f"local-{seed}"
        assert run(*SMALL, f"seed={seed}", f"runs_dir={here}") == 0
        [alone] = here.glob("sft/*/run.json")
        check_same(each, RunDir.open(alone.parent))


def test_slots_are_the_sessions_of_the_service(server, tmp_path):
    config = remote("sft", tmp_path, server)
    trials = [
        Trial(number=n, overrides=(), config=config, task=sft.prepare(config)) for n in (0, 1)
    ]
    with build_backend(config) as backend:
        assert trials_at_once(trials, backend, SweepConfig()) == 5
        assert trials_at_once(trials, backend, SweepConfig(max_at_once=2)) == 2


def test_what_a_sweep_costs_is_known_before_and_after(server, tmp_path, monkeypatch, capsys):
    """Three runs share a resource of 3 US dollars an hour: its hours are counted once."""
    monkeypatch.chdir(tmp_path)
    settings = ["backend=together", f"backend.base_url={server.url}", "sweep.max_at_once=2"]
    tokens = ["backend.tokens_per_second=1"]
    assert run(*SMALL, *settings, *tokens, "seed=0,1,2", "sweep.max_cost=1") == 2
    assert (
        "sweep.max_cost=1: the 3 runs to train are expected to cost 1.79" in capsys.readouterr().err
    )
    assert Ledger.of_user().entries() == []
    assert run(*SMALL, "seed=0,1,2", "sweep.max_cost=1") == 2
    assert "cannot say beforehand what a run will cost" in capsys.readouterr().err
    assert run(*SMALL, *settings, "seed=0,1,2", "sweep.max_cost=1") == 0
    rows = compare_sweep(sweep_in(tmp_path)).rows
    total, seconds = (sum(row[key] for row in rows) for key in (COST, "seconds"))
    # Two trained at a time, so the resource was there for half of their time at the least.
    assert 0.5 < total / (3 * seconds / 3600) < 1.0
    for row in rows:
        assert row[COST] / total == pytest.approx(row["seconds"] / seconds, abs=0.05)
    first = sweep_in(tmp_path).run_of(sweep_in(tmp_path).trials[0])
    alone = compare_runs([first]).results[COST]
    assert alone == [pytest.approx(3 * first.record.timing.training_s / 3600)]
