"""Random models of the families that the fast path knows, small and with every rule of theirs on."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tests.backends.tiny import VOCAB_SIZE, character_tokenizer

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
BOTH_KINDS = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=11),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "gemma": GemmaConfig(**SIZES, head_dim=8),
    "gemma2": Gemma2Config(
        **SIZES,
        head_dim=8,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        sliding_window=11,
        layer_types=BOTH_KINDS,
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES, head_dim=8, query_pre_attn_scalar=16, sliding_window=11, layer_types=BOTH_KINDS
    ),
}


def write_family(folder: Path, family: str) -> str:
    """A random model of a family with its tokenizer; returns the folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases begin as constants, which would hide where they are left out.
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)
