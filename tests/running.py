"""Runs a recipe in this process, as a notebook would."""

from recipes import dpo, sft
from tunebook.config import DPOConfig
from tunebook.launch import start_run
from tunebook.opening import build_backend
from tunebook.runs import RunDir


def train_all(config, *, stop_after=None):
    """The task and the run of a config, trained on its backend; closed after a step if asked."""
    recipe, name = (dpo, "dpo") if isinstance(config, DPOConfig) else (sft, "sft")
    task = recipe.prepare(config)
    run = start_run(name, task)
    with build_backend(config) as backend:
        steps = recipe.train(task, backend, run)
        for report in steps:
            if report.step == stop_after:
                steps.close()
    return task, RunDir.open(run.path)
