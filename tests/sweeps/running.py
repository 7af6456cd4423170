"""Trains trials together in this process, as the launcher of sweeps does."""

from dataclasses import dataclass, field

from recipes import dpo, grpo, sft
from tests.running import train_all
from tunebook.composition_errors import SCHEMAS
from tunebook.launch import StopRequest
from tunebook.opening import build_backend
from tunebook.runs import RunDir
from tunebook.sweeps.driving import train_trials
from tunebook.sweeps.trial import Trial

RECIPES = {"sft": sft, "dpo": dpo, "grpo": grpo}


@dataclass
class Seen:
    """A watch that remembers."""

    began_: list[int] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(trial, step) in the order in which they were made."""
    ended_: list[int] = field(default_factory=list)
    on_step: object = None

    def began(self, trial):
        self.began_.append(trial.number)

    def stepped(self, trial, report):
        self.steps.append((trial.number, report.step))
        if self.on_step is not None:
            self.on_step(trial, report)

    def ended(self, trial):
        self.ended_.append(trial.number)


def train_together(configs, *, at_once=None, backend=None, stop=None, watch=None, judge=None):
    """The trials of some configs after they were trained together, and what a watch saw."""
    name = next(name for name, schema in SCHEMAS.items() if type(configs[0]) is schema)
    recipe = RECIPES[name]
    trials = [
        Trial(number=number, overrides=(), config=config, task=recipe.prepare(config))
        for number, config in enumerate(configs)
    ]
    watch = Seen() if watch is None else watch
    with build_backend(configs[0]) as own:
        train_trials(
            name,
            trials,
            own if backend is None else backend,
            train=recipe.train,
            at_once=len(trials) if at_once is None else at_once,
            watch=watch,
            stop=StopRequest() if stop is None else stop,
            judge=judge,
        )
    return trials, watch


def train_alone(configs):
    """The runs of some configs, each trained alone."""
    return [train_all(config)[1] for config in configs]


def reopened(trial):
    return RunDir.open(trial.run.path)
