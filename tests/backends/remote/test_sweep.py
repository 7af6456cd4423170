"""Trials of a sweep on a service: one resource for all, a session each, the numbers of local runs."""

from recipes import sft
from tests.backends.remote.test_recipes import remote
from tests.backends.services import check_same, configured
from tests.running import train_all
from tests.sweeps.running import reopened, train_together
from tunebook.config import SweepConfig
from tunebook.opening import build_backend
from tunebook.resources import Ledger
from tunebook.sweeps.sweep import groups, trials_at_once
from tunebook.sweeps.trial import Trial

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


def test_slots_are_the_sessions_of_the_service(server, tmp_path):
    config = remote("sft", tmp_path, server)
    trials = [
        Trial(number=n, overrides=(), config=config, task=sft.prepare(config)) for n in (0, 1)
    ]
    with build_backend(config) as backend:
        assert trials_at_once(trials, backend, SweepConfig()) == 5
        assert trials_at_once(trials, backend, SweepConfig(max_at_once=2)) == 2
