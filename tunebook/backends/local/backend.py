"""Training and sampling with torch on this machine."""

import sys
import tempfile
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from transformers import PreTrainedTokenizerBase

from tunebook.backends.base import Capabilities
from tunebook.backends.local import probe
from tunebook.backends.local.allocator import keep_freed_memory
from tunebook.backends.local.base_model import (
    BaseModel,
    load_base_model,
    read_architecture,
    read_config,
    resolve_device,
    resolve_dtype,
)
from tunebook.backends.local.checkpoint import clean_up
from tunebook.backends.local.engine.engine import Engine, make_engine
from tunebook.backends.local.execution import padded_tokens
from tunebook.backends.local.export import is_full_model
from tunebook.backends.local.fit import (
    check_adapter_fits,
    check_full_model_fits,
    check_start,
)
from tunebook.backends.local.lora import adapter_targets, check_lora, features_of
from tunebook.backends.local.peft_format import (
    is_peft_adapter,
    read_peft_config,
    read_peft_weights,
)
from tunebook.backends.local.quantised import FULL, check_base_is_frozen, check_base_weights
from tunebook.backends.local.queue import OperationQueue
from tunebook.backends.local.session import LocalSession, SessionSettings
from tunebook.backends.local.tuning import tokens_at_once
from tunebook.backends.local.vllm_generator import (
    TORCH,
    AdapterPublisher,
    VllmEngine,
    check_generator,
    check_publishable,
    engine_settings,
)
from tunebook.backends.local.weights import AdapterWeights, FullWeights, TrainedWeights
from tunebook.errors import BackendError, CheckpointError, ConfigError
from tunebook.models import load_causal_lm, load_tokenizer, resolve_model
from tunebook.types import CheckpointRef, Estimate, LoraConfig, Workload

PROBE_SESSION = "estimate"


class LocalBackend:
    """One base model on one device; see `tunebook.backends.base.Backend`.

    Any number of adapters can be trained over the base at once; training the full weights takes it
    alone. With bfloat16 an adapter keeps float32 masters over a bfloat16 base, and full weights are
    kept in float32 and computed in bfloat16 by autocast. The base model's own dropout stays off.
    """

    def __init__(
        self,
        *,
        model: str,
        device: str = "auto",
        dtype: str = "auto",
        base_weights: str = FULL,
        micro_batch_tokens: int | None = None,
        fast: bool = True,
        recompute: bool | None = None,
        generator: str = TORCH,
        generator_memory: float = 0.4,
        generator_max_seq_len: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
        tokenizer: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Checks the settings; the model is loaded when first needed.

        Args:
            model: as in `tunebook.models.resolve_model`.
            device: auto (cuda, mps, cpu in this order), cpu, cuda, cuda:<number>, or mps.
            dtype: auto (bfloat16 on cuda, else float32), float32, or bfloat16.
            base_weights: full, or nf4: kept in 4 bits under the adapters (QLoRA), trained by the
                general path; needs CUDA and the extra `quant`.
            micro_batch_tokens: tokens computed at once, padding included where there is any; None =
                as many as the free memory holds, at most 2,048 on a CPU and 16,384 on a GPU; by the
                general path 1,024 and 8,192. It changes how fast, not what is computed: below 2,048
                the last bits of a gradient, where rows that begin alike no longer fit together;
                and where `lora.dropout` is above 0, the masks, which are drawn for each micro-batch
                as a whole.
            fast: train adapters by the fast path where the model is of a family it knows; False
                computes with the model's own code always.
            recompute: keep only the input of each layer for the backward pass of the fast path and
                compute the rest again, a third slower; None = where memory is short.
            generator: torch, or vllm: vLLM samples, from a copy of the base beside the one that is
                trained over; needs CUDA and the extra `vllm`.
            generator_memory: share of the GPU's memory that vLLM takes, its copy of the base
                included; training has the rest.
            generator_max_seq_len: tokens of prompt and answer that vLLM makes room for; None = as
                many as the model takes.
            revision: hub revision.
            trust_remote_code: allow the model repository's own Python code.
            allow_pickle: allow weights other than safetensors.
            tokenizer: of another model; None = the model's own.
            chat_template: as in `tunebook.models.load_tokenizer`.

        Raises:
            ConfigError: a value that is not allowed, or a device or package that is not there.
        """
        if micro_batch_tokens is not None and micro_batch_tokens < 1:
            raise ConfigError(
                f"backend.micro_batch_tokens={micro_batch_tokens}: must be at least 1, or null"
            )
        self._model = model
        self._device = resolve_device(device)
        self._dtype = resolve_dtype(dtype, self._device)
        check_base_weights(base_weights, device=self._device)
        check_generator(
            generator,
            device=self._device,
            base_weights=base_weights,
            memory=generator_memory,
            max_seq_len=generator_max_seq_len,
        )
        self._base_weights = base_weights
        self._generator = generator
        self._generator_memory = generator_memory
        self._generator_max_seq_len = generator_max_seq_len
        self._vllm: VllmEngine | None = None
        self._micro_batch_tokens = micro_batch_tokens
        self._recompute = recompute
        self._fast = fast
        self._revision = revision
        self._trust_remote_code = trust_remote_code
        self._allow_pickle = allow_pickle
        self._tokenizer_name = tokenizer
        self._chat_template = chat_template
        self._queue = OperationQueue()
        self._sessions: dict[str, LocalSession] = {}
        self._training_base = False
        self._base: BaseModel | None = None
        self._engine: Engine | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._max_seq_len: int | None = None
        self._config_read = False
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_sessions=sys.maxsize,
            has_generator=True,
            full_weight=True,
            optimizers=frozenset({"adamw", "muon"}),
            losses=None,
            max_seq_len=self._read_max_seq_len(),
            temperature=True,
        )

    def check(self, lora: LoraConfig | None, start: CheckpointRef | None) -> int | None:
        self._check_trainable(lora)
        architecture = read_architecture(
            self._model, revision=self._revision, trust_remote_code=self._trust_remote_code
        )
        count = None
        if lora is not None:
            check_lora(lora)
            if architecture is not None:
                targets = adapter_targets(
                    architecture.model, architecture.head, lora.target_modules
                )
                count = sum(lora.rank * sum(features_of(layer)) for layer in targets.values())
        elif architecture is not None:
            count = sum(parameter.numel() for parameter in architecture.model.parameters())
        if start is not None:
            check_start(start.path, lora, architecture=architecture)
        return count

    def open_session(
        self,
        name: str,
        lora: LoraConfig | None,
        *,
        directory: Path,
        restore: CheckpointRef | None = None,
        with_optimizer: bool = True,
    ) -> LocalSession:
        # Several threads may open sessions, and what is being computed meanwhile needs the base.
        with self._queue.paused():
            return self._open_session(
                name, lora, directory=directory, restore=restore, with_optimizer=with_optimizer
            )

    def _open_session(
        self,
        name: str,
        lora: LoraConfig | None,
        *,
        directory: Path,
        restore: CheckpointRef | None,
        with_optimizer: bool,
    ) -> LocalSession:
        self._check_can_open(name, lora)
        self._check_trainable(lora)
        clean_up(Path(directory))
        base = self._load_base(full=lora is None)
        weights = FullWeights(base) if lora is None else AdapterWeights(base, lora)
        publisher = None if lora is None else self._publisher(name, lora)
        engine = self._engine_for(base, weights)
        session = LocalSession(
            name,
            base=base,
            engine=engine,
            weights=weights,
            queue=self._queue,
            settings=SessionSettings(
                directory=Path(directory),
                micro_batch_tokens=self._tokens_at_once(engine),
                max_seq_len=self._read_max_seq_len(),
                export_name=resolve_model(self._model),
                load_tokenizer=self._load_tokenizer,
                publisher=publisher,
            ),
            on_close=lambda: self._forget(name),
        )
        self._sessions[name] = session
        self._training_base = lora is None
        try:
            if restore is not None:
                self._restore(session, lora, restore, with_optimizer=with_optimizer)
        except BaseException:
            session.close()
            raise
        return session

    def estimate(self, workload: Workload) -> Estimate:
        if not workload.sample or not workload.lengths:
            return Estimate(
                seconds=None,
                train_tokens=workload.train_tokens,
                peak_memory_bytes=None,
                price=None,
                basis="not measured: the workload names no rows to measure",
            )
        with tempfile.TemporaryDirectory() as folder:
            session = self.open_session(PROBE_SESSION, workload.lora, directory=Path(folder))
            try:
                measured = probe.measure(session, workload.sample, self._device)
                pads = session.pads
            finally:
                session.close()
        max_tokens = self._tokens_at_once(None)
        padded = partial(padded_tokens, rows_per_unit=1, max_tokens=max_tokens)
        return probe.extrapolate(
            workload,
            measured,
            computed_tokens=padded if pads else sum,
            device=f"{self._device} in {str(self._dtype).removeprefix('torch.')}",
        )

    def close(self) -> None:
        for session in list(self._sessions.values()):
            session.close()
        self._base = self._engine = None
        if self._vllm is not None:
            self._vllm.close()
        self._closed = True
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_trainable(self, lora: LoraConfig | None) -> None:
        check_base_is_frozen(self._base_weights, lora)
        check_publishable(self._generator, lora)

    def _check_can_open(self, name: str, lora: LoraConfig | None) -> None:
        if self._closed:
            raise BackendError("this backend is closed")
        if name in self._sessions:
            raise BackendError(f"a session called {name!r} is open already; give another name")
        if self._sessions and (self._training_base or lora is None):
            raise BackendError(
                f"session {name!r} cannot be opened beside {', '.join(map(repr, self._sessions))}: "
                "full-weight training changes the base, so it needs it alone"
            )

    def _restore(
        self,
        session: LocalSession,
        lora: LoraConfig | None,
        ref: CheckpointRef,
        *,
        with_optimizer: bool,
    ) -> None:
        is_adapter, is_model = is_peft_adapter(ref.path), is_full_model(ref.path)
        if not (is_adapter or is_model):
            session.restore(ref, with_optimizer=with_optimizer)
            return
        if with_optimizer:
            raise CheckpointError(
                f"{ref.path}: an exported model or adapter holds no optimizer state; start from "
                "its weights only"
            )
        if is_model:
            self._restore_full_model(session, lora, ref.path)
            return
        check_adapter_fits(read_peft_config(ref.path), lora, path=ref.path)
        session.load_weights(read_peft_weights(ref.path), path=ref.path)

    def _restore_full_model(
        self, session: LocalSession, lora: LoraConfig | None, folder: Path
    ) -> None:
        check_full_model_fits(lora, path=folder)
        model = load_causal_lm(
            str(folder),
            dtype=torch.float32,
            trust_remote_code=self._trust_remote_code,
            allow_pickle=self._allow_pickle,
        )
        tensors = {name: value.detach() for name, value in model.named_parameters()}
        session.load_weights(tensors, path=folder)

    def _load_base(self, *, full: bool) -> BaseModel:
        weight_dtype = torch.float32 if full else self._dtype
        if self._base is None or self._base.model.dtype != weight_dtype:
            assert not self._sessions
            self._base = self._engine = None
            self._base = load_base_model(
                self._model,
                device=self._device,
                weight_dtype=weight_dtype,
                compute_dtype=self._dtype,
                revision=self._revision,
                trust_remote_code=self._trust_remote_code,
                allow_pickle=self._allow_pickle,
                base_weights=self._base_weights,
            )
        return self._base

    def _engine_for(self, base: BaseModel, weights: TrainedWeights) -> Engine | None:
        """The fast path if it can train these weights."""
        if not self._fast or not isinstance(weights, AdapterWeights):
            return None
        if self._base_weights != FULL:
            return None  # Its products are bitsandbytes' own.
        if self._engine is None or self._engine.base is not base:
            self._engine = make_engine(base, recompute=self._recompute)
            if self._engine is not None and self._device.type == "cpu":
                keep_freed_memory()
        engine = self._engine
        # Dropout masks are the general path's; so are layers outside the decoder.
        if engine is None or weights.generator is not None:
            return None
        return engine if weights.layers.keys() <= engine.decoder.parts.keys() else None

    def _publisher(self, session: str, lora: LoraConfig) -> AdapterPublisher | None:
        """Where vLLM samples: what hands it a session's adapters. It takes its memory now."""
        if self._generator == TORCH:
            return None
        limits = (self._generator_max_seq_len, self._read_max_seq_len())
        max_seq_len = min((limit for limit in limits if limit is not None), default=None)
        if self._vllm is None:
            self._vllm = VllmEngine(
                engine_settings(
                    resolve_model(self._model),
                    revision=self._revision,
                    tokenizer=resolve_model(self._tokenizer_name) if self._tokenizer_name else None,
                    trust_remote_code=self._trust_remote_code,
                    dtype=self._dtype,
                    memory=self._generator_memory,
                    max_seq_len=max_seq_len,
                )
            )
        self._vllm.start(lora.rank)
        return AdapterPublisher(
            self._vllm, session=session, rank=lora.rank, max_seq_len=max_seq_len
        )

    def _tokens_at_once(self, engine: Engine | None) -> int:
        if self._micro_batch_tokens is not None:
            return self._micro_batch_tokens
        if engine is None:
            return default_micro_batch_tokens(self._device)
        return tokens_at_once(engine.decoder, recompute=engine.recompute)

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(
                self._tokenizer_name or self._model,
                revision=None if self._tokenizer_name else self._revision,
                chat_template=self._chat_template,
                trust_remote_code=self._trust_remote_code,
            )
        return self._tokenizer

    def _read_max_seq_len(self) -> int | None:
        if not self._config_read:
            config = read_config(
                self._model, revision=self._revision, trust_remote_code=self._trust_remote_code
            )
            self._max_seq_len = getattr(config.get_text_config(), "max_position_embeddings", None)
            self._config_read = True
        return self._max_seq_len

    def _forget(self, name: str) -> None:
        with self._queue.paused():
            del self._sessions[name]
            if self._training_base:
                # The weights are no longer those of the base model: load them again when needed.
                self._base = self._engine = None
                self._training_base = False


def default_micro_batch_tokens(device: torch.device) -> int:
    """Tokens of a micro-batch of the general path where the config leaves it open."""
    return 1024 if device.type == "cpu" else 8192
