"""Finds and loads models and tokenizers: packaged, from a folder, the cache, or a hub."""

from __future__ import annotations

import hashlib
import importlib.resources
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PLAIN_TEXT = "none"


def tunebook_home() -> Path:
    """The folder of everything tunebook keeps between runs: `$TUNEBOOK_HOME`, else a user cache."""
    configured = os.environ.get("TUNEBOOK_HOME")
    if configured:
        return Path(configured).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).expanduser() / "tunebook"


def packaged_path(uri: str) -> Path:
    """The file or folder that a `pkg://package.name/path` address names.

    Raises:
        ConfigError: no such package, or nothing at that path in it.
    """
    package, _, inner = uri.removeprefix("pkg://").partition("/")
    try:
        root = Path(str(importlib.resources.files(package)))
    except (ModuleNotFoundError, TypeError) as error:
        raise ConfigError(f"{uri}: there is no installed package {package!r}") from error
    path = root / inner
    if not path.exists():
        raise ConfigError(f"{uri}: the package {package!r} holds no {inner!r}")
    return path


def resolve_model(name: str) -> str:
    """What `from_pretrained` should be given: a folder where there is one, else the hub id.

    A hub id is first looked for under `<tunebook_home>/models/<id with / as -->`, so a model that
    was put there by hand needs no hub.

    Raises:
        ConfigError: `name` is a path that does not exist.
    """
    if name.startswith("pkg://"):
        return str(packaged_path(name))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    cached = tunebook_home() / "models" / name.replace("/", "--")
    if cached.is_dir():
        return str(cached)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(f"model.name={name}: no such folder ({folder.resolve()})")
    return name


SAMPLED_BLOCKS = 64
BLOCK_BYTES = 1 << 16


def model_fingerprint(name: str, *, revision: str | None = None) -> str:
    """Identifies what a model is made of: its files where they are local, else id and revision.

    Of a large file 64 blocks spread over it are read, so that weights of any size take no time.
    """
    resolved = Path(resolve_model(name))
    if not resolved.is_dir():
        return f"{name}@{revision or 'main'}"
    digest = hashlib.sha256()
    for path in sorted(resolved.iterdir()):
        if path.suffix not in (".safetensors", ".bin", ".json", ".jinja", ".model"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        stride = max(size // SAMPLED_BLOCKS, BLOCK_BYTES)
        with path.open("rb") as file:
            for start in range(0, size, stride):
                file.seek(start)
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]


def load_tokenizer(
    name: str,
    *,
    revision: str | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with `chat_template` put in place of its own.

    Args:
        name: as in `resolve_model`.
        revision: hub revision.
        chat_template: path of a Jinja file; `none` removes the template; None keeps it.
        trust_remote_code: allow the repository's own Python code.

    Raises:
        ConfigError: there is no such tokenizer, or no such template file.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_model(name), revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(_not_loadable("tokenizer", name, error)) from error
    if chat_template == PLAIN_TEXT:
        tokenizer.chat_template = None
    elif chat_template is not None:
        path = Path(chat_template).expanduser()
        if not path.is_file():
            raise ConfigError(f"model.chat_template={chat_template}: no such file")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def load_causal_lm(
    name: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    options: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal language model in evaluation mode, on the CPU unless `options` say otherwise.

    Args:
        name: as in `resolve_model`.
        revision: hub revision.
        dtype: of the weights.
        trust_remote_code: allow the repository's own Python code.
        allow_pickle: allow weights other than safetensors.
        options: more arguments of `from_pretrained`.

    Raises:
        ConfigError: there is no such model, or only with pickled weights.
    """
    from transformers import AutoModelForCausalLM

    try:
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                resolve_model(name),
                revision=revision,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=None if allow_pickle else True,
                **(options or {}),
            )
    except (OSError, ValueError) as error:
        raise ConfigError(_not_loadable("model", name, error)) from error
    return model.eval()


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing bars over our own display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _not_loadable(what: str, name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())
    return (
        f"model.name={name}: the {what} cannot be loaded: {reason} "
        "Give a Hub id that this machine can reach, or a folder with the model. Weights must be "
        "safetensors unless model.allow_pickle=true, and a model that needs its own code needs "
        "model.trust_remote_code=true. Where no hub can be reached: model=tiny, or "
        "model=smollm2_135m after `make smollm2`."
    )
