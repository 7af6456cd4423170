"""Makes the built-in model: a tokenizer and a language model of about a million parameters.

    python scripts/make_tiny_model.py --out tunebook/assets/tiny_model

What: a byte-level BPE tokenizer of 512 tokens with a ChatML template, and a four-layer Llama that
chats a little and does sums up to 99 with an unreliable hand: right about four times in ten when it
is sampled at temperature 1.

Why: tests and the quickstart need a model that fits in the package, loads like any other, and gets
visibly better in a minute on two cores. It is pre-trained on a *noisy demonstrator*, who knows the
right answer and often gives another one (see `tiny_chats.py`). So both the knowledge and the bad
habit are in the weights, and SFT on clean answers, DPO on right against wrong, and GRPO with an
exact-match reward each have something to bring out.

How: first on right answers only, so that the model learns to calculate; then on the noisy
demonstrator. The loss of what the user says has a small weight. About 15 minutes on one core. One
thread is the default because the same seed then gives the same weights on the same build of torch
and kind of processor, and because a second one gains little at this size.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tiny_chats import Message, draw_pretraining_chat
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB_SIZE = 512
MAX_POSITIONS = 2048

SHARE_RIGHT = 0.43
USER_WEIGHT = 0.1
CLEAN_STEPS, NOISY_STEPS = 5500, 1500
BATCH_SIZE = 32
PEAK_LEARNING_RATE = 2e-3

# ChatML. The generation markers hold what the assistant is trained to write: its content and the
# end of its turn, not the header before it and not the line break after it. No turn looks at a
# later one, so the rendering of the first messages, with the header of the next turn, is always a
# prefix of the rendering of all of them.
CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content -%}
            {{- part if part is string else (part.text or '') -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}
        {{- text_of(messages[0].content) + '\\n\\n' -}}
    {%- endif -%}
    {{- 'You can call these functions:\\n' -}}
    {%- for tool in tools -%}
        {%- set function = tool.function or tool -%}
        {{- {
            'name': function.name,
            'description': function.description or '',
            'parameters': function.parameters or {}
        } | tojson -}}
        {{- '\\n' -}}
    {%- endfor -%}
    {{- 'To call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call>.' -}}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- generation -%}
            {%- if message.reasoning_content -%}
                {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
            {%- endif -%}
            {%- set content = text_of(message.content) -%}
            {{- content -}}
            {%- for tool_call in message.tool_calls or [] -%}
                {%- set call = tool_call.function or tool_call -%}
                {{- '\\n' if content or not loop.first -}}
                {{- '<tool_call>{"name": ' + call.name | tojson + ', "arguments": ' -}}
                {%- set arguments = call.arguments or {} -%}
                {{- arguments if arguments is string else arguments | tojson -}}
                {{- '}</tool_call>' -}}
            {%- endfor -%}
            {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- elif not (tools and loop.first and message.role == 'system') -%}
        {{- '<|im_start|>' + message.role + '\\n' + text_of(message.content) + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """The tokenizer trained on `texts`, in which any text survives encoding and decoding.

    Every byte is a token. Digits and line breaks are tokens of their own; the second makes the
    header of an assistant turn the same tokens whatever the turn begins with.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex("\n"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = [PAD, TURN_START, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKUP),
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
        padding_side="right",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, in fp32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class Batch(NamedTuple):
    """Right-padded rows; B rows, T tokens."""

    tokens: Tensor
    """`[B, T]`."""
    token_weights: Tensor
    """`[B, T]`, of the token itself, not of the one before it."""


def encode_chat(
    messages: list[Message], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[float]]:
    """The tokens of a chat, as the template renders it, and the weight of each."""
    tokens: list[int] = []
    token_weights: list[float] = []
    for message in messages:
        header = tokenizer.encode(f"{TURN_START}{message['role']}\n")
        content = tokenizer.encode(f"{message['content']}{TURN_END}")
        content_weight = 1.0 if message["role"] == "assistant" else USER_WEIGHT
        tokens += [*header, *content, *tokenizer.encode("\n")]
        token_weights += [
            *[USER_WEIGHT] * len(header),
            *[content_weight] * len(content),
            USER_WEIGHT,
        ]
    return tokens, token_weights


def draw_batches(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, *, share_right: float, batch_size: int
) -> Iterator[Batch]:
    """Batches of fresh chats without end; the chats of a batch have about the same length."""
    while True:
        pool = [
            encode_chat(draw_pretraining_chat(rng, share_right=share_right), tokenizer)
            for _ in range(batch_size * 32)
        ]
        pool.sort(key=lambda row: len(row[0]))
        batches = [pool[start : start + batch_size] for start in range(0, len(pool), batch_size)]
        rng.shuffle(batches)
        for rows in batches:
            longest = len(rows[-1][0])
            tokens = torch.full((len(rows), longest), tokenizer.pad_token_id)
            token_weights = torch.zeros(len(rows), longest)
            for index, (row_tokens, row_weights) in enumerate(rows):
                tokens[index, : len(row_tokens)] = torch.tensor(row_tokens)
                token_weights[index, : len(row_weights)] = torch.tensor(row_weights)
            yield Batch(tokens, token_weights)


def weighted_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The mean cross-entropy in nats of the batch, by token weight."""
    logits = model(input_ids=batch.tokens[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="none"
    )
    token_weights = batch.token_weights[:, 1:].flatten()
    return (losses * token_weights).sum() / token_weights.sum()


def learning_rate_at(step: int, *, steps: int, warmup: int, decay: int, peak: float) -> float:
    """Linear warm-up, constant, then linear to zero over the last `decay` steps."""
    return peak * min(1.0, (step + 1) / warmup, (steps - step) / max(decay, 1))


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    clean_steps: int,
    noisy_steps: int,
    batch_size: int,
    peak_learning_rate: float,
    share_right: float,
) -> None:
    """Trains the model in place, first on right answers only, then on the noisy demonstrator."""
    rng = random.Random(seed)
    clean = draw_batches(rng, tokenizer, share_right=1.0, batch_size=batch_size)
    noisy = draw_batches(rng, tokenizer, share_right=share_right, batch_size=batch_size)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=True,
    )
    steps = clean_steps + noisy_steps
    started, total = time.monotonic(), 0.0
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(
                step, steps=steps, warmup=200, decay=noisy_steps, peak=peak_learning_rate
            )
        loss = weighted_loss(model, next(clean if step < clean_steps else noisy))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        if (step + 1) % 100 == 0:
            elapsed = time.monotonic() - started
            print(f"step {step + 1}/{steps}  loss {total / 100:.4f}  {elapsed:.0f} s", flush=True)
            total = 0.0
    model.eval()


def tokenizer_texts(seed: int) -> Iterator[str]:
    """What the tokenizer is trained on: the roles and contents of chats."""
    rng = random.Random(seed)
    for _ in range(20_000):
        for message in draw_pretraining_chat(rng, share_right=1.0):
            yield message["role"]
            yield message["content"]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a model folder: bf16 weights, tokenizer, chat template, generation config."""
    tokenizer.save_pretrained(folder)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    # The name that every version of transformers knows the class by.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.to(torch.bfloat16).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the built-in tokenizer and model.")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write; its README.md is left alone"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean-steps", type=int, default=CLEAN_STEPS)
    parser.add_argument("--noisy-steps", type=int, default=NOISY_STEPS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = make_tokenizer(tokenizer_texts(arguments.seed))
    model = make_model(tokenizer)
    pretrain(
        model,
        tokenizer,
        seed=arguments.seed,
        clean_steps=arguments.clean_steps,
        noisy_steps=arguments.noisy_steps,
        batch_size=BATCH_SIZE,
        peak_learning_rate=PEAK_LEARNING_RATE,
        share_right=SHARE_RIGHT,
    )
    save(model, tokenizer, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
