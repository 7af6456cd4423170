"""Scored groups of completions: rewards, advantages, the data of an update, and metrics.

Legend: P prompts of a step, G completions of a prompt, T scored tokens of a datum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunebook.advantages import kl_shaped_advantages
from tunebook.rollouts import to_datum
from tunebook.scoring import score_metrics
from tunebook.types import Datum, FloatArray, Metrics

if TYPE_CHECKING:
    from tunebook.data.rows import Row
    from tunebook.rollouts import Rollout
    from tunebook.scoring import Score


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt, scored."""

    rollouts: Sequence[Rollout]
    """`[G]`"""
    scores: Sequence[Score]
    """`[G]`"""
    rewards: npt.NDArray[np.float64]
    """`[G]` what advantages are computed from, penalties included; NaN = unscored."""

    @property
    def row(self) -> int:
        """Index of the prompt's row."""
        return self.rollouts[0].row

    @property
    def has_variance(self) -> bool:
        """Whether two completions have different rewards; else nothing is learned from them."""
        scored = self.rewards[~np.isnan(self.rewards)]
        return len(scored) > 1 and bool((scored != scored[0]).any())


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion that is trained on."""

    group: int
    """Number of its group in the step."""
    rollout: Rollout
    mask: FloatArray
    """`[T]`, 1 on the tokens that were sampled."""
    advantage: float
    temperature: float
    """That it was sampled at."""
    columns: Mapping[str, FloatArray] = field(default_factory=dict[str, FloatArray])
    """`[T]` each: further columns, and what takes the place of others."""

    def datum(self, token_weights: FloatArray) -> Datum:
        """What a session trains on.

        Args:
            token_weights: `[T]`, from the mask.
        """
        datum = to_datum(
            self.rollout,
            advantage=self.advantage,
            token_weights=token_weights,
            temperature=self.temperature,
        )
        return Datum(datum.tokens, {**datum.columns, **self.columns})


def training_samples(
    groups: Sequence[Group],
    advantages: Sequence[FloatArray],
    *,
    temperature: float,
    mask_truncated: bool,
) -> list[Sample]:
    """The completions that something is learned from.

    Left out are groups whose rewards are all equal, completions without a reward, and, where
    asked for, truncated ones (whose reward still counts in what the others are compared with).

    Args:
        groups: of the step.
        advantages: `[G]` of each group.
        temperature: that they were sampled at.
        mask_truncated: leave truncated completions out.
    """
    samples = []
    for number, (group, of_group) in enumerate(zip(groups, advantages, strict=True)):
        if not group.has_variance:
            continue
        for rollout, advantage, reward in zip(group.rollouts, of_group, group.rewards, strict=True):
            if math.isnan(reward) or (mask_truncated and rollout.truncated):
                continue
            samples.append(Sample(number, rollout, rollout.mask, float(advantage), temperature))
    return samples


def spread(samples: Sequence[Sample], *, parts: int) -> list[list[Sample]]:
    """The samples in at most `parts` minibatches of whole groups, as even as can be.

    Args:
        samples: of a step, in order of their groups.
        parts: optimizer updates wanted; fewer groups make fewer.
    """
    numbers = sorted({sample.group for sample in samples})
    if not numbers:
        return []
    chosen = [set(part.tolist()) for part in np.array_split(numbers, min(parts, len(numbers)))]
    return [[sample for sample in samples if sample.group in part] for part in chosen]


def reward_metrics(groups: Sequence[Group], prefix: str) -> Metrics:
    """Mean reward, its parts and spread, and how completions ended.

    `reward` is what advantages are computed from, with penalties; unscored completions are in no
    mean and counted. `entropy` is the mean negative
    log-prob of the sampled tokens under the policy that sampled them, which estimates its entropy
    without bias.

    Args:
        groups: scored; with all that were sampled, also what nothing is learned from.
        prefix: `train` or `eval`.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.concatenate([group.rewards for group in groups]) if groups else np.empty(0)
    scored = rewards[~np.isnan(rewards)].tolist()
    lengths = [rollout.num_sampled_tokens for rollout in rollouts]
    metrics = {
        "reward": _mean(scored),
        "unscored_share": 1 - len(scored) / max(len(rewards), 1),
        "truncated_share": _mean([float(rollout.truncated) for rollout in rollouts]),
        "completion_tokens": _mean(lengths),
        "completion_tokens_max": float(max(lengths, default=0)),
        "num_turns": _mean([float(rollout.num_turns) for rollout in rollouts]),
        "entropy": _entropy(rollouts),
    }
    stds = [float(np.nanstd(group.rewards)) for group in groups if _num_scored(group) > 1]
    if stds:
        metrics["reward_std"] = _mean(stds)
        metrics["zero_variance_share"] = _mean([float(not group.has_variance) for group in groups])
    judged = [
        score
        for group in groups
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
        if rollout.failure is None
    ]
    metrics |= {f"reward/{name}": math.nan for score in judged for name in score.parts}
    metrics |= {name: value for name, value in score_metrics(judged).items() if "/" in name}
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        values = [rollout.metrics[name] for rollout in rollouts if name in rollout.metrics]
        metrics[f"environment/{name}"] = _mean(values)
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def loss_metrics(updates: Sequence[Mapping[str, float]]) -> Metrics:
    """What the loss function said over the updates of one step.

    A metric `<name>_sum` is a sum over tokens and becomes their mean; `loss` is the mean over the
    updates. The log-prob gap is that of the first update, before which trainer and sampler hold the
    same weights unless the policy lags.
    """
    if not updates:
        return {}
    num_tokens = math.fsum(update.get("num_tokens", 0.0) for update in updates)
    metrics: Metrics = {"train/loss": _mean([update["loss"] for update in updates])}
    for name in sorted({name for update in updates for name in update} - {"loss"}):
        total = math.fsum(update.get(name, 0.0) for update in updates)
        if name == "num_tokens":
            metrics["train/num_tokens"] = total
        elif name.endswith("_sum"):
            if num_tokens:
                metrics[f"train/{name.removesuffix('_sum')}"] = total / num_tokens
        elif name == "grad_norm":
            metrics["train/grad_norm"] = total / len(updates)
        else:
            metrics[f"train/{name}"] = total
    if "train/ratio" in metrics and metrics.get("train/ratio_sq"):
        # (sum r)^2 / (N sum r^2): 1 where all samples weigh the same.
        ratio_sq = metrics.pop("train/ratio_sq")
        metrics["train/effective_sample_size"] = metrics["train/ratio"] ** 2 / ratio_sq
    first = updates[0]
    if "logratio_abs_sum" in first and first.get("num_tokens"):
        metrics["train/logprob_gap"] = first["logratio_abs_sum"] / first["num_tokens"]
    return metrics


def records(
    groups: Sequence[Group],
    *,
    rows: Sequence[Row],
    advantages: Sequence[FloatArray] = (),
    per_group: int | None = None,
) -> list[dict[str, Any]]:
    """Completions as lines for `samples/`; those of several turns with the whole conversation.

    Args:
        groups: to write.
        rows: of the side that the groups are of.
        advantages: `[G]` of each group; empty = they are not trained on.
        per_group: completions of each group; None = all.
    """
    return [
        {
            "prompt": str(rows[group.row].messages[-1]["content"]),
            "expected": rows[group.row].columns.get("answer"),
            "completion": rollout.completion,
            **({"messages": rollout.messages} if rollout.num_turns > 1 else {}),
            "reward": None if math.isnan(group.rewards[i]) else float(group.rewards[i]),
            "reward_parts": dict(group.scores[i].parts),
            **({"advantage": float(advantages[number][i])} if len(advantages) else {}),
            "stop_reason": rollout.stop_reason.value,
            "num_tokens": rollout.num_sampled_tokens,
            "versions": list(rollout.versions),
        }
        for number, group in enumerate(groups)
        for i, rollout in enumerate(group.rollouts[:per_group])
    ]


def shape_advantages(samples: Sequence[Sample], *, beta: float) -> tuple[list[Sample], Metrics]:
    """The samples with the KL to the reference in their advantages, and its mean.

    Args:
        samples: of a step, with the column `reference_logprobs`.
        beta: weight of the KL.
    """
    references = [sample.columns["reference_logprobs"] for sample in samples]
    sampling = [sample.rollout.sampling_logprobs for sample in samples]
    masks = [sample.mask for sample in samples]
    shaped = kl_shaped_advantages(
        [sample.mask * np.float32(sample.advantage) for sample in samples],
        masks=masks,
        sampling_logprobs=sampling,
        reference_logprobs=references,
        beta=beta,
    )
    changed = [
        replace(sample, columns={**sample.columns, "advantages": advantages})
        for sample, advantages in zip(samples, shaped, strict=True)
    ]
    ratios = [(q - f)[mask != 0] for q, f, mask in zip(sampling, references, masks, strict=True)]
    return changed, {"train/kl": float(np.concatenate(ratios).mean(dtype=np.float64))}


def staleness(groups: Sequence[Group], *, version: int) -> Metrics:
    """How many publishes the sampled tokens lie behind `version`, mean and most."""
    behind = [
        (version - segment.version, len(segment.tokens))
        for group in groups
        for rollout in group.rollouts
        for segment in rollout.segments
        if segment.version is not None
    ]
    num_tokens = sum(count for _, count in behind)
    mean = sum(lag * count for lag, count in behind) / num_tokens if num_tokens else 0.0
    return {
        "train/staleness": mean,
        "train/staleness_max": float(max((lag for lag, _ in behind), default=0)),
    }


def _entropy(rollouts: Sequence[Rollout]) -> float:
    sampled = [
        segment.logprobs
        for rollout in rollouts
        for segment in rollout.segments
        if segment.logprobs is not None
    ]
    return -float(np.concatenate(sampled).mean(dtype=np.float64)) if sampled else math.nan


def _num_scored(group: Group) -> int:
    return int((~np.isnan(group.rewards)).sum())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
