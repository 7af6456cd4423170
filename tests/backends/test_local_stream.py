"""A stream of rows gives every row what it gives alone, or is not used."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from loss_fns.cross_entropy import cross_entropy
from tests.backends.tiny import make_lora
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
