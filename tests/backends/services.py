"""What tests of all services share: small runs, and that they are those of local torch."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.backends.tiny import make_adam, make_lora
from tunebook.backends.local.generator import LocalGenerator
from tunebook.backends.remote.client import seed_of
from tunebook.compose import compose
from tunebook.types import Datum

SETTINGS = {
    "data.limit": 40,
    "eval.fraction": 0.2,
    "eval.min_rows": 1,
    "plan.batch_size": 4,
    "plan.epochs": None,
    "plan.max_steps": 3,
    "plan.checkpoint_every": 2,
    "optimizer.learning_rate": 1e-3,
    "lora.rank": 4,
}
OF_RECIPE = {
    "sft": {"samples.num_prompts": 1, "samples.max_tokens": 8},
    "dpo": {"samples.num_prompts": 0},
    "grpo": {
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 12,
        "samples.num_prompts": 1,
        "kl.beta": 0.05,
        "rollout.policy_lag": 1,
    },
}


def configured(recipe, folder, /, backend="local", **overrides):
    """The config of a small run; keys of overrides have `__` for `.`."""
    values = {**SETTINGS, **OF_RECIPE[recipe], "runs_dir": str(folder / "runs"), "backend": backend}
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    if backend == "local":
        values = {k: v for k, v in values.items() if not k.startswith("backend.")}
    return compose(recipe, values)


def numbers(run):
    """The metrics of every step but for times."""
    return [
        {key: value for key, value in row.items() if not key.startswith("time/")}
        for row in run.metrics()
    ]


def model_of(run):
    return load_file(run.model_dir / "adapter_model.safetensors")


def events(run, kind):
    return [event for event in run.events() if event["type"] == kind]


def check_same(run, expected):
    """Every metric of every step to 1e-4, and the adapters to 1e-3."""
    ours, theirs = numbers(run), numbers(expected)
    assert [set(row) for row in ours] == [set(row) for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-6, nan_ok=True)
    adapter, other = model_of(run), model_of(expected)
    assert adapter.keys() == other.keys()
    for name, value in adapter.items():
        # By norm: where a gradient is almost 0, Adam makes a whole step of its rounding.
        assert (value - other[name]).norm() <= 1e-3 * other[name].norm() + 1e-6, name


LENGTHS = (3, 5, 2, 4)
ROWS_PER_UNIT = 2


def make_rows(*, same_weights: bool, seed: int = 0) -> list[Datum]:
    """Pairs of rows with every column that any loss reads, some weights 0 and NaN beneath them."""
    random = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(LENGTHS):
        weights = np.zeros(length + 3, np.float32)
        weights[3:] = 0.1 if same_weights else 0.25 / length
        marked = weights != 0
        columns = {
            "token_weights": weights,
            "sampling_logprobs": random.uniform(-5, -4, length + 3),
            "reference_logprobs": random.uniform(-5, -4, length + 3),
            "advantages": np.full(length + 3, (-1.0) ** number * 0.7),
        }
        columns = {
            name: np.where(marked, column, np.nan if "logprobs" in name else 0).astype(np.float32)
            for name, column in columns.items()
        }
        columns["token_weights"] = weights
        columns["pair_weights"] = 0.5
        rows.append(Datum(random.integers(3, 120, length + 4).astype(np.int32), columns))
    return rows


def gradient_of(backend, loss_fn, rows, folder, **adapter):
    """Metrics of one step and what it did to B, which is minus the gradient by this eps."""
    session = backend.open_session(
        "gradient", make_lora(**adapter), directory=folder / "checkpoints"
    )
    metrics = session.forward_backward(rows, loss_fn, rows_per_unit=ROWS_PER_UNIT)
    norm = session.optim_step(make_adam(learning_rate=1e6, eps=1e6, beta1=0.0))
    ref = session.save("one").result()
    session.export(ref, folder / "model")
    session.close()
    weights = load_file(folder / "model" / "adapter_model.safetensors")
    found = torch.cat([weights[name].flatten() for name in sorted(weights) if "lora_B" in name])
    return {**metrics.result(), **norm.result()}, found


def sample_prompts_apart(monkeypatch):
    """Has the local backend draw as services do that take one prompt a request."""
    sample = LocalGenerator.sample

    def apart(self, prompts, params, num_samples):
        futures = [
            sample(self, [prompt], replace(params, seed=seed_of(params.seed, number)), num_samples)
            for number, prompt in enumerate(prompts)
        ]
        return _Joined(futures)

    monkeypatch.setattr(LocalGenerator, "sample", apart)


class _Joined:
    def __init__(self, futures):
        self._futures = futures

    def result(self):
        return list(chain.from_iterable(each.result() for each in self._futures))
