"""Sampling from published weights: batched prefill, then one token at a time with a KV cache.

Legend: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tunebook.backends.base import Future
from tunebook.backends.local.base_model import BaseModel, parameters_of_forward
from tunebook.backends.local.execution import micro_batches
from tunebook.backends.local.queue import Lane, OperationQueue
from tunebook.backends.local.weights import TrainedWeights
from tunebook.errors import BackendError, ConfigError, StaleGenerator
from tunebook.types import Completion, SamplingParams, StopReason

# Just below 1 in float32, so that no draw falls beyond the last token of a distribution.
LARGEST_DRAW = 1 - 2**-20


class LocalGenerator:
    """Samples from the weights of one publish; see `tunebook.backends.base.Generator`."""

    def __init__(
        self,
        *,
        version: int,
        base: BaseModel,
        weights: TrainedWeights,
        queue: OperationQueue,
        lane: Lane,
        current_version: Callable[[], int],
        batch_tokens: int,
        max_seq_len: int | None,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase],
    ) -> None:
        self.version = version
        self.values: Mapping[str, Tensor] | None = None
        """The published weights; None = the session's own, which have not changed since."""
        self._base = base
        self._weights = weights
        self._queue = queue
        self._lane = lane
        self._current_version = current_version
        self._batch_tokens = batch_tokens
        self._max_seq_len = max_seq_len
        self._load_tokenizer = load_tokenizer

    def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, num_samples: int
    ) -> Future[list[list[Completion]]]:
        prompts = [list(prompt) for prompt in prompts]
        return self._queue.submit(
            self._lane,
            "sample",
            lambda: self._sample(prompts, params, num_samples),
            poisons=False,  # Sampling changes nothing, so training can go on.
        )

    def _sample(
        self, prompts: list[list[int]], params: SamplingParams, num_samples: int
    ) -> list[list[Completion]]:
        self._check_current()
        check_sampling(params, num_samples)
        strings = tuple(stop for stop in params.stop if isinstance(stop, str))
        tokenizer = self._load_tokenizer()
        stop_ids = end_token_ids(self._base, tokenizer) | {
            stop for stop in params.stop if isinstance(stop, int)
        }
        rows = [
            _Row(
                prompt=prompt,
                max_tokens=self._room(prompt, params.max_tokens, index=index),
                index=(index, sample),
            )
            for index, prompt in enumerate(prompts)
            for sample in range(num_samples)
        ]
        seed = np.random.SeedSequence().entropy if params.seed is None else params.seed
        with torch.inference_mode(), self._weights.applied(dropout=False, values=self.values):
            plan = micro_batches(
                [len(row.prompt) + row.max_tokens for row in rows],
                rows_per_unit=1,
                max_tokens=self._batch_tokens,
            )
            for batch in plan:
                complete(
                    self._base,
                    [rows[row] for row in batch.rows],
                    params,
                    seed=seed,
                    ended=lambda tokens: ends(tokens, stop_ids, strings, tokenizer),
                )
        completions = [_completion(row, self.version) for row in rows]
        return [
            completions[first : first + num_samples]
            for first in range(0, len(completions), num_samples)
        ]

    def _check_current(self) -> None:
        if self._current_version() != self.version:
            raise StaleGenerator(
                f"this generator holds version {self.version} of session {self._lane.name!r}, "
                f"which has published version {self._current_version()} since"
            )

    def _room(self, prompt: list[int], max_tokens: int, *, index: int) -> int:
        if not prompt:
            raise BackendError(f"prompt {index} is empty; give at least one token")
        if min(prompt) < 0 or max(prompt) >= self._base.vocab_size:
            raise BackendError(
                f"prompt {index} holds a token id outside 0..{self._base.vocab_size - 1}"
            )
        if self._max_seq_len is None:
            return max_tokens
        room = self._max_seq_len - len(prompt)
        if room < 1:
            raise BackendError(
                f"prompt {index} has {len(prompt)} tokens, which leaves no room for an answer in "
                f"the {self._max_seq_len} tokens of {self._base.name}"
            )
        return min(max_tokens, room)


@dataclass(slots=True)
class _Row:
    prompt: list[int]
    max_tokens: int
    index: tuple[int, int]
    """Prompt and sample number."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def finished(self) -> bool:
        return self.stopped or len(self.tokens) >= self.max_tokens


def check_sampling(params: SamplingParams, num_samples: int) -> None:
    """Returns if the settings make sense.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
    """
    rules = (
        ("max_tokens", params.max_tokens, params.max_tokens >= 1, "at least 1"),
        ("temperature", params.temperature, params.temperature >= 0, "at least 0 (0 = greedy)"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("top_k", params.top_k, params.top_k >= 0, "at least 0 (0 = off)"),
        ("stop", params.stop, "" not in params.stop, "non-empty strings or token ids"),
        ("seed", params.seed, params.seed is None or params.seed >= 0, "at least 0, or null"),
        ("num_samples", num_samples, num_samples >= 1, "at least 1"),
    )
    for key, value, good, allowed in rules:
        if not good:
            raise ConfigError(f"sampling: {key}={value}: must be {allowed}")


def end_token_ids(base: BaseModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every id that ends an answer: of the generation config, the config, and the tokenizer."""
    named = [base.model.config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    if base.model.generation_config is not None:
        named.append(base.model.generation_config.eos_token_id)
    ids: set[int] = set()
    for value in named:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return ids


def ends(
    tokens: Sequence[int],
    stop_ids: set[int],
    strings: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
) -> bool:
    """Whether the last of `tokens` ends the completion: an end id, or the end of a stop string.

    The token in which a stop string ends is kept whole.
    """
    if tokens[-1] in stop_ids:
        return True
    if not strings:
        return False
    # A token holds at least one byte, except special ones, which decode to something longer.
    window = max(len(string.encode()) for string in strings) + 1
    text = tokenizer.decode(list(tokens[-window:]), skip_special_tokens=False)
    return any(string in text for string in strings)


def complete(
    base: BaseModel,
    rows: Sequence[_Row],
    params: SamplingParams,
    *,
    seed: Any,
    ended: Callable[[list[int]], bool],
) -> None:
    """Draws tokens for rows until each is finished.

    The random numbers of a row come from `(seed, prompt, sample)` alone, so they do not depend on
    what else is in the batch.
    """
    draws_BT = np.stack(
        [
            np.random.default_rng([*words_of(seed), *row.index]).random(params.max_tokens)
            for row in rows
        ]
    )
    draws = torch.from_numpy(np.minimum(draws_BT, LARGEST_DRAW).astype(np.float32)).to(base.device)
    longest = max(len(row.prompt) for row in rows)
    input_ids_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    for number, row in enumerate(rows):
        input_ids_BT[number, longest - len(row.prompt) :] = torch.tensor(row.prompt)
        mask_BT[number, longest - len(row.prompt) :] = 1
    input_ids_BT, mask_BT = input_ids_BT.to(base.device), mask_BT.to(base.device)
    positions_BT = (mask_BT.cumsum(1) - 1).clamp_min(0)
    cache = None
    for step in range(max(row.max_tokens for row in rows)):
        logits_BV, cache = next_logits(base, input_ids_BT, mask_BT, positions_BT, cache)
        tokens_B, logprobs_B = draw(logits_BV, params, draws[:, step])
        for row, token, logprob in zip(rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            if not row.finished:
                row.tokens.append(token)
                row.logprobs.append(logprob)
                row.stopped = ended(row.tokens)
        if all(row.finished for row in rows):
            return
        input_ids_BT = tokens_B[:, None]
        mask_BT = torch.cat([mask_BT, torch.ones_like(mask_BT[:, :1])], dim=1)
        positions_BT = positions_BT[:, -1:] + 1


def next_logits(
    base: BaseModel, input_ids_BT: Tensor, mask_BT: Tensor, positions_BT: Tensor, cache: Any
) -> tuple[Tensor, Any]:
    """Logits after the last token, `[B, V]` float32, and the cache to go on with."""
    module = base.model if base.logits_rule is None else base.body
    accepted = parameters_of_forward(module)
    cache_name = cache_argument(module)
    inputs: dict[str, Any] = {
        "input_ids": input_ids_BT,
        "attention_mask": mask_BT,
        "use_cache": True,
    }
    if "position_ids" in accepted:
        inputs["position_ids"] = positions_BT
    if cache is not None:
        inputs[cache_name] = cache
    with base.computing():
        output = module(**inputs)
        if base.logits_rule is None:
            logits_BV = output.logits[:, -1].float()
        else:
            hidden_BH = output.last_hidden_state[:, -1]
            logits_BV = base.logits_rule(base.head(hidden_BH).float())
    return logits_BV, output[cache_name]


def cache_argument(module: nn.Module) -> str:
    """What a model calls its KV cache; transformers renamed it from `past_key_values`.

    Raises:
        BackendError: the model has none that we know.
    """
    accepted = parameters_of_forward(module)
    for name in ("cache", "past_key_values"):
        if name in accepted:
            return name
    raise BackendError(f"{type(module).__name__} has no key-value cache, so it cannot be sampled")


def draw(logits_BV: Tensor, params: SamplingParams, draws_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob, both `[B]`.

    Log-probs are those of the distribution drawn from. Greedy decoding has no distribution; it
    reports the model's own log-probs.

    Args:
        logits_BV: `[B, V]`
        params: see `SamplingParams`.
        draws_B: `[B]`, uniform in [0, 1).
    """
    if params.temperature == 0:
        tokens_B = logits_BV.argmax(dim=1)
        logprobs_BV = logits_BV.log_softmax(dim=1)
    else:
        logprobs_BV = sampling_logprobs(
            logits_BV, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p
        )
        cumulative_BV = logprobs_BV.exp().cumsum(dim=1)
        thresholds_B = draws_B[:, None] * cumulative_BV[:, -1:]
        # `right`: the first token whose cumulative probability exceeds the draw, never one of 0.
        tokens_B = torch.searchsorted(cumulative_BV, thresholds_B, right=True).squeeze(1)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)


def sampling_logprobs(logits_BV: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Log-probs `[B, V]` after temperature, then top-k, then top-p; -inf where excluded.

    Top-p keeps the most probable tokens up to and including the one that reaches `top_p`.
    """
    logits_BV = logits_BV / temperature
    if 0 < top_k < logits_BV.shape[1]:
        kept = logits_BV.topk(top_k, dim=1)
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(1, kept.indices, kept.values)
    if top_p < 1:
        ordered, order = logits_BV.sort(dim=1, descending=True)
        probs_BV = ordered.softmax(dim=1)
        before_BV = probs_BV.cumsum(dim=1) - probs_BV
        ordered = ordered.masked_fill(before_BV >= top_p, -torch.inf)
        logits_BV = torch.empty_like(logits_BV).scatter(1, order, ordered)
    return logits_BV.log_softmax(dim=1)


def _completion(row: _Row, version: int) -> Completion:
    return Completion(
        tokens=np.asarray(row.tokens, np.int32),
        logprobs=np.asarray(row.logprobs, np.float32),
        stop_reason=StopReason.STOP if row.stopped else StopReason.LENGTH,
        version=version,
    )


def words_of(seed: int) -> list[int]:
    """A seed of any size as 32-bit words, which is what a seed sequence takes."""
    words = []
    while True:
        words.append(seed & 0xFFFFFFFF)
        seed >>= 32
        if not seed:
            return words
