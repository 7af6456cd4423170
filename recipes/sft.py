"""Supervised fine-tuning: `python -m recipes.sft data.path=<file>`, or from a notebook.

Read it top to bottom. `prepare` turns a config into a task and can fail for free; `train` is the
only loop, spends, and yields once per optimizer step.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook import launch
from tunebook.backends.base import Backend, LossFn, Session
from tunebook.columns import check_columns
from tunebook.compose import build, build_function
from tunebook.config import SFTConfig
from tunebook.data.rows import Kind
from tunebook.evaluate import NLL_METRICS, Monitor, choose_monitor, evaluate_nll
from tunebook.losses import check_loss
from tunebook.opening import check_backend, open_checkpoint, open_session, price_of
from tunebook.plan import MixedRows, Plan, checkpoint_steps, mix, step_rows, steps
from tunebook.planning import (
    check_resumed,
    downgrades_for,
    plan_for,
    summarize,
    workload_for,
)
from tunebook.preparation import (
    PreparedRows,
    kept_rows,
    render_side,
    rows_for,
    tokenizer_for,
)
from tunebook.promotion import CheckpointBook, check_can_go_on, planned_stop
from tunebook.runs import StopReason
from tunebook.sampling import SamplePrompt, sample_answers, sample_prompts, why_no_samples
from tunebook.schedule import Schedule, learning_rate_at
from tunebook.settings import make_normalizer, make_schedule, optimizer_params
from tunebook.split import Side
from tunebook.tracking import Tracker, tracking
from tunebook.types import Datum, Metrics, StepReport, Workload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.render import RenderedRows
    from tunebook.runs import RunDir

LOG = logging.getLogger("tunebook")
COLUMNS = ("token_weights",)
"""What this recipe offers to a loss."""


@dataclass(frozen=True)
class Task:
    """All that `train` needs, checked and frozen."""

    config: SFTConfig
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
    prompts: list[SamplePrompt]
    tracker: Tracker | None
    downgrades: tuple[str, ...]
    summary: dict[str, Any]
    """What `plan.json` holds, its hash included."""

    @property
    def workload(self) -> Workload:
        """What training will ask of a backend."""
        first = step_rows(self.plan, self.sources, seed=self.config.seed, step=1)
        return workload_for(
            self.config,
            self.plan,
            train_data=self.train_data,
            eval_data=self.eval_data,
            sample=step_data(self, first),
        )


def prepare(config: SFTConfig) -> Task:
    """The task that a config describes; opens no session and writes nothing but caches.

    Raises:
        ConfigError: a setting that cannot run.
        DataError: rows that cannot be trained on.
    """
    loss_fn = build_function(config.loss, key="loss")
    check_columns(loss_fn, COLUMNS, recipe="sft")
    check_loss(loss_fn)
    monitor = choose_monitor(config.eval, available=NLL_METRICS, default="eval/loss")
    can = check_backend(config)
    tracker = build(config.tracker, key="tracker") if config.tracker else None
    if tracker is not None:
        tracker.check()

    rows = rows_for(config, kind=Kind.conversation)
    tokenizer = tokenizer_for(config)
    train_data = render_side(rows.train, tokenizer, config, side=Side.train)
    assert train_data is not None, "prepare_rows leaves at least one train row"
    eval_data = render_side(rows.eval, tokenizer, config, side=Side.eval)

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
        "sft",
        config,
        rows,
        plan,
        train_data=train_data,
        eval_data=eval_data,
        monitor=monitor if eval_data else None,
        downgrades=downgrades,
    )
    summary["trainable_parameters"] = can.trainable_parameters
    summary["warnings"] += check_resumed(config, summary)
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
    with (
        book.attempt(planned_steps=plan.planned_steps, downgrades=task.downgrades),
        tracking(task.tracker, run, warn=LOG.warning) as feed,
    ):
        with closing(open_session(config, backend, run, book.newest)) as session:
            if done == 0:
                sample(task, session, run, step)
            if book.stops_early(config.early_stopping):  # what was interrupted is the promotion
                stop_reason = StopReason.EARLY_STOPPING
                remaining = iter(())
            else:
                remaining = steps(plan, task.sources, seed=config.seed, done=done)
            for step, rows in book.until_cancelled(remaining):
                metrics = one_step(task, session, step, rows)
                evaluation = evaluate(task, session) if step in saves_at else None
                logged = metrics | (evaluation or {})
                run.log_metrics(step, logged)
                feed.log(step, logged)
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


def one_step(task: Task, session: Session, step: int, rows: Sequence[int]) -> Metrics:
    """Makes one optimizer step and returns its metrics."""
    started = time.monotonic()
    data = step_data(task, rows)
    learning_rate = learning_rate_at(step, task.plan.planned_steps, task.schedule)
    loss = session.forward_backward(data, task.loss_fn)
    update = session.optim_step(optimizer_params(task.config.optimizer, learning_rate))
    metrics = {f"train/{name}": value for name, value in loss.result().items()}
    metrics |= {f"train/{name}": value for name, value in update.result().items()}
    return metrics | {
        "train/learning_rate": learning_rate,
        "train/tokens": float(sum(len(datum.tokens) for datum in data)),
        "time/step_s": time.monotonic() - started,
    }


def step_data(task: Task, rows: Sequence[int]) -> list[Datum]:
    """The data of one optimizer step, their `token_weights` normalised over all of it."""
    rendered = [
        task.train_data[index] for row in rows for index in task.train_data.data_of_row(row)
    ]
    weights = make_normalizer(task.config.normalization)([each.mask for each in rendered])
    return [
        Datum(each.tokens, {"token_weights": token_weights})
        for each, token_weights in zip(rendered, weights, strict=True)
    ]


def evaluate(task: Task, session: Session) -> Metrics | None:
    """Metrics of the whole eval split, or None where there is none."""
    if task.eval_data is None:
        return None
    data = (Datum(each.tokens, {"token_weights": each.mask}) for each in task.eval_data)
    return evaluate_nll(session, data, rows_per_call=task.config.plan.batch_size)


def sample(task: Task, session: Session, run: RunDir, step: int) -> None:
    """Answers the task's prompts with the session's weights, for people to compare."""
    if task.prompts:
        answers = sample_answers(
            session, task.prompts, task.tokenizer, task.config.samples, seed=task.config.seed
        )
        run.write_samples(step, answers)


def inspect_main(overrides: Sequence[str], *, html: Path | None, limit: int) -> int:
    """Shows the rows of a config token by token; returns 1 if a lint failed."""
    return launch.inspect("sft", overrides, prepare, html=html, limit=limit)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this recipe from the command line; returns the exit code."""
    return launch.main("sft", prepare, train, argv)


if __name__ == "__main__":
    sys.exit(main())
