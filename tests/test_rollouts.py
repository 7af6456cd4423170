"""Rollouts: what is sampled is what is trained, in one turn and in several."""

import math
from dataclasses import replace

import numpy as np
import pytest

from loss_fns.cross_entropy import cross_entropy
from tests.backends.tiny import make_adam, make_lora, make_sampling
from tests.fake_generator import FakeGenerator, logprobs_of
from tests.fakes import Done
from tests.render.templates import CHATML, byte_level, wrap
from tunebook.backends.local import LocalBackend
from tunebook.environments import Environment, Environments, Step
from tunebook.errors import BackendError, ConfigError, StaleGenerator
from tunebook.models import load_tokenizer
from tunebook.render import render_prompt
from tunebook.rollouts import (
    Ending,
    Prompt,
    Segment,
    sampling_seed,
    start_rollouts,
    to_datum,
)
from tunebook.types import Datum, StopReason

TINY = "pkg://tunebook/assets/tiny_model"
TOKENIZER = byte_level(CHATML)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def ids(text):
    """One id for each character, which is how nobody would encode it."""
    return [TOKENIZER.convert_tokens_to_ids(TOKENIZER.tokenize(each)[0]) for each in text]


def make_prompt(text, *, row=0, tokenizer=TOKENIZER, **columns):
    messages = [{"role": "user", "content": text}]
    tokens = np.asarray(render_prompt(messages, tokenizer), np.int32)
    return Prompt(row=row, tokens=tokens, messages=messages, columns=columns)


def play(generator, prompts, *, environments=None, tokenizer=TOKENIZER, **changes):
    """The groups of a call with the settings most tests share."""
    settings = {"group_size": 2, "key": (0, 1, 0), "max_seq_len": 200, **changes}
    params = settings.pop("params", make_sampling(max_tokens=20, seed=None))
    return start_rollouts(
        generator, prompts, params, tokenizer=tokenizer, environments=environments, **settings
    ).finish()


class Replies(Environment):
    """Answers every turn with the next of some replies, then is done."""

    def __init__(self, replies=("More.",), *, reward=None):
        self.replies = list(replies)
        self.reward = reward

    async def reset(self, start):
        return start.messages

    async def step(self, turn):
        if not self.replies:
            return Step(messages=(), done=True, reward=self.reward)
        message = {"role": "user", "content": self.replies.pop(0)}
        return Step([message], done=False, reward=self.reward, metrics={"replies": 1.0})


def environments_of(make, **changes):
    limits = {"max_turns": 4, "timeout_s": 5.0, "max_concurrency": 8, **changes}
    return Environments(make, name="test", **limits)


@pytest.fixture
def replying():
    """A function that makes `Environments` of `Replies`, closed after the test."""
    opened = []

    def make(*arguments, **changes):
        reward = changes.pop("reward", None)
        opened.append(environments_of(lambda: Replies(*arguments, reward=reward), **changes))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


# One turn.


def test_groups_come_in_the_order_of_the_prompts():
    generator = FakeGenerator(lambda prompt, sample: [*ids("ab"[sample]), END], end_ids=(END,))
    prompts = [make_prompt(text, row=row) for row, text in ((7, "one"), (3, "two"), (5, "three"))]
    groups = play(generator, prompts)
    assert [[rollout.row for rollout in group] for group in groups] == [[7, 7], [3, 3], [5, 5]]
    assert [[rollout.completion for rollout in group] for group in groups] == [["a", "b"]] * 3
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group:
            assert rollout.segments[0].tokens.tolist() == prompt.tokens.tolist()
            assert rollout.messages[0] == prompt.messages[0]
            assert rollout.messages[1] == {"role": "assistant", "content": rollout.completion}
            assert (rollout.num_turns, rollout.ending) == (1, Ending.FINISHED)
    # One call for all of them, so that they are sampled together.
    assert [(len(each.prompts), each.num_samples) for each in generator.asked] == [(3, 2)]


def test_starting_does_not_wait():
    """The first turn is submitted at once and waited for in `finish` only."""
    waited = []

    class Lazy(Done):
        def result(self):
            waited.append(True)
            return super().result()

    class Slow(FakeGenerator):
        def sample(self, prompts, params, num_samples):
            return Lazy(super().sample(prompts, params, num_samples).result())

    generator = Slow(lambda prompt, sample: [END], end_ids=(END,))
    pending = start_rollouts(
        generator, [make_prompt("hi")], make_sampling(), group_size=2, key=(0,),
        max_seq_len=100, tokenizer=TOKENIZER, environments=None,
    )  # fmt: skip
    assert len(generator.asked) == 1 and not waited
    pending.finish()
    assert waited


def test_any_of_several_end_tokens_ends_a_completion():
    """Case 70: stop ids [7, 9], completion ending in 9: finished, the mask ends there, with it."""
    generator = FakeGenerator(lambda prompt, sample: [20, 21, 9, 22, 23], end_ids=(7,))
    params = make_sampling(max_tokens=5, stop=(9,))
    (group,) = play(generator, [make_prompt("hi")], params=params)
    for rollout in group:
        assert not rollout.truncated and rollout.stop_reason is StopReason.STOP
        assert rollout.tokens[-3:].tolist() == [20, 21, 9]
        assert rollout.mask[-3:].tolist() == [1, 1, 1] and rollout.mask.sum() == 3
        assert rollout.num_sampled_tokens == 3
    assert sum(rollout.truncated for rollout in group) / len(group) == 0.0


def test_end_tokens_of_a_model_that_has_several(tmp_path):
    """Case 70 on a model: whichever of two ends it, it is not truncated, and is trained."""
    with LocalBackend(model=TINY, device="cpu") as backend:
        generator = session_of(backend, tmp_path).publish_weights().result()
        tokenizer = load_tokenizer(TINY)
        prompt = make_prompt("Add 3 and 4.", tokenizer=tokenizer)
        (first,) = play(
            generator, [prompt], tokenizer=tokenizer, params=make_sampling(max_tokens=30)
        )
        stop = int(first[0].tokens[len(prompt.tokens)])
        params = make_sampling(max_tokens=30, stop=(stop,))
        (group,) = play(generator, [prompt], tokenizer=tokenizer, params=params, group_size=8)
    ends = {int(rollout.tokens[-1]) for rollout in group}
    assert ends == {stop, tokenizer.eos_token_id}
    assert not any(rollout.truncated for rollout in group)
    assert all(rollout.mask[-1] == 1 for rollout in group)


def test_a_completion_without_an_end_is_truncated():
    generator = FakeGenerator(lambda prompt, sample: [20] * 50, end_ids=(END,))
    (group,) = play(generator, [make_prompt("hi")], params=make_sampling(max_tokens=6))
    assert [rollout.ending for rollout in group] == [Ending.MAX_NEW_TOKENS] * 2
    assert all(rollout.truncated and rollout.num_sampled_tokens == 6 for rollout in group)


def test_no_completion_goes_past_max_seq_len():
    generator = FakeGenerator(lambda prompt, sample: [20] * 50, end_ids=(END,))
    short, long = make_prompt("hi"), make_prompt("this one is longer")
    limit = len(long.tokens) + 4
    groups = play(generator, [short, long], max_seq_len=limit, params=make_sampling(max_tokens=9))
    assert [rollout.ending for rollout in groups[0]] == [Ending.MAX_NEW_TOKENS] * 2
    assert [rollout.ending for rollout in groups[1]] == [Ending.MAX_SEQ_LEN] * 2
    assert all(rollout.truncated and len(rollout.tokens) <= limit for rollout in groups[1])
    # Two calls that share no random numbers.
    assert [each.params.max_tokens for each in generator.asked] == [9, 4]
    assert len({each.params.seed for each in generator.asked}) == 2
    with pytest.raises(BackendError, match=rf"prompt 1 .*max_seq_len={len(long.tokens)}"):
        play(generator, [short, long], max_seq_len=len(long.tokens))


def test_the_stop_token_is_trained_with_its_own_log_prob():
    """Case 80: weight 1 and the sampler's log-prob on the sampled end token."""
    generator = FakeGenerator(lambda prompt, sample: [*ids("ok"), END], end_ids=(END,))
    (group,) = play(generator, [make_prompt("hi")])
    datum = to_datum(group[0], advantage=2.0, token_weights=group[0].mask, temperature=1.0)
    assert datum.tokens[-1] == END
    assert datum.columns["token_weights"][-1] == 1
    assert datum.columns["sampling_logprobs"][-1] == np.float32(-END / 1000)
    assert datum.columns["advantages"][-1] == 2.0
    assert "temperature" not in datum.columns
    # Another one was not sampled, so none is added.
    cut = FakeGenerator(lambda prompt, sample: ids("okay"), end_ids=(END,))
    (group,) = play(cut, [make_prompt("hi")], params=make_sampling(max_tokens=4))
    assert group[0].tokens[-4:].tolist() == ids("okay")


def test_a_stop_string_inside_a_token_keeps_the_whole_token():
    """Case 80: stop '..' with the token '...'."""
    tokenizer = wrap(TOKENIZER.backend_tokenizer, CHATML)
    tokenizer.add_tokens(["..."])
    dots = tokenizer.convert_tokens_to_ids("...")
    generator = FakeGenerator(
        lambda prompt, sample: [*ids("so"), dots, *ids("on")], tokenizer=tokenizer
    )
    params = make_sampling(max_tokens=9, stop=("..",))
    (group,) = play(generator, [make_prompt("hi")], params=params, tokenizer=tokenizer)
    assert group[0].tokens[-3:].tolist() == [*ids("so"), dots]
    assert group[0].mask.sum() == 3 and not group[0].truncated
    assert group[0].completion == "so..."


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda one: replace(one, logprobs=one.logprobs[:-1]), "3 tokens with 2 log-probs"),
        (lambda one: replace(one, logprobs=one.logprobs * math.nan), "NaN"),
        (
            lambda one: replace(one, tokens=one.tokens[:0], logprobs=one.logprobs[:0]),
            "without a token",
        ),
    ],
)
def test_what_cannot_be_trained_is_an_error(damage, message):
    """Case 71: as many log-probs as ids, or a hard error; nothing is padded."""

    class Damaged(FakeGenerator):
        def completion(self, prompt, params, number):
            return damage(super().completion(prompt, params, number))

    with pytest.raises(BackendError, match=message):
        play(Damaged(lambda prompt, sample: [20, 21, 22]), [make_prompt("hi")])


def test_a_generator_that_returns_too_few_is_an_error():
    class Short(FakeGenerator):
        def sample(self, prompts, params, num_samples):
            return Done([each[:1] for each in super().sample(prompts, params, num_samples).value])

    with pytest.raises(BackendError, match="asked for 2 completions of 1 prompts and returned 1"):
        play(Short(lambda prompt, sample: [20]), [make_prompt("hi")])
    with pytest.raises(BackendError, match="2 tokens with 1 log-probs"):
        Segment(np.zeros(2, np.int32), np.zeros(1, np.float32), 1)


# Random numbers.


def test_seeds_depend_on_every_number_and_its_place():
    keys = [(0,), (0, 0), (1, 0), (0, 1), (2**40, 1), ()]
    seeds = {sampling_seed(key, turn) for key in keys for turn in (1, 2)}
    assert len(seeds) == 2 * len(keys)
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert sampling_seed((3, 4), 1) == sampling_seed((3, 4), 1)


def test_the_same_key_asks_for_the_same(replying):
    """Case 72: a resumed step samples as before, and no two turns or steps share a seed."""
    seeds = []
    for key in ((42, 1, 0), (42, 1, 0), (42, 2, 0), (42, 1, 1)):
        generator = FakeGenerator(lambda prompt, sample: [*ids("a"), END], end_ids=(END,))
        play(generator, [make_prompt("hi")], key=key, environments=replying())
        seeds.append([each.params.seed for each in generator.asked])
    assert seeds[0] == seeds[1] and len(seeds[0]) == 2
    assert len({seed for each in seeds[1:] for seed in each}) == 6


# On the built-in model.


def session_of(backend, tmp_path, name="a"):
    return backend.open_session(name, make_lora(), directory=tmp_path / name)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
def test_a_group_is_diverse_and_reproducible(tmp_path, fast):
    """Case 72: seed 42, 4 completions at temperature 1: not all alike, and the same again."""
    tokenizer = load_tokenizer(TINY)
    prompts = [
        make_prompt(text, tokenizer=tokenizer) for text in ("Tell me about cats.", "Say something.")
    ]
    params = make_sampling(max_tokens=12, temperature=1.0, seed=42)
    with LocalBackend(model=TINY, device="cpu", fast=fast) as backend:
        generator = session_of(backend, tmp_path).publish_weights().result()

        def sampled(key, prompts):
            groups = play(
                generator, prompts, tokenizer=tokenizer, params=params, group_size=4, key=key
            )
            return [[tuple(rollout.tokens) for rollout in group] for group in groups]

        first = sampled((42, 1, 0), prompts)
        assert all(len(set(group)) >= 2 for group in first)
        assert sampled((42, 1, 0), prompts) == first
        assert sampled((42, 2, 0), prompts) != first


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_trainer_sees_the_log_probs_of_the_sampler(tmp_path, replying, fast, temperature):
    """Cases 68 and 71: after a step, in two turns, with the end of a cut turn put in between."""
    tokenizer = load_tokenizer(TINY)
    prompts = [
        make_prompt(text, tokenizer=tokenizer) for text in ("Add 3 and 4.", "Tell me about cats.")
    ]
    params = make_sampling(max_tokens=5, temperature=temperature)
    with LocalBackend(model=TINY, device="cpu", fast=fast) as backend:
        session = session_of(backend, tmp_path)
        train_a_step(session, prompts[0])
        generator = session.publish_weights().result()
        groups = play(
            generator, prompts, tokenizer=tokenizer, params=params, group_size=4,
            environments=replying(("And 5?",)),
        )  # fmt: skip
        rollouts = [rollout for group in groups for rollout in group]
        data = [
            to_datum(each, advantage=1.0, token_weights=each.mask / 100, temperature=temperature)
            for each in rollouts
        ]
        found = session.forward(data).result()
    assert {rollout.num_turns for rollout in rollouts} == {2}
    first = {rollout.segments[1].tokens[-1] == tokenizer.eos_token_id for rollout in rollouts}
    assert first == {True, False}
    for datum, logprobs in zip(data, found, strict=True):
        mask = datum.columns["token_weights"] != 0
        expected = datum.columns["sampling_logprobs"]
        np.testing.assert_allclose(logprobs.numpy()[mask], expected[mask], atol=1e-4)


def train_a_step(session, prompt):
    group = play(
        session.publish_weights().result(),
        [prompt],
        tokenizer=load_tokenizer(TINY),
        params=make_sampling(max_tokens=5),
        group_size=1,
    )
    (rollout,) = group[0]
    datum = to_datum(rollout, advantage=1.0, token_weights=rollout.mask, temperature=1.0)
    session.forward_backward([datum], cross_entropy)
    session.optim_step(make_adam(learning_rate=1e-2)).result()


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
def test_every_step_samples_from_the_weights_of_that_step(tmp_path, fast):
    """Case 73: completions carry the version, and their log-probs are those of its weights."""
    tokenizer = load_tokenizer(TINY)
    prompt = make_prompt("Tell me about cats.", tokenizer=tokenizer)
    sampled, generators = [], []
    with LocalBackend(model=TINY, device="cpu", fast=fast) as backend:
        session = session_of(backend, tmp_path)
        for step in (1, 2, 3):
            generators.append(session.publish_weights().result())
            (group,) = play(
                generators[-1], [prompt], tokenizer=tokenizer, params=make_sampling(max_tokens=8),
                key=(0, 0, 0),
            )  # fmt: skip
            assert {version for rollout in group for version in rollout.versions} == {step}
            data = [
                to_datum(each, advantage=1.0, token_weights=each.mask, temperature=1.0)
                for each in group
            ]
            for datum, logprobs in zip(data, session.forward(data).result(), strict=True):
                mask = datum.columns["token_weights"] != 0
                expected = datum.columns["sampling_logprobs"][mask]
                np.testing.assert_allclose(logprobs.numpy()[mask], expected, atol=1e-4)
            sampled.append(data[0].columns["sampling_logprobs"].tolist())
            session.forward_backward(data, cross_entropy)
            session.optim_step(make_adam(learning_rate=2e-2)).result()
        for generator in generators[:-1]:
            with pytest.raises(StaleGenerator):
                play(generator, [prompt], tokenizer=tokenizer)
    assert sampled[0] != sampled[1] != sampled[2]


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
def test_rollouts_that_began_before_a_step_keep_its_weights(tmp_path, replying, fast):
    """What `policy_lag` needs: every turn is sampled by the weights that were published."""
    tokenizer = load_tokenizer(TINY)
    prompt = make_prompt("Tell me about cats.", tokenizer=tokenizer)
    answers = []
    for trained_between in (False, True):
        with LocalBackend(model=TINY, device="cpu", fast=fast) as backend:
            session = session_of(backend, tmp_path, f"s{trained_between}")
            generator = session.publish_weights().result()
            pending = start_rollouts(
                generator, [prompt], make_sampling(max_tokens=8), group_size=3, key=(0,),
                max_seq_len=100, tokenizer=tokenizer, environments=replying(),
            )  # fmt: skip
            if trained_between:
                weights = np.ones(len(prompt.tokens) - 1, np.float32)
                datum = Datum(prompt.tokens, {"token_weights": weights})
                session.forward_backward([datum], cross_entropy)
                session.optim_step(make_adam(learning_rate=0.1)).result()
            (group,) = pending.finish()
            answers.append([rollout.tokens.tolist() for rollout in group])
            assert {each for rollout in group for each in rollout.versions} == {1}
    assert answers[0] == answers[1]


# Several turns.


def test_ids_are_kept_across_turns(replying):
    """Case 71: ids nobody would encode stay, and turn 2 begins with turn 1 as it was."""
    sampled = [*ids("hello"), END]
    assert TOKENIZER("hello", add_special_tokens=False)["input_ids"] != sampled[:-1]
    generator = FakeGenerator(lambda prompt, sample: sampled, end_ids=(END,))
    prompt = make_prompt("hi")
    ((rollout,),) = play(generator, [prompt], group_size=1, environments=replying(("again",)))
    first, second = (each.prompts[0] for each in generator.asked)
    assert first == prompt.tokens.tolist()
    assert second[: len(first) + len(sampled)] == first + sampled
    reply = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(second[len(first) + len(sampled) :]) == reply
    assert rollout.tokens.tolist() == second + sampled
    assert [each.logprobs is not None for each in rollout.segments] == [False, True, False, True]
    assert len(rollout.sampling_logprobs) == len(rollout.mask) == len(rollout.tokens) - 1
    assert rollout.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "hello"},
    ]
    assert rollout.num_turns == 2 and rollout.ending is Ending.FINISHED


def test_a_turn_that_was_cut_gets_its_end(replying):
    """The end of the turn that nobody sampled stands there, without loss."""
    generator = FakeGenerator(lambda prompt, sample: ids("hello"), end_ids=(END,))
    ((rollout,),) = play(
        generator, [make_prompt("hi")], group_size=1, environments=replying(("again",)),
        params=make_sampling(max_tokens=5),
    )  # fmt: skip
    text = "<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(rollout.segments[2].tokens) == text
    assert rollout.mask.sum() == 10
    assert rollout.ending is Ending.MAX_NEW_TOKENS


def test_every_turn_has_the_advantage_and_nothing_else_has(replying):
    """Case 78: two turns of unequal length at different offsets, advantage 1."""
    turns = {1: [*ids("a longer answer"), END], 2: [*ids("no"), END]}

    def answer(prompt, sample):
        return turns[1 + prompt.count(END) // 2]

    generator = FakeGenerator(answer, end_ids=(END,))
    ((rollout,),) = play(
        generator, [make_prompt("hi")], group_size=1, environments=replying(("again",))
    )
    datum = to_datum(
        rollout, advantage=1.0, token_weights=rollout.mask / rollout.mask.sum(), temperature=0.7
    )
    assert datum.columns["temperature"] == 0.7
    scored = datum.tokens[1:]
    advantages = np.asarray(datum.columns["advantages"])
    first, _, second = (len(each.tokens) for each in rollout.segments[1:])
    expected = np.zeros(len(scored))
    start = len(rollout.segments[0].tokens) - 1
    expected[start : start + first] = 1.0
    expected[-second:] = 1.0
    assert advantages.tolist() == expected.tolist() == rollout.mask.tolist()
    assert scored[advantages == 1].tolist() == turns[1] + turns[2]
    np.testing.assert_array_equal(
        datum.columns["sampling_logprobs"][advantages == 1], logprobs_of(turns[1] + turns[2])
    )
    assert not datum.columns["sampling_logprobs"][advantages == 0].any()
    assert datum.columns["token_weights"].sum() == pytest.approx(1)


def test_all_rollouts_of_a_turn_are_sampled_together(replying):
    generator = FakeGenerator(lambda prompt, sample: [*ids("abc"[sample % 3]), END], end_ids=(END,))
    prompts = [make_prompt("one"), make_prompt("two")]
    play(generator, prompts, group_size=3, environments=replying(("x", "y")))
    assert [(len(each.prompts), each.num_samples) for each in generator.asked] == [
        (2, 3), (6, 1), (6, 1),
    ]  # fmt: skip


def test_limits_of_turns_and_tokens(replying):
    generator = FakeGenerator(lambda prompt, sample: [*ids("ok"), END], end_ids=(END,))
    endless = ("again",) * 100
    prompt = make_prompt("hi")
    ((rollout,),) = play(
        generator, [prompt], group_size=1, environments=replying(endless, max_turns=3)
    )
    assert (rollout.num_turns, rollout.ending) == (3, Ending.MAX_TURNS)
    assert rollout.truncated and rollout.stop_reason is StopReason.STOP
    # What the environment said last was never answered, so it is no part of the conversation.
    assert rollout.messages[-1]["role"] == "assistant"
    assert rollout.segments[-1].logprobs is not None

    observation = len(rollout.segments[2].tokens)
    room = len(prompt.tokens) + 3 + observation + 1
    for limit, turns, sampled in ((room, 2, 4), (room - 1, 1, 3)):
        ((cut,),) = play(
            generator, [prompt], group_size=1, max_seq_len=limit,
            environments=replying(endless, max_turns=3),
        )  # fmt: skip
        assert (cut.num_turns, cut.ending) == (turns, Ending.MAX_SEQ_LEN)
        assert cut.truncated and cut.num_sampled_tokens == sampled
        assert len(cut.tokens) <= limit


def test_rewards_and_metrics_of_an_environment_add_up(replying):
    generator = FakeGenerator(lambda prompt, sample: [*ids("ok"), END], end_ids=(END,))
    ((scored,),) = play(
        generator, [make_prompt("hi")], group_size=1,
        environments=replying(("x", "y"), reward=0.5),
    )  # fmt: skip
    assert scored.environment_reward == 1.5
    assert scored.metrics == {"replies": 2.0}
    ((unscored,),) = play(
        generator, [make_prompt("hi")], group_size=1, environments=replying(("x",))
    )
    assert unscored.environment_reward is None and unscored.failure is None


def test_a_failed_environment_is_unscored_and_leaves_the_others_alone():
    """Case 66 for environments: what was sampled stays, the reward is None, not 0."""
    numbers = iter(range(100))

    class Breaks(Replies):
        def __init__(self):
            super().__init__(("more",), reward=1.0)
            # The first one is made to ask it for its tools.
            self.number = next(numbers) - 1

        async def reset(self, start):
            if self.number == 0:
                raise ConnectionError("no sandbox left")
            return start.messages

        async def step(self, turn):
            if self.number == 1 and turn.number == 2:
                raise TimeoutError("HTTP 429")
            return await super().step(turn)

    generator = FakeGenerator(lambda prompt, sample: [*ids("ok"), END], end_ids=(END,))
    environments = environments_of(Breaks)
    try:
        (group,) = play(generator, [make_prompt("hi")], group_size=3, environments=environments)
    finally:
        environments.close()
    reset, step, _ = group
    assert reset.failure == "ConnectionError: no sandbox left"
    assert step.failure == "TimeoutError: HTTP 429"
    assert [each.environment_reward for each in group] == [None, None, 2.0]
    assert [each.ending for each in group] == [Ending.FAILED, Ending.FAILED, Ending.FINISHED]
    assert [each.num_turns for each in group] == [0, 2, 2]
    assert [each.num_sampled_tokens for each in group] == [0, 6, 6]
    assert not reset.truncated and reset.completion == ""


def test_an_environment_may_begin_otherwise():
    """First messages of its own are rendered; those of the row keep the ids they came with."""

    class Own(Replies):
        async def reset(self, start):
            assert start.columns == {"answer": "7"}
            return [{"role": "system", "content": "Be brief."}, *start.messages]

    generator = FakeGenerator(lambda prompt, sample: [*ids("ok"), END], end_ids=(END,))
    prompt = make_prompt("hi", answer="7")
    environments = environments_of(lambda: Own(()))
    same = environments_of(lambda: Replies(()))
    try:
        (group,) = play(generator, [prompt], environments=environments)
        strange = replace(prompt, tokens=np.asarray([*ids("hi")], np.int32))
        (kept,) = play(generator, [strange], environments=same)
        (full,) = play(generator, [prompt], environments=environments, max_seq_len=20)
    finally:
        environments.close()
        same.close()
    text = TOKENIZER.decode(group[0].segments[0].tokens)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert group[0].messages[0]["role"] == "system"
    assert kept[0].segments[0].tokens.tolist() == ids("hi")
    assert "no room in max_seq_len=20" in full[0].failure


def test_rollouts_of_a_group_begin_with_the_same_seed():
    seeds = []

    class Seeded(Replies):
        async def reset(self, start):
            seeds.append(start.seed)
            return start.messages

    generator = FakeGenerator(lambda prompt, sample: [END], end_ids=(END,))
    environments = environments_of(lambda: Seeded(()))
    try:
        play(generator, [make_prompt("a"), make_prompt("b")], environments=environments)
    finally:
        environments.close()
    assert len(seeds) == 4 and len(set(seeds)) == 2
    assert seeds[0] == seeds[1] and seeds[2] == seeds[3]


def test_every_environment_is_closed_whatever_happens():
    closed = []

    class Closes(Replies):
        async def close(self):
            closed.append(self)

    class Broken(FakeGenerator):
        def sample(self, prompts, params, num_samples):
            return Done(error=RuntimeError("the service went away"))

    environments = environments_of(lambda: Closes(("x",)))
    good = FakeGenerator(lambda prompt, sample: [END], end_ids=(END,))
    try:
        play(good, [make_prompt("hi")], environments=environments)
        assert len(closed) == 2
        with pytest.raises(RuntimeError, match="went away"):
            play(Broken(good.answer), [make_prompt("hi")], environments=environments)
        assert len(closed) == 4
        start_rollouts(
            good, [make_prompt("hi")], make_sampling(), group_size=2, key=(0,), max_seq_len=100,
            tokenizer=TOKENIZER, environments=environments,
        )  # fmt: skip
    finally:
        environments.close()
    assert len(closed) == len(set(map(id, closed))) == 6


def test_an_environment_that_breaks_the_protocol_is_told(replying):
    class Wrong(Replies):
        async def step(self, turn):
            return [{"role": "user", "content": "hm"}]

    generator = FakeGenerator(lambda prompt, sample: [END], end_ids=(END,))
    environments = environments_of(Wrong)
    try:
        with pytest.raises(ConfigError, match="step returned a list"):
            play(generator, [make_prompt("hi")], environments=environments)
    finally:
        environments.close()
