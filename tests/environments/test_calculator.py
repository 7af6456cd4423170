"""The calculator: calls it answers, answers it lets through, and a conversation with it."""

import asyncio

import numpy as np
import pytest

from tests.backends.tiny import make_sampling
from tests.fake_generator import FakeGenerator
from tunebook.compose import compose, from_yaml, to_yaml
from tunebook.config import GRPOConfig
from tunebook.environments import Calculator, Start, Turn, build_environments
from tunebook.environments.calculator import MOST_CALLS, TOOL
from tunebook.environments.tool_calls import read_answer
from tunebook.errors import ConfigError
from tunebook.models import load_tokenizer
from tunebook.render import render_prompt
from tunebook.rollouts import Ending, Prompt, start_rollouts
from tunebook.types import StopReason

TINY = "pkg://tunebook/assets/tiny_model"


def call(expression, name="calculate"):
    return f'<tool_call>{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def step(environment, text):
    answer = read_answer(text)
    turn = Turn(
        number=1, is_last=False, text=text, calls=answer.calls, call_errors=answer.errors,
        stop_reason=StopReason.STOP,
    )  # fmt: skip
    return asyncio.run(environment.step(turn))


def by_template():
    return Calculator(described_in="template")


def test_a_call_gives_its_value():
    found = step(by_template(), "So " + call("(48 / 2) + 48"))
    assert not found.done and found.reward is None
    assert found.messages == [
        {"role": "tool", "content": "72", "name": "calculate", "tool_call_id": "call00000"}
    ]
    assert found.metrics == {"calls": 1.0, "failed_calls": 0.0}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (call("1 / 0"), "error: division by zero"),
        (call("import os"), "error: not an arithmetic expression"),
        (call("1", name="search"), "error: there is no function 'search', only calculate"),
        ('<tool_call>{"name": "calculate"}</tool_call>', "string argument expression"),
        ("<tool_call>{", "error: the tool call is not closed"),
    ],
)
def test_a_bad_call_is_answered_with_what_is_wrong(text, result):
    found = step(by_template(), text)
    assert not found.done and len(found.messages) == 1
    assert result in found.messages[0]["content"]
    assert found.metrics["failed_calls"] == 1.0


def test_calls_of_one_turn_are_limited():
    found = step(by_template(), call("1 + 1") * (MOST_CALLS + 2))
    contents = [message["content"] for message in found.messages]
    assert contents[:-1] == ["2"] * MOST_CALLS and "at most" in contents[-1]
    assert len({message["tool_call_id"] for message in found.messages}) == MOST_CALLS + 1


def test_an_answer_without_a_call_ends_the_conversation():
    assert step(by_template(), "The answer is 72.").done


def test_described_in_words():
    environment = Calculator(described_in="system_message")
    assert environment.tools is None
    start = Start(messages=[{"role": "user", "content": "Hi"}], columns={}, seed=0)
    system, user = asyncio.run(environment.reset(start))
    assert "calculator" in system["content"] and user["content"] == "Hi"
    assert not read_answer(system["content"]).errors
    (example,) = read_answer(system["content"]).calls
    assert example.name == "calculate"
    own = [{"role": "system", "content": "Be brief."}, *start.messages]
    merged = asyncio.run(environment.reset(Start(messages=own, columns={}, seed=0)))
    assert [message["role"] for message in merged] == ["system", "user"]
    assert merged[0]["content"].startswith("Be brief.\n\n") and own[0]["content"] == "Be brief."
    found = step(environment, call("2 * 3") + call("1 / 0"))
    assert found.messages == [{"role": "user", "content": "6\nerror: division by zero"}]


def test_the_config():
    config = compose("grpo", ["environment=calculator", "environment.max_turns=2"])
    assert isinstance(config, GRPOConfig) and config.environment is not None
    environments = build_environments(config.environment)
    assert environments.max_turns == 2 and environments.tools == [TOOL]
    assert environments.name == "Calculator"
    again = from_yaml(to_yaml(config), "grpo")
    assert isinstance(again, GRPOConfig) and again.environment == config.environment
    none = compose("grpo", ["environment=none"])
    assert isinstance(none, GRPOConfig) and none.environment is None
    without = from_yaml(to_yaml(none), "grpo")
    assert isinstance(without, GRPOConfig) and without.environment is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.described_in=nowhere", "described_in=nowhere: must be one of template, sys"),
        ("environment.max_turns=0", "environment.max_turns=0: must be at least 1"),
        ("environment.timeout_s=0", "environment.timeout_s=0: must be at least 0.001"),
        ("environment.max_concurrency=0", "max_concurrency=0: must be at least 1"),
        ("environment.max_turn=3", "max_turn.*described_in"),
    ],
)
def test_a_bad_setting_is_named(override, message):
    config = compose("grpo", ["environment=calculator", override])
    assert isinstance(config, GRPOConfig) and config.environment is not None
    with pytest.raises(ConfigError, match=message):
        build_environments(config.environment)


def test_a_missing_limit_is_named():
    with pytest.raises(ConfigError, match=r"environment\.max_turns is missing.*defaults: \[base\]"):
        build_environments({"_target_": "tunebook.environments.Calculator"})


@pytest.mark.parametrize("described_in", ["template", "system_message"])
def test_a_conversation(described_in):
    """A problem of the GSM8K kind: a call, its result, an answer; three segments of them."""
    tokenizer = load_tokenizer(TINY)
    answers = ["<tool_call>{oops</tool_call>", call("48 / 2 + 48"), "The answer is 72."]
    turns = [
        tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"] for text in answers
    ]

    def answer(prompt, sample):
        text = tokenizer.decode(prompt)
        return turns[text.count("oops") + text.count("48 / 2 + 48")]

    generator = FakeGenerator(answer, end_ids=(tokenizer.eos_token_id,))
    config = compose("grpo", ["environment=calculator", f"environment.described_in={described_in}"])
    assert isinstance(config, GRPOConfig) and config.environment is not None
    environments = build_environments(config.environment)
    messages = [{"role": "user", "content": "48 in April, half of it in May. How many?"}]
    tokens = np.asarray(render_prompt(messages, tokenizer, environments.tools), np.int32)
    try:
        ((rollout,),) = start_rollouts(
            generator,
            [Prompt(row=0, tokens=tokens, messages=messages, columns={"answer": "72"})],
            make_sampling(max_tokens=200),
            group_size=1,
            key=(0,),
            max_seq_len=1000,
            tokenizer=tokenizer,
            environments=environments,
        ).finish()
    finally:
        environments.close()
    assert rollout.ending is Ending.FINISHED and rollout.num_turns == 3
    assert rollout.completion == "The answer is 72."
    assert rollout.metrics == {"calls": 1.0, "failed_calls": 1.0}
    assert rollout.environment_reward is None
    assert rollout.num_sampled_tokens == sum(map(len, turns))
    text = tokenizer.decode(rollout.tokens)
    role = "tool" if described_in == "template" else "user"
    assert f"<|im_start|>{role}\n72<|im_end|>\n<|im_start|>assistant\nThe answer" in text
    results = [message["content"] for message in rollout.messages if message["role"] == role]
    assert results[-1] == "72" and results[-2].startswith("error: the tool call is not JSON")
    if described_in == "template":
        # Read back, the conversation renders to what was sampled.
        assert render_prompt(rollout.messages[:-1], tokenizer, environments.tools) == list(
            np.concatenate([each.tokens for each in rollout.segments[:-1]])
        )
