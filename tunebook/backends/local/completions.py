"""What every way of sampling shares: requests, how a token is drawn, and when an answer ends.

Legend: B rows, V vocabulary.
"""

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tunebook.backends.local.base_model import BaseModel
from tunebook.errors import BackendError, ConfigError, NonFiniteError
from tunebook.types import Completion, FloatArray, SamplingParams, StopReason

# Just below 1 in float32, so that no draw falls beyond the last token of a distribution.
LARGEST_DRAW = 1 - 2**-20
TOP_P_CANDIDATES = 1024
"""Most probable tokens that top-p looks at first; all are sorted only where these do not reach."""

MIN_TEMPERATURE = 1e-6
"""Logits divided by less overflow."""
Policy: TypeAlias = tuple[float, int, float]
"""Temperature, top-k and top-p: rows that have these in common are drawn together."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends the completions of a request before they are full."""

    ids: frozenset[int]
    strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase | None
    """Decodes for strings; may be None where there are none."""


@dataclass(slots=True, eq=False)
class Sampled:
    """What has been sampled of a completion."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False
    broken: bool = False
    """Whether its logits were NaN or infinite."""

    def completion(self, version: int) -> Completion:
        """What has been sampled, by the weights of a version.

        Raises:
            NonFiniteError: the model gave no numbers to sample from.
        """
        if self.broken:
            raise NonFiniteError(
                f"after {len(self.tokens)} tokens of a completion the logits are NaN or infinite: "
                "the weights are damaged, or too large for the dtype"
            )
        return Completion(
            tokens=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            stop_reason=StopReason.STOP if self.stopped else StopReason.LENGTH,
            version=version,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Row(Sampled):
    """One completion in the making."""

    prompt: tuple[int, ...]
    max_tokens: int
    policy: Policy
    ending: Ending
    draws: FloatArray
    """`[max_tokens]` uniform in [0, 1); one for each token."""

    @property
    def finished(self) -> bool:
        """Whether it takes no more tokens."""
        return self.stopped or self.broken or len(self.tokens) >= self.max_tokens

    def take(self, token: int, logprob: float) -> None:
        """Adds a token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        ending = self.ending
        self.stopped = ends(self.tokens, ending.ids, ending.strings, ending.tokenizer)


def make_rows(
    base: BaseModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    num_samples: int,
    *,
    max_seq_len: int | None,
) -> list[Row]:
    """The rows of a request, those of a prompt next to each other.

    The random numbers of a row come from `(seed, prompt, sample)` alone, so they do not depend on
    what else is in the batch.

    Args:
        base: model that is sampled.
        tokenizer: decodes for stop strings and names an end token.
        prompts: token ids.
        params: see `SamplingParams`.
        num_samples: completions for each prompt.
        max_seq_len: of the model, tokens; None = not known.

    Raises:
        ConfigError: a setting that is not allowed.
        BackendError: a prompt that does not fit.
    """
    check_sampling(params, num_samples)
    ending = Ending(
        ids=frozenset(
            end_token_ids(base, tokenizer) | {stop for stop in params.stop if isinstance(stop, int)}
        ),
        strings=tuple(stop for stop in params.stop if isinstance(stop, str)),
        tokenizer=tokenizer,
    )
    # 128 bits of the system's own randomness, where there is no seed.
    seed = secrets.randbits(128) if params.seed is None else int(params.seed)
    rows: list[Row] = []
    for index, prompt in enumerate(prompts):
        max_tokens = min(
            params.max_tokens, room_for(base, prompt, index=index, max_seq_len=max_seq_len)
        )
        rows.extend(
            Row(
                prompt=tuple(prompt),
                max_tokens=max_tokens,
                policy=(params.temperature, params.top_k, params.top_p),
                ending=ending,
                draws=draws_of(seed, (index, sample), max_tokens),
            )
            for sample in range(num_samples)
        )
    return rows


def room_for(base: BaseModel, prompt: Sequence[int], *, index: int, max_seq_len: int | None) -> int:
    """Tokens that can follow a prompt.

    Raises:
        BackendError: it is empty, too long, or of another tokenizer.
    """
    if not prompt:
        raise BackendError(f"prompt {index} is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= base.vocab_size:
        raise BackendError(f"prompt {index} holds a token id outside 0..{base.vocab_size - 1}")
    if max_seq_len is None:
        return sys.maxsize
    room = max_seq_len - len(prompt)
    if room < 1:
        raise BackendError(
            f"prompt {index} has {len(prompt)} tokens, which leaves no room for an answer in "
            f"the {max_seq_len} tokens of {base.name}"
        )
    return room


def draws_of(seed: int, index: tuple[int, int], count: int) -> FloatArray:
    """The random numbers of one row: prompt and sample number `index` of a request."""
    draws = np.random.default_rng([*words_of(seed), *index]).random(count)
    return np.minimum(draws, LARGEST_DRAW).astype(np.float32)


def words_of(seed: int) -> list[int]:
    """A seed of any size as 32-bit words, which is what a seed sequence takes."""
    words = []
    while True:
        words.append(seed & 0xFFFFFFFF)
        seed >>= 32
        if not seed:
            return words


def check_sampling(params: SamplingParams, num_samples: int) -> None:
    """Returns if the settings make sense.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
    """
    rules = (
        ("max_tokens", params.max_tokens, params.max_tokens >= 1, "at least 1"),
        (
            "temperature",
            params.temperature,
            params.temperature == 0 or params.temperature >= MIN_TEMPERATURE,
            f"0 (greedy) or at least {MIN_TEMPERATURE}",
        ),
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
    stop_ids: frozenset[int] | set[int],
    strings: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase | None,
) -> bool:
    """Whether the last of `tokens` ends the completion: an end id, or the end of a stop string.

    The token in which a stop string ends is kept whole.
    """
    if tokens[-1] in stop_ids:
        return True
    if not strings:
        return False
    assert tokenizer is not None
    # A token holds at least one byte, except special ones, which decode to something longer.
    window = max(len(string.encode()) for string in strings) + 1
    text = tokenizer.decode(list(tokens[-window:]), skip_special_tokens=False)
    return any(string in text for string in strings)


def draw_tokens(rows: Sequence[Row], logits_BV: Tensor) -> None:
    """Gives every row its next token.

    Args:
        rows: none of them finished.
        logits_BV: `[B, V]` float32, of the next token.
    """
    # The largest is NaN where any is; it is infinite where any is, or all are excluded.
    good = logits_BV.amax(dim=1).isfinite().tolist()
    if not all(good):
        for row, is_good in zip(rows, good, strict=True):
            row.broken = not is_good
        kept = [number for number, is_good in enumerate(good) if is_good]
        if kept:
            draw_tokens([rows[number] for number in kept], logits_BV[kept])
        return
    by_policy: dict[Policy, list[int]] = {}
    for number, row in enumerate(rows):
        by_policy.setdefault(row.policy, []).append(number)
    draws = np.array([row.draws[len(row.tokens)] for row in rows], np.float32)
    draws_B = torch.from_numpy(draws).to(logits_BV.device)
    for policy, numbers in by_policy.items():
        whole = len(by_policy) == 1
        tokens_B, logprobs_B = draw(
            logits_BV if whole else logits_BV[numbers],
            draws_B if whole else draws_B[numbers],
            temperature=policy[0],
            top_k=policy[1],
            top_p=policy[2],
        )
        for number, token, logprob in zip(
            numbers, tokens_B.tolist(), logprobs_B.tolist(), strict=True
        ):
            rows[number].take(token, logprob)


def draw(
    logits_BV: Tensor, draws_B: Tensor, *, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob, both `[B]`.

    Log-probs are those of the distribution drawn from. Greedy decoding has no distribution; it
    reports the model's own log-probs.

    Args:
        logits_BV: `[B, V]`
        draws_B: `[B]`, uniform in [0, 1).
        temperature: 0 = greedy.
        top_k: 0 = off.
        top_p: 1 = off.
    """
    if temperature == 0:
        cut_BV = logits_BV
        tokens_B = logits_BV.argmax(dim=1)
    else:
        cut_BV = cut_logits(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p)
        cumulative_BV = cut_BV.softmax(dim=1).cumsum_(dim=1)
        thresholds_B = draws_B[:, None] * cumulative_BV[:, -1:]
        # `right`: the first token whose cumulative probability exceeds the draw, never one of 0.
        tokens_B = torch.searchsorted(cumulative_BV, thresholds_B, right=True).squeeze(1)
    chosen_B = cut_BV.gather(1, tokens_B[:, None]).squeeze(1)
    return tokens_B, chosen_B - cut_BV.logsumexp(dim=1)


def sampling_logprobs(logits_BV: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Log-probs `[B, V]` of the distribution that is drawn from; -inf where excluded."""
    return cut_logits(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p).log_softmax(
        dim=1
    )


def cut_logits(logits_BV: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Logits `[B, V]` after temperature, then top-k, then top-p; -inf where excluded.

    Top-p keeps the most probable tokens up to and including the one that reaches `top_p`.
    """
    if temperature != 1:
        logits_BV = logits_BV / temperature
    if 0 < top_k < logits_BV.shape[1]:
        kept = logits_BV.topk(top_k, dim=1)
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter(1, kept.indices, kept.values)
    if top_p < 1:
        logits_BV = _cut_to_top_p(logits_BV, top_p)
    return logits_BV


def _cut_to_top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    total_B = logits_BV.logsumexp(dim=1, keepdim=True)
    count = min(TOP_P_CANDIDATES, logits_BV.shape[1])
    while True:
        # Sorting a whole vocabulary takes longer than a small model's step.
        ordered, order = logits_BV.topk(count, dim=1)
        probs_BV = (ordered - total_B).exp()
        reached_BV = probs_BV.cumsum(dim=1)
        if count == logits_BV.shape[1] or bool((reached_BV[:, -1] >= top_p).all()):
            break
        count = logits_BV.shape[1]
    ordered = ordered.masked_fill(reached_BV - probs_BV >= top_p, -torch.inf)
    return torch.full_like(logits_BV, -torch.inf).scatter(1, order, ordered)
