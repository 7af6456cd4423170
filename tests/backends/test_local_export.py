"""What is exported loads elsewhere, in a fresh process, and computes the same."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loss_fns.cross_entropy import cross_entropy
from tests.backends.tiny import TEMPLATE, make_adam, make_data, make_lora
from tunebook.backends.local.export import merge_adapter
from tunebook.backends.local.peft_format import peft_target_modules
from tunebook.errors import CheckpointError, ConfigError
from tunebook.types import CheckpointRef

PROBE = torch.arange(3, 60)[None]
LOAD_IN_FRESH_PROCESS = """
import sys, numpy as np, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
out, *folders = sys.argv[1:]
found = {}
for number, folder in enumerate(folders):
    adapter = "adapter" in folder
    load = AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM
    model = load.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.arange(3, 60)[None]).logits
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi there"}], tokenize=True, return_dict=False)
    found[f"logits_{number}"], found[f"ids_{number}"] = logits.numpy(), np.array(ids)
np.savez(out, **found)
"""


def trained(backend, lora, directory, steps: int = 3):
    session = backend.open_session("a", lora, directory=directory)
    for _ in range(steps):
        session.forward_backward(make_data(), cross_entropy)
        session.optim_step(make_adam(learning_rate=0.05)).result()
    return session


def logits_of(session) -> torch.Tensor:
    with torch.no_grad(), session._weights.applied(dropout=False):
        return session._base.model(input_ids=PROBE).logits.float()


def test_exports_load_in_a_fresh_process_with_the_same_logits(open_backend, tiny, tmp_path) -> None:
    """Cases 81, 83, 87: in peft and transformers, tied models too, with tokenizer and template."""
    exported, expected = [], []
    for name, model, lora in (
        ("adapter", tiny.untied, make_lora()),
        (
            "adapter_of_head",
            tiny.tied,
            make_lora(target_modules=("lm_head", "q_proj"), rslora=True, dropout=0.1),
        ),
        ("full", tiny.tied, None),
    ):
        session = trained(open_backend(model=model), lora, tmp_path / name)
        exported.append(session.export(session.save("last").result(), tmp_path / f"out_{name}"))
        assert exported[-1] == tmp_path / f"out_{name}"
        expected.append(logits_of(session))
        plain = AutoModelForCausalLM.from_pretrained(model)(input_ids=PROBE).logits
        assert not torch.allclose(expected[-1], plain, atol=1e-2)
        session.close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    out = tmp_path / "probe.npz"
    done = subprocess.run(
        [sys.executable, "-c", LOAD_IN_FRESH_PROCESS, str(out), *map(str, exported)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = np.load(out)
    for number, logits in enumerate(expected):
        assert torch.allclose(torch.from_numpy(loaded[f"logits_{number}"]), logits, atol=1e-4)
        assert loaded[f"ids_{number}"].tolist() == [ord(character) for character in "Hi there"]
        assert AutoTokenizer.from_pretrained(exported[number]).chat_template == TEMPLATE
    config = json.loads((exported[2] / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and config["dtype"] == "float32"


def test_full_weights_in_bfloat16_are_exported_in_it(open_backend, tiny, tmp_path) -> None:
    session = trained(open_backend(dtype="bfloat16"), None, tmp_path, steps=1)
    folder = session.export(session.save("last").result(), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    expected = session._weights.parameters["lm_head.weight"].to(torch.bfloat16)
    assert torch.equal(model.lm_head.weight, expected)


def test_the_checkpoint_is_exported_not_the_present(open_backend, tmp_path) -> None:
    session = trained(open_backend(), make_lora(), tmp_path, steps=1)
    ref, then = session.save("early").result(), logits_of(session)
    session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam(learning_rate=0.1)).result()
    session.export(ref, tmp_path / "out")
    other = open_backend().open_session(
        "b",
        make_lora(),
        directory=tmp_path,
        restore=CheckpointRef("out", str(tmp_path / "out"), False),
        with_optimizer=False,
    )
    assert torch.equal(logits_of(other), then)
    assert not torch.allclose(logits_of(session), then, atol=1e-3)


def test_a_peft_adapter_has_weights_only_and_must_fit(open_backend, tmp_path) -> None:
    session = trained(open_backend(), make_lora(), tmp_path, steps=1)
    folder = session.export(session.save("s").result(), tmp_path / "out")
    ref = CheckpointRef("out", str(folder), False)

    def restore(lora, **settings):
        open_backend().open_session("b", lora, directory=tmp_path, restore=ref, **settings)

    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        restore(make_lora())
    for lora, message in (
        (make_lora(rank=3), "lora.rank: 4 in the adapter, 3 now"),
        (make_lora(alpha=2.0), "lora.alpha: 8 in the adapter, 2.0 now"),
        (make_lora(rslora=True), "lora.rslora: False in the adapter, True now"),
        (
            make_lora(target_modules=("q_proj",)),
            r"only the checkpoint has .*down_proj.lora_A \(compare lora.target_modules",
        ),
        (None, "holds an adapter, this session trains full weights"),
    ):
        with pytest.raises(CheckpointError, match=message):
            restore(lora, with_optimizer=False)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(CheckpointError, match="use_dora=True is not supported"):
        restore(make_lora(), with_optimizer=False)


@pytest.mark.parametrize("model", ["untied", "tied"])
def test_an_exported_model_is_a_start_for_full_weights(open_backend, tiny, tmp_path, model) -> None:
    name = getattr(tiny, model)
    session = trained(open_backend(model=name), None, tmp_path, steps=1)
    folder = session.export(session.save("s").result(), tmp_path / "out")
    ref = CheckpointRef("out", str(folder), False)
    again = open_backend(model=name).open_session(
        "b", None, directory=tmp_path, restore=ref, with_optimizer=False
    )
    assert again.step == 0 and torch.equal(logits_of(again), logits_of(session))
    for lora, settings, message in (
        (None, {}, "holds no optimizer state"),
        (make_lora(), {"with_optimizer": False}, "holds a full model, .*set model.name="),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_backend(model=name).open_session(
                "c", lora, directory=tmp_path, restore=ref, **settings
            )


def test_target_names_are_short_where_that_is_unambiguous() -> None:
    modules = ["a.q_proj", "b.q_proj", "b.v_proj", "vision.v_proj", "lm_head"]
    assert peft_target_modules(modules, ["a.q_proj", "b.q_proj"]) == ["q_proj"]
    assert peft_target_modules(modules, ["a.q_proj", "b.v_proj"]) == ["a.q_proj", "b.v_proj"]


@pytest.mark.parametrize("model", ["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging(open_backend, tiny, tmp_path, model: str, dtype: str) -> None:
    """Cases 83, 84: W' = W + s B A to 1e-6 in float32, one cast after; the head comes untied."""
    name = getattr(tiny, model)
    lora = make_lora(target_modules=("lm_head", "up_proj"))
    session = trained(open_backend(model=name), lora, tmp_path)
    adapter = session.export(session.save("last").result(), tmp_path / "adapter")
    report = merge_adapter(name, adapter, tmp_path / "merged", dtype=dtype)
    assert report.num_layers == 3 and report.path == tmp_path / "merged"
    assert report.untied_head == (model == "tied")
    assert report.max_logit_difference < (1e-4 if dtype == "float32" else 0.5)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == getattr(torch, dtype) and not merged.config.tie_word_embeddings
    base = AutoModelForCausalLM.from_pretrained(name)
    parameters = session._weights.parameters
    for layer in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"):
        update = 2.0 * parameters[f"{layer}.lora_B"] @ parameters[f"{layer}.lora_A"]
        expected = (base.get_submodule(layer).weight + update).to(merged.dtype)
        tolerance = 1e-6 if dtype == "float32" else 1e-2
        assert (merged.get_submodule(layer).weight - expected).abs().max() <= tolerance
    assert torch.equal(
        merged.get_input_embeddings().weight, base.get_input_embeddings().weight.to(merged.dtype)
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == TEMPLATE
    if dtype == "float32":
        logits = merged(input_ids=PROBE).logits
        assert torch.allclose(logits, logits_of(session), atol=1e-4)


def test_merging_into_a_quantised_base_is_refused(open_backend, tiny, tmp_path) -> None:
    """Case 84."""
    session = trained(open_backend(), make_lora(), tmp_path, steps=1)
    adapter = session.export(session.save("s").result(), tmp_path / "adapter")
    quantised = tmp_path / "quantised"
    AutoTokenizer.from_pretrained(tiny.untied).save_pretrained(quantised)
    config = json.loads((Path(tiny.untied) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="the weights are quantised"):
        merge_adapter(str(quantised), adapter, tmp_path / "merged", dtype="float32")
    with pytest.raises(ConfigError, match="the weights are quantised"):
        open_backend(model=str(quantised)).open_session("b", make_lora(), directory=tmp_path)
    with pytest.raises(ConfigError, match="dtype=int4: must be one of float32, bfloat16"):
        merge_adapter(tiny.untied, adapter, tmp_path / "merged", dtype="int4")
    assert not (tmp_path / "merged").exists()
