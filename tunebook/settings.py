"""Turns config sections into the values that pure functions and backends take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

from tunebook import advantages, token_weights
from tunebook.advantages import Rewards
from tunebook.config import (
    AdvantageConfig,
    AdvantageEstimator,
    Normalization,
    NormalizationConfig,
    OptimizerConfig,
    OptimizerKind,
    RecipeConfig,
)
from tunebook.schedule import Schedule
from tunebook.types import AdamParams, FloatArray, MuonParams, OptimizerParams

Normalizer = Callable[[Sequence[FloatArray]], list[FloatArray]]
Estimator = Callable[[Sequence[Rewards]], list[FloatArray]]


def make_schedule(config: RecipeConfig) -> Schedule:
    """The learning-rate schedule of a run."""
    schedule = config.schedule
    return Schedule(
        kind=schedule.kind.value,
        peak=config.optimizer.learning_rate,
        warmup=schedule.warmup,
        final_fraction=schedule.final_fraction,
        decay=schedule.decay,
    )


def optimizer_params(config: OptimizerConfig, learning_rate: float) -> OptimizerParams:
    """Every setting of one optimizer step at a learning rate."""
    adam = AdamParams(
        learning_rate=learning_rate,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
    if config.kind is OptimizerKind.adamw:
        return adam
    return MuonParams(
        learning_rate=learning_rate,
        momentum=config.momentum,
        newton_schulz_steps=config.newton_schulz_steps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        adam=adam,
    )


def make_normalizer(
    config: NormalizationConfig, *, groups: Sequence[Hashable] | None = None
) -> Normalizer:
    """The function that gives the `token_weights` of one optimizer step from its masks.

    Args:
        config: what the loss is a mean over.
        groups: the prompt of every datum of the step; None = the recipe has no groups.
    """
    if config.kind is Normalization.fixed_horizon:
        assert config.horizon is not None
        return partial(token_weights.fixed_horizon, horizon=config.horizon)
    if config.kind is Normalization.prompt_mean:
        assert groups is not None, "config_checks lets prompt_mean through only where groups are"
        return partial(token_weights.prompt_mean, groups=groups)
    functions = {
        Normalization.token_mean: token_weights.token_mean,
        Normalization.sequence_mean: token_weights.sequence_mean,
        Normalization.token_sum: token_weights.token_sum,
    }
    return functions[config.kind]


def make_advantages(config: AdvantageConfig) -> Estimator:
    """The function that gives the advantages `[G]` of every prompt of a step from its rewards."""
    functions: dict[AdvantageEstimator, Estimator] = {
        AdvantageEstimator.group_mean: advantages.group_mean,
        AdvantageEstimator.group_std: advantages.group_std,
        AdvantageEstimator.batch_std: advantages.batch_std,
        AdvantageEstimator.rloo: advantages.rloo,
        AdvantageEstimator.maxrl: advantages.maxrl,
    }
    return functions[config.estimator]
