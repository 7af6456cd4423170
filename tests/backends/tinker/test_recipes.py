"""All three recipes on the service: the same numbers as on local torch."""

import pytest

from recipes import grpo, sft
from tests.backends.services import (
    check_same,
    configured,
    events,
    numbers,
    sample_prompts_apart,
)
from tests.running import train_all
from tunebook.compose import compose
from tunebook.errors import CheckpointError, ConfigError
from tunebook.resources import ServiceError
from tunebook.runs import RunDir, RunState

pytestmark = pytest.mark.xdist_group("tinker")

ADAM = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "grad_clip_norm": 1.0,
}


def on_tinker(recipe, folder, server, /, **overrides):
    return configured(recipe, folder, backend="tinker", backend__base_url=server.url, **overrides)


@pytest.fixture(scope="module")
def local_sft(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        sample_prompts_apart(monkeypatch)
        return train_all(configured("sft", tmp_path_factory.mktemp("local")))[1]


def test_sft(tinker_server, local_sft, tmp_path):
    _, run = train_all(on_tinker("sft", tmp_path, tinker_server))
    check_same(run, local_sft)
    assert run.samples() == local_sft.samples()
    assert run.record.state is RunState.SUCCEEDED and run.record.model_available
    assert run.record.outcome.downgrades == []
    assert (run.model_dir / "tokenizer.json").is_file()
    [computed] = events(run, "loss_computed")
    assert (computed["loss"], computed["way"]) == ("cross_entropy", "cross_entropy")
    sent = tinker_server.state()["adam"][-3:]
    assert [each.keys() for each in sent] == [ADAM.keys()] * 3
    assert sent[0] == pytest.approx(ADAM)


@pytest.mark.parametrize("recipe", ["dpo", "grpo"])
def test_the_other_recipes(recipe, tinker_server, tmp_path, monkeypatch):
    sample_prompts_apart(monkeypatch)
    _, run = train_all(on_tinker(recipe, tmp_path / "remote", tinker_server))
    _, expected = train_all(configured(recipe, tmp_path / "local"))
    check_same(run, expected)
    [computed] = events(run, "loss_computed")
    assert computed["way"] == "two_passes"  # also GRPO's, for its KL term


def test_grpo_by_the_service_on_a_live_sampler(tinker_server, tmp_path, monkeypatch):
    sample_prompts_apart(monkeypatch)
    changes = {"kl__beta": 0.0, "rollout__policy_lag": 0}
    config = on_tinker(
        "grpo", tmp_path / "remote", tinker_server, backend__sampler="live", **changes
    )
    _, run = train_all(config)
    _, expected = train_all(configured("grpo", tmp_path / "local", **changes))
    check_same(run, expected)
    assert [event["way"] for event in events(run, "loss_computed")] == ["ppo"]


def test_resumed_and_begun_from(tinker_server, local_sft, tmp_path):
    """A stopped run goes on exactly in another session; another run begins from its model."""
    config = on_tinker("sft", tmp_path, tinker_server)
    _, run = train_all(config, stop_after=2)
    assert run.record.state is RunState.CANCELLED
    train_all(compose("sft", {"resume": str(run.path)}))
    check_same(RunDir.open(run.path), local_sft)
    changes = {"start_from": str(run.path), "plan__max_steps": 1, "samples__num_prompts": 0}
    _, begun = train_all(on_tinker("sft", tmp_path, tinker_server, **changes))
    _, expected = train_all(configured("sft", tmp_path, **changes))
    assert numbers(begun) == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in numbers(expected)]
    changes["start_from"] = run.checkpoints()[-1].ref.location
    assert changes["start_from"].startswith("tinker://")
    assert sft.prepare(on_tinker("sft", tmp_path, tinker_server, **changes))
    changes["start_from"] += "-gone"
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        sft.prepare(on_tinker("sft", tmp_path, tinker_server, **changes))


def test_a_local_adapter_is_refused_before_anything_is_made(tinker_server, local_sft, tmp_path):
    config = on_tinker("sft", tmp_path, tinker_server, start_from=str(local_sft.path))
    with pytest.raises(CheckpointError, match="cannot load a folder"):
        sft.prepare(config)


def test_the_price_is_in_the_plan_and_can_be_too_high(tinker_server, tmp_path):
    price = {"backend__price_per_million_tokens": 2.0}
    task = sft.prepare(on_tinker("sft", tmp_path, tinker_server, **price))
    estimate = task.summary["estimate"]
    assert estimate["price"] == pytest.approx(2e-6 * estimate["train_tokens"])
    with pytest.raises(ConfigError, match=r"backend\.max_cost=1e-06: the run is expected to cost"):
        sft.prepare(on_tinker("sft", tmp_path, tinker_server, backend__max_cost=1e-6, **price))


def test_what_the_service_lacks_is_said_or_refused_in_prepare(tinker_server, tmp_path):
    config = on_tinker("sft", tmp_path, tinker_server, lora__alpha=8, lora__dropout=0.1)
    assert sft.prepare(config).downgrades == (
        "lora.alpha:ignored:the_service_has_32",
        "lora.dropout:ignored:not_on_the_service",
    )
    config.strict = True
    with pytest.raises(ConfigError, match=r"strict=true .*lora\.alpha"):
        sft.prepare(config)
    for overrides, match in (
        ({"lora__target_modules": ["q_proj"]}, "whole groups only"),
        ({"lora": None}, "adapters only"),
        ({"max_seq_len": 100_000}, "takes at most"),
        ({"backend__model": "somebody/else"}, "the service does not train it"),
        ({"backend__losses": "none"}, "one of auto, two_passes"),
        ({"backend__sampler": "frozen"}, "snapshot, live"),
        ({"backend__checkpoint_ttl": 60}, "at least 3600"),
        ({"backend__max_cost": 1.0}, "price_per_million_tokens"),
        ({"optimizer__kind": "muon"}, "muon"),
    ):
        with pytest.raises(ConfigError, match=match):
            sft.prepare(on_tinker("sft", tmp_path, tinker_server, **overrides))
    with pytest.raises(ConfigError, match=r"rollout\.temperature"):
        grpo.prepare(on_tinker("grpo", tmp_path, tinker_server, rollout__temperature=0.8))


def test_no_key_and_nobody_there(tmp_path, monkeypatch):
    config = configured("sft", tmp_path, backend="tinker")
    with pytest.raises(ConfigError, match="TINKER_API_KEY is not set"):
        sft.prepare(config)
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(ServiceError, match="cannot be reached"):
        sft.prepare(config)
