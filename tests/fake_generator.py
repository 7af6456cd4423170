"""A generator that says what a test tells it to, and remembers everything it was asked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.fakes import Done
from tunebook.backends.local.completions import ends
from tunebook.types import Completion, SamplingParams, StopReason


@dataclass
class Asked:
    """One call of `sample`."""

    prompts: list[list[int]]
    params: SamplingParams
    num_samples: int


@dataclass
class FakeGenerator:
    """Samples the ids of `answer(prompt, sample)`, cut at the first end id or stop string.

    The log-prob of a token is minus its id over 1000, so every token has its own.
    """

    answer: Callable[[list[int], int], Sequence[int]]
    end_ids: tuple[int, ...] = ()
    """The model's own end tokens."""
    version: int = 1
    tokenizer: object = None
    """For stop strings."""
    asked: list[Asked] = field(default_factory=list)

    def sample(self, prompts, params, num_samples):
        prompts = [list(prompt) for prompt in prompts]
        self.asked.append(Asked(prompts, params, num_samples))
        return Done(
            [
                [self.completion(prompt, params, number) for number in range(num_samples)]
                for prompt in prompts
            ]
        )

    def completion(self, prompt, params, number):
        stop_ids = {*self.end_ids, *(stop for stop in params.stop if isinstance(stop, int))}
        strings = tuple(stop for stop in params.stop if isinstance(stop, str))
        tokens, reason = [], StopReason.LENGTH
        for token in self.answer(prompt, number)[: params.max_tokens]:
            tokens.append(token)
            if ends(tokens, stop_ids, strings, self.tokenizer):  # pyright: ignore
                reason = StopReason.STOP
                break
        return Completion(
            tokens=np.asarray(tokens, np.int32),
            logprobs=logprobs_of(tokens),
            stop_reason=reason,
            version=self.version,
        )


def logprobs_of(tokens):
    """The log-probs that a `FakeGenerator` gives these tokens."""
    return np.asarray([-token / 1000 for token in tokens], np.float32)
