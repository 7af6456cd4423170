"""What a sampler is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunebook.errors import ConfigError, DataError
from tunebook.render.chat_template import ChatTemplate, Message, Tools, chat_template_of
from tunebook.render.codec import Codec
from tunebook.render.conversation import Fix, Turn, Unusable, read_conversation
from tunebook.render.placing import plain_ids, plain_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """The tokens of a prompt."""

    tokens: list[int]
    """`[N]`"""
    fixes: frozenset[Fix]


def place_prompt(
    template: ChatTemplate | None, codec: Codec, messages: Sequence[Message], tools: Tools
) -> PlacedPrompt:
    """The tokens to sample an answer from.

    Args:
        template: None = the messages are plain text.
        codec: of the tokenizer.
        messages: of the prompt.
        tools: that it offers.

    Raises:
        Unusable: the template cannot render these messages.
    """
    fixes: frozenset[Fix] = frozenset()
    if template is None:
        tokens = plain_ids(codec, plain_prompt(messages))
    else:
        turns = [Turn(message, 1.0, i) for i, message in enumerate(messages)]
        conversation = read_conversation(template, turns, tools, generation_prompt=True)
        tokens, fixes = list(codec.ids(conversation.text)), conversation.fixes
    return PlacedPrompt(tokens, fixes)


def render_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, tools: Tools = None
) -> list[int]:
    """The token ids to sample an answer from, `[N]`; training tokens of that answer begin so.

    Without a chat template the messages are plain text.

    Raises:
        DataError: the template cannot render these messages.
    """
    template = None if tokenizer.chat_template is None else chat_template_of(tokenizer)
    codec = Codec(tokenizer) if template is None else template.codec
    try:
        return place_prompt(template, codec, messages, tools).tokens
    except Unusable as problem:
        raise DataError(f"{problem.field}: {problem.reason}") from problem


def no_template(row: Row, tokenizer: PreTrainedTokenizerBase) -> ConfigError:
    """What to say about a conversation that meets a tokenizer without a chat template."""
    return ConfigError(
        f"model.chat_template: the tokenizer of {tokenizer.name_or_path} has no chat template, but "
        f"{row.file}:{row.line} is a conversation. Set model.chat_template=<file.jinja>, or give "
        "prompt and completion as plain strings."
    )
