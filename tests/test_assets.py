"""The built-in model, its tokenizer and template, and the built-in data."""

from __future__ import annotations

import json
import re
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

ASSETS = Path(str(files("tunebook"))) / "assets"
MODEL = ASSETS / "tiny_model"
DATA = ASSETS / "tiny_data"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "été"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What is été? "},
    {
        "role": "assistant",
        "content": " \n🙂 Wait.",
        "reasoning_content": "French?\n",
        "tool_calls": [CALL, CALL],
    },
    {"role": "tool", "content": "\nsummer"},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "\n\nSummer, 12 + 7."}],
        "tool_calls": None,
    },
    {"role": "user", "content": ""},
    {"role": "assistant", "content": None},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Twice.",
        "tool_calls": [CALL["function"]],
    },
]
TRAINED = [
    "<think>\nFrench?\n\n</think>\n\n \n🙂 Wait."
    '\n<tool_call>{"name": "look_up", "arguments": {"word": "été"}}</tool_call>'
    '\n<tool_call>{"name": "look_up", "arguments": {"word": "été"}}</tool_call><|im_end|>',
    "\n\nSummer, 12 + 7.<|im_end|>",
    "<|im_end|>",
    "<think>\nTwice.\n</think>\n\n"
    '<tool_call>{"name": "look_up", "arguments": {"word": "été"}}</tool_call><|im_end|>',
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def test_the_weights_are_small() -> None:
    assert (MODEL / "model.safetensors").stat().st_size < 3_000_000


def test_the_model_loads_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(MODEL)
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert not caplog.records
    assert model.config.max_position_embeddings >= 1024
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_padding_is_not_the_end_of_a_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Hello, world!",
        "1234 - 56",
        "a  b\t\n\n c \r\n",
        "naïve 🙂👩‍👩‍👧 日本語 ½²",
        "\x00\u200b\ufeff",
        "x <think> y",
    ],
)
def test_any_text_survives_encoding(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_digits_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerBase) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("2026")] == ["2", "0", "2", "6"]


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_mask_is_what_the_assistant_writes(
    tokenizer: PreTrainedTokenizerBase, tools: list[dict[str, Any]] | None
) -> None:
    rendered = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    spans, previous = [], 0
    for token, mask in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True):
        if mask and not previous:
            spans.append([])
        if mask:
            spans[-1].append(token)
        previous = mask
    assert [tokenizer.decode(span) for span in spans] == TRAINED


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    "turn", [index for index, message in enumerate(MESSAGES) if message["role"] == "assistant"]
)
def test_the_sampling_prompt_is_a_strict_prefix(
    tokenizer: PreTrainedTokenizerBase, turn: int, tools: list[dict[str, Any]] | None
) -> None:
    how: dict[str, Any] = {"tools": tools, "return_dict": False}
    prompt = tokenizer.apply_chat_template(MESSAGES[:turn], add_generation_prompt=True, **how)
    for end in range(turn + 1, len(MESSAGES) + 1):
        whole = tokenizer.apply_chat_template(MESSAGES[:end], **how)
        assert len(whole) > len(prompt)
        assert whole[: len(prompt)] == prompt


def test_tools_are_shown_with_the_system_message(tokenizer: PreTrainedTokenizerBase) -> None:
    text = tokenizer.apply_chat_template(MESSAGES[:2], tools=TOOLS, tokenize=False)
    assert text.count("<|im_start|>system\n") == 1
    assert text.startswith("<|im_start|>system\nBe kind.\n\n")
    assert json.dumps(TOOLS[0]["function"]) in text
    without_system = tokenizer.apply_chat_template(MESSAGES[1:2], tools=TOOLS, tokenize=False)
    assert without_system.startswith("<|im_start|>system\nYou can call")


def test_every_turn_ends_once(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    assert tokens.count(tokenizer.eos_token_id) == len(MESSAGES)


@pytest.mark.parametrize(
    ("name", "fields", "count"),
    [
        ("chats.jsonl", {"id", "messages"}, 640),
        ("preferences.jsonl", {"id", "prompt", "chosen", "rejected"}, 800),
        ("prompts.jsonl", {"id", "prompt", "answer"}, 400),
        ("test_prompts.jsonl", {"id", "prompt", "answer"}, 100),
    ],
)
def test_the_data_is_small_and_whole(name: str, fields: set[str], count: int) -> None:
    rows = read_rows(name)
    assert (DATA / name).stat().st_size < 200_000
    assert len(rows) == count
    assert all(set(row) == fields for row in rows)
    assert len({row["id"] for row in rows}) == count


def problems_of(text: str) -> set[tuple[str, frozenset[int]]]:
    """The sums a question could stand for: its two numbers with each operator its words allow."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if len(numbers) != 2:
        return set()
    takes_away = re.search(r"\d - |minus|Take|left", text) is not None
    times = re.search(r"\*|times|Multiply", text) is not None
    return {("*" if times else "-" if takes_away else "+", frozenset(numbers))}


def test_no_train_file_holds_a_test_problem() -> None:
    def asked(name: str) -> set[tuple[str, frozenset[int]]]:
        return {
            problem
            for row in read_rows(name)
            for message in row.get("messages", row.get("prompt"))
            if message["role"] == "user"
            for problem in problems_of(message["content"])
        }

    held_out = asked("test_prompts.jsonl")
    assert len(held_out) >= 98
    for name in ("chats.jsonl", "preferences.jsonl", "prompts.jsonl"):
        assert len(asked(name)) >= 250
        assert not asked(name) & held_out


def test_a_preferred_answer_is_right_and_the_other_is_not() -> None:
    for row in read_rows("preferences.jsonl"):
        (operator, numbers), *_ = problems_of(row["prompt"][0]["content"])
        high, low = max(numbers), min(numbers)
        answer = {"+": high + low, "-": high - low, "*": high * low}[operator]
        said = [re.findall(r"\d+", row[side][0]["content"])[-1] for side in ("chosen", "rejected")]
        assert int(said[0]) == answer
        assert int(said[1]) != answer
