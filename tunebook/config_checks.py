"""Ranges of config values, and pairs of them that contradict each other."""

from __future__ import annotations

import math
from typing import Any

from tunebook.config import (
    AdvantageEstimator,
    DPOConfig,
    GRPOConfig,
    Mask,
    Normalization,
    NormalizationConfig,
    OnTruncated,
    OptimizerKind,
    RecipeConfig,
    SFTConfig,
)
from tunebook.errors import ConfigError
from tunebook.health import RULES

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
    "limits.max_seconds": (0, math.inf, False),
    "limits.max_cost": (0, math.inf, False),
    "limits.min_free_bytes": (0, math.inf, False),
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
    "sweep.max_at_once": (1, math.inf, False),
    "sweep.max_cost": (0, math.inf, False),
}

GRPO_RANGES: dict[str, tuple[float, float, bool]] = {
    "reward.timeout_s": (1e-3, math.inf, False),
    "reward.max_concurrency": (1, math.inf, False),
    "rollout.max_new_tokens": (1, math.inf, False),
    "rollout.num_substeps": (1, math.inf, False),
    "rollout.num_iterations": (1, math.inf, False),
    "rollout.policy_lag": (0, 1, True),
    "rollout.penalty_buffer": (1, math.inf, False),
    "rollout.dynamic_sampling": (0, math.inf, False),
    "rollout.eval_group_size": (1, math.inf, False),
    "rollout.eval_temperature": (0, math.inf, False),
    "kl.beta": (0, math.inf, False),
    "health.window": (1, math.inf, False),
}


def check_ranges(config: RecipeConfig) -> None:
    """Returns if every value is in its range and none contradicts another.

    Raises:
        ConfigError: names the key, the value and what is allowed.
    """
    ranges = RANGES | (GRPO_RANGES if isinstance(config, GRPOConfig) else {})
    for key, (lowest, highest, inclusive) in ranges.items():
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
    if isinstance(config, SFTConfig):
        _check_normalization(config.normalization)
        if config.normalization.kind is Normalization.prompt_mean:
            raise ConfigError(
                "normalization.kind=prompt_mean averages over the completions of a prompt, which "
                "only grpo has; use token_mean, sequence_mean, fixed_horizon or token_sum"
            )
    if isinstance(config, GRPOConfig):
        _check_normalization(config.normalization)
        _check_rollout(config)


def _check_normalization(normalization: NormalizationConfig) -> None:
    fixed = normalization.kind is Normalization.fixed_horizon
    horizon = normalization.horizon
    if fixed and (horizon is None or horizon < 1):
        raise ConfigError("normalization.kind=fixed_horizon needs normalization.horizon (tokens)")
    if not fixed and horizon is not None:
        raise ConfigError(
            f"normalization.horizon={horizon} is read by normalization.kind=fixed_horizon only"
        )


def _check_rollout(config: GRPOConfig) -> None:
    rollout = config.rollout
    if rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size={rollout.group_size}: needs at least 2 completions per prompt, "
            "since their rewards are compared with each other"
        )
    if not (rollout.temperature > 0 and math.isfinite(rollout.temperature)):
        raise ConfigError(
            f"rollout.temperature={rollout.temperature}: must be above 0, or the completions of a "
            "prompt do not differ"
        )
    for key, value, off in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, 0)):
        if value != off:
            raise ConfigError(
                f"rollout.{key}={value}: must be {off} (off). It leaves tokens out of sampling, "
                "while the trained log-probs are over all tokens, so that the ratio of the two "
                "would be wrong. rollout.temperature is allowed: it applies to both"
            )
    if rollout.num_substeps > config.plan.batch_size:
        raise ConfigError(
            f"rollout.num_substeps={rollout.num_substeps} and plan.batch_size="
            f"{config.plan.batch_size} (prompts): a step cannot make more updates than it has "
            "prompts; lower the one or raise the other"
        )
    if rollout.max_new_tokens >= config.max_seq_len:
        raise ConfigError(
            f"rollout.max_new_tokens={rollout.max_new_tokens} leaves no room for a prompt in "
            f"max_seq_len={config.max_seq_len}; raise max_seq_len"
        )
    penalises = rollout.truncated is OnTruncated.penalise
    if penalises and rollout.penalty_buffer > rollout.max_new_tokens:
        raise ConfigError(
            f"rollout.penalty_buffer={rollout.penalty_buffer}: must be at most "
            f"rollout.max_new_tokens={rollout.max_new_tokens}"
        )
    if penalises and config.environment is not None:
        raise ConfigError(
            "rollout.truncated=penalise is about the tokens of one answer, and with an environment "
            "a completion has several; use truncated=keep or mask"
        )
    if penalises and config.advantage.estimator is AdvantageEstimator.maxrl:
        raise ConfigError(
            "advantage.estimator=maxrl divides by the mean reward, which must not be negative, and "
            "rollout.truncated=penalise makes rewards negative; use truncated=mask, or group_mean"
        )
    if rollout.dynamic_sampling and config.plan.drop_last:
        raise ConfigError(
            f"rollout.dynamic_sampling={rollout.dynamic_sampling} reads the prompts as one stream "
            "in which there is no last batch to drop; use plan.drop_last=false"
        )
    if not config.reward.functions and config.environment is None:
        raise ConfigError("reward.functions is empty: choose one, for example reward=exact_number")
    for name in config.health.stop:
        if name not in (*RULES, "all"):
            raise ConfigError(
                f"health.stop={name}: there is no such rule. Rules: {', '.join(RULES)}, or all"
            )
    if config.lora is not None and config.lora.dropout > 0:
        raise ConfigError(
            f"lora.dropout={config.lora.dropout}: must be 0 here. Dropout would be part of the "
            "trained log-probs and not of the sampled ones, so that their ratio would be random"
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
        config = None if config is None else getattr(config, name, None)
    return config
