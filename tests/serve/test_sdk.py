"""The service's own SDK, as it is, against a server."""

import numpy as np
import pytest
import together
from together.post_training import ModelResourcesClient, SessionClient
from together.post_training.checkpoints import download_checkpoint

from tests.serve.requests import ADAM, CROSS_ENTROPY, LORA, SEQUENCES, model_input, sample_of
from tunebook.backends.local import LocalBackend
from tunebook.types import CheckpointRef, Datum, LoraConfig

SAMPLES = [sample_of(sequence) for sequence in SEQUENCES]


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("TOGETHER_API_KEY", "any")


@pytest.fixture
def client(server):
    with together.Together(base_url=server.url) as client:
        yield client


@pytest.fixture
def resource(server):
    with ModelResourcesClient.create(base_url=server.url, base_model=server.model) as made:
        yield made


def train(session, steps=1):
    losses = []
    for _ in range(steps):
        result = session.trainer.forward_backward(samples=SAMPLES, loss=CROSS_ENTROPY)
        losses.append(result.loss)
        session.trainer.optim_step(adam_params=ADAM)
    return losses


def forward(session):
    result = session.trainer.forward(samples=SAMPLES, loss=CROSS_ENTROPY)
    return [output.tensors["logprobs"].data for output in result.loss_fn_outputs]


def test_the_catalogue_and_the_price_are_known_before(server, client):
    (model,) = client.post_training.supported_models.get().data
    assert model.base_model == server.model
    lora = model.compute_configs[0].trainer_config.lora
    assert lora.max_batch_size == 4096 and lora.max_seq_length > 100
    cost = client.post_training.model_resources.estimate_cost(base_model=server.model)
    assert cost.currency == "USD" and cost.price_per_hour == 0


def test_two_sessions_train_sample_and_stop(resource):
    with (
        resource.create_session(lora_config=LORA, display_name="one") as first,
        resource.create_session(lora_config={**LORA, "seed": 1}) as second,
    ):
        assert train(first, 2) != train(second, 2)
        losses = train(first, 3)
        assert losses[-1] < losses[0]
        assert int(first.trainer.weights_sync().weights_version) == 5
        prompts = [model_input([5, 60, 7]), model_input([11])]
        params = {"max_tokens": 5, "temperature": 0.0, "seed": 1, "stop": ["zzz"]}
        results = first.generator.sample_batch(prompts, num_samples=2, sampling_params=params)
        for result in results:
            one, other = result.sequences
            assert one.tokens == other.tokens and 1 <= len(one.tokens) <= 5  # Greedy.
            assert all(isinstance(token, str) for token in one.tokens)
            assert result.policy_segments[0].version == 5
        logprobs = first.generator.compute_logprobs(model_input(SEQUENCES[0]))
        np.testing.assert_allclose(logprobs[1:], forward(first)[0], atol=1e-3)
    assert first.session_id != second.session_id


@pytest.mark.parametrize(
    ("given", "rank", "alpha"), [({"rank": 4}, 4, 64), ({}, 32, 64), ({"alpha": 8}, 32, 8)]
)
def test_an_adapter_that_is_not_spelt_out_is_that_of_the_service(resource, given, rank, alpha):
    with resource.create_session(lora_config=given) as session:
        found = session.retrieve().lora_config
    assert (found.rank, found.alpha) == (rank, alpha)


def test_a_session_resumes_exactly(resource):
    """T26."""
    with resource.create_session(lora_config=LORA) as session:
        train(session, 2)
        checkpoint = session.create_training_checkpoint()
        assert int(checkpoint.step) == 2
        expected = train(session, 2)
    with resource.create_session(resume_from_checkpoint_id=checkpoint.id) as resumed:
        found = resumed.retrieve()
        assert found.resume_from_checkpoint_id == checkpoint.id and int(found.step) == 2
        assert int(found.policy_state.trainer_step) == 0
        assert found.lora_config.alpha == 8 and found.lora_config.train_unembed is False
        assert train(resumed, 2) == expected
    with resource.create_session(
        resume_from_checkpoint_id=checkpoint.id, load_optimizer=False, lora_config={"rank": 4}
    ) as warm:
        losses = train(warm, 2)
        assert losses[0] == expected[0] and losses[1] != expected[1]
        assert int(warm.retrieve().step) == 2
    with pytest.raises(together.BadRequestError, match="rank"):
        resource.create_session(resume_from_checkpoint_id=checkpoint.id, lora_config={"rank": 8})


def test_an_inference_checkpoint_is_downloaded_and_resumed(server, client, resource, tmp_path):
    with resource.create_session(lora_config=LORA) as session:
        train(session, 2)
        checkpoint = session.create_inference_checkpoint()
        training = session.create_training_checkpoint()
        expected = forward(session)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    variant = "CHECKPOINT_VARIANT_ADAPTER"
    paths = download_checkpoint(client, checkpoint.id, variant=variant, output_dir=adapter)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in paths}
    download_checkpoint(client, checkpoint.id, output_dir=merged)
    data = [
        Datum(np.array(s, np.int32), {"token_weights": np.ones(len(s) - 1, np.float32)})
        for s in SEQUENCES
    ]
    lora = LoraConfig(4, 8.0, 0.0, "all-linear", 0, False)
    ref = CheckpointRef("adapter", str(adapter), False)
    with LocalBackend(model=server.model, device="cpu") as backend:
        session = backend.open_session(
            "s", lora, directory=tmp_path / "s", restore=ref, with_optimizer=False
        )
        for ours, theirs in zip(session.forward(data).result(), expected, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5)
    with LocalBackend(model=str(merged), device="cpu") as backend:
        session = backend.open_session("s", lora, directory=tmp_path / "m")
        for ours, theirs in zip(session.forward(data).result(), expected, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-4)
    with resource.create_session(resume_from_checkpoint_id=checkpoint.id) as warm:
        assert int(warm.retrieve().step) == 0
        for ours, theirs in zip(forward(warm), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
    with pytest.raises(together.BadRequestError, match="training checkpoint"):
        download_checkpoint(client, training.id, output_dir=tmp_path)


def test_large_bodies_and_results_go_beside(resource):
    """T50."""
    random = np.random.default_rng(0)
    samples = [sample_of(random.integers(3, 500, 200).tolist()) for _ in range(300)]
    with resource.create_session(lora_config=LORA) as session:
        result = session.trainer.forward(samples=samples, loss=CROSS_ENTROPY)
        assert result.metrics["num_tokens"] == 300 * 199
        logprobs = [output.tensors["logprobs"].data for output in result.loss_fn_outputs]
        assert [len(values) for values in logprobs] == [199] * 300
        assert -sum(map(sum, logprobs)) == pytest.approx(result.loss, rel=1e-4)


def test_another_process_attaches(server, resource):
    """T12, T13."""
    session = resource.create_session(lora_config=LORA)
    train(session)
    other = ModelResourcesClient.attach(
        model_resources_id=resource.model_resources_id, base_url=server.url
    )
    attached = SessionClient.attach(session_id=session.session_id, base_url=server.url)
    assert attached.has_generator
    train(attached)
    assert int(session.retrieve().step) == 2
    with pytest.raises(together.BadRequestError, match="sessions of this resource are active"):
        other.stop()
    attached.detach()
    session.stop()
    gone = SessionClient.attach(session_id=session.session_id, base_url=server.url)
    with pytest.raises(together.BadRequestError, match="not running"):
        gone.trainer.optim_step(adam_params=ADAM)
    gone.detach()


def test_the_cap_is_met(resource):
    """T24."""
    sessions = [resource.create_session(lora_config=LORA) for _ in range(5)]
    with pytest.raises(RuntimeError, match="entered terminal status"):
        resource.create_session(lora_config=LORA)
    sessions[0].stop()
    resource.create_session(lora_config=LORA).stop()
    for session in sessions[1:]:
        session.stop()


def test_errors_are_those_of_the_sdk(server, resource, monkeypatch):
    with resource.create_session(lora_config=LORA) as session:
        with pytest.raises(RuntimeError, match="INVALID_INPUT"):
            session.trainer.optim_step(adam_params=ADAM)
        with pytest.raises(together.BadRequestError, match=r"samples\[0\]"):
            session.trainer.forward_backward(samples=[sample_of([5] * 5000)], loss=CROSS_ENTROPY)
        train(session)  # It goes on.
    with pytest.raises(together.NotFoundError):
        SessionClient.attach(session_id="ts-0", base_url=server.url)
    with pytest.raises(together.BadRequestError, match="this server has"):
        ModelResourcesClient.create(base_url=server.url, base_model="other")


def test_without_a_generator_the_sdk_knows(server):
    """T11."""
    with (
        ModelResourcesClient.create(
            base_url=server.url,
            base_model=server.model,
            compute_config={"num_generator_replicas": 0},
        ) as resource,
        resource.create_session(lora_config=LORA) as session,
    ):
        assert not session.has_generator
        train(session)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_full_weights_are_trained(server, client, tmp_path, optimizer):
    with ModelResourcesClient.create(
        base_url=server.url,
        base_model=server.model,
        lora_enabled=False,
        optimizer_config={optimizer: {}},
    ) as resource:
        with resource.create_session() as session:
            losses = []
            for _ in range(3):
                result = session.trainer.forward_backward(samples=SAMPLES, loss=CROSS_ENTROPY)
                losses.append(result.loss)
                params = {f"{optimizer}_params": {"learning_rate": 1e-3}}
                session.trainer.optim_step(**params)
            assert losses[-1] < losses[0]
            session.trainer.weights_sync()
            result = session.generator.sample(model_input([5]), sampling_params={"max_tokens": 2})
            assert result.policy_segments[0].version == 3
            checkpoint = session.create_inference_checkpoint()
            with pytest.raises(RuntimeError, match="entered terminal status"):
                resource.create_session()
        paths = download_checkpoint(client, checkpoint.id, output_dir=tmp_path)
        assert "model.safetensors" in {path.name for path in paths}


def test_expiry_is_extended(resource):
    before = resource.retrieve().expires_at
    after = resource.extend_expiry(seconds=86400).expires_at
    assert (after - before).total_seconds() > 80000
