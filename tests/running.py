"""Runs a recipe in this process, as a notebook would."""

from recipes import dpo, grpo, sft
from tunebook.composition_errors import SCHEMAS
from tunebook.launch import start_run
from tunebook.opening import build_backend
from tunebook.runs import RunDir


def train_all(config, *, stop_after=None):
    """The task and the run of a config, trained on its backend; closed after a step if asked."""
    name = next(name for name, schema in SCHEMAS.items() if type(config) is schema)
    recipe = {"sft": sft, "dpo": dpo, "grpo": grpo}[name]
    task = recipe.prepare(config)
    run = start_run(name, task)
    with build_backend(config) as backend:
        steps = recipe.train(task, backend, run)
        for report in steps:
            if report.step == stop_after:
                steps.close()
    return task, RunDir.open(run.path)
