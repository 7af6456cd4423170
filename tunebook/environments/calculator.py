"""A calculator that a model may use while it solves an arithmetic problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunebook.environments.arithmetic import evaluate, shown
from tunebook.environments.protocol import Environment, Message, Start, Step, ToolCall, Tools, Turn
from tunebook.errors import ConfigError

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "For example (3 + 4) * 2.5"}
            },
            "required": ["expression"],
        },
    },
}
INSTRUCTIONS = (
    "You can use a calculator. To do so, write\n"
    '<tool_call>{"name": "calculate", "arguments": {"expression": "(3 + 4) * 2.5"}}</tool_call>\n'
    "and nothing behind it. The next message is the result."
)
MOST_CALLS = 8
"""Of one turn."""
DESCRIBED_IN = ("template", "system_message")


class Calculator(Environment):
    """Answers calls of `calculate`; a turn without a call is the answer and ends the conversation.

    It leaves scoring to the reward functions, which get the last turn as the completion. Metrics:
    `calls` and `failed_calls`, those whose result is an error that the model gets to read.
    """

    def __init__(self, *, described_in: str) -> None:
        """Takes where the model is told of the calculator.

        Args:
            described_in: `template`: by the chat template, as a tool, its results in tool messages.
                `system_message`: in words, its results in user messages, which is for templates
                that know no tools.

        Raises:
            ConfigError: another value.
        """
        if described_in not in DESCRIBED_IN:
            raise ConfigError(
                f"environment.described_in={described_in}: must be one of {', '.join(DESCRIBED_IN)}"
            )
        self._by_template = described_in == "template"

    @property
    def tools(self) -> Tools:
        return [TOOL] if self._by_template else None

    async def reset(self, start: Start) -> Sequence[Message]:
        messages = list(start.messages)
        if self._by_template:
            return messages
        if messages[0]["role"] == "system":
            system, *messages = messages
            return [{**system, "content": f"{system['content']}\n\n{INSTRUCTIONS}"}, *messages]
        return [{"role": "system", "content": INSTRUCTIONS}, *messages]

    async def step(self, turn: Turn) -> Step:
        if not turn.calls and not turn.call_errors:
            return Step(messages=(), done=True)
        results = [self._result(call) for call in turn.calls[:MOST_CALLS]]
        unread = [*turn.call_errors]
        if len(turn.calls) > MOST_CALLS:
            unread.append(f"at most {MOST_CALLS} calls are made in one turn")
        failed = sum(not good for _, good in results) + len(unread)
        texts = [text for text, _ in results] + [f"error: {reason}" for reason in unread]
        return Step(
            messages=self._messages(turn, texts),
            done=False,
            metrics={"calls": float(len(turn.calls)), "failed_calls": float(failed)},
        )

    def _result(self, call: ToolCall) -> tuple[str, bool]:
        """What a call gives, and whether it is a value."""
        expression = call.arguments.get("expression")
        if call.name != TOOL["function"]["name"]:
            return f"error: there is no function {call.name[:40]!r}, only calculate", False
        if not isinstance(expression, str):
            return "error: calculate needs the string argument expression", False
        try:
            return shown(evaluate(expression)), True
        except ValueError as error:
            return f"error: {error}", False

    def _messages(self, turn: Turn, texts: Sequence[str]) -> list[Message]:
        if not self._by_template:
            return [{"role": "user", "content": "\n".join(texts)}]
        messages: list[Message] = []
        for number, text in enumerate(texts):
            made = number < len(turn.calls)
            messages.append(
                {
                    "role": "tool",
                    "content": text,
                    "name": turn.calls[number].name if made else TOOL["function"]["name"],
                    "tool_call_id": turn.calls[number].id if made else f"call{number:05d}",
                }
            )
        return messages
