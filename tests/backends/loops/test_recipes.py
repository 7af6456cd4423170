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
from tunebook.launch import start_run
from tunebook.opening import build_backend
from tunebook.runs import RunDir, RunState


def remote(recipe, folder, server, /, **overrides):
    changes = {"backend__base_url": server.url, "backend__lora_alpha": 8, "lora__alpha": 8}
    if recipe == "sft":
        changes["backend__sampler"] = "pinned"
    return configured(recipe, folder, backend="baseten", **{**changes, **overrides})


def local(recipe, folder, /, **overrides):
    return configured(recipe, folder, **{"lora__alpha": 8, **overrides})


@pytest.fixture(scope="module")
def local_sft(tmp_path_factory):
    return train_all(local("sft", tmp_path_factory.mktemp("local")))[1]


@pytest.mark.parametrize("capacity", ["serverless", "dedicated"])
def test_sft(capacity, local_sft, tmp_path, request):
    server = request.getfixturevalue(capacity)
    _, run = train_all(remote("sft", tmp_path, server))
    check_same(run, local_sft)
    assert run.samples() == local_sft.samples()
    assert run.record.state is RunState.SUCCEEDED and run.record.model_available
    assert (run.model_dir / "tokenizer.json").is_file()
    [computed] = events(run, "loss_computed")
    assert (computed["loss"], computed["way"]) == ("cross_entropy", "cross_entropy")
    assert server.active_runs() == []


@pytest.mark.parametrize("recipe", ["dpo", "grpo"])
def test_the_other_recipes(recipe, serverless, tmp_path, monkeypatch):
    _, run = train_all(remote(recipe, tmp_path / "remote", serverless))
    sample_prompts_apart(monkeypatch)
    _, expected = train_all(local(recipe, tmp_path / "local"))
    check_same(run, expected)
    [computed] = events(run, "loss_computed")
    assert computed["way"] == "two_passes"


def test_grpo_samples_live(dedicated, tmp_path, monkeypatch):
    settings = {"backend__sampler": "live", "rollout__policy_lag": 0}
    _, run = train_all(remote("grpo", tmp_path / "remote", dedicated, **settings))
    sample_prompts_apart(monkeypatch)
    _, expected = train_all(local("grpo", tmp_path / "local", rollout__policy_lag=0))
    check_same(run, expected)


def test_every_adam_value_is_sent(serverless, tmp_path):
    """Case 108: and every operation took effect once, in the order of its number."""
    changes = {"optimizer__weight_decay": 0.01, "optimizer__max_grad_norm": 0.0}
    earlier = len(serverless.state()["runs"])
    train_all(remote("sft", tmp_path, serverless, plan__max_steps=1, **changes))
    run = serverless.state()["runs"][earlier]["id"]
    steps = [one for one in serverless.operations(run) if one["operation"] == "optim_step"]
    assert [step["adam_params"] for step in steps] == [
        {
            "learning_rate": 1e-3,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "weight_decay": 0.01,
            "grad_clip_norm": 0.0,
        }
    ]
    numbered = [one["seq_id"] for one in serverless.operations(run)]
    assert numbered == list(range(1, len(numbered) + 1))


def test_no_sampler_unless_asked(serverless, tmp_path):
    """SFT makes none, so there are no samples, which the run says."""
    asked = len(serverless.requests("/samplers"))
    config = remote("sft", tmp_path, serverless, backend__sampler=None, plan__max_steps=1)
    _, run = train_all(config)
    assert run.samples() == {}
    assert run.record.outcome.downgrades == ["samples:disabled:no_generator"]
    assert len(serverless.requests("/samplers")) == asked


def test_resumed_and_begun_from(serverless, local_sft, tmp_path):
    """A stopped run goes on exactly, as another run there; another one begins from its model."""
    config = remote("sft", tmp_path, serverless)
    _, run = train_all(config, stop_after=2)
    assert run.record.state is RunState.CANCELLED
    train_all(compose("sft", {"resume": str(run.path), "backend.submit_timeout": 60}))
    check_same(RunDir.open(run.path), local_sft)
    changes = {"start_from": str(run.path), "plan__max_steps": 1, "samples__num_prompts": 0}
    _, begun = train_all(remote("sft", tmp_path, serverless, **changes))
    _, expected = train_all(local("sft", tmp_path, **changes))
    assert numbers(begun) == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in numbers(expected)]
    changes["start_from"] = run.checkpoints()[-1].ref.location
    assert changes["start_from"].startswith("bt://loops:")
    assert sft.prepare(remote("sft", tmp_path, serverless, **changes))


def test_what_begins_from_a_checkpoint_is_sampled_with_its_weights(serverless, tmp_path):
    """At step 0 the SDK's own publish would take the base model's."""
    _, run = train_all(remote("sft", tmp_path, serverless))
    place = run.checkpoints()[-1].ref.location
    changes = {"start_from": place, "plan__max_steps": 1, "optimizer__learning_rate": 1e-12}
    _, begun = train_all(remote("sft", tmp_path, serverless, **changes))
    assert begun.samples()[0] == run.samples()[3]


def test_what_the_service_lacks_is_refused_or_said_in_prepare(serverless, tmp_path):
    made = len(serverless.state()["sessions"])
    for overrides, match in (
        ({"lora__target_modules": ["q_proj"]}, "all-linear"),
        ({"lora": None}, "adapters only"),
        ({"max_seq_len": 100_000}, "takes at most"),
        ({"backend__model": "somebody/else"}, "the service does not train it"),
        ({"backend__losses": "none"}, "auto, two_passes"),
        ({"backend__sampler": "snapshot"}, "pinned, live, none"),
        ({"backend__scope": "mine"}, "serverless"),
        ({"backend__submit_timeout": 0}, "above 0"),
        ({"optimizer__kind": "muon"}, "adamw"),
        ({"lora__alpha": 16, "strict": True}, r"lora\.alpha:ignored"),
        ({"lora__dropout": 0.1, "strict": True}, r"lora\.dropout:ignored"),
    ):
        with pytest.raises(ConfigError, match=match):
            sft.prepare(remote("sft", tmp_path, serverless, **overrides))
    for overrides, match in (
        ({"rollout__temperature": 0.8}, r"rollout\.temperature"),
        ({"backend__sampler": "none"}, "does not sample"),
    ):
        with pytest.raises(ConfigError, match=match):
            grpo.prepare(remote("grpo", tmp_path, serverless, **overrides))
    place = "bt://loops:ru0/weights/step_1"
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        sft.prepare(remote("sft", tmp_path, serverless, start_from=place))
    assert len(serverless.state()["sessions"]) == made


def test_a_local_adapter_is_refused_before_anything_is_made(serverless, local_sft, tmp_path):
    config = remote("sft", tmp_path, serverless, start_from=str(local_sft.path))
    with pytest.raises(CheckpointError, match="cannot load a folder"):
        sft.prepare(config)


def test_another_alpha_is_recorded_as_a_downgrade(serverless, tmp_path):
    config = remote("sft", tmp_path, serverless, lora__alpha=16, plan__max_steps=1)
    _, run = train_all(config)
    assert run.record.outcome.downgrades == ["lora.alpha:ignored:the_service_has_8"]


def test_a_run_that_fails_is_deactivated(dedicated, tmp_path, monkeypatch):
    config = remote("sft", tmp_path, dedicated)
    task = sft.prepare(config)
    run = start_run("sft", task)
    monkeypatch.setattr("recipes.sft.evaluate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), build_backend(config) as backend:
        list(sft.train(task, backend, run))
    assert dedicated.active_runs() == []
    assert RunDir.open(run.path).record.state is RunState.FAILED
