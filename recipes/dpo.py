"""Direct preference optimisation: `python -m recipes.dpo data.path=<file>`, or from a notebook.

Read it top to bottom. `prepare` turns a config into a task and can fail for free; `train` is the
only loop, spends, and yields once per optimizer step.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook import launch
from tunebook.backends.base import Backend, LossFn, Session
from tunebook.columns import check_columns, loss_name, required_columns
from tunebook.compose import build, build_function
from tunebook.config import DPOConfig
from tunebook.data.rows import Kind
from tunebook.errors import RunError
from tunebook.evaluate import Monitor, choose_monitor, evaluate_loss
from tunebook.losses import check_loss
from tunebook.opening import check_backend, open_checkpoint, open_session, price_of
from tunebook.plan import MixedRows, Plan, checkpoint_steps, mix, step_rows, steps
from tunebook.planning import (
    check_resumed,
    cut_rows,
    downgrades_for,
    plan_for,
    summarize,
    workload_for,
)
from tunebook.preparation import (
    PreparedRows,
    kept_rows,
    render_pair_side,
    rows_for,
    tokenizer_for,
)
from tunebook.promotion import CheckpointBook, check_can_go_on, planned_stop
from tunebook.reference import ReferenceLogprobs, read_reference, write_reference
from tunebook.runs import StopReason
from tunebook.sampling import SamplePrompt, sample_answers, sample_prompts, why_no_samples
from tunebook.schedule import Schedule, learning_rate_at
from tunebook.settings import make_schedule, optimizer_params
from tunebook.split import Side
from tunebook.tracking import Tracker, tracking
from tunebook.types import Column, Datum, Metrics, StepReport, Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.render import RenderedRows
    from tunebook.runs import RunDir

LOG = logging.getLogger("tunebook")
REFERENCE = "reference_logprobs"
COLUMNS = ("token_weights", "pair_weights", REFERENCE)
"""What this recipe offers to a loss."""
PAIR = 2
"""Data of a pair: chosen, rejected."""

Reference = dict[Side, ReferenceLogprobs]
"""Of both sides of the split; empty where the loss reads no reference."""


@dataclass(frozen=True)
class Task:
    """All that `train` needs, checked and frozen."""

    config: DPOConfig
    rows: PreparedRows
    tokenizer: PreTrainedTokenizerBase
    train_data: RenderedRows
    """Two data a pair: chosen, then rejected."""
    eval_data: RenderedRows | None
    """None = there is no eval split."""
    monitor: Monitor | None
    sources: tuple[MixedRows, ...]
    """The pairs of `train_data` that can be trained, by source."""
    plan: Plan
    schedule: Schedule
    loss_fn: LossFn
    prompts: list[SamplePrompt]
    tracker: Tracker | None
    downgrades: tuple[str, ...]
    summary: dict[str, Any]
    """What `plan.json` holds, its hash included."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the policy at the start of the run."""
        return REFERENCE in required_columns(self.loss_fn)

    @property
    def sides(self) -> dict[Side, RenderedRows]:
        """The data of each side of the split that has any."""
        sides = {Side.train: self.train_data, Side.eval: self.eval_data}
        return {side: data for side, data in sides.items() if data is not None}

    @property
    def workload(self) -> Workload:
        """What training will ask of a backend."""
        first = step_rows(self.plan, self.sources, seed=self.config.seed, step=1)
        of_data = workload_for(
            self.config,
            self.plan,
            train_data=self.train_data,
            eval_data=self.eval_data,
            sample=step_data(self, first, {}),
        )
        scored = [*of_data.lengths, *of_data.eval_lengths] if self.needs_reference else []
        return replace(of_data, batch_size=PAIR * self.plan.batch_size, scored_lengths=scored)


def prepare(config: DPOConfig) -> Task:
    """The task that a config describes; opens no session and writes nothing but caches.

    Raises:
        ConfigError: a setting that cannot run.
        DataError: pairs that cannot be trained on.
    """
    loss_fn = build_function(config.loss, key="loss")
    check_columns(loss_fn, COLUMNS, recipe="dpo", essential=("pair_weights",))
    measured = ["loss", *with_gap(check_loss(loss_fn))]
    monitor = choose_monitor(
        config.eval,
        available=[f"eval/{name}" for name in measured if name != "num_tokens"],
        default="eval/loss",
    )
    can = check_backend(config)
    tracker = build(config.tracker, key="tracker") if config.tracker else None
    if tracker is not None:
        tracker.check()

    rows = rows_for(config, kind=Kind.preference)
    tokenizer = tokenizer_for(config)
    train_data = render_pair_side(rows.train, tokenizer, config, side=Side.train)
    assert train_data is not None, "prepare_rows leaves at least one train row"
    eval_data = render_pair_side(rows.eval, tokenizer, config, side=Side.eval)

    kept = train_data.report.kept_rows
    sources = mix(kept, [rows.train[row].source for row in kept], rows.source_weights)
    plan = plan_for(config, sources)
    prompts = sample_prompts(
        kept_rows(rows, train_data, eval_data),
        tokenizer,
        count=config.samples.num_prompts if can.has_generator else 0,
        max_tokens=config.max_seq_len - config.samples.max_tokens,
    )
    downgrades = downgrades_for(
        config,
        plan,
        monitor=monitor if eval_data else None,
        of_backend=can.downgrades,
        no_samples=why_no_samples(config.samples, prompts, has_generator=can.has_generator),
    )
    summary = summarize(
        "dpo",
        config,
        rows,
        plan,
        train_data=train_data,
        eval_data=eval_data,
        monitor=monitor if eval_data else None,
        downgrades=downgrades,
    )
    summary["trainable_parameters"] = can.trainable_parameters
    summary["reference"] = reference_text(config, loss_fn)
    summary["warnings"] += [
        *cut_rows(rows.train, train_data),
        *(f"eval: {each}" for each in (cut_rows(rows.eval, eval_data) if eval_data else [])),
        *check_resumed(config, summary),
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
        prompts=prompts,
        tracker=tracker,
        downgrades=downgrades,
        summary=summary,
    )
    if can.bills:
        summary["estimate"] = price_of(config, task.workload)
    return task


def reference_text(config: DPOConfig, loss_fn: LossFn) -> str:
    """What the policy is compared with, for people."""
    if REFERENCE not in required_columns(loss_fn):
        return f"none: {loss_name(loss_fn)} compares with no reference"
    start = "the base model" if config.start_from is None else config.start_from
    return f"the policy at the start of the run ({start}), scored once before step 1"


def train(task: Task, backend: Backend, run: RunDir) -> Generator[StepReport]:
    """Trains, evaluates, saves, stops, and promotes the best checkpoint; yields once per step.

    Closing the generator stops after the step that was yielded: it is saved, the best checkpoint is
    promoted, and the run is recorded as cancelled.
    """
    config, plan = task.config, task.plan
    saves_at = frozenset(
        checkpoint_steps(plan.planned_steps, checkpoint_every=config.plan.checkpoint_every)
    )
    book = CheckpointBook(run, task.monitor, keep=config.checkpoints.keep)
    done = step = book.resumed_step
    stop_reason = planned_stop(plan)
    warned = False
    with (
        book.attempt(planned_steps=plan.planned_steps, downgrades=task.downgrades),
        tracking(task.tracker, run, warn=LOG.warning) as feed,
    ):
        with closing(open_session(config, backend, run, book.newest)) as session:
            reference = reference_of(task, session, run, step)
            if done == 0:
                sample(task, session, run, step)
            if book.stops_early(config.early_stopping):  # what was interrupted is the promotion
                stop_reason = StopReason.EARLY_STOPPING
                remaining = iter(())
            else:
                remaining = steps(plan, task.sources, seed=config.seed, done=done)
            for step, rows in book.until_cancelled(remaining):
                metrics = one_step(task, session, reference, step, rows)
                evaluation = evaluate(task, session, reference) if step in saves_at else None
                logged = metrics | (evaluation or {})
                run.log_metrics(step, logged)
                feed.log(step, logged)
                if not warned and step > 1 and metrics.get("train/margin") == 0:
                    warn_of_no_margin(run, step)
                    warned = True
                checkpoint = book.save(session, step, evaluation) if step in saves_at else None
                report = StepReport(
                    step=step,
                    planned_steps=plan.planned_steps,
                    epoch=step / plan.steps_per_epoch,
                    metrics=metrics,
                    evaluation=evaluation,
                    checkpoint=checkpoint,
                    is_best=evaluation is not None and book.best_step == step,
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
            if step != book.saved_step:
                book.save(session, step, None)
        stop_reason = run.finalize(stop_reason)
        promoted = book.promoted()
        with closing(open_checkpoint(config, backend, run, promoted.ref)) as session:
            book.promote(session, promoted)
            if task.prompts and stop_reason is not StopReason.CANCELLED:
                with run.phase("post_processing_s"):
                    sample(task, session, run, promoted.step)
        run.finish(stop_reason, steps=step)


def reference_of(task: Task, session: Session, run: RunDir, step: int) -> Reference:
    """The log-probs of the policy at the start of the run, scored before its first step.

    They are kept in the run, so that a resumed run compares with the same numbers.

    Raises:
        RunError: the run has made steps and its reference is gone.
    """
    if not task.needs_reference:
        return {}
    directory = run.data_dir / "reference"
    prints = task.summary["fingerprints"]
    fingerprint = f"{prints['settings']} {prints['tokens']} {task.summary['model']}"
    found = read_reference(directory, task.sides, fingerprint=fingerprint)
    if found is not None:
        return found
    if step > 0:
        raise RunError(
            f"{directory}: the log-probs of the reference policy are gone or damaged, and the "
            f"policy has made {step} steps since, so the run cannot go on exactly. Begin a new run "
            f"from its weights with start_from={run.path}"
        )
    with run.phase("preparing_s"):
        return write_reference(
            directory,
            task.sides,
            {Side.train: task.rows.train, Side.eval: task.rows.eval},
            session,
            fingerprint=fingerprint,
        )


def one_step(
    task: Task, session: Session, reference: Reference, step: int, rows: Sequence[int]
) -> Metrics:
    """Makes one optimizer step and returns its metrics."""
    started = time.monotonic()
    data = step_data(task, rows, reference)
    learning_rate = learning_rate_at(step, task.plan.planned_steps, task.schedule)
    loss = session.forward_backward(data, task.loss_fn, rows_per_unit=PAIR)
    update = session.optim_step(optimizer_params(task.config.optimizer, learning_rate))
    metrics = {f"train/{name}": value for name, value in with_gap(loss.result()).items()}
    metrics |= {f"train/{name}": value for name, value in update.result().items()}
    return metrics | {
        "train/learning_rate": learning_rate,
        "train/pairs": float(len(rows)),
        "train/tokens": float(sum(len(datum.tokens) for datum in data)),
        "time/step_s": time.monotonic() - started,
    }


def step_data(task: Task, rows: Sequence[int], reference: Reference) -> list[Datum]:
    """The data of one optimizer step: the chosen and the rejected of each pair, side by side."""
    numbers = [number for row in rows for number in task.train_data.data_of_row(row)]
    known = reference.get(Side.train)
    return list(pair_data(task.train_data, numbers, known, pair_weight=1 / len(rows)))


def pair_data(
    data: RenderedRows,
    numbers: Sequence[int],
    reference: ReferenceLogprobs | None,
    *,
    pair_weight: float,
) -> Iterator[Datum]:
    """Data with the columns of a preference loss.

    Answers are not divided by their length: the loss sees whole log-probs. The divisor of the step
    is in `pair_weights`, so its loss is a mean over pairs however they are split.

    Args:
        data: of one side of the split.
        numbers: of the data, pair by pair.
        reference: of that side; None = the loss reads none.
        pair_weight: 1 over the pairs that the loss is a mean of.
    """
    for number in numbers:
        each = data[number]
        columns: dict[str, Column] = {"token_weights": each.mask, "pair_weights": pair_weight}
        if reference is not None:
            columns[REFERENCE] = reference.column(number, each.mask)
        yield Datum(each.tokens, columns)


def evaluate(task: Task, session: Session, reference: Reference) -> Metrics | None:
    """The loss function and its metrics over the whole eval split, or None where there is none."""
    if task.eval_data is None:
        return None
    data = pair_data(
        task.eval_data,
        range(len(task.eval_data)),
        reference.get(Side.eval),
        pair_weight=PAIR / len(task.eval_data),
    )
    rows_per_call = PAIR * task.config.plan.batch_size
    found = evaluate_loss(session, data, task.loss_fn, rows_per_call=rows_per_call)
    return {f"eval/{name}": value for name, value in with_gap(found).items()}


def with_gap(metrics: Metrics) -> Metrics:
    """The metrics of a preference loss, and by how much chosen answers are likelier than rejected.

    `gap` is in nats, of the policy alone: `margin` is what the loss makes of it.
    """
    if "chosen_logprob" not in metrics or "rejected_logprob" not in metrics:
        return metrics
    return {**metrics, "gap": metrics["chosen_logprob"] - metrics["rejected_logprob"]}


def warn_of_no_margin(run: RunDir, step: int) -> None:
    """Says that a step saw no difference between chosen and rejected answers."""
    run.event("no_margin", step=step)
    LOG.warning(
        "step %d: the margin of every pair is exactly 0, so the policy does not learn to tell "
        "chosen from rejected answers. Look at the pairs with `tunebook inspect --recipe dpo`, and "
        "at optimizer.learning_rate",
        step,
    )


def sample(task: Task, session: Session, run: RunDir, step: int) -> None:
    """Answers the task's prompts with the session's weights, for people to compare."""
    if task.prompts:
        answers = sample_answers(
            session, task.prompts, task.tokenizer, task.config.samples, seed=task.config.seed
        )
        run.write_samples(step, answers)


def inspect_main(overrides: Sequence[str], *, html: Path | None, limit: int) -> int:
    """Shows the pairs of a config token by token; returns 1 if a lint failed."""
    return launch.inspect("dpo", overrides, prepare, html=html, limit=limit)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this recipe from the command line; returns the exit code."""
    return launch.main("dpo", prepare, train, argv)


if __name__ == "__main__":
    sys.exit(main())
