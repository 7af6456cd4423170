"""What a server refuses, and what it says: every message names the field."""

import copy
import json
import tracemalloc

import numpy as np
import pytest

from tests.serve.requests import CROSS_ENTROPY, model_input, policy_inputs, sample_of
from tunebook.serve.errors import ApiError
from tunebook.serve.operations import Limits, OptimStep, Sample, merged, read_request
from tunebook.serve.values import parse_json, read_floats, read_int, read_integers
from tunebook.types import AdamParams, MuonParams

LIMITS = Limits(vocab_size=100, max_seq_len=16, max_samples=8)
SEQUENCE = [5, 6, 7, 8]
PPO = {"type": "LOSS_TYPE_PPO"}
FB = "forward-backward"


def forward_backward(**changes):
    body = {"loss": CROSS_ENTROPY, "samples": [sample_of(SEQUENCE)]}
    return {**copy.deepcopy(body), **changes}


def policy(loss=PPO, drop=(), **inputs):
    given = {**policy_inputs(SEQUENCE), **inputs}
    del given["reference_logprobs"]
    kept = {name: values for name, values in given.items() if name not in drop}
    return {"loss": loss, "samples": [sample_of(SEQUENCE, **kept)]}


def with_tensor(name="weights", **tensor):
    body = forward_backward()
    body["samples"][0]["loss_fn_inputs"][name] = {
        "data": [1.0, 1.0, 1.0],
        "dtype": "float32",
        **tensor,
    }
    return body


def with_tokens(tokens):
    body = forward_backward()
    body["samples"][0]["model_input"] = model_input(tokens)
    return body


def custom(gradients, **inputs):
    inputs = inputs or {"mask": [1.0] * 3}
    return {"samples": [sample_of(SEQUENCE, **inputs)], "gradients": gradients}


def sample(**changes):
    return {"model_inputs": [model_input(SEQUENCE)], **changes}


def sampling(**params):
    return sample(sampling_params=params)


BAD = {
    "no loss": (FB, {"samples": []}, "loss: is missing"),
    "unknown loss": (FB, forward_backward(loss={"type": "LOSS_TYPE_DPO"}), "loss.type"),
    "a short name": (FB, forward_backward(loss={"type": "ppo"}), "LOSS_TYPE_PPO"),
    "params of another": (FB, policy({**PPO, "dro_params": {"beta": 1}}), "dro_params"),
    "unknown param": (FB, policy({**PPO, "ppo_params": {"clip": 1}}), "loss.ppo_params"),
    "no beta": (FB, policy({"type": "LOSS_TYPE_DRO"}), "loss.dro_params.beta: is missing"),
    "clip above 1": (
        FB,
        policy({**PPO, "ppo_params": {"clip_low_threshold": 1.5}}),
        "loss.ppo_params.clip_low_threshold: is 1.5",
    ),
    "bad aggregation": (
        FB,
        policy({"type": "LOSS_TYPE_GRPO", "grpo_params": {"agg_type": "SUM"}}),
        "loss.grpo_params.agg_type",
    ),
    "no reference": (
        FB,
        policy({"type": "LOSS_TYPE_GRPO", "grpo_params": {"beta": 0.1}}),
        "samples[0].loss_fn_inputs.reference_logprobs: is missing",
    ),
    "no samples": (FB, forward_backward(samples=[]), "samples: has 0 entries"),
    "too many samples": (FB, forward_backward(samples=[sample_of(SEQUENCE)] * 9), "from 1 to 8"),
    "samples no list": (FB, forward_backward(samples={}), "samples: must be a list"),
    "sample no object": (FB, forward_backward(samples=[3]), "samples[0]: must be an object"),
    "unknown key": (FB, forward_backward(extra=1), "'extra'"),
    "flag no boolean": (FB, forward_backward(forward_only=1), "forward_only"),
    "no logprobs": (FB, policy(drop=["logprobs"]), "loss_fn_inputs.logprobs: is missing"),
    "no advantages": (FB, policy(drop=["advantages"]), "loss_fn_inputs.advantages: is missing"),
    "weights and mask": (FB, policy(mask=[1.0] * 3), "both weights and mask"),
    "no weights": (FB, {**policy(), "loss": CROSS_ENTROPY}, "samples[0].loss_fn_inputs"),
    "wrong dtype": (FB, with_tensor("target_tokens", dtype="float32"), "target_tokens'].dtype"),
    "wrong length": (FB, with_tensor(data=[1.0]), "1 values for 3 input tokens"),
    "wrong shape": (FB, with_tensor(shape=[1, 3]), "shape: must be [3]"),
    "sparse": (FB, with_tensor(sparse_col_indices=[1]), "sparse"),
    "nested data": (FB, with_tensor(data=[[1.0], [2.0], [3.0]]), "data[0]"),
    "text in data": (FB, with_tensor(data=[1.0, "x", 3.0]), "data[1]: must be a number"),
    "too large for float32": (FB, with_tensor(data=[1.0, 1e39, 3.0]), "data[1]"),
    "no data": (FB, with_tensor(data=None), "data: is missing"),
    "token of no vocabulary": (FB, with_tokens([5, 6, 100]), "tokens[2]: is 100"),
    "negative token": (FB, with_tokens([5, 6, -1]), "tokens[2]: is -1"),
    "fractional token": (FB, with_tokens([5, 6, 7.5]), "tokens[2]"),
    "huge token": (FB, with_tokens([5, 6, 2**70]), "tokens[2]"),
    "no tokens": (FB, with_tokens([]), "tokens: is empty"),
    "too long": (FB, forward_backward(samples=[sample_of([5] * 18)]), "17 tokens"),
    "unlike targets": (FB, with_tokens([5, 9, 7]), "target_tokens[0]: is 6"),
    "no chunks": (FB, forward_backward(samples=[{**sample_of(SEQUENCE), "model_input": {"chunks": []}}]), "chunks"),
    "image": (FB, forward_backward(samples=[{**sample_of(SEQUENCE), "model_input": {"chunks": [{"image": 1}]}}]), "'image'"),
    "experts": (FB, forward_backward(samples=[{**sample_of(SEQUENCE), "routed_experts_key": "k"}]), "routed_experts_key"),
    "gradient count": ("custom-forward-backward", custom([]), "0 entries for 1 samples"),
    "gradient length": (
        "custom-forward-backward",
        custom([{"data": [1.0]}]),
        "gradients[0].data: has 1 values for 3",
    ),
    "gradient dtype": (
        "custom-forward-backward",
        custom([{"data": [1.0] * 3, "dtype": "D_TYPE_INT64"}]),
        "gradients[0].dtype",
    ),
    "both optimizers": ("optim-step", {"adam_params": {}, "muon_params": {}}, "exclude"),
    "negative rate": ("optim-step", {"adam_params": {"learning_rate": -1}}, "learning_rate"),
    "beta of 1": ("optim-step", {"adam_params": {"beta1": 1.0}}, "beta1: is 1, must be below 1"),
    "rate as text": ("optim-step", {"adam_params": {"learning_rate": "1"}}, "must be a number"),
    "no such sync": ("weights-sync", {"weight_sync_type": "NOW"}, "weight_sync_type"),
    "no sync": ("weights-sync", {}, "weight_sync_type: is missing"),
    "no prompts": ("sample", sample(model_inputs=[]), "model_inputs"),
    "too many completions": ("sample", sample(num_samples=9), "num_samples"),
    "no room": ("sample", sample(model_inputs=[model_input([5] * 16)]), "no room"),
    "no tokens wanted": ("sample", sampling(max_tokens=0), "max_tokens"),
    "cold": ("sample", sampling(temperature=-0.5), "temperature"),
    "almost cold": ("sample", sampling(temperature=1e-9), "temperature"),
    "no mass": ("sample", sampling(top_p=0), "top_p"),
    "too much mass": ("sample", sampling(top_p=1.5), "top_p"),
    "stop no list": ("sample", sampling(stop="x"), "stop: must be a list"),
    "empty stop": ("sample", sampling(stop=["a", ""]), "stop[1]: is empty"),
    "half a character": ("sample", sampling(stop=["\ud800"]), "surrogate"),
    "seed": ("sample", sampling(seed=2**63), "seed"),
    "top logprobs": ("sample", sample(topk_prompt_logprobs=21), "topk_prompt_logprobs"),
    "checkpoint with a body": ("training-checkpoint", {"name": "x"}, "'name'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_by_name(name):
    kind, body, expected = BAD[name]
    with pytest.raises(ApiError) as caught:
        read_request(kind, body, LIMITS)
    assert caught.value.status == 400 and expected in caught.value.message
    assert len(caught.value.message) < 500


def test_int64_may_be_text():
    body = forward_backward()
    body["samples"][0]["model_input"] = model_input(["5", 6, "7"])
    request = read_request(FB, body, LIMITS)
    assert request.data[0].tokens.tolist() == SEQUENCE
    assert read_request("sample", sampling(seed="-1"), LIMITS).params.seed == 2**64 - 1
    for text in ("1_0", " 1", "0x1", "1.0", "٣", "1" * 30):
        with pytest.raises(ApiError):
            read_int(text, "x", low=0, high=100)


def test_chunks_concatenate():
    chunks = [{"encoded_text": {"tokens": tokens}} for tokens in ([5], [6, 7])]
    body = forward_backward()
    body["samples"][0]["model_input"] = {"chunks": chunks}
    assert read_request(FB, body, LIMITS).data[0].tokens.tolist() == SEQUENCE


def test_a_target_without_weight_may_be_any():
    body = policy(weights=[0.0, 1.0, 1.0])
    body["samples"][0]["loss_fn_inputs"]["target_tokens"]["data"] = [99, 7, 8]
    assert read_request(FB, body, LIMITS).data[0].tokens.tolist() == SEQUENCE


def test_policy_losses_select_and_cross_entropy_weighs():
    """T40."""
    weights = [0.0, 0.25, -2.0]
    columns = read_request(FB, policy(weights=weights), LIMITS).data[0].columns
    assert columns["token_weights"].tolist() == [0, 1, 1]
    body = forward_backward(samples=[sample_of(SEQUENCE, weights=weights)])
    columns = read_request(FB, body, LIMITS).data[0].columns
    assert columns["token_weights"].tolist() == weights
    columns = read_request(FB, policy(drop=["weights"]), LIMITS).data[0].columns
    assert columns["token_weights"].tolist() == [1, 1, 1]


def test_defaults_are_the_services():
    assert read_request("optim-step", {}, LIMITS) == OptimStep(
        AdamParams(1e-4, 0.9, 0.95, 1e-8, 0.0, 1.0)
    )
    muon = read_request("optim-step", {"muon_params": {"learning_rate": 1}}, LIMITS).params
    assert isinstance(muon, MuonParams) and muon.momentum == 0.95 and muon.max_grad_norm == 1
    found = read_request("sample", sample(), LIMITS)
    assert isinstance(found, Sample)
    assert found.num_samples == 1 and not found.prompt_logprobs and found.top_logprobs == 0
    assert found.params.max_tokens == 16 and found.params.temperature == 1
    assert found.params.top_k == 0 and found.params.seed is None


def test_a_payload_replaces_its_shortened_copy():
    inline = {"samples": [{"short": 1}], "forward_only": True, "payload_id": "p"}
    assert merged(inline, {"samples": [{"whole": 1}]}) == {
        "samples": [{"whole": 1}],
        "forward_only": True,
        "payload_id": "p",
    }
    with pytest.raises(ApiError, match="1 inline, 2 in the payload"):
        merged(inline, {"samples": [{}, {}]})
    with pytest.raises(ApiError, match="payload: must be an object"):
        merged(inline, [])


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", "[Infinity]", "[" * 100_000, '{"a": 1' + "0" * 5000 + "}", b"\xff"]
)
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ApiError) as caught:
        parse_json(text if isinstance(text, bytes) else text.encode())
    assert caught.value.status == 400


@pytest.mark.parametrize("values", [[True, "1"], [None], [{}], [[1]], ["x"], [1, [2]], "1", {}, 3])
def test_only_numbers_are_numbers(values):
    for read in (read_integers, read_floats):
        with pytest.raises(ApiError):
            read(values, "x")


def test_numbers_keep_their_values():
    np.testing.assert_array_equal(read_integers([1, 2.0, "3"], "x"), [1, 2, 3])
    assert read_floats([1, 2.5], "x").dtype == np.float32
    assert read_floats([], "x").shape == (0,)
    assert json.loads(json.dumps(read_floats([0.1], "x").tolist())) == [np.float32(0.1)]


def test_a_boolean_among_integers_is_none():
    for read in (read_integers, read_floats):
        with pytest.raises(ApiError, match=r"x\[1\]"):
            read([1, True], "x")


def test_one_long_text_takes_no_room_for_the_others():
    """An array of texts would hold 1,001 of 10,000 characters: 40 MB."""
    values = [1] * 1000 + ["9" * 10_000]
    for read in (read_integers, read_floats):
        tracemalloc.start()
        try:
            with pytest.raises(ApiError, match=r"x\[1000\]"):
                read(values, "x")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1e6
