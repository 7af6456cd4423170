"""Tiny random models, settings and data for tests of backends."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tunebook.types import AdamParams, Datum, LoraConfig, MuonParams, SamplingParams

VOCAB_SIZE = 128
EOS = 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Models:
    """Folders of random models that differ in one thing."""

    untied: str
    tied: str
    other: str
    """Other weights than `untied`."""


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each ASCII character, its code being its id."""
    vocab = {chr(code): code for code in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=chr(EOS), chat_template=TEMPLATE
    )


def write_model(folder: Path, *, seed: int, tied: bool) -> str:
    """A random two-layer Llama with logits large enough that its tokens differ in probability."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


def make_lora(**changes) -> LoraConfig:
    """A small adapter."""
    values = {
        "rank": 4,
        "alpha": 8.0,
        "dropout": 0.0,
        "target_modules": "all-linear",
        "seed": 0,
        "rslora": False,
    }
    return LoraConfig(**{**values, **changes})


def make_adam(**changes) -> AdamParams:
    """AdamW without decay or clipping."""
    values = {
        "learning_rate": 1e-2,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
    }
    return AdamParams(**{**values, **changes})


def make_data(answer_lengths=(1, 2, 3, 10), *, prompt_length: int = 4, seed: int = 0):
    """Rows of a random prompt without weight and a random answer, token-mean over all rows."""
    random = np.random.default_rng(seed)
    total = sum(answer_lengths)
    return [
        Datum(
            tokens=random.integers(3, VOCAB_SIZE, prompt_length + length).astype(np.int32),
            columns={
                "token_weights": np.array(
                    [0.0] * (prompt_length - 1) + [1 / total] * length, np.float32
                )
            },
        )
        for length in answer_lengths
    ]


def make_muon(**changes) -> MuonParams:
    """Muon without decay or clipping."""
    values = {
        "learning_rate": 1e-2,
        "momentum": 0.95,
        "newton_schulz_steps": 5,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "adam": make_adam(),
    }
    return MuonParams(**{**values, **changes})


def make_sampling(**changes) -> SamplingParams:
    """Eight tokens at temperature 1 with a seed."""
    values = {
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop": (),
        "seed": 0,
    }
    return SamplingParams(**{**values, **changes})
