"""Runs and sweeps with everything a report shows, made without training anything."""

import math

from recipes import sft
from tunebook.compose import compose
from tunebook.launch import plan_run
from tunebook.runs import Evaluation, RunDir, StopReason
from tunebook.sweeps.record import SweepDir, TrialRecord
from tunebook.sweeps.trial import TrialState

STEPS = 60
SETTINGS = {
    "data.limit": 60,
    "eval.fraction": 0.2,
    "eval.min_rows": 1,
    "plan.batch_size": 8,
    "plan.epochs": None,
    "plan.max_steps": STEPS,
}


def planned_run(tmp_path, **settings):
    """A run that is prepared as the recipe does, and not trained."""
    config = compose("sft", {**SETTINGS, "runs_dir": str(tmp_path / "runs"), **settings})
    return plan_run("sft", sft.prepare(config), 1.5)


def finish(run, *, speed=1.0, reason=StopReason.MAX_STEPS, policy=False):
    """Gives a run the metrics, samples and end of a training."""
    evals = {}
    with run.attempt(planned_steps=STEPS, downgrades=["early_stopping:disabled:no_eval_set"]):
        run.write_samples(0, [sample("yes yes yes yes", reward=0.0 if policy else None)])
        for step in range(1, STEPS + 1):
            loss = 0.2 + 2.5 * math.exp(-step * speed / 15) + 0.15 * math.sin(step * 2.1)
            values = {
                "train/loss": loss,
                "train/tokens": 900 + 40 * (step % 7),
                "train/learning_rate": 1e-3 * speed * min(step / 6, (STEPS - step) / 54),
                "train/grad_norm": 1.0 + 0.4 * math.cos(step),
                "time/step_s": 0.2 + 0.02 * (step % 5),
            }
            if policy:
                values["train/reward"] = 1 - math.exp(-step / 30) + 0.1 * math.sin(step)
            if step % 10 == 0:
                evals[step] = loss + 0.1
                values |= {"eval/loss": loss + 0.1, "eval/perplexity": math.exp(loss + 0.1)}
            run.log_metrics(step, values)
        run.write_samples(STEPS, [sample("4", reward=1.0 if policy else None)])
        if policy:
            run.write_rollouts(STEPS, rollouts())
        best = min(evals, key=lambda step: evals[step])
        last = evals[STEPS]
        run.set_evaluation(
            Evaluation(
                "eval/loss", "down", evals[best], best, last, STEPS, len(evals), best, best != STEPS
            )
        )
        (run.model_dir / "adapter_config.json").write_text("{}")
        run.set_model_available(True)
        run.finish(reason, steps=STEPS)
    return RunDir.open(run.path)


def sample(completion, *, reward=None):
    base = {"prompt": "What is 2 + 2? <b>&", "completion": completion, "expected": "4"}
    return base if reward is None else {**base, "reward": reward}


def rollouts():
    texts = [("4", 1.0, 1.2), ("five, of course, as everybody knows", 0.0, -0.8), ("", None, None)]
    return [
        {"prompt": "What is 2 + 2?", "completion": text, "reward": reward, "advantage": advantage}
        for text, reward, advantage in texts
    ]


def made_sweep(tmp_path, *, rates=(1e-4, 4e-4, 1.6e-3), ranks=(4, 16), pending=0):
    """A sweep over two keys, whose last trial failed."""
    folder = tmp_path / "runs" / "sweeps" / "2026-01-02_03-04-05_made"
    folder.mkdir(parents=True)
    sweep = SweepDir.create(folder, "sft", halving=None)
    pairs = [(rate, rank) for rate in rates for rank in ranks]
    for number, (rate, rank) in enumerate(pairs):
        run = RunDir.create(tmp_path / "runs", "sft", f"trial{number}")
        run.write_config({"optimizer": {"learning_rate": rate}, "lora": {"rank": rank}})
        failed = number == len(pairs) - 1
        if failed:
            run.log_metrics(1, {"train/loss": 3.0})
        else:
            run = finish(run, speed=0.5 + number * 0.4)
        record = run.record.evaluation
        sweep.trials.append(
            TrialRecord(
                number=number,
                label=f"learning_rate={rate:g} rank={rank}",
                overrides=(f"optimizer.learning_rate={rate:g}", f"lora.rank={rank}"),
                config_hash="0" * 16,
                plan_hash="0" * 16,
                state=TrialState.FAILED if failed else TrialState.SUCCEEDED,
                run=f"sft/{run.path.name}",
                metric=None if record is None else record.metric,
                value=None if record is None else record.best,
                why="the loss of step 2 is nan: lower the learning rate" if failed else None,
            )
        )
    for number in range(len(pairs), len(pairs) + pending):
        label = f"learning_rate={number}"
        sweep.trials.append(
            TrialRecord(
                number, label, (), "0" * 16, None, TrialState.PENDING, None, None, None, None
            )
        )
    sweep.save()
    return sweep
