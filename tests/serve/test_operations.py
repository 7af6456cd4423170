"""What operations of a session do, by the wire, against the engine in this process."""

from functools import partial

import numpy as np
import pytest

from loss_fns.cross_entropy import cross_entropy
from loss_fns.kl import with_kl
from loss_fns.policy import cispo, dppo, dro, gspo, importance_sampling, ppo
from tests.serve.requests import (
    ADAM,
    CROSS_ENTROPY,
    SEQUENCES,
    model_input,
    policy_inputs,
    sample_of,
)
from tunebook.backends.local import LocalBackend
from tunebook.types import AdamParams, Datum, LoraConfig, SamplingParams

pytestmark = pytest.mark.xdist_group("operations")

LOCAL_LORA = LoraConfig(4, 8.0, 0.0, "all-linear", 0, False)
LOCAL_ADAM = AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.0, 1.0)
CLIP = {"clip_low": 0.8, "clip_high": 1.2}
BOUNDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
NARROW = {"clip_low": 0.9, "clip_high": 1.3}
KL = partial(with_kl, beta=0.1, estimator="k3")
GRPO = "LOSS_TYPE_GRPO"
SEQUENCE_RATIO = {"ratio_type": "GRPO_LOSS_RATIO_TYPE_SEQUENCE"}
LENGTHS = [len(sequence) - 1 for sequence in SEQUENCES]
COUNTED = [length - 1 for length in LENGTHS]
LOSSES = {
    "cross_entropy": (CROSS_ENTROPY, cross_entropy, None),
    "importance_sampling": ({"type": "LOSS_TYPE_IMPORTANCE_SAMPLING"}, importance_sampling, None),
    "ppo": ({"type": "LOSS_TYPE_PPO"}, partial(ppo, **CLIP), None),
    "ppo_bounds": ({"type": "LOSS_TYPE_PPO", "ppo_params": BOUNDS}, partial(ppo, **NARROW), None),
    "cispo": ({"type": "LOSS_TYPE_CISPO"}, partial(cispo, clip_low=0.0, clip_high=4.0), None),
    "dppo": ({"type": "LOSS_TYPE_DPPO"}, partial(dppo, delta_low=0.15, delta_high=0.15), None),
    "dro": ({"type": "LOSS_TYPE_DRO", "dro_params": {"beta": 0.05}}, partial(dro, beta=0.05), None),
    "grpo": ({"type": GRPO}, partial(ppo, **CLIP), [3 * max(LENGTHS)] * 3),
    "grpo_token_mean": (
        {"type": GRPO, "grpo_params": {"agg_type": "GRPO_LOSS_AGGREGATION_TYPE_TOKEN_MEAN"}},
        partial(ppo, **CLIP),
        [sum(COUNTED)] * 3,
    ),
    "grpo_sequence_mean": (
        {
            "type": GRPO,
            "grpo_params": {
                "agg_type": "GRPO_LOSS_AGGREGATION_TYPE_SEQUENCE_MEAN",
                **SEQUENCE_RATIO,
            },
        },
        partial(gspo, **CLIP),
        [3 * count for count in COUNTED],
    ),
    "grpo_kl": (
        {"type": GRPO, "grpo_params": {"beta": 0.1}},
        KL(partial(ppo, **CLIP)),
        [3 * max(LENGTHS)] * 3,
    ),
}


@pytest.fixture(scope="module")
def local(server):
    with LocalBackend(model=server.model, device="cpu") as backend:
        yield backend


def local_data(name, divisors):
    """The samples of `wire_samples` in our columns, with the divisor of the loss."""
    data = []
    for number, sequence in enumerate(SEQUENCES):
        inputs = policy_inputs(sequence)
        weights = np.array(inputs.pop("weights"), np.float32)
        if name == "cross_entropy":
            weights = weights / 4
        if divisors is not None:
            weights = (weights / divisors[number]).astype(np.float32)
        columns = {"sampling_logprobs" if k == "logprobs" else k: v for k, v in inputs.items()}
        arrays = {key: np.array(value, np.float32) for key, value in columns.items()}
        data.append(Datum(np.array(sequence, np.int32), {"token_weights": weights, **arrays}))
    return data


def wire_samples(name):
    samples = []
    for sequence in SEQUENCES:
        inputs = policy_inputs(sequence)
        if name == "cross_entropy":
            inputs = {"weights": [weight / 4 for weight in inputs["weights"]]}
        samples.append(sample_of(sequence, **inputs))
    return samples


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_engine(wire, new_session, local, tmp_path, name):
    """Loss, metrics, gradient norm, log-probs, and the weights after three steps."""
    loss, loss_fn, divisors = LOSSES[name]
    session, ours = new_session(), local.open_session(name, LOCAL_LORA, directory=tmp_path)
    data = local_data(name, divisors)
    for step in range(1, 4):
        body = {"loss": loss, "samples": wire_samples(name), "return_loss_fn_outputs": True}
        forward = wire.run(session, "forward-backward", {**body, "forward_only": True})
        output = wire.run(session, "forward-backward", body)
        logprobs = [values.numpy() for values in ours.forward(data).result()]
        expected = ours.forward_backward(data, loss_fn).result()
        assert output["loss"] == pytest.approx(expected.pop("loss"), rel=1e-5, abs=1e-7)
        assert output["metrics"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert forward["loss"] == pytest.approx(output["loss"], rel=1e-4, abs=1e-6)
        for outputs in (output["loss_fn_outputs"], forward["loss_fn_outputs"]):
            for one, values in zip(outputs, logprobs, strict=True):
                tensor = one["tensors"]["logprobs"]
                assert tensor["dtype"] == "float32" and tensor["shape"] == [len(values)]
                np.testing.assert_allclose(tensor["data"], np.nan_to_num(values), atol=1e-5)
                assert tensor["data"][0] == 0  # Outside the loss.
        stepped = wire.run(session, "optim-step", {"adam_params": ADAM})
        norm = ours.optim_step(LOCAL_ADAM).result()["grad_norm"]
        assert stepped == {"step": str(step), "metrics": {"grad_norm": pytest.approx(norm)}}
    ours.close()


def test_gradients_of_the_client_are_a_loss(wire, new_session):
    """`gradients = -weights` is cross-entropy with these weights."""
    by_loss, by_gradients = new_session(), new_session()
    weights = [[0.0] + [0.5 + i / 8 for i in range(length - 1)] for length in LENGTHS]
    samples = [sample_of(s, weights=w) for s, w in zip(SEQUENCES, weights, strict=True)]
    plain = [sample_of(s, mask=[1.0] * (len(s) - 1)) for s in SEQUENCES]
    gradients = [{"data": [-w for w in row], "dtype": "D_TYPE_FLOAT32"} for row in weights]
    for _ in range(3):
        wire.forward_backward(by_loss, samples)
        body = {"samples": plain, "gradients": gradients}
        wire.run(by_gradients, "custom-forward-backward", body)
        norms = [
            wire.run(session, "optim-step", {"adam_params": ADAM})["metrics"]["grad_norm"]
            for session in (by_loss, by_gradients)
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for ours, theirs in zip(wire.logprobs(by_loss), wire.logprobs(by_gradients), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_requests_of_one_step_add_up(wire, new_session):
    """Case 7."""
    whole, parts = new_session(), new_session()
    samples = [sample_of(sequence) for sequence in SEQUENCES]
    wire.forward_backward(whole, samples)
    for sample in samples:
        wire.forward_backward(parts, [sample])
    norms = [
        wire.run(session, "optim-step", {})["metrics"]["grad_norm"] for session in (whole, parts)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_forward_leaves_the_gradient_alone(wire, new_session):
    session = new_session()
    wire.forward_backward(session, forward_only=True)
    error = wire.fail(session, "optim-step", {})
    assert error["code"] == "TRAINING_OPERATION_ERROR_CODE_INVALID_INPUT"
    assert wire.step(session) > 0


def test_completions_are_those_of_the_engine(wire, new_session, local, tmp_path):
    session, ours = new_session(), local.open_session("s", LOCAL_LORA, directory=tmp_path)
    wire.step(session)
    data = [
        Datum(np.array(s, np.int32), {"token_weights": np.ones(len(s) - 1, np.float32)})
        for s in SEQUENCES
    ]
    ours.forward_backward(data, cross_entropy).result()
    ours.optim_step(LOCAL_ADAM).result()
    assert wire.run(
        session, "weights-sync", {"weight_sync_type": "WEIGHT_SYNC_TYPE_SYNCHRONOUS"}
    ) == {"weights_version": "1"}
    generator = ours.publish_weights().result()
    for params in (
        {"max_tokens": 6, "temperature": 1.0, "seed": "7", "top_k": -1},
        {"max_tokens": 6, "temperature": 0, "seed": 7},
        {"max_tokens": 6, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 9, "stop": ["e"]},
    ):
        prompts = [[5, 60, 7], [11]]
        body = {
            "model_inputs": [model_input(prompt) for prompt in prompts],
            "num_samples": 3,
            "sampling_params": params,
        }
        results = wire.run(session, "sample", body)["results"]
        local_params = SamplingParams(
            max_tokens=6,
            temperature=params["temperature"],
            top_p=params.get("top_p", 1.0),
            top_k=max(0, params.get("top_k", 0)),
            stop=tuple(params.get("stop", ())),
            seed=int(params["seed"]),
        )
        expected = generator.sample(prompts, local_params, 3).result()
        for result, completions in zip(results, expected, strict=True):
            assert result["policy_segments"] == [{"version": 1, "start_token": 0}]
            for sequence, completion in zip(result["sequences"], completions, strict=True):
                assert sequence["tokens"] == [str(t) for t in completion.tokens]
                np.testing.assert_allclose(sequence["logprobs"], completion.logprobs, atol=1e-5)
                assert sequence["stop_reason"] == f"STOP_REASON_{completion.stop_reason.upper()}"
                assert sequence["prompt_cache_hit_tokens"] == 0
    ours.close()


def test_the_sampler_keeps_what_was_published(wire, new_session):
    """Prompt log-probs are forward's; steps reach the sampler by weights-sync only."""
    session = new_session()

    def scored():
        body = {
            "model_inputs": [model_input(sequence) for sequence in SEQUENCES],
            "sampling_params": {"max_tokens": 1},
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 3,
        }
        results = wire.run(session, "sample", body)["results"]
        for result, sequence in zip(results, SEQUENCES, strict=True):
            assert result["prompt_logprobs"][0] == 0
            tops = result["topk_prompt_logprobs"]
            assert len(tops) == len(sequence)
            assert tops[0] == {"token_ids": [], "logprobs": []}
            for top, token, logprob in zip(
                tops[1:], sequence[1:], result["prompt_logprobs"][1:], strict=True
            ):
                assert len(top["token_ids"]) == 3
                assert top["logprobs"] == sorted(top["logprobs"], reverse=True)
                assert logprob <= top["logprobs"][0] + 1e-5
                if token in top["token_ids"]:
                    found = top["logprobs"][top["token_ids"].index(token)]
                    assert found == pytest.approx(logprob, abs=1e-6)
        assert {r["policy_segments"][0]["version"] for r in results} == {version}
        return [result["prompt_logprobs"][1:] for result in results]

    def same(ours, theirs):
        pairs = zip(ours, theirs, strict=True)
        return all(np.allclose(one, other, atol=1e-3) for one, other in pairs)

    version = 0
    before = wire.logprobs(session)
    assert same(scored(), before)
    wire.step(session)
    wire.step(session)
    after = wire.logprobs(session)
    assert not same(before, after) and same(scored(), before)
    body = {"weight_sync_type": "WEIGHT_SYNC_TYPE_BACKGROUND_PUBLISH"}
    assert wire.run(session, "weights-sync", body) == {"weights_version": "2"}
    version = 2
    assert same(scored(), after)
    state = wire.get(f"training-sessions/{session}").json()["policy_state"]
    assert state == {
        "applied_weights_version": "2",
        "pending_publish": False,
        "target_weights_version": "2",
        "trainer_step": "2",
    }


def test_a_loss_that_is_no_number_changes_nothing(wire, new_session):
    session, untouched = new_session(), new_session()
    for one in (session, untouched):
        wire.forward_backward(one)
    body = {
        "samples": [sample_of(s) for s in SEQUENCES],
        "gradients": [{"data": [3e38] * (len(s) - 1)} for s in SEQUENCES],
    }
    error = wire.fail(session, "custom-forward-backward", body)
    assert error["code"] == "TRAINING_OPERATION_ERROR_CODE_NON_FINITE_LOSS"
    norms = [
        wire.run(one, "optim-step", {})["metrics"]["grad_norm"] for one in (session, untouched)
    ]
    assert norms[0] == norms[1]


def test_after_a_gradient_that_is_no_number_no_step_is_taken(wire, new_session):
    session = new_session()
    wire.step(session)
    body = {
        "samples": [sample_of(s) for s in SEQUENCES],
        "gradients": [{"data": [1e37, -1e37] * (len(s) // 2)} for s in SEQUENCES],
    }
    for sample, gradient in zip(body["samples"], body["gradients"], strict=True):
        count = len(sample["loss_fn_inputs"]["target_tokens"]["data"])
        gradient["data"] = gradient["data"][:count] + [0.0] * (count - len(gradient["data"]))
    wire.run(session, "custom-forward-backward", body)
    for _ in range(2):
        error = wire.fail(session, "optim-step", {})
        assert error["code"] == "TRAINING_OPERATION_ERROR_CODE_NON_FINITE_LOSS"
    found = wire.get(f"training-sessions/{session}").json()
    assert found["step"] == "1"


def test_sessions_that_train_at_once_do_not_touch_each_other(wire, server, new_session):
    alone = new_session()
    losses = [wire.step(alone) for _ in range(4)]
    resource = wire.resource(server.model)["id"]
    together = [new_session(resource=resource) for _ in range(2)]
    body = {"loss": CROSS_ENTROPY, "samples": [sample_of(s) for s in SEQUENCES]}
    submitted = []
    for _ in range(4):
        for session in together:
            made = wire.submit(session, "forward-backward", body).json()["id"]
            submitted.append((session, made))
            wire.submit(session, "optim-step", {"adam_params": ADAM})
    for session in together:
        found = [
            wire.wait(session, "forward-backward", operation)["output"]["loss"]
            for owner, operation in submitted
            if owner == session
        ]
        assert found == losses
    wire.post(f"model-resources/{resource}/stop", force=True)


def test_the_output_head_is_trained_unless_it_is_declined(wire, new_session):
    session = new_session(lora_config={"rank": 4, "alpha": 8})
    found = wire.get(f"training-sessions/{session}").json()["lora_config"]
    assert found["train_unembed"] is True
    losses = [wire.step(session) for _ in range(3)]
    assert losses[-1] < losses[0]
