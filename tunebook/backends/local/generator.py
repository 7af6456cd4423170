"""Sampling from published weights.

Adapters over a model that the fast path knows are sampled by it, all requests of all sessions that
were queued before somebody waits together; see `engine.batching`. Everything else is sampled by the
model's own code: batched prefill, then one token at a time with its own KV cache.
Legend: B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tunebook.backends.base import Future
from tunebook.backends.local.base_model import BaseModel, parameters_of_forward
from tunebook.backends.local.completions import Row, draw_tokens, make_rows, room_for
from tunebook.backends.local.engine.batching import Batch, Request, serve
from tunebook.backends.local.engine.engine import Engine
from tunebook.backends.local.execution import micro_batches
from tunebook.backends.local.logprobs import CHUNK_LOGITS
from tunebook.backends.local.queue import Joint, Lane, OperationQueue
from tunebook.backends.local.weights import AdapterWeights, TrainedWeights
from tunebook.errors import BackendError, StaleGenerator
from tunebook.types import Completion, SamplingParams

UNFINISHED = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What has been sampled since the piece before."""

    tokens: tuple[int, ...]
    text: str
    """May be empty where a character takes several tokens."""
    completion: Completion | None
    """The whole answer, with the last piece; None with the others."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What a model thinks of the tokens of a prompt; the first has nothing before it."""

    logprobs: list[float]
    """One a token; 0 for the first."""
    top_ids: list[list[int]]
    """The most probable tokens at every place, the best first; none at the first place."""
    top_logprobs: list[list[float]]


class LocalGenerator:
    """Samples from the weights of one publish; see `tunebook.backends.base.Generator`."""

    def __init__(
        self,
        *,
        version: int,
        base: BaseModel,
        engine: Engine | None,
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
        self._engine = engine
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
        engine = self._engine
        # A failure does not poison: sampling changes nothing, so training can go on.
        if engine is None:
            return self._queue.submit(
                self._lane,
                "sample",
                lambda: self._sample(self._begin(prompts, params, num_samples), num_samples),
                poisons=False,
            )
        joint: Joint[Request, list[list[Completion]]] = Joint(
            kind="sample",
            begin=lambda: self._request(engine, self._begin(prompts, params, num_samples)),
            run=lambda requests: self._serve(engine, requests),
            finish=lambda request: self._completions(request.rows, num_samples),
            drop=lambda: None,
        )
        return self._queue.submit(self._lane, "sample", joint, poisons=False)

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Piece]:
        """One completion, piece by piece as it is sampled: what `sample` gives for it alone.

        What the session has queued before runs first. The pieces are of the weights of this
        publish, even if the session trains on meanwhile.

        Args:
            prompt: token ids.
            params: see `SamplingParams`.
        """
        rows, steps = self._queue.submit(
            self._lane, "stream", lambda: self._begin_stream(list(prompt), params), poisons=False
        ).result()
        row, shown, text = rows[0], 0, ""
        while not row.finished:
            with self._queue.paused():
                next(steps, None)
            fresh = tuple(row.tokens[shown:])
            shown = len(row.tokens)
            whole = self._load_tokenizer().decode(row.tokens, skip_special_tokens=True)
            assert isinstance(whole, str)
            if not row.finished and whole.endswith(UNFINISHED):
                whole = text
            completion = row.completion(self.version) if row.finished else None
            yield Piece(fresh, whole[len(text) :], completion)
            text = whole

    def score(self, prompts: Sequence[Sequence[int]], top_k: int) -> Future[list[PromptScores]]:
        """Log-probs of the tokens of prompts, by the weights of this publish.

        Args:
            prompts: token ids.
            top_k: most probable tokens to name at every place; 0 = none.
        """
        prompts = [list(prompt) for prompt in prompts]
        return self._queue.submit(
            self._lane, "score", lambda: self._score(prompts, top_k), poisons=False
        )

    def _score(self, prompts: list[list[int]], top_k: int) -> list[PromptScores]:
        for index, prompt in enumerate(prompts):
            room_for(self._base, prompt, index=index, max_seq_len=None)
        with torch.no_grad(), self._applied():
            return [prompt_scores(self._base, prompt, top_k=top_k) for prompt in prompts]

    def _begin_stream(
        self, prompt: list[int], params: SamplingParams
    ) -> tuple[list[Row], Iterator[None]]:
        rows = self._begin([prompt], params, 1)
        if self._engine is not None:
            request = self._request(self._engine, rows)
            batch = Batch(self._engine, [request], batch_tokens=self._batch_tokens)
            return rows, batch.steps()
        return rows, complete(self._base, rows, self._applied)

    def _begin(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, num_samples: int
    ) -> list[Row]:
        self._check_current()
        return make_rows(
            self._base,
            self._load_tokenizer(),
            prompts,
            params,
            num_samples,
            max_seq_len=self._max_seq_len,
        )

    def _request(self, engine: Engine, rows: list[Row]) -> Request:
        assert isinstance(self._weights, AdapterWeights)
        return Request(rows, self._weights.applied_to(engine.decoder, self.values))

    def _serve(self, engine: Engine, requests: list[Request]) -> None:
        serve(engine, requests, batch_tokens=self._batch_tokens)

    def _check_current(self) -> None:
        if self._current_version() != self.version:
            raise StaleGenerator(
                f"this generator holds version {self.version} of session {self._lane.name!r}, "
                f"which has published version {self._current_version()} since"
            )

    def _applied(self) -> AbstractContextManager[None]:
        # A stream may outlive a publish, after which nobody keeps these weights.
        self._check_current()
        return self._weights.applied(dropout=False, values=self.values)

    def _sample(self, rows: list[Row], num_samples: int) -> list[list[Completion]]:
        plan = micro_batches(
            [len(row.prompt) + row.max_tokens for row in rows],
            rows_per_unit=1,
            max_tokens=self._batch_tokens,
        )
        for batch in plan:
            for _ in complete(self._base, [rows[row] for row in batch.rows], self._applied):
                pass
        return self._completions(rows, num_samples)

    def _completions(self, rows: Sequence[Row], num_samples: int) -> list[list[Completion]]:
        completions = [row.completion(self.version) for row in rows]
        return [
            completions[first : first + num_samples]
            for first in range(0, len(completions), num_samples)
        ]


def complete(
    base: BaseModel,
    rows: Sequence[Row],
    applied: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """Draws tokens for rows with the model's own code until all are finished.

    Yields after each step.

    Args:
        base: the model.
        rows: decode together from beginning to end.
        applied: the context in which the model computes with the weights to sample.
    """
    input_ids_BT, mask_BT = padded_prompts([row.prompt for row in rows], base.device)
    cache = None
    while True:
        # Weights are applied for one step at a time: whoever reads the steps may stop between two.
        with torch.no_grad(), applied():
            logits_BV, cache = next_logits(base, input_ids_BT, mask_BT, cache)
        unfinished = [number for number, row in enumerate(rows) if not row.finished]
        draw_tokens([rows[number] for number in unfinished], logits_BV[unfinished])
        yield
        if all(row.finished for row in rows):
            return
        input_ids_BT, mask_BT = next_inputs(rows, mask_BT)


def padded_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left and where they have tokens, both `[B, T]`."""
    longest = max(map(len, prompts))
    input_ids_BT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask_BT = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for number, prompt in enumerate(prompts):
        input_ids_BT[number, longest - len(prompt) :] = torch.tensor(prompt)
        mask_BT[number, longest - len(prompt) :] = 1
    return input_ids_BT.to(device), mask_BT.to(device)


def next_inputs(rows: Sequence[Row], mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The last token of every row, `[B, 1]`, and the mask with it.

    A finished row gets padding: its positions stop, which could go beyond the model's.
    """
    tokens = [[0 if row.finished else row.tokens[-1]] for row in rows]
    unfinished = [[not row.finished] for row in rows]
    mask_B1 = torch.tensor(unfinished, dtype=mask_BT.dtype, device=mask_BT.device)
    return torch.tensor(tokens, device=mask_BT.device), torch.cat([mask_BT, mask_B1], dim=1)


def prompt_scores(base: BaseModel, prompt: Sequence[int], *, top_k: int) -> PromptScores:
    """The scores of one prompt.

    Args:
        base: the model, with whatever adapter is applied to it.
        prompt: token ids.
        top_k: most probable tokens to name at every place.
    """
    scores = PromptScores([0.0], [[]], [[]])
    if len(prompt) == 1:
        return scores
    tokens = torch.tensor(prompt, device=base.device)
    inputs = {"input_ids": tokens[None, :-1], "use_cache": False}
    with base.computing():
        rule = base.logits_rule
        if rule is None:
            places = base.model(**inputs).logits[0]
        else:
            places = base.body(**inputs).last_hidden_state[0]
    num_places = max(1, CHUNK_LOGITS // base.vocab_size)
    for part, targets_C in zip(places.split(num_places), tokens[1:].split(num_places), strict=True):
        logits_CV = part
        if rule is not None:
            with base.computing():
                logits_CV = rule(base.head(part).float())
        logprobs_CV = logits_CV.float().log_softmax(dim=1)
        scores.logprobs.extend(logprobs_CV.gather(1, targets_C[:, None]).squeeze(1).tolist())
        top = logprobs_CV.topk(top_k, dim=1)
        scores.top_ids.extend(top.indices.tolist())
        scores.top_logprobs.extend(top.values.tolist())
    return scores


def next_logits(
    base: BaseModel, input_ids_BT: Tensor, mask_BT: Tensor, cache: Any
) -> tuple[Tensor, Any]:
    """Logits after the last token, `[B, V]` float32, and the cache to go on with.

    Args:
        base: the model, with whatever adapter is applied to it.
        input_ids_BT: the tokens that the cache does not hold.
        mask_BT: 1 at tokens and 0 at padding, those that the cache holds included.
        cache: of the tokens before; None = there are none.
    """
    module = base.model if base.logits_rule is None else base.body
    accepted = parameters_of_forward(module)
    cache_name = cache_argument(module)
    inputs: dict[str, Any] = {
        "input_ids": input_ids_BT,
        "attention_mask": mask_BT,
        "use_cache": True,
    }
    if "position_ids" in accepted:
        positions_BT = (mask_BT.cumsum(1) - 1).clamp_min(0)
        inputs["position_ids"] = positions_BT[:, -input_ids_BT.shape[1] :]
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
