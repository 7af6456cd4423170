"""What a local backend refuses before it loads any weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, GPT2Config

from tests.backends.tiny import make_lora
from tunebook.backends.local import backend as local_backend
from tunebook.backends.local import base_model
from tunebook.errors import CheckpointError, ConfigError
from tunebook.models import resolve_model
from tunebook.types import CheckpointRef

PACKAGED = "pkg://tunebook/assets/tiny_model"


def ref_to(folder: Path) -> CheckpointRef:
    return CheckpointRef(folder.name, str(folder), True)


@pytest.fixture
def no_weights(monkeypatch) -> None:
    """Makes loading a model an error."""

    def refuse(*_args, **_settings):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(base_model, "load_causal_lm", refuse)
    monkeypatch.setattr(local_backend, "load_causal_lm", refuse)


@pytest.fixture
def saved(open_backend, tmp_path) -> dict[str, Path]:
    """Folders of every kind that a session can begin from."""
    folders = {}
    for kind, lora in (("adapter", make_lora()), ("full", None)):
        backend = open_backend()
        session = backend.open_session("a", lora, directory=tmp_path / kind)
        ref = session.save("saved").result()
        folders[kind] = ref.path
        folders[f"exported_{kind}"] = session.export(ref, tmp_path / f"exported_{kind}")
        backend.close()
    return folders


@pytest.mark.parametrize(
    "lora",
    [None, make_lora(), make_lora(target_modules=("lm_head", "layers.1.mlp.up_proj"))],
    ids=["full", "all-linear", "suffixes"],
)
@pytest.mark.usefixtures("no_weights")
def test_what_can_be_trained_passes_without_weights(open_backend, lora) -> None:
    random_state = torch.get_rng_state()
    count = open_backend().check(lora, None)
    assert count is not None and count > 0
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "lora",
    [None, make_lora(), make_lora(target_modules=("lm_head", "layers.1.mlp.up_proj"))],
    ids=["full", "all-linear", "suffixes"],
)
def test_the_count_is_that_of_a_session(open_backend, tmp_path, lora) -> None:
    count = open_backend().check(lora, None)
    session = open_backend().open_session("a", lora, directory=tmp_path)
    assert count == session.trainable_parameters


@pytest.mark.usefixtures("no_weights")
def test_the_packaged_model_is_checked(open_backend) -> None:
    """28 layers of rank 4; hidden 128, intermediate sizes as in its config."""
    config = AutoConfig.from_pretrained(resolve_model(PACKAGED))
    hidden, inner = config.hidden_size, config.intermediate_size
    each = 4 * 2 * hidden + 3 * (hidden + inner)
    rank = make_lora().rank
    assert open_backend(model=PACKAGED).check(make_lora(), None) == 4 * rank * each


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_modules": ("q_prj", "v_proj")},
            "lora.target_modules: no linear layer is called q_prj (did you mean q_proj?); this "
            "model has down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj, or "
            "give all-linear",
        ),
        (
            {"target_modules": ()},
            "lora.target_modules=(): no layer is selected, so nothing would be trained; give "
            "all-linear or some of down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, "
            "v_proj",
        ),
        ({"rank": 0}, "lora.rank=0: must be at least 1"),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_an_adapter_that_cannot_be_trained_is_refused(open_backend, changes, message) -> None:
    with pytest.raises(ConfigError) as caught:
        open_backend().check(make_lora(**changes), None)
    assert str(caught.value) == message


@pytest.mark.parametrize("lora", [None, make_lora()], ids=["full", "adapter"])
def test_a_quantised_model_is_refused(open_backend, tiny, tmp_path, lora) -> None:
    folder = tmp_path / "quantised"
    shutil.copytree(tiny.untied, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantised: the weights are quantised"):
        open_backend(model=str(folder)).check(lora, None)


def test_conv1d_of_gpt2_is_found_without_weights(open_backend, tmp_path) -> None:
    GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32).save_pretrained(
        tmp_path
    )
    backend = open_backend(model=str(tmp_path))
    backend.check(make_lora(target_modules=("c_attn",)), None)
    with pytest.raises(ConfigError, match=r"c_atn \(did you mean c_attn\?\)"):
        backend.check(make_lora(target_modules=("c_atn",)), None)


def test_a_model_that_cannot_be_built_without_weights_is_left_to_opening(
    open_backend, saved, monkeypatch
) -> None:
    def needs_values(*_args, **_settings):
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    monkeypatch.setattr(base_model.AutoModelForCausalLM, "from_config", needs_values)
    backend = open_backend()
    backend.check(make_lora(target_modules=("q_prj",)), None)
    # Layers are not compared, the rest is.
    for kind in ("adapter", "exported_adapter"):
        backend.check(make_lora(target_modules=("q_prj",)), ref_to(saved[kind]))
        with pytest.raises(CheckpointError, match=r"lora.rank: 4 in the"):
            backend.check(make_lora(rank=2), ref_to(saved[kind]))


def test_a_start_of_this_shape_passes_without_weights(open_backend, saved, no_weights) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    backend = open_backend()
    for lora in (make_lora(), make_lora(target_modules=names, dropout=0.5, seed=9)):
        backend.check(lora, ref_to(saved["adapter"]))
        backend.check(lora, ref_to(saved["exported_adapter"]))
    backend.check(None, ref_to(saved["full"]))
    backend.check(None, ref_to(saved["exported_full"]))


ONE_LAYER = ("layers.0.mlp.up_proj",)
DIFFERENT = [
    (make_lora(rank=2), "lora.rank: 4 in the {where}, 2 now"),
    (make_lora(alpha=4.0), "lora.alpha: {alpha} in the {where}, 4.0 now"),
    (make_lora(rslora=True), "lora.rslora: False in the {where}, True now"),
    (
        make_lora(target_modules=ONE_LAYER),
        "lora.target_modules (layers model.layers.0.mlp.down_proj, model.layers.0.mlp.gate_proj, "
        "model.layers.0.self_attn.k_proj ...): {named} in the {where}, "
        "('layers.0.mlp.up_proj',) now",
    ),
]


@pytest.mark.parametrize("kind", ["adapter", "exported_adapter"])
def test_an_adapter_of_another_shape_is_refused_as_in_opening(open_backend, saved, kind) -> None:
    values = {"where": "checkpoint", "alpha": "8.0", "named": "all-linear"}
    if kind == "exported_adapter":
        config = json.loads((saved[kind] / "adapter_config.json").read_text())
        values = {"where": "adapter", "alpha": "8", "named": config["target_modules"]}
    backend = open_backend()
    for lora, message in DIFFERENT:
        with pytest.raises(CheckpointError) as caught:
            backend.check(lora, ref_to(saved[kind]))
        expected = message.format(**values)
        assert str(caught.value) == f"{saved[kind]}: does not fit this session. {expected}"


@pytest.mark.parametrize(
    ("kind", "lora", "message"),
    [
        ("adapter", None, "holds an adapter, this session trains full weights"),
        ("exported_adapter", None, "holds an adapter, this session trains full weights"),
        ("full", make_lora(), "holds full weights, this session trains an adapter"),
        ("exported_full", make_lora(), "holds a full model, .*set model.name="),
    ],
)
def test_an_adapter_does_not_begin_from_full_weights(
    open_backend, saved, kind, lora, message
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_backend().check(lora, ref_to(saved[kind]))


@pytest.mark.parametrize(
    ("targets", "good"),
    [
        ("all-linear", True),
        (r".*_proj", True),
        (r".*\.(q|k)_proj", False),
        (["q_proj"], False),
    ],
)
def test_peft_names_layers_in_three_ways(open_backend, saved, targets, good) -> None:
    """A list of suffixes, `all-linear`, or an expression for the whole name."""
    path = saved["exported_adapter"] / "adapter_config.json"
    config = {**json.loads(path.read_text()), "target_modules": targets}
    path.write_text(json.dumps(config))
    backend, ref = open_backend(), ref_to(path.parent)
    if good:
        backend.check(make_lora(), ref)
    else:
        with pytest.raises(CheckpointError, match=r"lora.target_modules \(layers model"):
            backend.check(make_lora(), ref)
        path.write_text(json.dumps({**config, "layers_to_transform": [0]}))
        backend.check(make_lora(), ref)


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("adapter", "state.json"),
        ("adapter", "adapter.safetensors"),
        ("exported_adapter", "adapter_model.safetensors"),
    ],
)
def test_a_start_with_a_file_missing_is_refused(open_backend, saved, kind, file) -> None:
    (saved[kind] / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        open_backend().check(make_lora(), ref_to(saved[kind]))


def test_a_start_that_is_not_there_is_refused(open_backend, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: there is no such checkpoint folder"):
        open_backend().check(make_lora(), ref_to(tmp_path / "nowhere"))
