"""Trials of a sweep on the service: one session for all, an adapter each, the numbers of local runs."""

from tests.backends.services import check_same, configured
from tests.backends.tinker.test_recipes import on_tinker
from tests.running import train_all
from tests.sweeps.running import reopened, train_together

CHANGES = ({"seed": 1}, {"lora__rank": 2}, {"optimizer__learning_rate": 1e-2})


def test_three_trials_share_a_session(tinker_server, tmp_path):
    before = tinker_server.state()["requests"].count("create_session")
    configs = [
        on_tinker("sft", tmp_path, tinker_server, samples__num_prompts=0, **changes)
        for changes in CHANGES
    ]
    trials, _ = train_together(configs, at_once=2)
    assert [trial.state for trial in trials] == ["succeeded"] * 3, [each.why for each in trials]
    assert tinker_server.state()["requests"].count("create_session") == before + 1
    for trial, changes in zip(trials, CHANGES, strict=True):
        local = configured("sft", tmp_path / "local", samples__num_prompts=0, **changes)
        check_same(reopened(trial), train_all(local)[1])
