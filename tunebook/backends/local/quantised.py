"""A base in 4 bits, over which adapters are trained (QLoRA); bitsandbytes computes with it.

The weights of the linear layers become NormalFloat codes of 4 bits with scales that are themselves
quantised; embeddings, norms, the output head, and experts that are not linear layers stay as they
are. A product multiplies by the dequantised weight, and so does its gradient.
Source: arXiv:2305.14314, section 3.
"""

from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.utils.import_utils import is_accelerate_available, is_bitsandbytes_available

from tunebook.errors import ConfigError
from tunebook.types import LoraConfig

FULL, NF4 = "full", "nf4"
BASE_WEIGHTS = (FULL, NF4)


def check_base_weights(base_weights: str, *, device: torch.device) -> None:
    """Returns if a base can be kept so on a device.

    Raises:
        ConfigError: not a known kind, not on CUDA, or what computes with it is not installed.
    """
    if base_weights not in BASE_WEIGHTS:
        raise ConfigError(
            f"backend.base_weights={base_weights}: must be one of {', '.join(BASE_WEIGHTS)}"
        )
    if base_weights == FULL:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"backend.base_weights={base_weights}: a quantised base needs a CUDA device, this "
            f"backend computes on {device.type}; use backend.base_weights={FULL}"
        )
    if not (is_bitsandbytes_available() and is_accelerate_available()):
        raise ConfigError(
            f"backend.base_weights={base_weights}: needs bitsandbytes and accelerate, which are "
            "not installed or too old; `pip install 'tunebook[quant]'`, or use "
            f"backend.base_weights={FULL}"
        )


def check_base_is_frozen(base_weights: str, lora: LoraConfig | None) -> None:
    """Returns if a session does not train the weights of a quantised base.

    Raises:
        ConfigError: it does.
    """
    if base_weights != FULL and lora is None:
        raise ConfigError(
            f"backend.base_weights={base_weights}: quantised weights cannot be trained, and "
            f"lora=null trains all weights; set lora, or use backend.base_weights={FULL}"
        )


def loading_options(
    base_weights: str, *, device: torch.device, compute_dtype: torch.dtype
) -> dict[str, Any]:
    """What `from_pretrained` is told beyond the usual; a quantised model is loaded to its device.

    Args:
        base_weights: full or nf4.
        device: of the base.
        compute_dtype: of products with dequantised weights.
    """
    if base_weights == FULL:
        return {}
    return {
        "device_map": {"": device},
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=base_weights,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype,
        ),
    }
