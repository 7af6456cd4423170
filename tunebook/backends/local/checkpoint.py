"""Checkpoints as folders: complete or ignored.

    <directory>/<name>/adapter.safetensors | model.safetensors    weights, float32
                       optimizer.safetensors                       <parameter>.<state name>
                       state.json                                  written last

`state.json` holds the SHA-256 of the other files, and what does not match it is not read. A folder
is written under a temporary name, flushed to disk, and renamed.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tunebook.errors import BackendError, CheckpointError
from tunebook.types import CheckpointRef, LoraConfig

FORMAT = 2
STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
ADAPTER_FILE = "adapter.safetensors"
MODEL_FILE = "model.safetensors"
TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp(?P<old>\.old)?")
"""Names of half-written folders (`.tmp`), and of those they were about to replace (`.old`)."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Everything about a checkpoint but its tensors."""

    step: int
    optimizer: str | None
    """adamw or muon; None before the first step."""
    untouched: tuple[str, ...]
    """Parameters that no step has reached, so that the optimizer keeps nothing for them."""
    lora: LoraConfig | None
    targets: tuple[str, ...]
    """Names of the layers that carry the adapter."""
    base_name: str
    base_fingerprint: str
    random: dict[str, str] | None
    """Device and state (base64) of the dropout generator."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """File -> SHA-256; filled in when the files are written."""


def save_checkpoint(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: CheckpointState,
) -> None:
    """Writes a checkpoint; afterwards `folder` is the whole of it, or what it was before.

    Raises:
        CheckpointError: it cannot be written.
    """
    tensors_of_file = {weights_file(state): weights, OPTIMIZER_FILE: optimizer}
    num_bytes = sum(
        tensor.numel() * tensor.element_size()
        for tensors in tensors_of_file.values()
        for tensor in tensors.values()
    )
    with replaced_folder(folder, num_bytes=num_bytes) as temporary:
        for file, tensors in tensors_of_file.items():
            on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
            save_file(on_cpu, temporary / file)
        digests = {file: digest_of(temporary / file) for file in tensors_of_file}
        text = json.dumps({"format": FORMAT, **asdict(replace(state, digests=digests))}, indent=1)
        # Last: its presence says that everything else is there.
        flush_folder(temporary)
        (temporary / STATE_FILE).write_text(text, encoding="utf-8")


def read_state(folder: Path) -> CheckpointState:
    """What a complete checkpoint says about itself.

    Raises:
        CheckpointError: there is no checkpoint, or only an incomplete one.
    """
    path = folder / STATE_FILE
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint folder")
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: not a complete checkpoint ({STATE_FILE}, which is written last, is missing)"
        )
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path}: written by another version of tunebook (format {FORMAT})")
    try:
        return _parsed_state(values)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not what a checkpoint holds: {error!r}") from error


def _parsed_state(values: dict[str, Any]) -> CheckpointState:
    lora = values.pop("lora")
    if lora is not None:
        targets = lora.pop("target_modules")
        lora = LoraConfig(
            **lora, target_modules=targets if isinstance(targets, str) else tuple(targets)
        )
    return CheckpointState(
        lora=lora,
        targets=tuple(values.pop("targets")),
        untouched=tuple(values.pop("untouched")),
        **values,
    )


def weights_file(state: CheckpointState) -> str:
    """The name of the file that holds the weights of a checkpoint."""
    return MODEL_FILE if state.lora is None else ADAPTER_FILE


def read_weights(folder: Path, state: CheckpointState) -> dict[str, Tensor]:
    """Name -> weight of a checkpoint.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    return _read_verified(folder / weights_file(state), state)


def read_optimizer(folder: Path, state: CheckpointState) -> dict[str, Tensor]:
    """The optimizer state of a checkpoint.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    return _read_verified(folder / OPTIMIZER_FILE, state)


def _read_verified(path: Path, state: CheckpointState) -> dict[str, Tensor]:
    expected, found = state.digests.get(path.name), digest_of(path)
    if found != expected:
        raise CheckpointError(
            f"{path}: damaged or changed since it was saved (SHA-256 {found}, saved as "
            f"{expected}); use another checkpoint"
        )
    return read_tensors(path)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, 64 hex digits.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def pack_random_state(generator: torch.Generator | None) -> dict[str, str] | None:
    """The state of a generator as JSON values."""
    if generator is None:
        return None
    state = base64.b64encode(generator.get_state().numpy().tobytes()).decode()
    return {"device": generator.device.type, "state": state}


def unpack_random_state(generator: torch.Generator, packed: Mapping[str, str]) -> None:
    """Puts a saved state into a generator.

    Raises:
        CheckpointError: it was saved on another kind of device, whose random numbers differ.
    """
    if packed["device"] != generator.device.type:
        raise CheckpointError(
            f"the dropout of this checkpoint was drawn on {packed['device']}, which "
            f"{generator.device.type} cannot continue; use the same device, or start from its "
            "weights only"
        )
    values = bytearray(base64.b64decode(packed["state"]))
    generator.set_state(torch.frombuffer(values, dtype=torch.uint8))


@contextmanager
def replaced_folder(target: Path, *, num_bytes: int) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block ends well.

    Args:
        target: the folder to make or replace.
        num_bytes: about how much will be written, checked against the free space first.

    Raises:
        CheckpointError: no space, or the disk refuses; `target` is then as it was.
    """
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < num_bytes:
            raise CheckpointError(
                f"{target}: cannot be written, {num_bytes} bytes are needed and {free} are free"
            )
        temporary.mkdir()
        yield temporary
        _open_to_readers(temporary)
        flush_folder(temporary)
        _swap(temporary, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{target}: cannot be written ({num_bytes} bytes needed): {error}"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    """Lets those read files who may read the folder; safetensors writes for its owner alone."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(mode)


def clean_up(directory: Path) -> None:
    """Removes what saves that were cut short have left in a directory.

    Half-written folders go. A folder that was moved aside, to be replaced by one that never came,
    gets its name back.

    Args:
        directory: holds checkpoints, and nothing is being saved in it; need not exist.

    Raises:
        CheckpointError: a folder cannot be moved back.
    """
    if not directory.is_dir():
        return
    left = [
        (path, match)
        for path in directory.iterdir()
        if (match := TEMPORARY.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    # The newest of those moved aside first; the others find its name taken and go.
    for path, match in sorted(left, key=lambda one: one[0].stat().st_mtime_ns, reverse=True):
        target = directory / match["name"]
        if match["old"] and not target.exists():
            try:
                path.rename(target)
            except OSError as error:
                raise CheckpointError(
                    f"{path}: cannot be moved back to {target.name}: {error}"
                ) from error
    for path, _ in left:
        shutil.rmtree(path, ignore_errors=True)


def flush_folder(folder: Path) -> None:
    """Forces the files of a folder, and the folder itself, to the disk."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    _flush_directory(folder)


def _swap(temporary: Path, target: Path) -> None:
    old = target.parent / f"{temporary.name}.old"
    if target.exists():
        target.rename(old)
        try:
            temporary.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old)
    else:
        temporary.rename(target)
    _flush_directory(target.parent)


def _flush_directory(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_name(name: str) -> None:
    """Returns if a checkpoint can be called so.

    Raises:
        BackendError: it cannot.
    """
    if not name or name.startswith(".") or Path(name).name != name:
        # Folders that begin with a dot are half-written ones.
        raise BackendError(
            f"save({name!r}): a checkpoint's name is one folder name that does not begin with a dot"
        )


def discard(ref: CheckpointRef, directory: Path) -> None:
    """Deletes a checkpoint of a session; one already gone is no error.

    Args:
        ref: the checkpoint.
        directory: where the session keeps its own.

    Raises:
        CheckpointError: it is another's.
    """
    if ref.path.parent.resolve() != directory.resolve():
        raise CheckpointError(
            f"{ref.path}: not a checkpoint of this session, which keeps its own in {directory}"
        )
    if ref.path.exists():
        # First the file that makes it complete: a deletion cut short leaves nothing to restore.
        (ref.path / STATE_FILE).unlink(missing_ok=True)
        shutil.rmtree(ref.path)


def check_tensors(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, path: Path
) -> None:
    """Returns if tensors have the names and shapes of a session's parameters.

    Raises:
        CheckpointError: names or shapes differ.
    """
    for name in sorted(parameters.keys() ^ tensors.keys()):
        owner = "this session" if name in parameters else "the checkpoint"
        raise CheckpointError(
            f"{path}: does not fit this session, only {owner} has {name} "
            "(compare lora.target_modules)"
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(tensors[name].shape)}, "
                f"this session needs {tuple(parameter.shape)}"
            )
