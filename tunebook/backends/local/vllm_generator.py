"""Sampling by vLLM: the adapter of each publish is loaded into an engine that runs beside training.

vLLM keeps its own copy of the base, in the dtype the backend computes in, in a share of the GPU's
memory that it takes when it starts. Written against vLLM's documented interface (0.11 and later)
and not yet run on a GPU; the functions that translate to and from vLLM are tested without it.
"""

import gc
import importlib.util
import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunebook.backends.base import Future
from tunebook.backends.local.completions import (
    check_sampling,
    end_token_ids,
    room_for,
    words_of,
)
from tunebook.backends.local.generator import LocalGenerator
from tunebook.backends.local.quantised import FULL
from tunebook.errors import BackendError, ConfigError
from tunebook.types import Completion, LoraConfig, SamplingParams, StopReason

TORCH, VLLM = "torch", "vllm"
GENERATORS = (TORCH, VLLM)
RANK_LIMITS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM allows as the largest rank of an engine's adapters."""


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """An adapter in a folder, as vLLM is told about it."""

    name: str
    """Unique in an engine: cached keys and values are found by it."""
    number: int
    """Unique in an engine, from 1."""
    rank: int
    folder: Path


class VllmEngine:
    """vLLM over the base, shared by the adapters of all sessions; started when first needed."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Takes the settings; starts nothing.

        Args:
            settings: see `engine_settings`.
        """
        self._settings = settings
        self._llm: Any = None
        self._max_rank = 0
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """A number that no adapter has had."""
        return next(self._numbers)

    def start(self, rank: int) -> None:
        """Makes room for adapters of a rank; starts the engine, again where it has too little.

        Raises:
            BackendError: vLLM does not start.
        """
        max_rank = rank_limit(rank)
        if self._llm is not None and max_rank <= self._max_rank:
            return
        self.close()
        vllm: Any = importlib.import_module("vllm")
        try:
            self._llm = vllm.LLM(**self._settings, max_lora_rank=max_rank)
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"backend.generator={VLLM}: vLLM did not start: {error} Where memory is short, "
                "change backend.generator_memory (now "
                f"{self._settings['gpu_memory_utilization']}) or lower "
                "backend.generator_max_seq_len"
            ) from error
        self._max_rank = max_rank

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[Mapping[str, Any]],
        adapter: PublishedAdapter,
    ) -> list[Any]:
        """vLLM's `CompletionOutput` for each prompt, in order.

        Args:
            prompts: token ids.
            settings: see `sampling_settings`, one for each prompt.
            adapter: to sample with.
        """
        self.start(adapter.rank)
        vllm: Any = importlib.import_module("vllm")
        lora: Any = importlib.import_module("vllm.lora.request")
        requests = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            sampling_params=[vllm.SamplingParams(**each) for each in settings],
            lora_request=lora.LoRARequest(
                lora_name=adapter.name,
                lora_int_id=adapter.number,
                lora_path=str(adapter.folder),
            ),
            use_tqdm=False,
        )
        return [request.outputs[0] for request in requests]

    def remove(self, adapter: PublishedAdapter) -> None:
        """Frees what the engine holds of an adapter, if it holds anything."""
        if self._llm is not None:
            self._llm.llm_engine.remove_lora(adapter.number)

    def close(self) -> None:
        """Stops the engine and gives its memory back; a second call does nothing."""
        self._llm = None
        gc.collect()  # vLLM stops its own process when its engine is collected.


class AdapterPublisher:
    """The newest published adapter of one session, in a temporary folder."""

    def __init__(
        self, engine: VllmEngine, *, session: str, rank: int, max_seq_len: int | None
    ) -> None:
        self.engine = engine
        self.max_seq_len = max_seq_len
        """Tokens of prompt and answer that the engine has room for; None = no limit."""
        self._session = session
        self._rank = rank
        self._root: Path | None = None
        self._current: PublishedAdapter | None = None

    def publish(self, version: int, write: Callable[[Path], Path]) -> PublishedAdapter:
        """The adapter of a version; that of the version before is removed.

        Args:
            version: of the publish.
            write: writes the adapter into a folder in PEFT's format.
        """
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="tunebook-vllm-"))
        number = self.engine.next_number()
        adapter = PublishedAdapter(
            name=f"{self._session}-{version}-{number}",
            number=number,
            rank=self._rank,
            folder=write(self._root / str(version)),
        )
        self._remove_current()
        self._current = adapter
        return adapter

    def close(self) -> None:
        """Removes what was published."""
        self._remove_current()
        if self._root is not None:
            shutil.rmtree(self._root)
            self._root = None

    def _remove_current(self) -> None:
        if self._current is not None:
            self.engine.remove(self._current)
            shutil.rmtree(self._current.folder)
            self._current = None


class VllmGenerator(LocalGenerator):
    """Samples from one published adapter with vLLM; see `tunebook.backends.base.Generator`.

    The random numbers of a completion come from `(seed, prompt, sample)`, so a completion can be
    drawn again; they are vLLM's own, so it is another one than `LocalGenerator` draws. Products of
    other sizes round otherwise, so vLLM may differ from itself in another batch. It raises
    temperatures between 0 and 0.01 to 0.01.
    """

    def __init__(self, *, vllm: VllmEngine, adapter: PublishedAdapter, **settings: Any) -> None:
        """Takes what it samples from.

        Args:
            vllm: of the backend.
            adapter: the published one.
            settings: see `LocalGenerator`.
        """
        super().__init__(engine=None, **settings)
        self._vllm = vllm
        self._adapter = adapter

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, num_samples: int
    ) -> Future[list[list[Completion]]]:
        prompts = [list(prompt) for prompt in prompts]
        return self._queue.submit(
            self._lane,
            "sample",
            lambda: self._sample_by_vllm(prompts, params, num_samples),
            poisons=False,  # Sampling changes nothing, so training can go on.
        )

    def _sample_by_vllm(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, num_samples: int
    ) -> list[list[Completion]]:
        self._check_current()
        check_sampling(params, num_samples)
        end_ids = end_token_ids(self._base, self._load_tokenizer())
        seed = np.random.SeedSequence().entropy if params.seed is None else params.seed
        assert isinstance(seed, int)
        settings = [
            sampling_settings(
                params,
                max_tokens=min(
                    params.max_tokens,
                    room_for(self._base, prompt, index=index, max_seq_len=self._max_seq_len),
                ),
                end_ids=end_ids,
                seed=row_seed(seed, prompt=index, sample=sample),
            )
            for index, prompt in enumerate(prompts)
            for sample in range(num_samples)
        ]
        repeated = [prompt for prompt in prompts for _ in range(num_samples)]
        outputs = self._vllm.generate(repeated, settings, self._adapter)
        completions = [completion_of(output, version=self.version) for output in outputs]
        return [
            completions[first : first + num_samples]
            for first in range(0, len(completions), num_samples)
        ]


def check_generator(
    generator: str,
    *,
    device: torch.device,
    base_weights: str,
    memory: float,
    max_seq_len: int | None,
) -> None:
    """Returns if a backend can sample so.

    Args:
        generator: `backend.generator`.
        device: of the backend.
        base_weights: of the backend.
        memory: `backend.generator_memory`.
        max_seq_len: `backend.generator_max_seq_len`.

    Raises:
        ConfigError: a value that is not allowed, or vLLM cannot be used.
    """
    if generator not in GENERATORS:
        raise ConfigError(f"backend.generator={generator}: must be one of {', '.join(GENERATORS)}")
    if not 0 < memory < 1:
        raise ConfigError(f"backend.generator_memory={memory}: must be above 0 and below 1")
    if max_seq_len is not None and max_seq_len < 2:
        raise ConfigError(
            f"backend.generator_max_seq_len={max_seq_len}: must be at least 2, or null"
        )
    if generator == TORCH:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"backend.generator={VLLM}: needs a CUDA device, this backend computes on "
            f"{device.type}; use backend.generator={TORCH}"
        )
    if device.index:
        raise ConfigError(
            f"backend.generator={VLLM}: runs on the first CUDA device that it sees, this backend "
            f"computes on {device}; set CUDA_VISIBLE_DEVICES={device.index} and backend.device=cuda"
        )
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"backend.generator={VLLM}: vLLM is not installed; `pip install 'tunebook[vllm]'`, or "
            f"use backend.generator={TORCH}"
        )
    if base_weights != FULL:
        raise ConfigError(
            f"backend.generator={VLLM}: samples over the full base, with "
            f"backend.base_weights={base_weights} an adapter is trained over another; use "
            f"backend.generator={TORCH} or backend.base_weights={FULL}"
        )


def check_publishable(generator: str, lora: LoraConfig | None) -> None:
    """Returns if the generator can sample from what a session trains.

    Raises:
        ConfigError: it cannot.
    """
    if generator == TORCH:
        return
    if lora is None:
        raise ConfigError(
            f"backend.generator={generator}: takes over adapters only, and lora=null trains all "
            f"weights; set lora, or use backend.generator={TORCH}"
        )
    if lora.rank > RANK_LIMITS[-1]:
        raise ConfigError(
            f"lora.rank={lora.rank}: backend.generator={generator} takes ranks up to "
            f"{RANK_LIMITS[-1]}; lower it, or use backend.generator={TORCH}"
        )


def engine_settings(
    model: str,
    *,
    revision: str | None,
    tokenizer: str | None,
    trust_remote_code: bool,
    dtype: torch.dtype,
    memory: float,
    max_seq_len: int | None,
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`.

    Args:
        model: a folder or hub id.
        revision: hub revision.
        tokenizer: a folder or hub id; None = the model's own.
        trust_remote_code: allow the model repository's own Python code.
        dtype: of weights and products.
        memory: share of the GPU's memory that vLLM takes.
        max_seq_len: tokens of prompt and answer; None = as the model's config says.
    """
    return {
        "model": model,
        "revision": revision,
        "tokenizer": tokenizer,
        "tokenizer_revision": None if tokenizer else revision,
        "trust_remote_code": trust_remote_code,
        "dtype": str(dtype).removeprefix("torch."),
        "gpu_memory_utilization": memory,
        "max_model_len": max_seq_len,
        "enable_lora": True,
        "max_loras": 1,
        # Log-probs of the distribution drawn from: after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        # The model's own sampling defaults stay out; end tokens are passed with each request.
        "generation_config": "vllm",
    }


def sampling_settings(
    params: SamplingParams, *, max_tokens: int, end_ids: set[int], seed: int
) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` for one completion.

    Args:
        params: of all completions.
        max_tokens: of this one.
        end_ids: the model's own end tokens.
        seed: of this completion.
    """
    return {
        "n": 1,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "seed": seed,
        "max_tokens": max_tokens,
        "stop": [stop for stop in params.stop if isinstance(stop, str)],
        "stop_token_ids": sorted(end_ids | {stop for stop in params.stop if isinstance(stop, int)}),
        "logprobs": 0,  # That of the sampled token alone.
        # Stop strings are looked for in the text, in which special tokens count.
        "skip_special_tokens": False,
    }


def completion_of(output: Any, *, version: int) -> Completion:
    """A completion from vLLM's `CompletionOutput`.

    Args:
        output: of one completion.
        version: of the weights.

    Raises:
        BackendError: vLLM gave the completion up.
    """
    reasons = {"stop": StopReason.STOP, "length": StopReason.LENGTH}
    if output.finish_reason not in reasons:
        raise BackendError(f"vLLM ended a completion with {output.finish_reason!r}")
    tokens = list(output.token_ids)
    logprobs = [
        at_token[token].logprob for token, at_token in zip(tokens, output.logprobs, strict=True)
    ]
    return Completion(
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        stop_reason=reasons[output.finish_reason],
        version=version,
    )


def row_seed(seed: int, *, prompt: int, sample: int) -> int:
    """The seed of one completion, below 2^63.

    Args:
        seed: of the call.
        prompt: its number.
        sample: number of the sample.
    """
    sequence = np.random.SeedSequence([*words_of(seed), prompt, sample])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def rank_limit(rank: int) -> int:
    """The smallest rank that vLLM allows as a limit and that is not below `rank`."""
    return next(limit for limit in RANK_LIMITS if limit >= rank)
