"""Log-probs where they are needed, on models with and without rules of their own for logits."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from loss_fns.cross_entropy import cross_entropy
from tests.backends.test_local_lora import load
from tests.backends.tiny import VOCAB_SIZE, make_data, make_lora
from tunebook.backends.local import logprobs
from tunebook.backends.local.base_model import verified_logits_rule
from tunebook.backends.local.engine import head, products
from tunebook.types import Datum

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig, SIZES),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, SIZES),
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2_SIZES),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**SIZES, "final_logit_softcapping": 3.0}),
    "cohere": (CohereForCausalLM, CohereConfig, {**SIZES, "logit_scale": 0.25}),
    "granite": (GraniteForCausalLM, GraniteConfig, {**SIZES, "logits_scaling": 8.0}),
}


def make_model(architecture: str):
    torch.manual_seed(0)
    model_class, config_class, sizes = ARCHITECTURES[architecture]
    return model_class(config_class(**sizes)).eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_the_models_own_logits(open_backend, tmp_path, architecture) -> None:
    """Soft caps and scales included; by the fast path on all of these."""
    model = make_model(architecture)
    model.save_pretrained(tmp_path / "model")
    session = open_backend(model=str(tmp_path / "model")).open_session(
        "a", make_lora(), directory=tmp_path
    )
    assert session._base.logits_rule is not None
    rows = [Datum(datum.tokens) for datum in make_data()]
    for datum, ours in zip(rows, session.forward(rows).result(), strict=True):
        tokens = torch.from_numpy(datum.tokens.astype(np.int64))[None]
        with torch.no_grad():
            theirs = model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
        assert torch.allclose(ours, theirs.gather(1, tokens[0, 1:, None]).squeeze(1), atol=1e-4)


class UnknownRule(LlamaForCausalLM):
    """A model that does to its logits what no config says."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


class ScaledHidden(LlamaForCausalLM):
    """A model whose head does not get what its body returns."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.lm_head.register_forward_pre_hook(lambda _module, args: (args[0] * 0.5,))


@pytest.mark.parametrize("model_class", [UnknownRule, ScaledHidden])
def test_an_unknown_rule_is_found_out(model_class) -> None:
    torch.manual_seed(0)
    # Logits so small that comparing real ones would not tell a soft cap or an offset.
    model = model_class(LlamaConfig(**{**SIZES, "initializer_range": 1e-3})).eval()
    assert verified_logits_rule(model, model.base_model, model.lm_head) is None
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    assert verified_logits_rule(plain, plain.base_model, plain.lm_head) is not None


def test_a_soft_cap_that_the_config_hides_is_found_out() -> None:
    """Gemma 2 with its cap removed from the config after the check would be wrong: seen."""
    torch.manual_seed(0)
    model = make_model("gemma2")

    class Hidden(type(model)):
        def forward(self, *args, **kwargs):
            self.config.final_logit_softcapping = 3.0
            output = super().forward(*args, **kwargs)
            self.config.final_logit_softcapping = None
            return output

    model.__class__ = Hidden
    model.config.final_logit_softcapping = None
    assert verified_logits_rule(model, model.base_model, model.lm_head) is None


def test_the_models_own_logits_serve_where_the_rule_is_unknown(
    open_backend, tmp_path, monkeypatch
) -> None:
    """Same loss and gradient as the fast path, from the full logits."""
    from tunebook.backends.local import base_model

    results = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(base_model, "verified_logits_rule", lambda *_: None)
        session = open_backend().open_session("a", make_lora(), directory=tmp_path)
        assert (session._base.logits_rule is not None) == known
        loss = session.forward_backward(make_data(), cross_entropy).result()["loss"]
        grads = [p.grad for p in session._weights.parameters.values()]
        results.append((loss, grads))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_chunks_give_the_loss_and_gradient_of_the_whole(
    open_backend, tmp_path, monkeypatch
) -> None:
    """Case 124: chunked equals unchunked to 1e-5, with an adapter on the head as well."""
    lora = make_lora(target_modules=("q_proj", "lm_head"))
    results = []
    for num_rows in (3, 1000):
        monkeypatch.setattr(logprobs, "CHUNK_LOGITS", num_rows * VOCAB_SIZE)
        session = open_backend().open_session("a", lora, directory=tmp_path)
        loss = session.forward_backward(make_data(), cross_entropy).result()["loss"]
        results.append((loss, [p.grad for p in session._weights.parameters.values()]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-5)
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.fixture
def products_of_the_head(monkeypatch):
    """A function that notes the size of each result of a session's output head, fast path or not.

    The first entry of a size is the number of rows, the second the vocabulary.
    """

    def note(session) -> list[tuple[int, int]]:
        sizes: list[tuple[int, int]] = []
        if session._engine is None:
            session._base.head.register_forward_hook(
                lambda _module, _args, output: sizes.append(tuple(output.shape))
            )
            return sizes

        def noting(inputs, weight, bias=None):
            sizes.append((len(inputs), len(weight)))
            return products.linear(inputs, weight, bias)

        monkeypatch.setattr(head, "linear", noting)
        return sizes

    return note


@pytest.mark.parametrize("fast", [True, False])
def test_only_supervised_rows_go_through_the_head(
    tmp_path, open_backend, products_of_the_head, fast: bool
) -> None:
    """Case 124: 2048 tokens, 16 of them supervised, vocabulary 50,000: at most 16 + one chunk."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 50_000, "max_position_embeddings": 4096, "head_dim": 4}
    config = LlamaConfig(**{**sizes, "hidden_size": 16, "intermediate_size": 16})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    backend = open_backend(model=str(tmp_path / "model"), fast=fast)
    session = backend.open_session("a", make_lora(), directory=tmp_path)
    weights = np.zeros(2048, np.float32)
    weights[::128] = 1 / 16
    tokens = np.random.default_rng(0).integers(3, 50_000, 2049).astype(np.int32)
    sizes = products_of_the_head(session)
    session.forward_backward([Datum(tokens, {"token_weights": weights})], cross_entropy).result()
    chunk = head.rows_at_once(50_000) if fast else logprobs.CHUNK_LOGITS // 50_000
    # The fast path fills a chunk up to SIZE_STEP and computes it once, the other one twice.
    assert 16 <= sum(rows for rows, _ in sizes) <= (32 if fast else 16 + chunk)
    sizes.clear()
    bare = Datum(tokens[:1000])
    session.forward([bare]).result()
    num_rows = sum(rows for rows, _ in sizes)
    assert 999 <= num_rows <= 999 + (head.SIZE_STEP if fast else 0)
    assert max(rows for rows, _ in sizes) <= chunk


@pytest.mark.parametrize("fast", [True, False])
def test_evaluation_memory_does_not_grow_with_rows(
    open_backend, tmp_path, products_of_the_head, fast: bool
) -> None:
    """Case 129: 8 and 80 rows: the largest logits held are one micro-batch's."""
    session = open_backend(micro_batch_tokens=64, fast=fast).open_session(
        "a", make_lora(), directory=tmp_path
    )
    sizes = products_of_the_head(session)
    peaks = []
    for num_rows in (8, 80):
        sizes.clear()
        session.forward([Datum(d.tokens) for d in make_data([10] * num_rows)]).result()
        peaks.append(max(rows * size for rows, size in sizes))
    assert peaks[0] == peaks[1] <= 64 * VOCAB_SIZE


def test_a_temperature_divides_the_logits() -> None:
    """Case 68: logits [2, 0] at 0.5 are [4, 0], and -log(1 + e^-4) is -0.01815; at 1 -0.12693.

    The gradient of the log-prob of token 0 is (1 - p) / T = 2 * 0.017986 for logit 0, and minus
    that for logit 1.
    """
    expected = torch.tensor([-0.01815, -0.12693])
    temperatures = torch.tensor([0.5, 1.0])
    logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]], requires_grad=True)
    values = logprobs.gather_logprobs(logits, torch.zeros(2, dtype=torch.int64), temperatures)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    values.sum().backward()
    slope = torch.tensor([[0.035972, -0.035972], [0.119203, -0.119203]])
    torch.testing.assert_close(logits.grad, slope, rtol=0, atol=1e-5)
    # The head of the fast path: hidden states are the logits themselves.
    found = head.target_logprobs(
        logits.detach(),
        torch.zeros(2, dtype=torch.int64),
        weight=torch.eye(2),
        bias=None,
        rule=None,
        temperatures=temperatures,
        with_slopes=True,
    )
    torch.testing.assert_close(found.logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.slopes, slope, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", [None, lambda logits: 3.0 * torch.tanh(logits / 3.0)])
def test_slopes_have_the_factor_of_the_temperature(monkeypatch, rule) -> None:
    """In several chunks, with and without a rule of the model's own, against autograd."""
    torch.manual_seed(0)
    hidden = torch.randn(90, 8, requires_grad=True)
    weight, bias = torch.randn(500, 8), torch.randn(500)
    targets = torch.randint(500, (90,))
    temperatures = torch.rand(90) + 0.3
    logits = hidden @ weight.T + bias
    logits = logits if rule is None else rule(logits)
    expected = (logits / temperatures[:, None]).log_softmax(1).gather(1, targets[:, None])[:, 0]
    (slopes,) = torch.autograd.grad(expected.sum(), hidden)
    monkeypatch.setattr(head, "CHUNK_LOGITS", 40 * 500)
    found = head.target_logprobs(
        hidden.detach(),
        targets,
        weight=weight,
        bias=bias,
        rule=rule,
        temperatures=temperatures,
        with_slopes=True,
    )
    torch.testing.assert_close(found.logprobs, expected.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found.slopes, slopes, rtol=0, atol=1e-5)


def test_large_logits_stay_finite() -> None:
    """Logits of 1e4 would overflow a plain exp; log-probs are exact there: 0 and -1e4."""
    logits = torch.tensor([[1e4, 0.0], [1e4, 0.0]])
    values = logprobs.gather_logprobs(logits, torch.tensor([0, 1]))
    assert values.tolist() == [0.0, -1e4]


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
    value = logprobs.gather_logprobs(logits, torch.tensor([3]))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(-np.log(1000), abs=1e-5)


def test_embedding_of_a_tied_model_is_not_touched_by_an_adapted_head(
    tiny, tmp_path, open_backend
) -> None:
    """Case 83: the adapter of a tied head changes logits, not the input embedding."""
    backend = open_backend(model=tiny.tied)
    session = backend.open_session("a", make_lora(target_modules=("lm_head",)), directory=tmp_path)
    model = session._base.model
    assert model.lm_head.weight is model.get_input_embeddings().weight
    session._weights.parameters["lm_head.lora_B"].data.fill_(0.1)
    tokens = torch.arange(3, 9)[None]
    plain = model.base_model(input_ids=tokens).last_hidden_state
    with session._weights.applied(dropout=False):
        adapted = model.base_model(input_ids=tokens).last_hidden_state
        logits = model(input_ids=tokens).logits
    assert torch.equal(plain, adapted)
    assert not torch.allclose(logits, model(input_ids=tokens).logits)
    assert isinstance(model.lm_head, nn.Linear)


def test_base_of_another_kind_loads(tiny) -> None:
    """Head and body are found on an untied model, and the head's name is its own."""
    base = load(tiny.untied)
    assert base.head_name == "lm_head" and base.vocab_size == VOCAB_SIZE
