"""Ranges of config values, and pairs of them that contradict each other."""

from __future__ import annotations

import math
from typing import Any

from tunebook.config import (
    DPOConfig,
    Mask,
    Normalization,
    OptimizerKind,
    RecipeConfig,
    SFTConfig,
)
from tunebook.errors import ConfigError

# key -> (lowest, highest, whether the highest itself is allowed)
RANGES: dict[str, tuple[float, float, bool]] = {
    "plan.batch_size": (1, math.inf, False),
    "plan.checkpoint_every": (0, math.inf, False),
    "eval.fraction": (0, 1, True),
    "eval.min_rows": (0, math.inf, False),
    "eval.max_rows": (1, math.inf, False),
    "early_stopping.patience": (1, math.inf, False),
    "early_stopping.min_delta": (0, math.inf, False),
    "checkpoints.keep": (1, math.inf, False),
    "optimizer.learning_rate": (0, math.inf, False),
    "optimizer.beta1": (0, 1, False),
    "optimizer.beta2": (0, 1, False),
    "optimizer.eps": (0, math.inf, False),
    "optimizer.weight_decay": (0, math.inf, False),
    "optimizer.max_grad_norm": (0, math.inf, False),
    "optimizer.momentum": (0, 1, False),
    "optimizer.newton_schulz_steps": (1, 99, True),
    "schedule.warmup": (0, math.inf, False),
    "schedule.final_fraction": (0, 1, True),
    "schedule.decay": (0, 1, True),
    "lora.rank": (1, math.inf, False),
    "lora.dropout": (0, 1, False),
    "max_seq_len": (2, math.inf, False),
    "samples.num_prompts": (0, math.inf, False),
    "samples.max_tokens": (1, math.inf, False),
    "samples.temperature": (0, math.inf, False),
    "data.limit": (1, math.inf, False),
}


def check_ranges(config: RecipeConfig) -> None:
    """Returns if every value is in its range and none contradicts another.

    Raises:
        ConfigError: names the key, the value and what is allowed.
    """
    for key, (lowest, highest, inclusive) in RANGES.items():
        value = _value(config, key)
        if value is None:
            continue
        inside = lowest <= value and (value <= highest if inclusive else value < highest)
        if not inside:  # NaN is never inside
            upper = (
                ""
                if highest == math.inf
                else f" and {'at most' if inclusive else 'below'} {highest:g}"
            )
            raise ConfigError(f"{key}={value}: must be at least {lowest:g}{upper}")
    warmup = config.schedule.warmup
    if warmup >= 1 and warmup != int(warmup):
        raise ConfigError(
            f"schedule.warmup={warmup}: must be a whole number of steps, or a fraction below 1"
        )
    for number, source in enumerate([config.data, *config.data.sources]):
        if not (0 < source.weight < math.inf):
            key = "data" if number == 0 else f"data.sources[{number - 1}]"
            raise ConfigError(f"{key}.weight={source.weight}: must be above 0")
    if config.lora is not None:
        _check_lora(config)
    _check_pairs(config)
    if isinstance(config, DPOConfig):
        _check_preferences(config)


def _check_lora(config: RecipeConfig) -> None:
    assert config.lora is not None
    targets = config.lora.target_modules
    names_given = isinstance(targets, list) and targets and all(isinstance(t, str) for t in targets)
    if targets != "all-linear" and not names_given:
        raise ConfigError(
            f"lora.target_modules={targets}: must be all-linear or a list of names such as "
            "[q_proj, v_proj]"
        )
    if not (config.lora.alpha > 0 and math.isfinite(config.lora.alpha)):
        raise ConfigError(f"lora.alpha={config.lora.alpha}: must be above 0")
    if config.optimizer.kind is OptimizerKind.muon:
        raise ConfigError(
            "optimizer.kind=muon needs full weights: it orthogonalises whole matrices. Add "
            "lora=null, or use optimizer.kind=adamw"
        )


def _check_pairs(config: RecipeConfig) -> None:
    if (
        config.early_stopping.patience is not None
        and config.eval.fraction == 0
        and not config.data.eval.is_given
    ):
        raise ConfigError(
            f"early_stopping.patience={config.early_stopping.patience} needs an eval set, but "
            "eval.fraction=0 holds none out and data.eval names none"
        )
    if config.start_from is not None and config.resume is not None:
        raise ConfigError(
            "start_from and resume are both set: resume goes on with a run exactly, start_from "
            "begins a new one from its weights"
        )
    if isinstance(config, SFTConfig):
        if config.normalization.kind is Normalization.prompt_mean:
            raise ConfigError(
                "normalization.kind=prompt_mean is a mean over the completions of a prompt, of "
                "which this recipe has one. Use token_mean, sequence_mean, fixed_horizon or "
                "token_sum"
            )
        fixed = config.normalization.kind is Normalization.fixed_horizon
        horizon = config.normalization.horizon
        if fixed and (horizon is None or horizon < 1):
            raise ConfigError(
                "normalization.kind=fixed_horizon needs normalization.horizon (tokens)"
            )
        if not fixed and horizon is not None:
            raise ConfigError(
                f"normalization.horizon={horizon} is read by normalization.kind=fixed_horizon only"
            )


def _check_preferences(config: DPOConfig) -> None:
    if config.lora is not None and config.lora.dropout > 0:
        raise ConfigError(
            f"lora.dropout={config.lora.dropout}: must be 0 for this recipe. The loss compares the "
            "policy with its own start, token by token, and dropout would make that difference "
            "noise: the first loss would not be that of equal policies"
        )
    if config.data.mask is not Mask.all_assistant:
        raise ConfigError(
            f"data.mask={config.data.mask}: must be all_assistant for this recipe, which compares "
            "whole answers"
        )


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = None if config is None else getattr(config, name)
    return config
