"""Training on rewards with GRPO: `python -m recipes.grpo data.path=<file> reward=exact_number`.

Read it top to bottom. `prepare` turns a config into a task and can fail for free; `train` is the
only loop, spends, and yields once per step. One step samples a group of completions for each of its
prompts, scores them, and trains on what scored better than the rest of its group: exactly the
sampled ids, with the sampler's log-probs.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebook import launch
from tunebook.backends.base import Backend, LossFn, Session
from tunebook.backends.base import Generator as Sampler
from tunebook.columns import check_columns, required_columns
from tunebook.compose import build, build_function
from tunebook.config import Direction, GRPOConfig, KLEstimator, KLPlacement, OnTruncated
from tunebook.data.rows import Kind, Row
from tunebook.environments import Environments, build_environments
from tunebook.errors import ConfigError
from tunebook.evaluate import Monitor, choose_monitor
from tunebook.groups import (
    Group,
    Sample,
    loss_metrics,
    records,
    reward_metrics,
    shape_advantages,
    spread,
    staleness,
    training_samples,
)
from tunebook.health import findings, stopping_rule
from tunebook.losses import check_loss
from tunebook.opening import (
    check_backend,
    open_checkpoint,
    open_session,
    open_start,
    price_of,
)
from tunebook.plan import MixedRows, Plan, checkpoint_steps, mix, step_rows, stream_rows
from tunebook.planning import check_resumed, downgrades_for, plan_for, summarize, workload_for
from tunebook.preparation import PreparedRows, render_prompt_side, rows_for, tokenizer_for
from tunebook.promotion import CheckpointBook, check_can_go_on, planned_stop
from tunebook.render.turns import check_turns
from tunebook.rewards.overlong import overlong_penalty
from tunebook.rollouts import PendingRollouts, Prompt, Rollout, start_rollouts
from tunebook.runs import NoStepsError, StopReason
from tunebook.schedule import Schedule, learning_rate_at
from tunebook.scoring import GIVEN_COLUMNS, Score, Scorer, check_rows, make_scorer
from tunebook.scoring import Sample as Scored
from tunebook.settings import (
    make_advantages,
    make_normalizer,
    make_schedule,
    optimizer_params,
)
from tunebook.split import Side
from tunebook.tracking import Tracker, tracking
from tunebook.types import (
    Datum,
    FloatArray,
    IntArray,
    Metrics,
    SamplingParams,
    StepReport,
    Workload,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.render import RenderedRows
    from tunebook.runs import RunDir

LOG = logging.getLogger("tunebook")
COLUMNS = ("token_weights", "sampling_logprobs", "advantages")
"""What this recipe offers to a loss, besides `reference_logprobs` to one that reads it."""
EVAL_PROMPTS_PER_CALL = 64


@dataclass(frozen=True)
class Task:
    """All that `train` needs, checked and frozen."""

    config: GRPOConfig
    rows: PreparedRows
    tokenizer: PreTrainedTokenizerBase
    train_data: RenderedRows
    eval_data: RenderedRows | None
    """None = there is no eval split."""
    monitor: Monitor | None
    sources: tuple[MixedRows, ...]
    """The rows of `train_data` that can be trained, by source."""
    plan: Plan
    schedule: Schedule
    loss_fn: LossFn
    scorer: Scorer | None
    """None = the environment alone gives rewards."""
    tracker: Tracker | None
    downgrades: tuple[str, ...]
    summary: dict[str, Any]
    """What `plan.json` holds, its hash included."""

    @property
    def has_reference(self) -> bool:
        """Whether anything reads the log-probs of the policy at the start of the run."""
        return needs_reference(self.config, self.loss_fn)

    @property
    def workload(self) -> Workload:
        """What training will ask of a backend, if every completion is as long as allowed."""
        length = self.config.rollout.max_new_tokens
        rows = step_rows(self.plan, self.sources, seed=self.config.seed, step=1)
        prompts = [prompt_tokens(self.train_data, row) for row in rows]
        longest = [np.pad(prompt, (0, length), mode="edge") for prompt in prompts]
        masks = [np.arange(1, len(each)) >= len(each) - length for each in longest]
        return workload_for(
            self.config,
            self.plan,
            train_data=self.train_data,
            eval_data=None,
            sample=[
                Datum(tokens, {"token_weights": mask.astype(np.float32) / mask.sum()})
                for tokens, mask in zip(longest, masks, strict=True)
                for _ in range(self.config.rollout.group_size)
            ],
            completions=self.config.rollout.group_size,
            completion_tokens=length,
        )


@dataclass(frozen=True)
class Batch:
    """What one step has sampled and scored."""

    groups: list[Group]
    """Of all its prompts, in their order."""
    advantages: list[FloatArray]
    """`[G]` of each group."""
    metrics: Metrics
    problems: list[str]
    """What reward functions and environments raised, a sentence each."""
    prompts_consumed: int
    """Positions of the stream of prompts that the run has taken, this step included."""


def prepare(config: GRPOConfig) -> Task:
    """The task that a config describes; opens no session and writes nothing but caches.

    Raises:
        ConfigError: a setting that cannot run.
        DataError: rows that cannot be trained on.
    """
    loss_fn = make_loss(config)
    num_sessions = 2 if needs_reference(config, loss_fn) else 1
    can = check_backend(
        config,
        samples=True,
        num_sessions=num_sessions,
        temperature=config.rollout.temperature,
        stop=config.rollout.stop,
    )
    tracker = build(config.tracker, key="tracker") if config.tracker else None
    if tracker is not None:
        tracker.check()

    rows = with_tools(rows_for(config, kind=Kind.prompt), config)
    scorer = scorer_for(config, rows)
    rewards = directions_of(scorer)
    monitor = choose_monitor(
        config.eval, available=rewards, default="eval/reward", directions=rewards
    )
    tokenizer = tokenizer_for(config)
    check_environment(config, tokenizer)
    room = config.max_seq_len - config.rollout.max_new_tokens
    train_data = render_prompt_side(rows.train, tokenizer, config, side=Side.train, max_tokens=room)
    assert train_data is not None, "prepare_rows leaves at least one train row"
    eval_data = render_prompt_side(rows.eval, tokenizer, config, side=Side.eval, max_tokens=room)

    kept = train_data.report.kept_rows
    sources = mix(kept, [rows.train[row].source for row in kept], rows.source_weights)
    plan = plan_for(config, sources)
    downgrades = downgrades_for(
        config, plan, monitor=monitor if eval_data else None, of_backend=can.downgrades
    )
    summary = summarize(
        "grpo",
        config,
        rows,
        plan,
        train_data=train_data,
        eval_data=eval_data,
        monitor=monitor if eval_data else None,
        downgrades=downgrades,
    )
    summary["trainable_parameters"] = can.trainable_parameters
    summary["sessions"] = num_sessions
    summary["notes"] = [
        *summary["notes"],
        "a measured estimate (dry_run=true) is of training alone, with completions as long as "
        "they may be; sampling, rewards and evaluation come on top",
    ]
    summary["warnings"] += [
        *doubts(config),
        *check_resumed(config, summary, needs_start=num_sessions > 1),
    ]
    if config.resume is not None:
        check_can_go_on(config, plan, monitor)
    task = Task(
        config=config,
        rows=rows,
        tokenizer=tokenizer,
        train_data=train_data,
        eval_data=eval_data,
        monitor=monitor if eval_data else None,
        sources=sources,
        plan=plan,
        schedule=make_schedule(config),
        loss_fn=loss_fn,
        scorer=scorer,
        tracker=tracker,
        downgrades=downgrades,
        summary=summary,
    )
    if can.bills:
        summary["estimate"] = price_of(config, task.workload)
    return task


def with_tools(rows: PreparedRows, config: GRPOConfig) -> PreparedRows:
    """The rows with the tools of the environment, which the chat template prints.

    Raises:
        ConfigError: the environment cannot be built, or rows have tools of their own.
    """
    if config.environment is None:
        return rows
    with closing(build_environments(config.environment)) as environments:
        tools = environments.tools
    for row in (*rows.train, *rows.eval):
        if row.tools is not None and row.tools != tools:
            raise ConfigError(
                f"{row.file}:{row.line}: the row has tools of its own, which the environment does "
                "not serve; take them out of the rows, or use environment=none"
            )
    return replace(
        rows,
        train=[replace(row, tools=tools) for row in rows.train],
        eval=[replace(row, tools=tools) for row in rows.eval],
    )


def check_environment(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Returns if the chat template can show what the environment says between turns.

    Raises:
        ConfigError: it cannot.
    """
    if config.environment is not None:
        with closing(build_environments(config.environment)) as environments:
            check_turns(tokenizer, environments.tools)


def scorer_for(config: GRPOConfig, rows: PreparedRows) -> Scorer | None:
    """The reward functions of a config, every row having the columns they need.

    Raises:
        ConfigError: a function that cannot be used so.
        DataError: rows without a column.
    """
    if not config.reward.functions:
        return None
    every = (*rows.train, *rows.eval)
    columns = {name for row in every for name in row.columns}
    scorer = make_scorer(config.reward, {*columns, *GIVEN_COLUMNS})
    check_rows(scorer, ((row.file, row.line, row.columns) for row in every))
    return scorer


def directions_of(scorer: Scorer | None) -> dict[str, Direction]:
    """Which way each metric of rewards improves: down if its weight takes from the sum, else up."""
    parts = scorer.rewards if scorer else ()
    return {"eval/reward": Direction.up} | {
        f"eval/reward/{part.name}": Direction.down if part.weight < 0 else Direction.up
        for part in parts
    }


def doubts(config: GRPOConfig) -> list[str]:
    """What a person should know about a config that runs."""
    kl = config.kl
    if kl.beta > 0 and kl.estimator is KLEstimator.k1 and kl.placement is KLPlacement.loss:
        return [
            "kl.estimator=k1 in the loss has an expected gradient of 0, so it adds noise and holds "
            "nothing; use k2 or k3, or kl.placement=reward"
        ]
    return []


def make_loss(config: GRPOConfig) -> LossFn:
    """The loss of a config, with the KL term where it goes into the loss.

    Raises:
        ConfigError: it is no policy loss, or needs what this recipe does not have.
    """
    loss_fn: LossFn = build_function(config.loss, key="loss")
    check_columns(
        loss_fn, (*COLUMNS, "reference_logprobs"), recipe="grpo", essential=("advantages",)
    )
    if config.kl.beta > 0 and config.kl.placement is KLPlacement.loss:
        from loss_fns.kl import with_kl

        loss_fn = with_kl(loss_fn, beta=config.kl.beta, estimator=config.kl.estimator.value)
    check_loss(loss_fn)
    return loss_fn


def needs_reference(config: GRPOConfig, loss_fn: LossFn) -> bool:
    """Whether the loss, or the KL term of the config, reads the log-probs of a reference."""
    return config.kl.beta > 0 or "reference_logprobs" in required_columns(loss_fn)


def train(task: Task, backend: Backend, run: RunDir) -> Generator[StepReport]:
    """Samples, scores, trains, evaluates, saves, stops, and promotes the best checkpoint.

    Yields once per step. Closing the generator stops after the step that was yielded: it is saved,
    the best checkpoint is promoted, and the run is recorded as cancelled.
    """
    config, plan = task.config, task.plan
    saves_at = frozenset(
        checkpoint_steps(plan.planned_steps, checkpoint_every=config.plan.checkpoint_every)
    )
    book = CheckpointBook(run, task.monitor, keep=config.checkpoints.keep)
    done = step = book.resumed_step
    stop_reason, rule = planned_stop(plan), None
    with ExitStack() as stack:
        stack.enter_context(
            book.attempt(planned_steps=plan.planned_steps, downgrades=task.downgrades)
        )
        feed = stack.enter_context(tracking(task.tracker, run, warn=LOG.warning))
        arena = stack.enter_context(open_arena(task))
        history = [row for row in run.metrics() if row["step"] > 0]
        with ExitStack() as sessions:
            session = sessions.enter_context(
                closing(open_session(config, backend, run, book.newest))
            )
            reference = (
                sessions.enter_context(closing(open_start(config, backend, run)))
                if task.has_reference
                else None
            )
            sampler = session.publish_weights().result()
            if not run.metrics():
                start = evaluate(task, sampler, arena, run, 0)
                start = {key.replace("eval/", "start/"): value for key, value in start.items()}
                run.log_metrics(0, start)
                feed.log(0, start)
            last = plan.planned_steps
            if book.stops_early(config.early_stopping):  # only the promotion is left
                stop_reason, last = StopReason.EARLY_STOPPING, done
            taken = int(history[-1]["train/prompts_consumed"]) if history else 0
            if done and config.rollout.policy_lag:
                run.event("policy_lag_begins_anew", step=done)
            batch: Batch | None = None
            for step in book.until_cancelled(range(done + 1, last + 1)):
                started = time.monotonic()
                if batch is None:
                    batch = collect(task, begin(task, sampler, arena, step, taken), sampler, arena)
                taken = batch.prompts_consumed
                ahead = config.rollout.policy_lag > 0 and step < last
                upcoming = begin(task, sampler, arena, step + 1, taken) if ahead else None
                metrics = one_step(task, session, reference, batch, step, version=sampler.version)
                report_problems(run, step, batch.problems)
                write_rollouts(task, run, step, batch)
                # Collected before the publish, with which its generator becomes stale.
                batch = collect(task, upcoming, sampler, arena) if upcoming else None
                sampler = session.publish_weights().result()
                metrics["time/step_s"] = time.monotonic() - started
                evaluation: Metrics | None = None
                if step in saves_at:
                    evaluation = evaluate(task, sampler, arena, run, step) or None
                logged = metrics | (evaluation or {})
                run.log_metrics(step, logged)
                feed.log(step, logged)
                history.append({"step": step, **metrics})
                found = findings(history, window=config.health.window)
                for finding in found:
                    run.event("health", step=step, rule=finding.rule, advice=finding.advice)
                checkpoint = None
                if step in saves_at:
                    checkpoint = book.save(session, step, evaluation)
                report = StepReport(
                    step=step,
                    planned_steps=plan.planned_steps,
                    epoch=taken / plan.train_rows,
                    metrics=metrics,
                    evaluation=evaluation,
                    checkpoint=checkpoint,
                    is_best=evaluation is not None and book.best_step == step,
                    notes=(
                        *first_without_update(history),
                        *(f"{each.rule}: {each.advice}" for each in found),
                    ),
                )
                try:
                    yield report
                except GeneratorExit:  # somebody closed us; what follows cleans up
                    if step < plan.planned_steps:
                        stop_reason = StopReason.CANCELLED
                    break
                if evaluation is not None and book.stops_early(config.early_stopping):
                    stop_reason = StopReason.EARLY_STOPPING
                    break
                stopping = stopping_rule(found, config.health.stop)
                if stopping is not None:
                    stop_reason, rule = StopReason.HEALTH, stopping.rule
                    break
            if step != book.saved_step:
                book.save(session, step, None)
        stop_reason = run.finalize(stop_reason)
        if stop_reason is not StopReason.CANCELLED:
            require_updates(run, rule)
        promoted = book.promoted()
        with closing(open_checkpoint(config, backend, run, promoted.ref)) as session:
            book.promote(session, promoted)
        run.finish(stop_reason, steps=step, rule=rule)


def first_without_update(history: Sequence[Metrics]) -> list[str]:
    """What to say of the last step of a history if it is the first to leave the weights alone."""
    idle = [row for row in history if not row["train/num_updates"]]
    if len(idle) != 1 or history[-1] is not idle[0]:
        return []
    return [
        "no group of this step had rewards that differ, so it made no update (said once; "
        "train/num_updates tells of every step)"
    ]


def require_updates(run: RunDir, rule: str | None) -> None:
    """Returns if any step has changed the weights; else there is no model to promote.

    Raises:
        NoStepsError: none has; says why, as far as the metrics tell.
    """
    rows = [row for row in run.metrics() if row["step"] > 0]
    if not rows or any(row.get("train/num_updates") for row in rows):
        return
    stopped = "" if rule is None else f" when the health rule {rule} ended it"
    if all(row["train/unscored_share"] == 1 for row in rows):
        why = (
            "no completion could be scored. What the reward functions raised is in "
            f"{run.path / 'events.jsonl'}"
        )
    else:
        why = (
            "no group had rewards that differ. The reward or the prompts do not fit the model; "
            "look at samples/"
        )
    raise NoStepsError(
        f"{run.path}: none of its {len(rows)} steps had changed the weights{stopped}, so there is "
        f"no model: {why}"
    )


# Sampling and scoring.


@dataclass(frozen=True)
class Arena:
    """What answers the policy and what scores it."""

    environments: Environments | None
    """None = one answer per prompt."""
    scorer: Scorer | None


@contextmanager
def open_arena(task: Task) -> Iterator[Arena]:
    """Environments and scorer of a run, closed on every way out."""
    with ExitStack() as stack:
        environments = None
        if task.config.environment is not None:
            environments = stack.enter_context(closing(build_environments(task.config.environment)))
        if task.scorer is not None:
            stack.enter_context(task.scorer)
        yield Arena(environments, task.scorer)


@dataclass(frozen=True)
class Begun:
    """Completions of one step that are being sampled."""

    step: int
    rows: tuple[int, ...]
    pending: PendingRollouts
    taken: int
    """Positions of the stream of prompts that earlier steps have taken."""


def begin(task: Task, sampler: Sampler, arena: Arena, step: int, taken: int) -> Begun:
    """Submits the first completions of a step; nothing waits for them yet."""
    config = task.config
    if config.rollout.dynamic_sampling:
        rows = stream_rows(
            task.sources, seed=config.seed, start=taken, count=config.plan.batch_size
        )
    else:
        rows = step_rows(task.plan, task.sources, seed=config.seed, step=step)
    pending = start(task, sampler, arena, task.train_data, rows, step=step, first=0)
    return Begun(step, rows, pending, taken)


def collect(task: Task, begun: Begun, sampler: Sampler, arena: Arena) -> Batch:
    """Waits for the completions of a step and scores them.

    With dynamic sampling, groups of further prompts join those without variance, up to the limit.
    """
    config = task.config
    groups: list[Group] = []
    problems: list[str] = []
    rollout_s = reward_s = 0.0
    taken, extra_left = begun.taken, config.rollout.dynamic_sampling
    while True:
        sampling = time.monotonic()
        sampled = begun.pending.finish()
        scoring = time.monotonic()
        rollout_s += scoring - sampling
        scored, raised = score(
            task, arena.scorer, [task.rows.train[row] for row in begun.rows], sampled
        )
        reward_s += time.monotonic() - scoring
        groups += scored
        problems += raised
        taken += len(begun.rows)
        missing = config.plan.batch_size - sum(group.has_variance for group in groups)
        count = min(missing, extra_left)
        if count <= 0:
            break
        extra_left -= count
        rows = stream_rows(task.sources, seed=config.seed, start=taken, count=count)
        pending = start(
            task, sampler, arena, task.train_data, rows, step=begun.step, first=len(groups)
        )
        begun = Begun(begun.step, rows, pending, taken)
    metrics = reward_metrics(groups, "train") | {
        "train/prompts": float(len(groups)),
        "train/prompts_consumed": float(taken),
        "train/reward_problems": float(len(problems)),
        "time/rollout_s": rollout_s,
        "time/reward_s": reward_s,
    }
    advantages = make_advantages(config.advantage)([group.rewards for group in groups])
    return Batch(groups, advantages, metrics, problems, taken)


def start(
    task: Task,
    sampler: Sampler,
    arena: Arena,
    data: RenderedRows,
    rows: Sequence[int],
    *,
    step: int,
    first: int,
) -> PendingRollouts:
    """Submits a group of completions for each row.

    Args:
        task: of the run.
        sampler: of the policy.
        arena: what answers the policy.
        data: rendered prompts, of the train rows or of the eval rows.
        rows: to sample for.
        step: part of the seeds; 0 = an evaluation.
        first: position of the first row in its step, part of the seeds.
    """
    rollout = task.config.rollout
    evaluates = step == 0
    temperature = rollout.temperature
    if evaluates and rollout.eval_temperature is not None:
        temperature = rollout.eval_temperature
    side = task.rows.eval if data is task.eval_data else task.rows.train
    return start_rollouts(
        sampler,
        [
            Prompt(row, prompt_tokens(data, row), side[row].messages, side[row].columns)
            for row in rows
        ],
        SamplingParams(
            max_tokens=rollout.max_new_tokens,
            temperature=temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=tuple(rollout.stop),
            seed=None,
        ),
        group_size=rollout.eval_group_size if evaluates else rollout.group_size,
        key=(task.config.seed, step, first),
        max_seq_len=task.config.max_seq_len,
        tokenizer=task.tokenizer,
        environments=arena.environments,
    )


def score(
    task: Task, scorer: Scorer | None, rows: Sequence[Row], sampled: Sequence[Sequence[Rollout]]
) -> tuple[list[Group], list[str]]:
    """The groups of sampled completions, and what went wrong while they were scored.

    Raises:
        RewardError: a reward function failed, and reward.on_error=fail.
    """
    judged = [rollout for rollouts in sampled for rollout in rollouts if rollout.failure is None]
    items = [
        Scored(
            rollout.completion,
            {
                **row.columns,
                "prompt": row.messages,
                "messages": rollout.messages,
                "stop_reason": rollout.stop_reason.value,
                "num_tokens": rollout.num_sampled_tokens,
            },
        )
        for row, rollouts in zip(rows, sampled, strict=True)
        for rollout in rollouts
        if rollout.failure is None
    ]
    by_environment = Score(total=0.0, parts={})
    scores = iter(scorer.score(items) if scorer is not None else [by_environment] * len(judged))
    failed = Score(total=None, parts={})
    groups = []
    for rollouts in sampled:
        of_group = [next(scores) if each.failure is None else failed for each in rollouts]
        rewards = [
            total_reward(task.config, each, rollout)
            for each, rollout in zip(of_group, rollouts, strict=True)
        ]
        groups.append(Group(rollouts, of_group, np.asarray(rewards, np.float64)))
    problems = [
        str(problem) for group in groups for each in group.scores for problem in each.problems
    ]
    problems += [
        rollout.failure for group in groups for rollout in group.rollouts if rollout.failure
    ]
    return groups, problems


def total_reward(config: GRPOConfig, score: Score, rollout: Rollout) -> float:
    """What advantages are computed from; NaN where something could not score the completion.

    The reward functions' sum, what the environment gave, and the penalty for coming near the limit
    of tokens.
    """
    if score.total is None or rollout.failure is not None:
        return math.nan
    if not score.parts and rollout.environment_reward is None:
        return math.nan  # nothing has scored it
    total = score.total + (rollout.environment_reward or 0.0)
    if config.rollout.truncated is OnTruncated.penalise:
        total += overlong_penalty(
            rollout.num_sampled_tokens,
            truncated=rollout.truncated,
            max_tokens=config.rollout.max_new_tokens,
            buffer=config.rollout.penalty_buffer,
        )
    return total


def prompt_tokens(data: RenderedRows, row: int) -> IntArray:
    """Token ids of the prompt of a row, `[N]`."""
    (datum,) = data.data_of_row(row)
    return data[datum].tokens


# Learning.


def one_step(
    task: Task,
    session: Session,
    reference: Session | None,
    batch: Batch,
    step: int,
    *,
    version: int,
) -> Metrics:
    """Makes the optimizer updates of one step and returns its metrics.

    A step without a group whose rewards differ makes no update.

    Args:
        task: of the run.
        session: the policy.
        reference: the policy at the start of the run; None = no KL term.
        batch: what was sampled.
        step: from 1.
        version: of the weights that are trained.
    """
    started = time.monotonic()
    config = task.config
    samples = training_samples(
        batch.groups,
        batch.advantages,
        temperature=config.rollout.temperature,
        mask_truncated=config.rollout.truncated is OnTruncated.mask,
    )
    kl: Metrics = {}
    if reference is not None and samples:
        samples, kl = with_reference(config, reference, samples)
    learning_rate = learning_rate_at(step, task.plan.planned_steps, task.schedule)
    pending = []
    for _ in range(config.rollout.num_iterations):
        for minibatch in spread(samples, parts=config.rollout.num_substeps):
            normalize = make_normalizer(
                config.normalization, groups=[sample.group for sample in minibatch]
            )
            weights = normalize([sample.mask for sample in minibatch])
            data = [
                sample.datum(token_weights)
                for sample, token_weights in zip(minibatch, weights, strict=True)
            ]
            loss = session.forward_backward(data, task.loss_fn)
            update = session.optim_step(optimizer_params(config.optimizer, learning_rate))
            pending.append((loss, update))
    updates = [{**loss.result(), **update.result()} for loss, update in pending]
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    return (
        batch.metrics
        | kl
        | loss_metrics(updates)
        | staleness(batch.groups, version=version)
        | {
            "train/samples": float(len(samples)),
            "train/num_updates": float(len(updates)),
            "train/learning_rate": learning_rate,
            "train/tokens": float(sum(len(rollout.tokens) for rollout in rollouts)),
            "time/train_s": time.monotonic() - started,
        }
    )


def with_reference(
    config: GRPOConfig, reference: Session, samples: Sequence[Sample]
) -> tuple[list[Sample], Metrics]:
    """The samples with what the reference says of them, and the KL from it."""
    forwarded = reference.forward([sample.datum(sample.mask) for sample in samples]).result()
    # Positions that are not asked for come back as NaN.
    logprobs = [
        np.where(sample.mask != 0, row.float().cpu().numpy(), 0).astype(np.float32)
        for sample, row in zip(samples, forwarded, strict=True)
    ]
    compared = [
        replace(sample, columns={**sample.columns, "reference_logprobs": row})
        for sample, row in zip(samples, logprobs, strict=True)
    ]
    if config.kl.beta > 0 and config.kl.placement is KLPlacement.reward:
        return shape_advantages(compared, beta=config.kl.beta)
    return compared, {}


def evaluate(task: Task, sampler: Sampler, arena: Arena, run: RunDir, step: int) -> Metrics:
    """Metrics of the held-out prompts, always with the same seeds; keeps some of the answers.

    Without an eval split only the answers are kept, to prompts of the training rows, and there are
    no metrics.
    """
    count = task.config.samples.num_prompts
    if task.eval_data is not None:
        data, side, rows = task.eval_data, task.rows.eval, task.eval_data.report.kept_rows
    else:
        data, side, rows = (
            task.train_data,
            task.rows.train,
            task.train_data.report.kept_rows[:count],
        )
    groups: list[Group] = []
    problems: list[str] = []
    for first in range(0, len(rows), EVAL_PROMPTS_PER_CALL):
        part = rows[first : first + EVAL_PROMPTS_PER_CALL]
        sampled = start(task, sampler, arena, data, part, step=0, first=first).finish()
        scored, raised = score(task, arena.scorer, [side[row] for row in part], sampled)
        groups += scored
        problems += raised
    report_problems(run, step, problems)
    run.write_samples(step, records(groups[:count], rows=side, per_group=1))
    if task.eval_data is None:
        return {}
    metrics = reward_metrics(groups, "eval")
    if task.monitor is not None:
        metrics.setdefault(task.monitor.metric, math.nan)  # where nothing could be scored by it
    return metrics


def write_rollouts(task: Task, run: RunDir, step: int, batch: Batch) -> None:
    """Keeps what some prompts of a step were answered, with rewards and advantages."""
    count = task.config.samples.num_prompts
    # Groups that are trained on come first.
    order = sorted(range(len(batch.groups)), key=lambda i: not batch.groups[i].has_variance)
    shown = order[:count]
    if shown:
        kept = records(
            [batch.groups[i] for i in shown],
            rows=task.rows.train,
            advantages=[batch.advantages[i] for i in shown],
        )
        run.write_rollouts(step, kept)


def report_problems(run: RunDir, step: int, problems: Sequence[str]) -> None:
    """Records what reward functions and environments raised."""
    if problems:
        run.event("reward_problems", step=step, count=len(problems), first=list(problems[:5]))


def inspect_main(overrides: Sequence[str], *, html: Path | None, limit: int) -> int:
    """Shows the prompts of a config token by token; returns 1 if a lint failed."""
    return launch.inspect("grpo", overrides, prepare, html=html, limit=limit)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this recipe from the command line; returns the exit code."""
    return launch.main("grpo", prepare, train, argv)


if __name__ == "__main__":
    sys.exit(main())
