"""A stream of rows gives every row what it gives alone, or is not used."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
)

from loss_fns.cross_entropy import cross_entropy
from tests.backends.test_local_lora import load
from tests.backends.tiny import character_tokenizer, make_lora, make_sampling
from tunebook.backends.local.logprobs import collate, target_logprobs
from tunebook.backends.local.stream import stream_hidden, supports_stream
from tunebook.types import Datum

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=6),
    "gpt2": GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


def random_model(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_of_a_stream_is_what_it_is_alone(family):
    """Case 125: no row attends to another, and positions begin at 0 in each."""
    model = random_model(FAMILIES[family])
    assert supports_stream(model, model.base_model)
    lengths = [7, 30, 2, 19]
    input_ids = torch.randint(1, 128, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together = stream_hidden(model.base_model, input_ids, lengths).split(lengths)
        for row, hidden in zip(input_ids.split(lengths), together, strict=True):
            alone = model.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(hidden, alone, rtol=0, atol=2e-6)
            torch.testing.assert_close(
                hidden, stream_hidden(model.base_model, row, [len(row)]), rtol=0, atol=1e-6
            )
    assert model.config._attn_implementation != "tunebook_row_wise"


def test_a_model_that_caps_its_scores_is_computed_with_padding():
    """Gemma 2: row-wise attention does not compute the soft cap, and says so."""
    model = random_model(Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=50.0))
    assert not supports_stream(model, model.base_model)


def rows(lengths):
    generator = np.random.default_rng(0)
    total = sum(length - 1 for length in lengths)
    return [
        Datum(
            generator.integers(1, 120, size=length).astype(np.int32),
            {"token_weights": np.full(length - 1, 1 / total, np.float32)},
        )
        for length in lengths
    ]


def gradients_of(open_backend, tmp_path, name, batches, **settings):
    session = open_backend(**settings).open_session(name, make_lora(rank=4), directory=tmp_path)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in session._weights.parameters.values():
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1
            )
    for batch in batches:
        session.forward_backward(batch, cross_entropy).result()
    return {key: value.grad.clone() for key, value in session._weights.parameters.items()}


def test_gradients_do_not_depend_on_the_micro_batches(open_backend, tmp_path):
    """Rows alone, all at once, and in two requests: the same adapter gradient."""
    data = rows([17, 40, 12, 33, 25])
    whole = gradients_of(open_backend, tmp_path, "whole", [data], micro_batch_tokens=10_000)
    alone = gradients_of(open_backend, tmp_path, "alone", [data], micro_batch_tokens=1)
    parts = gradients_of(
        open_backend, tmp_path, "parts", [data[:1], data[1:]], micro_batch_tokens=90
    )
    for key, gradient in whole.items():
        assert gradient.abs().max() > 0
        tolerance = 1e-6 * float(gradient.abs().max())
        torch.testing.assert_close(alone[key], gradient, rtol=0, atol=tolerance)
        torch.testing.assert_close(parts[key], gradient, rtol=0, atol=tolerance)


def test_stream_and_padding_agree(open_backend, tmp_path):
    """The plain way, with padding and autograd's own sums, gives the same gradient (1e-6)."""
    data = rows([17, 40, 12])
    stream = gradients_of(open_backend, tmp_path, "stream", [data])
    backend = open_backend()
    session = backend.open_session("padded", make_lora(rank=4), directory=tmp_path)
    assert session._base.streams
    object.__setattr__(session._base, "streams", False)
    with torch.no_grad():
        for parameter in session._weights.parameters.values():
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1
            )
    session.forward_backward(data, cross_entropy).result()
    for key, parameter in session._weights.parameters.items():
        torch.testing.assert_close(stream[key], parameter.grad, rtol=1e-4, atol=1e-6)


PHI3 = Phi3Config(
    **{**SIZES, "max_position_embeddings": 256},
    original_max_position_embeddings=16,
    initializer_range=0.15,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    },
)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
SCALED = {
    "longrope": PHI3,
    "dynamic": LlamaConfig(
        **{**SIZES, "max_position_embeddings": 16}, initializer_range=0.15, rope_parameters=DYNAMIC
    ),
    "dynamic in some layers": Gemma3TextConfig(
        **{**SIZES, "max_position_embeddings": 16},
        head_dim=8,
        initializer_range=0.15,
        rope_parameters={
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        layer_types=["full_attention", "sliding_attention"],
    ),
}


@pytest.mark.parametrize("kind", SCALED)
def test_the_angles_of_a_row_do_not_depend_on_the_rows_beside_or_before_it(tmp_path, kind):
    """Lengths on both sides of 16, from where on angles change; each alone in a new model."""
    random_model(SCALED[kind]).save_pretrained(tmp_path)
    data = rows([11, 41, 16, 17, 18, 12])
    expected = []
    for row in data:
        model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        tokens = torch.from_numpy(row.tokens.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        expected.append(logits.log_softmax(1).gather(1, tokens[1:, None])[:, 0])
    base = load(str(tmp_path))
    for numbers in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [1], [2], [0, 5]):
        batch = collate(
            [data[number] for number in numbers],
            num_columns=max(data[number].num_scored for number in numbers),
            device=base.device,
        )
        with torch.no_grad():
            found = target_logprobs(base, batch, fill=0.0)
        for number, logprobs in zip(numbers, found, strict=True):
            torch.testing.assert_close(
                logprobs[: data[number].num_scored], expected[number], rtol=0, atol=1e-5
            )


def test_long_rows_change_no_gradient_and_no_sample_of_short_ones(open_backend, tmp_path):
    folder = tmp_path / "model"
    random_model(PHI3).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    data = rows([11, 41, 16, 12])
    whole, alone = (
        gradients_of(
            open_backend, tmp_path, "a", [data], model=str(folder), micro_batch_tokens=tokens
        )
        for tokens in (10_000, 1)
    )
    for key, gradient in whole.items():
        torch.testing.assert_close(alone[key], gradient, rtol=1e-4, atol=1e-6)
    session = open_backend(model=str(folder)).open_session("b", make_lora(), directory=tmp_path)
    generator = session.publish_weights().result()
    prompts = [row.tokens.tolist() for row in data]
    params = make_sampling(temperature=0.0, max_tokens=4)
    together = generator.sample(prompts, params, 1).result()
    for prompt, [completion] in zip(prompts, together, strict=True):
        [[expected]] = generator.sample([prompt], params, 1).result()
        assert completion.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)
