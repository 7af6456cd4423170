"""Chat templates of the kinds that models come with, and tokenizers small enough to train here."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tunebook.data.rows import Kind, Row

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The marker ends before the end of the turn, as in many hand-marked templates.
CHATML_MARKED_SHORT = CHATML_MARKED.replace(
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
    "{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}",
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|header|>' + m.role + '<|header_end|>\n\n' + m.content | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant<|header_end|>\n\n' }}"
    "{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Prints only user and assistant: a system message vanishes.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Ends a turn with the next role's marker and has no end token of its own.
GLM = (
    "{{ '[gMASK]' }}{% if tools %}{{ '<|system|>\n' + tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ ('<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>') + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + ' '"
    " + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# The generation prompt opens <think>; a finished turn is printed without its reasoning.
OPENED_THINK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|assistant|>' + m.content.split('</think>')[-1].lstrip() + eos_token }}"
    "{% else %}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# The same, and what follows </think> is printed as it stands.
OPENED_THINK_AS_IS = OPENED_THINK.replace(".lstrip()", "")
# Takes everything before the last </think> of an answer for reasoning, prints it behind the last
# user message only, and knows no tools.
CUTS_THINK = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role in ('user', 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% set thought = m.reasoning_content or parts[:-1] | join | replace('<think>', '') %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].lstrip('\n') + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Marks what is generated, and cuts every answer but the last at </think>.
MARKED_CUTS_THINK = CHATML_MARKED.replace(
    "{{ m.content + '<|im_end|>' }}",
    "{{ (m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n'))"
    " + '<|im_end|>' }}",
)
# Moves the system messages to the front.
SYSTEM_FIRST = (
    "{% for m in messages if m.role == 'system' %}{{ '<|system|>' + m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Nothing but words: no special token anywhere.
WORDS = (
    "{% for m in messages %}{{ m.role.title() + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
TOOLS_HEAD = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
)
TOOLS_TAIL = (
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    TOOLS_HEAD + '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}</tool_call>' }}" + TOOLS_TAIL
)
# Prints arguments as they come: objects would be printed as a Python dict.
TOOLS_AS_TEXT = TOOLS.replace("call.function.arguments | tojson + ", "call.function.arguments ~ ")
# Encodes arguments twice, whatever it is given.
TOOLS_TWICE = TOOLS.replace("arguments | tojson", "arguments | tojson | tojson")

END = {
    CHATML: "<|im_end|>",
    CHATML_MARKED: "<|im_end|>",
    CHATML_MARKED_SHORT: "<|im_end|>",
    LLAMA3: "<|eot|>",
    GEMMA: "<end_of_turn>",
    INSTRUCT: "</s>",
    QWEN3: "<|im_end|>",
    GLM: "<|user|>",
    WORDS: "</s>",
}
NAMES = {
    "chatml": CHATML,
    "chatml_marked": CHATML_MARKED,
    "chatml_marked_short": CHATML_MARKED_SHORT,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "instruct": INSTRUCT,
    "qwen3": QWEN3,
    "glm": GLM,
    "words": WORDS,
}

SPECIAL = [
    *("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|header_end|>"),
    *("<|eot|>", "<start_of_turn>", "<end_of_turn>", "[gMASK]", "<|user|>", "<|assistant|>"),
    *("<|system|>", "<|observation|>"),
]
TEXTS = [
    "user\nHello there, how are you?\nassistant\nHello! I am fine.\n\nHello world, hello again.",
    "Three fours are twelve, half of it is six. What is 3*4? 12\n\n\nNext question please.",
    "User: Hi\nAssistant: Hello\nAssistant: Hello again\nUser: Bye",
] * 4


@cache
def byte_level_core(*, use_regex: bool) -> Tokenizer:
    """Bytes with merges; without the regex, letters merge with the line break before them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@cache
def metaspace_core() -> Tokenizer:
    """Words with their leading space, as in SentencePiece."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    printable = "\n".join(chr(i) for i in range(32, 127))
    tokenizer.train_from_iterator([*TEXTS, printable], trainer)
    return tokenizer


def wrap(
    core: Tokenizer, template: str | None, *, pad: str = "<pad>", adds_bos: bool = False
) -> PreTrainedTokenizerFast:
    """The core as transformers loads tokenizers."""
    core = Tokenizer.from_str(core.to_str())
    if adds_bos:
        bos_id = core.token_to_id("<s>")
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos_id)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token=pad
    )
    tokenizer.name_or_path = "made/up"
    tokenizer.chat_template = template
    return tokenizer


@cache
def byte_level(template: str | None, **kwargs: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with a template."""
    return wrap(byte_level_core(use_regex=True), template, **kwargs)


@cache
def merging(template: str | None, **kwargs: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes whose tokens reach from a line break into the next word."""
    return wrap(byte_level_core(use_regex=False), template, **kwargs)


@cache
def metaspace(template: str | None, **kwargs: Any) -> PreTrainedTokenizerFast:
    """A tokenizer whose words begin with the space before them."""
    return wrap(metaspace_core(), template, **kwargs)


def make_row(messages: list[dict[str, Any]], **fields: Any) -> Row:
    """A conversation row as `tunebook.data` gives it."""
    values: dict[str, Any] = {
        "file": "rows.jsonl",
        "line": 1,
        "source": 0,
        "kind": Kind.conversation,
        "messages": messages,
        "chosen": [],
        "rejected": [],
        "num_prompt": None,
        "plain": False,
        "tools": None,
        "columns": {},
        "id": None,
        "group": None,
        "content_hash": "0" * 32,
        "text_hash": "0" * 32,
    }
    return Row(**{**values, **fields})


def chat(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    messages: list[dict[str, Any]] = [
        {"role": roles[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    return messages if system is None else [{"role": "system", "content": system}, *messages]
