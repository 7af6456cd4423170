"""The local backend with its model split over several processes."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tunebook.backends.base import Capabilities
from tunebook.backends.local.backend import LocalBackend
from tunebook.backends.local.base_model import BaseModel, resolve_device
from tunebook.backends.local.checkpoint import clean_up
from tunebook.backends.local.distributed.launching import current_member
from tunebook.backends.local.distributed.session import ShardedSession
from tunebook.backends.local.distributed.sharding import ModelSettings
from tunebook.backends.local.quantised import FULL
from tunebook.backends.local.session import LocalSession, SessionSettings
from tunebook.backends.local.vllm_generator import TORCH
from tunebook.errors import BackendError, ConfigError
from tunebook.models import resolve_model
from tunebook.types import CheckpointRef, LoraConfig


class ShardedBackend(LocalBackend):
    """One base model on the devices of all processes of a launch, one session at a time.

    It computes what `LocalBackend` computes and takes the same settings; `micro_batch_tokens`
    counts for each process. Where `lora.dropout` is above 0, every process draws its own masks.
    """

    __signature__ = inspect.signature(LocalBackend)

    def __init__(self, *, device: str = "auto", **settings: Any) -> None:
        """As `LocalBackend`, but for one setting.

        Args:
            device: auto (cuda where there is one, else cpu), cuda, or cpu. Each process takes the
                CUDA device of its own number.
            settings: see `LocalBackend`.

        Raises:
            ConfigError: a value that is not allowed, or a device that is not there.
        """
        kind = process_device(device)
        for key, only in (("base_weights", FULL), ("generator", TORCH)):
            if settings.get(key, only) != only:
                raise ConfigError(
                    f"backend.{key}={settings[key]}: several processes have backend.{key}={only} "
                    "only; use that, or one process"
                )
        super().__init__(device=kind, **settings)
        self._kind = kind
        self._open: ShardedSession | None = None
        self._opened_model = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_sessions=1, optimizers=frozenset({"adamw"}))

    def open_session(
        self,
        name: str,
        lora: LoraConfig | None,
        *,
        directory: Path,
        restore: CheckpointRef | None = None,
        with_optimizer: bool = True,
    ) -> LocalSession:
        if self._closed:
            raise BackendError("this backend is closed")
        if self._open is not None:
            raise BackendError(
                f"session {name!r} cannot be opened beside {self._open.name!r}: in several "
                "processes one session is open at a time; close that one, or use one process"
            )
        with self._queue.paused():
            clean_up(Path(directory))
            member = current_member()
            weight_dtype = torch.float32 if lora is None else self._dtype
            settings = ModelSettings(
                name=self._model,
                device=self._kind,
                weight_dtype=weight_dtype,
                compute_dtype=self._dtype,
                revision=self._revision,
                trust_remote_code=self._trust_remote_code,
                allow_pickle=self._allow_pickle,
                micro_batch_tokens=self._tokens_at_once(None),
            )
            self._opened_model = True
            member.call("open", settings, lora)
        session: Any = ShardedSession(
            name,
            member=member,
            queue=self._queue,
            settings=SessionSettings(
                directory=Path(directory),
                micro_batch_tokens=self._tokens_at_once(None),
                max_seq_len=self._read_max_seq_len(),
                export_name=resolve_model(self._model),
                load_tokenizer=self._load_tokenizer,
            ),
            on_close=self._forget_session,
        )
        self._open = session
        try:
            if restore is not None:
                self._restore(session, lora, restore, with_optimizer=with_optimizer)
        except BaseException:
            session.close()
            raise
        return session

    def close(self) -> None:
        if self._closed:
            return
        if self._open is not None:
            self._open.close()
        self._closed = True
        if self._opened_model and not current_member().team.broken:
            current_member().call("release")

    def _load_base(self, *, full: bool) -> BaseModel:
        del full
        return current_member().loaded.base

    def _forget_session(self) -> None:
        self._open = None


def process_device(device: str) -> str:
    """The kind of device that every process has one of.

    Raises:
        ConfigError: not one, or a single device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"backend.device={device}: several processes need auto, cuda or cpu; each takes the "
            "CUDA device of its own number"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return resolve_device(device).type
