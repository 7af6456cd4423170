"""Our LoRA layer: scale, targets, initial values, and PEFT's numbers."""

import json

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from peft.utils import set_peft_model_state_dict
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from loss_fns.cross_entropy import cross_entropy
from tests.backends.tiny import (
    EOS,
    VOCAB_SIZE,
    character_tokenizer,
    make_adam,
    make_data,
    make_lora,
)
from tunebook.backends.local.base_model import load_base_model
from tunebook.backends.local.lora import LoraLayer, adapter_targets, initial_lora_a
from tunebook.backends.local.weights import AdapterWeights
from tunebook.errors import ConfigError
from tunebook.types import CheckpointRef, LoraConfig

LLAMA_LEAVES = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"


def load(folder: str, dtype: torch.dtype = torch.float32):
    return load_base_model(
        folder,
        device=torch.device("cpu"),
        weight_dtype=dtype,
        compute_dtype=dtype,
        revision=None,
        trust_remote_code=False,
        allow_pickle=False,
    )


def randomise(weights: AdapterWeights) -> None:
    """Makes B non-zero, so that the adapter does something."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in weights.parameters.items():
        if name.endswith("lora_B"):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "scale"), [(8, 16.0, False, 2.0), (16, 16.0, True, 4.0)]
)
def test_delta_is_scale_times_b_a(rank: int, alpha: float, rslora: bool, scale: float) -> None:
    """Case 81: r 8, alpha 16 gives 2 B A; rslora r 16, alpha 16 gives 16 / sqrt(16) = 4 B A."""
    torch.manual_seed(0)
    linear = nn.Linear(5, 3)
    layer = LoraLayer("x", linear, make_lora(rank=rank, alpha=alpha, rslora=rslora))
    layer.lora_b.data.normal_()
    inputs = torch.randn(2, 4, 5)
    plain = linear(inputs)
    handle = linear.register_forward_hook(
        layer.hook(lora_a=layer.lora_a, lora_b=layer.lora_b, generator=None)
    )
    delta = linear(inputs) - plain
    handle.remove()
    assert torch.allclose(delta, scale * inputs @ (layer.lora_b @ layer.lora_a).T, atol=1e-5)
    assert torch.equal(linear(inputs), plain)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), "all-linear", ("lm_head", "o_proj")])
def test_same_weights_same_logits_as_peft(tiny, tied: bool, targets) -> None:
    """Cases 81, 83: same A and B in PEFT give the same logits, on a tied head too."""
    folder = tiny.tied if tied else tiny.untied
    base = load(folder)
    config = make_lora(target_modules=targets, rslora=True)
    weights = AdapterWeights(base, config)
    randomise(weights)
    tokens = torch.arange(3, 40)[None]
    with weights.applied(dropout=False), torch.no_grad():
        ours = base.model(input_ids=tokens).logits
    peft_model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        PeftConfig(
            r=config.rank,
            lora_alpha=int(config.alpha),
            use_rslora=True,
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type="CAUSAL_LM",
        ),
    )
    state = {
        f"base_model.model.{name}.weight": parameter.detach()
        for name, parameter in weights.parameters.items()
    }
    loaded = set_peft_model_state_dict(peft_model, state)
    assert not loaded.unexpected_keys
    peft_model.eval()
    with torch.no_grad():
        assert torch.allclose(peft_model(input_ids=tokens).logits, ours, atol=1e-5)
        plain = base.model(input_ids=tokens).logits
    assert not torch.allclose(plain, ours, atol=1e-2)
    trainable = sum(p.numel() for p in peft_model.parameters() if p.requires_grad)
    assert trainable == sum(p.numel() for p in weights.parameters.values())


def test_conv1d_of_gpt2_same_as_peft(tmp_path) -> None:
    """GPT-2 keeps its weights transposed; A is `[rank, in]` and B `[out, rank]` all the same."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    base = load(str(tmp_path))
    weights = AdapterWeights(base, make_lora(target_modules=("c_attn", "c_fc")))
    randomise(weights)
    tokens = torch.arange(3, 20)[None]
    with weights.applied(dropout=False), torch.no_grad():
        ours = base.model(input_ids=tokens).logits
    peft_model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path),
        PeftConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    )
    state = {
        f"base_model.model.{name}.weight": parameter.detach()
        for name, parameter in weights.parameters.items()
    }
    assert not set_peft_model_state_dict(peft_model, state).unexpected_keys
    with torch.no_grad():
        assert torch.allclose(peft_model.eval()(input_ids=tokens).logits, ours, atol=1e-5)


def test_all_linear_is_every_linear_but_the_head(tiny) -> None:
    base = load(tiny.untied)
    targets = adapter_targets(base.model, base.head, "all-linear")
    assert len(targets) == 2 * 7
    assert not any("lm_head" in name for name in targets)


@pytest.mark.parametrize(
    ("targets", "named"),
    [(("q_prj",), "q_prj"), (("q_proj", "v_prj"), "v_prj"), (("embed_tokens",), "embed_tokens")],
)
def test_every_suffix_must_match(tiny, targets: tuple[str, ...], named: str) -> None:
    """Case 86: the error names the suffix without a match and lists the leaf names."""
    base = load(tiny.untied)
    with pytest.raises(ConfigError) as error:
        AdapterWeights(base, make_lora(target_modules=targets))
    assert named in str(error.value) and LLAMA_LEAVES in str(error.value)
    assert "called q_proj" not in str(error.value)


def test_a_suffix_ends_at_a_dot(tiny) -> None:
    """`proj` is not a suffix of `q_proj`; `0.self_attn.q_proj` is one layer of two."""
    base = load(tiny.untied)
    with pytest.raises(ConfigError, match="called proj"):
        adapter_targets(base.model, base.head, ("proj",))
    targets = adapter_targets(base.model, base.head, ("layers.0.self_attn.q_proj",))
    assert list(targets) == ["model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize("targets", [(), "all-linear"])
def test_nothing_to_train_is_an_error(targets) -> None:
    """Case 86: 0 trainable parameters."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=32, num_hidden_layers=0))
    with pytest.raises(ConfigError, match="nothing would be trained"):
        adapter_targets(model, model.lm_head, targets)


@pytest.fixture(scope="module")
def with_images(tmp_path_factory) -> str:
    """A random Gemma 3 of images and text, whose two encoders name their layers alike."""
    folder = tmp_path_factory.mktemp("models") / "images"
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config={
            "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.1,
            "query_pre_attn_scalar": 8, "bos_token_id": 1, "eos_token_id": EOS,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        mm_tokens_per_image=1, boi_token_index=125, eoi_token_index=126, image_token_index=127,
        bos_token_id=1, eos_token_id=EOS,
    )  # fmt: skip
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("targets", "count"),
    # Rank 4 times inputs and outputs. A layer: q and o 32 + 32, k and v 32 + 16, MLP 3 (32 + 48).
    [
        ("all-linear", 2 * 4 * (2 * 64 + 2 * 48 + 3 * 80)),
        (("q_proj", "v_proj"), 2 * 4 * (64 + 48)),
        (("k_proj", "lm_head"), 2 * 4 * 48 + 4 * (32 + VOCAB_SIZE)),
    ],
)
def test_an_adapter_is_on_the_text_decoder_of_a_model_of_images(
    open_backend, with_images: str, tmp_path, targets, count: int
) -> None:
    """Counted so before anything is loaded; it learns, and is exported and restored."""
    lora = make_lora(target_modules=targets)
    backend = open_backend(model=with_images)
    assert backend.check(lora, None) == count
    session = backend.open_session("a", lora, directory=tmp_path)
    assert session.trainable_parameters == count
    losses = []
    for _ in range(3):
        losses.append(session.forward_backward(make_data(), cross_entropy).result()["loss"])
        session.optim_step(make_adam(learning_rate=1e-3)).result()
    assert losses[2] < losses[1] < losses[0]
    folder = session.export(session.save("s").result(), tmp_path / "out")
    named = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    peft_model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(with_images),
        PeftConfig(r=4, lora_alpha=8, target_modules=named),
    )
    trainable = sum(p.numel() for p in peft_model.parameters() if p.requires_grad)
    assert trainable == count
    expected = session.forward(make_data()).result()
    session.close()
    backend.check(lora, CheckpointRef("out", str(folder), False))
    restored = backend.open_session(
        "b", lora, directory=tmp_path, restore=CheckpointRef("s", str(tmp_path / "s"), True)
    )
    for ours, theirs in zip(restored.forward(make_data()).result(), expected, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_layers_of_an_encoder_of_images_are_none_that_can_be_named(
    open_backend, with_images: str
) -> None:
    with pytest.raises(ConfigError, match=f"called fc1; this model has {LLAMA_LEAVES}"):
        open_backend(model=with_images).check(make_lora(target_modules=("fc1",)), None)


def test_all_weights_of_a_model_of_images_are_trained(
    open_backend, with_images: str, tmp_path
) -> None:
    """Those of its encoder have no gradient from text, and stay as they are."""
    session = open_backend(model=with_images).open_session("a", None, directory=tmp_path)
    before = {name: value.detach().clone() for name, value in session._weights.parameters.items()}
    session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam(weight_decay=0.1)).result()
    for name, value in session._weights.parameters.items():
        assert torch.equal(value, before[name]) == ("language_model" not in name), name


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"rank": 0}, "lora.rank=0"), ({"alpha": 0.0}, "lora.alpha=0"), ({"dropout": 1.0}, "dropout")],
)
def test_bad_values_name_the_key(tiny, changes: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        AdapterWeights(load(tiny.untied), make_lora(**changes))


def test_initial_values_depend_on_seed_and_name_alone(tiny) -> None:
    """Case 88: A is not 0, B is, other seeds give another A; PEFT's bound is 1 / sqrt(inputs)."""
    torch.manual_seed(5)
    first = initial_lora_a("a.q_proj", (4, 100), seed=0)
    torch.manual_seed(6)
    assert torch.equal(initial_lora_a("a.q_proj", (4, 100), seed=0), first)
    assert not torch.equal(initial_lora_a("a.k_proj", (4, 100), seed=0), first)
    assert not torch.equal(initial_lora_a("a.q_proj", (4, 100), seed=1), first)
    assert 0.09 < first.abs().max() <= 0.1 and abs(first.mean()) < 0.02
    weights = AdapterWeights(load(tiny.untied), make_lora())
    for name, parameter in weights.parameters.items():
        assert (parameter == 0).all() == name.endswith("lora_B")


def test_three_jobs_one_after_another_all_learn(open_backend, tmp_path) -> None:
    """Case 88: every job begins with A != 0 and has a gradient at step 1."""
    backend = open_backend()
    norms = set()
    for seed in range(3):
        session = backend.open_session("job", make_lora(seed=seed), directory=tmp_path)
        session.forward_backward(make_data(), cross_entropy)
        norm = session.optim_step(make_adam()).result()["grad_norm"]
        assert norm > 0
        norms.add(norm)
        session.close()
    assert len(norms) == 3


def test_every_option_reaches_the_layer_and_the_export(open_backend, tmp_path) -> None:
    """Case 81: rank, alpha, rslora, dropout and targets, in the layer and in the config."""
    lora = LoraConfig(
        rank=3, alpha=6.5, dropout=0.25, target_modules=("q_proj",), seed=7, rslora=True
    )
    session = open_backend().open_session("a", lora, directory=tmp_path)
    layer = next(iter(session._weights.layers.values()))
    assert layer.scale == pytest.approx(6.5 / 3**0.5)
    assert layer.dropout == 0.25 and layer.lora_a.shape[0] == 3
    assert torch.equal(layer.lora_a, initial_lora_a(layer.name, layer.lora_a.shape, seed=7))
    folder = session.export(session.save("s").result(), tmp_path / "out")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 6.5, 0.25)
    assert config["use_rslora"] is True and config["target_modules"] == ["q_proj"]


def test_dropout_acts_in_training_only_and_repeats(open_backend, tmp_path) -> None:
    data = make_data()

    def run(dropout: float) -> tuple[list[float], torch.Tensor]:
        session = open_backend().open_session("a", make_lora(dropout=dropout), directory=tmp_path)
        losses = []
        for _ in range(3):
            losses.append(session.forward_backward(data, cross_entropy).result()["loss"])
            session.optim_step(make_adam()).result()
        once, twice = session.forward(data).result(), session.forward(data).result()
        assert torch.equal(once[3], twice[3]) or torch.allclose(once[3], twice[3], equal_nan=True)
        return losses, once[3]

    torch.manual_seed(1)
    with_dropout = run(0.5)
    torch.manual_seed(2)  # The global generator plays no part.
    assert run(0.5)[0] == with_dropout[0]
    assert run(0.0)[0][1] != with_dropout[0][1]


def test_dropout_keeps_the_mean() -> None:
    """Half of the values become 0, the others twice as large."""
    from tunebook.backends.local.lora import dropped_out

    generator = torch.Generator().manual_seed(0)
    values = dropped_out(torch.ones(1000), share=0.5, generator=generator)
    assert set(values.tolist()) == {0.0, 2.0}
    assert abs(values.mean() - 1) < 0.1


def test_dropout_on_the_head_is_the_same_when_recomputed(tiny, monkeypatch) -> None:
    """The gradient of a chunk that is computed twice belongs to the dropout of the first time."""
    from tunebook.backends.local import logprobs

    gradients = []
    for chunk_logits in (VOCAB_SIZE * 4, VOCAB_SIZE * 1000):
        monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk_logits)
        base = load(tiny.untied)
        weights = AdapterWeights(base, make_lora(target_modules=("lm_head",), dropout=0.5))
        randomise(weights)
        seen: list[torch.Tensor] = []
        batch = logprobs.collate(make_data((8,)), num_columns=11, device=base.device)
        assert weights.generator is not None
        with weights.applied(dropout=True):
            # Four rows a chunk draw their masks one after another, as one chunk of eight does.
            value = logprobs.target_logprobs(base, batch, fill=0.0, replay=weights.replay)
            state = weights.generator.get_state()
            value.sum().backward()
            assert torch.equal(weights.generator.get_state(), state)
        seen.extend(parameter.grad for parameter in weights.parameters.values())
        gradients.append((value.detach(), seen))
    assert torch.allclose(gradients[0][0], gradients[1][0], atol=1e-6)
    for ours, theirs in zip(gradients[0][1], gradients[1][1], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_layer_that_is_gone_around_is_refused(tiny) -> None:
    """A model that multiplies by a layer's weight itself would ignore an adapter on the layer."""
    base = load(tiny.untied)
    attention = base.model.model.layers[0].mlp
    original = attention.down_proj

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = original

        def forward(self, inputs):
            return inputs @ self.inner.weight.T

    attention.down_proj = Around()
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj\.inner"):
        AdapterWeights(base, make_lora(target_modules=("inner",)))


def test_bfloat16_base_keeps_float32_masters(tiny) -> None:
    base = load(tiny.untied, torch.bfloat16)
    weights = AdapterWeights(base, make_lora())
    randomise(weights)
    assert all(p.dtype == torch.float32 for p in weights.parameters.values())
    tokens = torch.arange(3, 20)[None]
    with weights.applied(dropout=False):
        logits = base.model(input_ids=tokens).logits
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 for p in weights.parameters.values()
    )


def test_a_layer_that_gives_more_than_its_output_is_refused(tiny) -> None:
    """Some routers are linear layers that return a tuple; an adapter cannot be added to that."""
    base = load(tiny.untied)

    class Router(nn.Linear):
        def forward(self, input):
            return super().forward(input), None

    class Unpacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = Router(32, 32, bias=False)

        def forward(self, inputs):
            return self.router(inputs)[0]

    base.model.model.layers[0].mlp = Unpacked()
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.router.*more than one tensor"):
        AdapterWeights(base, make_lora())
