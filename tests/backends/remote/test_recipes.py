"""All three recipes on the service: the same numbers as on local torch."""

import pytest

from recipes import grpo, sft
from tests.backends.services import SETTINGS, check_same, configured, events, numbers
from tests.running import train_all
from tunebook.compose import compose
from tunebook.errors import CheckpointError, ConfigError
from tunebook.launch import start_run
from tunebook.opening import build_backend
from tunebook.runs import RunDir, RunState

pytestmark = pytest.mark.xdist_group("remote")


def remote(recipe, folder, server, /, **overrides):
    if recipe == "sft":
        overrides = {"backend__generator_replicas": 1, **overrides}
    return configured(recipe, folder, backend="together", backend__base_url=server.url, **overrides)


@pytest.fixture(scope="module")
def local_sft(tmp_path_factory):
    return train_all(configured("sft", tmp_path_factory.mktemp("local")))[1]


def test_sft(server, local_sft, tmp_path):
    _, run = train_all(remote("sft", tmp_path, server))
    check_same(run, local_sft)
    assert run.samples() == local_sft.samples()
    assert run.record.state is RunState.SUCCEEDED and run.record.model_available
    assert (run.model_dir / "tokenizer.json").is_file()
    [computed] = events(run, "loss_computed")
    assert (computed["loss"], computed["way"]) == ("cross_entropy", "LOSS_TYPE_CROSS_ENTROPY")
    texts = [event["text"] for event in events(run, "resource")]
    assert "created" in texts[0] and "READY" in texts[1] and "stopped" not in texts[-1]


@pytest.mark.parametrize("recipe", ["dpo", "grpo"])
def test_the_other_recipes(recipe, server, tmp_path):
    _, run = train_all(remote(recipe, tmp_path / "remote", server))
    _, expected = train_all(configured(recipe, tmp_path / "local"))
    check_same(run, expected)
    [computed] = events(run, "loss_computed")
    assert computed["way"] == "two_passes"  # also GRPO's, for its KL term


def test_trainer_only_unless_asked(server, tmp_path):
    """A resource of SFT has no generator, so there are no samples, which the run says."""
    config = remote("sft", tmp_path, server, backend__generator_replicas=None, plan__max_steps=1)
    _, run = train_all(config)
    assert run.samples() == {}
    assert run.record.outcome.downgrades == ["samples:disabled:no_generator"]
    with pytest.raises(ConfigError, match="samples:disabled:no_generator"):
        sft.prepare(compose_strict(config))


def compose_strict(config):
    config.strict = True
    return config


def test_resumed_and_begun_from(server, local_sft, tmp_path):
    """A stopped run goes on exactly, on another resource; another run begins from its model."""
    config = remote("sft", tmp_path, server)
    _, run = train_all(config, stop_after=2)
    assert run.record.state is RunState.CANCELLED
    resumed = compose("sft", {"resume": str(run.path), "backend.inactive_timeout": 600})
    train_all(resumed)
    check_same(RunDir.open(run.path), local_sft)
    changes = {"start_from": str(run.path), "plan__max_steps": 1, "samples__num_prompts": 0}
    _, begun = train_all(remote("sft", tmp_path, server, **changes))
    _, expected = train_all(configured("sft", tmp_path, **changes))
    assert numbers(begun) == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in numbers(expected)]
    changes["start_from"] = f"together://{run.checkpoints()[-1].ref.location}"
    assert sft.prepare(remote("sft", tmp_path, server, **changes))


def test_a_local_adapter_is_refused_before_anything_is_made(server, local_sft, tmp_path):
    config = remote("sft", tmp_path, server, start_from=str(local_sft.path))
    with pytest.raises(CheckpointError, match="cannot load a folder"):
        sft.prepare(config)


def test_the_price_is_in_the_plan_and_can_be_too_high(server, tmp_path):
    """The server's price is 3 dollars an hour."""
    task = sft.prepare(remote("sft", tmp_path, server))
    estimate = task.summary["estimate"]
    assert estimate["price"] == pytest.approx(3 * estimate["seconds"] / 3600)
    assert "3.00 USD an hour" in estimate["basis"]
    with pytest.raises(ConfigError, match=r"backend\.max_cost=1e-06: the run is expected to cost"):
        sft.prepare(remote("sft", tmp_path, server, backend__max_cost=1e-6))


def test_what_the_service_lacks_is_refused_in_prepare(server, tmp_path):
    for overrides, match in (
        ({"lora__target_modules": ["q_proj"]}, "all-linear"),
        ({"lora__alpha": 2.5}, "whole numbers"),
        ({"lora__rank": 10_000}, "the service takes"),
        ({"max_seq_len": 100_000}, "takes at most"),
        ({"backend__model": "somebody/else"}, "the service does not train it"),
        ({"backend__losses": "none"}, "one of auto, two_passes"),
        ({"optimizer__kind": "muon"}, "muon"),
    ):
        with pytest.raises(ConfigError, match=match):
            sft.prepare(remote("sft", tmp_path, server, **overrides))
    for overrides, match in (
        ({"rollout__stop": ["\n", 7]}, r"rollout\.stop=\[7\]"),
        ({"rollout__temperature": 0.8}, r"rollout\.temperature"),
        ({"backend__generator_replicas": 0}, "does not sample"),
    ):
        with pytest.raises(ConfigError, match=match):
            grpo.prepare(remote("grpo", tmp_path, server, **overrides))


def test_a_run_that_fails_stops_its_resource(server, tmp_path, monkeypatch):
    config = remote("sft", tmp_path, server)
    task = sft.prepare(config)
    run = start_run("sft", task)
    monkeypatch.setattr("recipes.sft.evaluate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), build_backend(config) as backend:
        list(sft.train(task, backend, run))
    # That nothing bills is checked after every test.
    assert RunDir.open(run.path).record.state is RunState.FAILED


def test_the_command_without_what_only_our_server_tells(server, tmp_path, monkeypatch, capsys):
    """The hosted service has no gradient norm: the metric is missing, and nothing minds."""
    monkeypatch.setattr("tunebook.backends.together.link.metrics_of_step", lambda output: {})
    settings = {**SETTINGS, "plan.max_steps": 2, "plan.epochs": "null", "samples.num_prompts": 0}
    code = sft.main(
        [
            "backend=together",
            f"backend.base_url={server.url}",
            f"runs_dir={tmp_path}",
            *(f"{key}={value}" for key, value in settings.items()),
        ]
    )
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert "3.00 USD an hour" in " ".join(shown.split())
    [run] = [RunDir.open(path.parent) for path in tmp_path.rglob("run.json")]
    assert len(run.metrics()) == 2
    assert all("train/loss" in row and "train/grad_norm" not in row for row in run.metrics())
    assert (run.path / "report.html").is_file()
