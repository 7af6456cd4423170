"""Rules that watch the metrics of a run on rewards, and one sentence of advice for each.

Every rule is a pure function of the metrics of the last steps, so it can be tried on a run that is
over. A rule speaks when it begins to hold, not at every step that it goes on holding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Window: TypeAlias = Sequence[Mapping[str, float | None]]
"""Metrics of steps in a row, the newest last."""

SAME = 0.95
"""Share of groups without variance from which rewards count as all equal."""
TRUNCATED = 0.9
UNSCORED = 0.2
ENTROPY_LEFT = 0.1
"""Share of the entropy at the start below which it has collapsed."""
KL_NATS = 1.0
"""KL to the reference per token, nats."""
SAMPLE_SIZE = 0.5
"""Effective sample size, as a share of the tokens."""
LOGPROB_GAP = 0.05
"""Mean difference of trainer and sampler log-probs on the sampler's own weights, nats."""
CANCELLED = 0.1
"""Share of the parts' changes that is left in their sum."""
CHANGED = 0.05
"""Change of reward parts below which nothing is said about them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that holds."""

    rule: str
    advice: str


def rewards_equal(window: Window, first: Window) -> str | None:
    share = _mean(window, "train/zero_variance_share")
    if share is None or share < SAME:
        return None
    reward = _mean(window, "train/reward")
    level = "" if reward is None else f" (mean reward {reward:.3g})"
    return (
        f"{share:.0%} of the groups have equal rewards{level}, so almost nothing is learned: "
        "choose prompts that the model sometimes solves, a reward with more levels, or "
        "rollout.dynamic_sampling"
    )


def all_truncated(window: Window, first: Window) -> str | None:
    share = _mean(window, "train/truncated_share")
    if share is None or share < TRUNCATED:
        return None
    return (
        f"{share:.0%} of the completions run into rollout.max_new_tokens: raise it, add the string "
        "that ends an answer to rollout.stop, or begin from a model that ends its answers"
    )


def entropy_collapse(window: Window, first: Window) -> str | None:
    now, before = _mean(window, "train/entropy"), _mean(first, "train/entropy")
    if now is None or before is None or before <= 0 or now >= ENTROPY_LEFT * before:
        return None
    return (
        f"the entropy has fallen from {before:.3g} to {now:.3g} nats a token, so groups hardly "
        "differ any more: lower optimizer.learning_rate, raise the upper clip, or add kl.beta"
    )


def kl_blowup(window: Window, first: Window) -> str | None:
    kl = _mean(window, "train/kl")
    if kl is None or kl < KL_NATS:
        return None
    return (
        f"the policy is {kl:.3g} nats a token away from where it began: lower "
        "optimizer.learning_rate or raise kl.beta, and read samples/ for text that no person wrote"
    )


def parts_cancel(window: Window, first: Window) -> str | None:
    names = {key for row in window for key in row if key.startswith("train/reward/")}
    changes = {}
    for name in sorted(names):
        before, now = _mean(first, name), _mean(window, name)
        if before is not None and now is not None:
            changes[name.removeprefix("train/reward/")] = now - before
    moved = sum(abs(change) for change in changes.values())
    if len(changes) < 2 or moved < CHANGED or abs(sum(changes.values())) > CANCELLED * moved:
        return None
    shown = ", ".join(f"{name} {change:+.3g}" for name, change in changes.items())
    return f"the parts of the reward cancel each other ({shown}): weigh them differently"


def stale_policy(window: Window, first: Window) -> str | None:
    share = _mean(window, "train/effective_sample_size")
    if share is None or share >= SAMPLE_SIZE:
        return None
    lag = _mean(window, "train/staleness") or 0.0
    return (
        f"the samples are too far from the weights they train (effective sample size {share:.0%}, "
        f"{lag:.2g} steps behind): use rollout.policy_lag=0, fewer rollout.num_substeps or "
        "num_iterations, or a lower optimizer.learning_rate"
    )


def many_unscored(window: Window, first: Window) -> str | None:
    share = _mean(window, "train/unscored_share")
    if share is None or share < UNSCORED:
        return None
    return (
        f"{share:.0%} of the completions have no reward: events.jsonl holds what the reward "
        "functions raised"
    )


def logprob_mismatch(window: Window, first: Window) -> str | None:
    lag, gap = _mean(window, "train/staleness"), _mean(window, "train/logprob_gap")
    if gap is None or lag != 0 or gap < LOGPROB_GAP:
        return None
    return (
        f"trainer and sampler disagree by {gap:.3g} nats a token on the same weights, so the ratio "
        "is wrong: use one precision and one engine for both"
    )


RULES: dict[str, Callable[[Window, Window], str | None]] = {
    rule.__name__: rule
    for rule in (
        rewards_equal, all_truncated, entropy_collapse, kl_blowup, parts_cancel, stale_policy,
        many_unscored, logprob_mismatch,
    )
}  # fmt: skip
"""Name -> `rule(window, first)`: advice if it holds over `window`, `first` being the first one."""


def findings(history: Window, *, window: int) -> list[Finding]:
    """The rules that begin to hold at the last step of a history.

    Args:
        history: metrics of all steps so far, in order.
        window: steps that a rule looks back on; before there are so many, none holds.
    """
    if len(history) < window:
        return []
    first = history[:window]
    now = _holding(history[-window:], first)
    before = _holding(history[-window - 1 : -1], first) if len(history) > window else {}
    return [Finding(rule, advice) for rule, advice in now.items() if rule not in before]


def stopping_rule(found: Sequence[Finding], stop: Sequence[str]) -> Finding | None:
    """The first finding that is to end the run.

    Args:
        found: what begins to hold.
        stop: names of rules; `all` = any.
    """
    return next((each for each in found if "all" in stop or each.rule in stop), None)


def _holding(window: Window, first: Window) -> dict[str, str]:
    advice = {name: rule(window, first) for name, rule in RULES.items()}
    return {name: text for name, text in advice.items() if text is not None}


def _mean(rows: Window, key: str) -> float | None:
    """Mean of a metric over the steps that have it as a finite number; None where none has."""
    values = [row.get(key) for row in rows]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None
