"""Adapters over a base in 4 bits, computed by bitsandbytes' CPU kernels.

A user is refused it on a CPU; here the setting is put in behind that check, so that everything but
the CUDA kernels is the real thing.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from loss_fns.cross_entropy import cross_entropy
from tests.backends.test_local_check import ref_to
from tests.backends.test_local_training import parameters_of
from tests.backends.tiny import (
    character_tokenizer,
    make_adam,
    make_data,
    make_lora,
    make_sampling,
)
from tunebook.backends.local import LocalBackend, quantised
from tunebook.backends.local.lora import features_of
from tunebook.errors import CheckpointError, ConfigError


@pytest.fixture
def open_nf4(open_backend, monkeypatch):
    """A function that opens a backend with a base in 4 bits on the CPU."""
    reason = "needs bitsandbytes and accelerate: pip install 'tunebook[quant]'"
    pytest.importorskip("accelerate", reason=reason)
    modules = pytest.importorskip("bitsandbytes.nn.modules", reason=reason)
    # With these instructions bitsandbytes repacks weights on a CPU for inference alone.
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)

    def open_one(**settings) -> LocalBackend:
        backend = open_backend(**settings)
        backend._base_weights = quantised.NF4
        return backend

    return open_one


def test_a_kind_of_weights_that_is_not_known(tiny) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalBackend(model=tiny.untied, device="cpu", base_weights="int8")
    assert str(caught.value) == "backend.base_weights=int8: must be one of full, nf4"


def test_it_is_refused_off_cuda(tiny) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalBackend(model=tiny.untied, device="cpu", base_weights="nf4")
    assert str(caught.value) == (
        "backend.base_weights=nf4: a quantised base needs a CUDA device, this backend computes on "
        "cpu; use backend.base_weights=full"
    )


def test_it_is_refused_where_bitsandbytes_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(quantised, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        quantised.check_base_weights("nf4", device=torch.device("cuda"))
    assert str(caught.value) == (
        "backend.base_weights=nf4: needs bitsandbytes and accelerate, which are not installed or "
        "too old; `pip install 'tunebook[quant]'`, or use backend.base_weights=full"
    )


def test_full_weights_are_refused_before_anything_is_loaded(open_backend, tmp_path) -> None:
    backend = open_backend()
    backend._base_weights = quantised.NF4
    for begin in (
        lambda: backend.check(None, None),
        lambda: backend.open_session("a", None, directory=tmp_path),
    ):
        with pytest.raises(ConfigError) as caught:
            begin()
        assert str(caught.value) == (
            "backend.base_weights=nf4: quantised weights cannot be trained, and lora=null trains "
            "all weights; set lora, or use backend.base_weights=full"
        )
    assert backend._base is None


def test_it_trains_by_the_general_path(open_nf4, tmp_path) -> None:
    """Three steps: the loss falls, the base keeps every byte, the count is that of `check`."""
    backend, data = open_nf4(), make_data()
    session = backend.open_session("a", make_lora(), directory=tmp_path)
    model = session._base.model
    assert session._engine is None
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    assert model.lm_head.weight.dtype == torch.float32
    assert session.trainable_parameters == backend.check(make_lora(), None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = []
    for _ in range(3):
        loss = session.forward_backward(data, cross_entropy)
        session.optim_step(make_adam()).result()
        losses.append(loss.result()["loss"])
    assert losses[2] < losses[1] < losses[0]
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_computes_what_the_dequantised_weights_would(
    open_nf4, open_backend, tiny, tmp_path, dtype
) -> None:
    """Log-probs and gradients against the general path over the same values in full."""
    from bitsandbytes.functional import dequantize_4bit

    data = make_data()
    session = open_nf4(dtype=dtype).open_session("a", make_lora(), directory=tmp_path)
    values = {
        f"{name}.weight": dequantize_4bit(module.weight.data, module.weight.quant_state)
        for name, module in session._base.model.named_modules()
        if hasattr(module, "source_cls")
    }
    assert len(values) == 14
    model = AutoModelForCausalLM.from_pretrained(tiny.untied)
    model.load_state_dict({**model.state_dict(), **values})
    model.save_pretrained(tmp_path / "dequantised")
    character_tokenizer().save_pretrained(tmp_path / "dequantised")
    other = open_backend(model=str(tmp_path / "dequantised"), fast=False, dtype=dtype)
    expected = other.open_session("a", make_lora(), directory=tmp_path)
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    for each in (session, expected):
        # Of a new adapter B is 0, and with it the gradient of A.
        torch.manual_seed(0)
        for name, parameter in each._weights.parameters.items():
            if name.endswith("lora_B"):
                parameter.data.normal_(std=0.05)
        each.forward_backward(data, cross_entropy).result()
    for name, parameter in session._weights.parameters.items():
        reference = expected._weights.parameters[name].grad
        assert (parameter.grad - reference).norm() <= tolerance * reference.norm(), name
    for ours, theirs in zip(
        session.forward(data).result(), expected.forward(data).result(), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=10 * tolerance, equal_nan=True)


def test_a_checkpoint_goes_on_over_the_same_kind_of_base_only(
    open_nf4, open_backend, tmp_path
) -> None:
    data = make_data()
    session = open_nf4().open_session("a", make_lora(), directory=tmp_path)
    session.forward_backward(data, cross_entropy)
    session.optim_step(make_adam())
    ref = session.save("one").result()
    session.forward_backward(data, cross_entropy)
    session.optim_step(make_adam())
    session.forward(data).result()
    resumed = open_nf4().open_session("a", make_lora(), directory=tmp_path, restore=ref)
    resumed.forward_backward(data, cross_entropy)
    resumed.optim_step(make_adam()).result()
    values = parameters_of(resumed)
    assert all(torch.equal(value, values[name]) for name, value in parameters_of(session).items())
    with pytest.raises(CheckpointError, match=r"base model: .*\(nf4-\w{32}\) in the checkpoint"):
        open_backend().open_session("a", make_lora(), directory=tmp_path, restore=ref)


def test_an_exported_adapter_is_one_over_the_full_base(
    open_nf4, open_backend, tiny, tmp_path
) -> None:
    """PEFT and our own full base compute the same with it; a quantised base starts from it."""
    peft = pytest.importorskip("peft")
    data = make_data()
    backend = open_nf4()
    session = backend.open_session("a", make_lora(), directory=tmp_path)
    session.forward_backward(data, cross_entropy)
    session.optim_step(make_adam())
    folder = session.export(session.save("one").result(), tmp_path / "exported")
    again = backend.open_session(
        "b", make_lora(seed=1), directory=tmp_path, restore=ref_to(folder), with_optimizer=False
    )
    values = parameters_of(again)
    assert all(torch.equal(value, values[name]) for name, value in parameters_of(session).items())
    full = open_backend().open_session(
        "a", make_lora(), directory=tmp_path, restore=ref_to(folder), with_optimizer=False
    )
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny.untied), folder
    )
    tokens = torch.tensor(data[3].tokens, dtype=torch.int64)[None]
    with torch.no_grad():
        logprobs = model(input_ids=tokens).logits.log_softmax(-1)[0, :-1]
    expected = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
    ours = full.forward(data).result()[3]
    scored = ~ours.isnan()
    assert torch.allclose(ours[scored], expected[scored], atol=1e-4)


def test_it_samples_from_what_was_published(open_nf4, tmp_path) -> None:
    session = open_nf4().open_session("a", make_lora(), directory=tmp_path)
    generator = session.publish_weights().result()
    first = generator.sample([[5, 6], [7]], make_sampling(), 2).result()
    session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam(learning_rate=1.0)).result()
    second = generator.sample([[5, 6], [7]], make_sampling(), 2).result()
    for ours, theirs in zip(first, second, strict=True):
        assert [list(one.tokens) for one in ours] == [list(one.tokens) for one in theirs]


def test_conv1d_is_quantised_and_exported_as_what_it_was(open_nf4, tmp_path) -> None:
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    character_tokenizer().save_pretrained(tmp_path / "gpt2")
    lora = make_lora(target_modules=("c_attn", "c_proj"))
    backend = open_nf4(model=str(tmp_path / "gpt2"))
    session = backend.open_session("a", lora, directory=tmp_path)
    layer = session._base.model.transformer.h[0].attn.c_attn
    assert layer.weight.dtype == torch.uint8 and features_of(layer) == (96, 32)
    assert session.trainable_parameters == backend.check(lora, None)
    session.forward_backward(make_data(), cross_entropy).result()
    session.optim_step(make_adam()).result()
    folder = session.export(session.save("one").result(), tmp_path / "exported")
    assert json.loads((folder / "adapter_config.json").read_text())["fan_in_fan_out"] is True
