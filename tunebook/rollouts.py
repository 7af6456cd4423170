"""Rollouts: conversations sampled from a policy, alone or with an environment, as training data.

What was sampled is what is trained: ids and log-probs are the sampler's own, and no completion is
decoded and encoded again. `start_rollouts` submits the first turn and returns at once, so that a
recipe can train meanwhile; `finish` waits, and plays the turns that follow.
Legend: P prompts, G rollouts of a group, N tokens of a segment, T scored tokens of a rollout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebook.backends.base import Future, Generator
from tunebook.environments.protocol import Environment, Message, Start, Step, Tools, Turn
from tunebook.environments.running import Environments, Failure
from tunebook.environments.tool_calls import assistant_message, read_answer
from tunebook.errors import BackendError
from tunebook.render import render_prompt
from tunebook.render.turns import observation_ids
from tunebook.types import (
    Completion,
    Datum,
    FloatArray,
    IntArray,
    SamplingParams,
    StopReason,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Ending(StrEnum):
    """Why a rollout has no further turn."""

    FINISHED = "finished"
    """Its last turn ended by itself."""
    MAX_NEW_TOKENS = "max_new_tokens"
    """Its last turn was cut at the tokens of one turn."""
    MAX_SEQ_LEN = "max_seq_len"
    """The conversation would have become too long."""
    MAX_TURNS = "max_turns"
    """The environment would have gone on."""
    FAILED = "failed"
    """The environment raised or took too long; `Rollout.failure` says what."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a group of rollouts begins with."""

    row: int
    """Index of the row."""
    tokens: IntArray
    """`[N]`, rendered with the tools of the environment."""
    messages: Sequence[Message]
    """The same as text."""
    columns: Mapping[str, Any]
    """The row's other columns."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one origin."""

    tokens: IntArray
    """`[N]`"""
    logprobs: FloatArray | None
    """`[N]` nats, of the sampler; None = not sampled: a prompt, an observation."""
    version: int | None
    """Version of the weights that sampled it; None = not sampled."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.tokens):
            raise BackendError(
                f"the generator returned {len(self.tokens)} tokens with {len(self.logprobs)} "
                "log-probs; each token needs its own"
            )


@dataclass(frozen=True, slots=True)
class Rollout:
    """One conversation: a prompt, and what was sampled and observed since."""

    row: int
    """Index of the row of its prompt."""
    segments: tuple[Segment, ...]
    """The prompt, then completions and observations in turn. Nothing behind the last completion:
    an observation that the model never answered is left out."""
    messages: list[Message]
    """The same as text, the prompt included."""
    completion: str
    """Text of the last turn without special tokens; empty where nothing was sampled."""
    stop_reason: StopReason
    """Of the last completion; `length` where there is none."""
    ending: Ending
    num_turns: int
    """Completions."""
    environment_reward: float | None
    """Sum of what its environment gave; None = there is none, it does not score, or it failed."""
    failure: str | None
    """What went wrong in the environment. Such a rollout is unscored, which is not a reward of 0;
    it may hold no completion."""
    metrics: dict[str, float]
    """Of the environment, added up over the turns."""

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it, so that the model did not."""
        return self.ending in (Ending.MAX_NEW_TOKENS, Ending.MAX_SEQ_LEN, Ending.MAX_TURNS)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that carry loss, over all turns."""
        return sum(len(each.tokens) for each in self.segments if each.logprobs is not None)

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of the weights of every turn."""
        return tuple(each.version for each in self.segments if each.version is not None)

    @property
    def tokens(self) -> IntArray:
        """`[T + 1]`, all segments joined."""
        return np.concatenate([each.tokens for each in self.segments]).astype(np.int32)

    @property
    def mask(self) -> FloatArray:
        """`[T]`: 1 on sampled tokens, sampled end tokens included; 0 on all others."""
        return _joined(
            np.full(len(each.tokens), each.logprobs is not None) for each in self.segments
        )

    @property
    def sampling_logprobs(self) -> FloatArray:
        """`[T]` nats, of the sampler; 0 on tokens that were not sampled."""
        return _joined(
            np.zeros(len(each.tokens)) if each.logprobs is None else each.logprobs
            for each in self.segments
        )


def to_datum(
    rollout: Rollout, *, advantage: float, token_weights: FloatArray, temperature: float
) -> Datum:
    """The columns of a policy loss for one rollout, its ids and log-probs being the sampler's.

    Args:
        rollout: with at least one completion.
        advantage: of every sampled token; all other tokens have 0.
        token_weights: `[T]`, the rollout's `mask` after a normaliser of `tunebook.token_weights`; 0
            throughout leaves it out of the loss.
        temperature: it was sampled at; a column only where it is not 1.
    """
    assert rollout.num_sampled_tokens, "a rollout without a completion trains nothing"
    mask = rollout.mask
    datum = Datum(
        rollout.tokens,
        {
            "token_weights": token_weights,
            "sampling_logprobs": rollout.sampling_logprobs,
            "advantages": (mask * advantage).astype(np.float32),
        },
    )
    if temperature == 1:
        return datum
    return Datum(datum.tokens, {**datum.columns, "temperature": float(temperature)})


def sampling_seed(key: Sequence[int], *parts: int) -> int:
    """A seed below 2^53 that depends on all numbers and their order.

    Services take seeds as JSON numbers, which are exact up to there.
    """
    text = json.dumps([[int(number) for number in key], list(parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 11


def start_rollouts(
    generator: Generator,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    group_size: int,
    key: Sequence[int],
    max_seq_len: int,
    tokenizer: PreTrainedTokenizerBase,
    environments: Environments | None,
) -> PendingRollouts:
    """Submits the first turn of `group_size` rollouts for each prompt.

    Args:
        generator: samples all turns, so it has to be valid until `finish` returns, unless there
            are no environments.
        prompts: P of them.
        params: of every turn. `max_tokens` is the most of one turn; `seed` is not read.
        group_size: G.
        key: integers from which, with the turn and the place in the batch, all random numbers come:
            the run's seed, the step, and a number for each call in the step. The same key samples
            the same, another one shares nothing with it.
        max_seq_len: tokens of the longest conversation. A completion is cut where it is reached.
        tokenizer: of the model.
        environments: what answers the model; None = one turn.

    Raises:
        BackendError: a prompt that fills `max_seq_len`.
    """
    made = environments.start(len(prompts) * group_size) if environments else []
    pending = PendingRollouts(
        generator=generator,
        params=params,
        group_size=group_size,
        key=tuple(key),
        max_seq_len=max_seq_len,
        tokenizer=tokenizer,
        environments=environments,
        conversations=[
            _Conversation(
                prompt, position, made[position * group_size + number] if environments else None
            )
            for position, prompt in enumerate(prompts)
            for number in range(group_size)
        ],
    )
    pending.begin()
    return pending


@dataclass(slots=True, eq=False)
class _Conversation:
    """A rollout in the making."""

    prompt: Prompt
    position: int
    """Of its prompt."""
    environment: Environment | None
    segments: list[Segment] = field(default_factory=list[Segment])
    messages: list[Message] = field(default_factory=list[Message])
    num_prompt: int = 0
    """Messages that it begins with."""
    completion: Completion | None = None
    """The last one."""
    text: str = ""
    """Of the last completion."""
    num_turns: int = 0
    ending: Ending | None = None
    reward: float | None = None
    failure: str | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def num_tokens(self) -> int:
        return sum(len(each.tokens) for each in self.segments)

    def fail(self, reason: str) -> None:
        self.failure, self.ending, self.reward = reason, Ending.FAILED, None

    def rollout(self) -> Rollout:
        assert self.ending is not None
        return Rollout(
            row=self.prompt.row,
            segments=tuple(self.segments),
            messages=self.messages,
            completion=self.text,
            stop_reason=self.completion.stop_reason if self.completion else StopReason.LENGTH,
            ending=self.ending,
            num_turns=self.num_turns,
            environment_reward=self.reward,
            failure=self.failure,
            metrics=self.metrics,
        )


@dataclass(frozen=True, slots=True)
class _Sampling:
    """A call of the generator, and whose completions it gives."""

    future: Future[list[list[Completion]]]
    conversations: list[list[_Conversation]]
    """Those of each prompt of the call."""


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRollouts:
    """Rollouts whose first turn is being sampled; the fields are the arguments of
    `start_rollouts`."""

    generator: Generator
    params: SamplingParams
    group_size: int
    key: tuple[int, ...]
    max_seq_len: int
    tokenizer: PreTrainedTokenizerBase
    environments: Environments | None
    conversations: list[_Conversation]
    """`[P * G]`, those of a prompt next to each other."""
    samplings: list[_Sampling] = field(default_factory=list[_Sampling])
    """Of the turn that is being sampled."""

    def begin(self) -> None:
        """Puts the prompts in place and submits the first turn."""
        try:
            if self.environments is None:
                self._put_prompts()
            else:
                self._reset(self.environments)
            self.samplings = self._submit(self._active(), turn=1)
        except BaseException:
            self._finish_environments()
            raise

    def finish(self) -> list[list[Rollout]]:
        """The groups, `[P][G]`, in the order of the prompts, once all their turns are played.

        Raises:
            BackendError: the generator did not return what was asked of it.
            ConfigError: an environment did not return what the protocol says.
        """
        try:
            turn = 1
            while self.samplings:
                for sampling in self.samplings:
                    self._take_all(sampling)
                if self.environments is not None:
                    self._step(self.environments)
                turn += 1
                self.samplings = self._submit(self._active(), turn=turn)
        finally:
            self._finish_environments()
        rollouts = [conversation.rollout() for conversation in self.conversations]
        return [
            rollouts[first : first + self.group_size]
            for first in range(0, len(rollouts), self.group_size)
        ]

    def _active(self) -> list[_Conversation]:
        return [each for each in self.conversations if each.ending is None]

    def _finish_environments(self) -> None:
        if self.environments is not None:
            self.environments.finish(
                [each.environment for each in self.conversations if each.environment is not None]
            )

    def _put_prompts(self) -> None:
        for conversation in self.conversations:
            self._put_prompt(conversation, conversation.prompt.messages, None)
            if conversation.num_tokens >= self.max_seq_len:
                raise BackendError(
                    f"prompt {conversation.position} has {conversation.num_tokens} tokens, which "
                    f"leaves no room in max_seq_len={self.max_seq_len}"
                )

    def _reset(self, environments: Environments) -> None:
        starts = [
            Start(
                messages=[dict(message) for message in each.prompt.messages],
                columns=each.prompt.columns,
                seed=sampling_seed(self.key, each.position),
            )
            for each in self.conversations
        ]
        made = [each.environment for each in self.conversations if each.environment is not None]
        rendered: dict[str, IntArray] = {}
        for conversation, found in zip(
            self.conversations, environments.reset(made, starts), strict=True
        ):
            if isinstance(found, Failure):
                self._put_prompt(conversation, conversation.prompt.messages, None)
                conversation.fail(found.reason)
                continue
            tokens = None
            if list(found) != list(conversation.prompt.messages):
                text = repr(list(found))
                if text not in rendered:
                    rendered[text] = self._rendered(found, environments.tools)
                tokens = rendered[text]
            self._put_prompt(conversation, found, tokens)
            if conversation.num_tokens >= self.max_seq_len:
                conversation.fail(
                    f"its first messages are {conversation.num_tokens} tokens, which leaves no "
                    f"room in max_seq_len={self.max_seq_len}"
                )

    def _rendered(self, messages: Sequence[Message], tools: Tools) -> IntArray:
        return np.asarray(render_prompt(messages, self.tokenizer, tools), np.int32)

    def _put_prompt(
        self, conversation: _Conversation, messages: Sequence[Message], tokens: IntArray | None
    ) -> None:
        ids = conversation.prompt.tokens if tokens is None else tokens
        conversation.segments.append(Segment(np.asarray(ids, np.int32), None, None))
        conversation.messages = [dict(message) for message in messages]
        conversation.num_prompt = len(messages)

    def _submit(self, active: Sequence[_Conversation], *, turn: int) -> list[_Sampling]:
        """One call for all conversations that have as much room; most often there is one only."""
        together: dict[Any, list[_Conversation]] = {}
        for number, conversation in enumerate(active):
            # The rollouts of a prompt are samples of it as long as nothing tells them apart.
            own = conversation.segments[0].tokens.tobytes() if turn == 1 else number
            together.setdefault((conversation.position, own), []).append(conversation)
        calls: dict[tuple[int, int], list[list[_Conversation]]] = {}
        for members in together.values():
            room = self.max_seq_len - members[0].num_tokens
            max_tokens = min(self.params.max_tokens, room)
            calls.setdefault((max_tokens, len(members)), []).append(members)
        return [
            _Sampling(
                self.generator.sample(
                    [
                        np.concatenate([each.tokens for each in members[0].segments]).tolist()
                        for members in conversations
                    ],
                    replace(
                        self.params,
                        max_tokens=max_tokens,
                        seed=sampling_seed(self.key, turn, max_tokens, num_samples),
                    ),
                    num_samples,
                ),
                conversations,
            )
            for (max_tokens, num_samples), conversations in calls.items()
        ]

    def _take_all(self, sampling: _Sampling) -> None:
        found = sampling.future.result()
        asked = [len(members) for members in sampling.conversations]
        if [len(completions) for completions in found] != asked:
            raise BackendError(
                f"the generator was asked for {sum(asked)} completions of {len(asked)} prompts and "
                f"returned {sum(map(len, found))} of {len(found)}"
            )
        for members, completions in zip(sampling.conversations, found, strict=True):
            for conversation, completion in zip(members, completions, strict=True):
                self._take(conversation, completion)

    def _take(self, conversation: _Conversation, completion: Completion) -> None:
        if not len(completion.tokens):
            raise BackendError("the generator returned a completion without a token")
        if not np.isfinite(completion.logprobs).all():
            raise BackendError("the generator returned log-probs that are NaN or infinite")
        conversation.segments.append(
            Segment(
                np.asarray(completion.tokens, np.int32),
                np.asarray(completion.logprobs, np.float32),
                completion.version,
            )
        )
        conversation.completion = completion
        conversation.num_turns += 1
        tokens = list(map(int, completion.tokens))
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        assert isinstance(text, str)
        conversation.text = text
        if conversation.environment is None:
            conversation.messages.append({"role": "assistant", "content": text})
            conversation.ending = self._ending_of(conversation)

    def _step(self, environments: Environments) -> None:
        """Gives the environments the turns that were sampled last, and takes what follows them."""
        active = self._active()
        turns: list[Turn] = []
        for conversation in active:
            assert conversation.completion is not None
            answer = read_answer(self._answer_text(conversation.completion))
            conversation.messages.append(assistant_message(conversation.text, answer))
            turns.append(
                Turn(
                    number=conversation.num_turns,
                    is_last=conversation.num_turns >= environments.max_turns,
                    text=conversation.text,
                    calls=answer.calls,
                    call_errors=answer.errors,
                    stop_reason=conversation.completion.stop_reason,
                )
            )
        made = [each.environment for each in active if each.environment is not None]
        for conversation, step in zip(active, environments.step(made, turns), strict=True):
            if isinstance(step, Failure):
                conversation.fail(step.reason)
                continue
            if step.reward is not None:
                conversation.reward = (conversation.reward or 0.0) + float(step.reward)
            for name, value in step.metrics.items():
                conversation.metrics[name] = conversation.metrics.get(name, 0.0) + float(value)
            if step.done:
                conversation.ending = self._ending_of(conversation)
            elif conversation.num_turns >= environments.max_turns:
                conversation.ending = Ending.MAX_TURNS
            else:
                self._observe(conversation, step, environments.tools)

    def _observe(self, conversation: _Conversation, step: Step, tools: Tools) -> None:
        ids = observation_ids(
            self.tokenizer,
            conversation.messages,
            step.messages,
            num_prompt=conversation.num_prompt,
            completion=conversation.segments[-1].tokens.tolist(),
            tools=tools,
        )
        if conversation.num_tokens + len(ids) >= self.max_seq_len:
            conversation.ending = Ending.MAX_SEQ_LEN
            return
        conversation.segments.append(Segment(np.asarray(ids, np.int32), None, None))
        conversation.messages += [dict(message) for message in step.messages]

    def _answer_text(self, completion: Completion) -> str:
        """The text of a turn without its end, special tokens kept: some models call tools so."""
        tokens = list(map(int, completion.tokens))
        if tokens[-1] in self.tokenizer.all_special_ids:
            tokens = tokens[:-1]
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def _ending_of(self, conversation: _Conversation) -> Ending:
        """How a conversation ends that has no turn after its last completion."""
        completion = conversation.completion
        assert completion is not None
        if completion.stop_reason is StopReason.STOP:
            return Ending.FINISHED
        if conversation.num_tokens >= self.max_seq_len:
            return Ending.MAX_SEQ_LEN
        return Ending.MAX_NEW_TOKENS


def _joined(parts: Iterable[Any]) -> FloatArray:
    """Values per token as a column `[T]`: the first token of a rollout is never scored."""
    return np.concatenate(list(parts)).astype(np.float32)[1:]
