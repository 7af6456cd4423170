"""Several processes compute what one computes, and a failure of one ends all of them.

Every launch is a real one: `python -m torch.distributed.run` with two processes on the CPU. Numbers
differ between one process and two only by the order in which float32 values are added.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from tests.backends.tiny import EOS, VOCAB_SIZE, Models, character_tokenizer
from tests.backends.together import run_scenarios
from tests.running import train_all
from tunebook.backends.local.distributed.slices import row_slices, sliced_micro_batches
from tunebook.compose import compose
from tunebook.runs import RunDir, RunState

pytestmark = pytest.mark.xdist_group("distributed")

LAUNCH_LIMIT_S = 240
GRADIENT = 1e-6
"""Absolute, float32 gradients of size 1."""
AFTER_STEPS = 1e-5
"""Absolute, weights after four AdamW steps of up to 1e-2 each."""
KINDS = (
    "lora",
    "rank_1",
    "head",
    "full",
    "lora@tied",
    "full@tied",
    "lora@gpt2",
    "full@mixtral",
    "lora@phi3",
)
HALF = ("lora", "full")
RESUMED = ("lora", "full")
SAMPLED = ("sample", "sample_to_the_end@gpt2", "sample_nan@nan")
ESTIMATED = ("lora", "full@phi3")
"""A model whose rows are a stream, and one whose rows are padded."""
ROOT = Path(__file__).parents[2]


def command(module: str, *arguments: object) -> list[str]:
    """Starts a module in two processes."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", module, *map(str, arguments),
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def launch(*arguments: object, module: str):
    """Runs a module in two processes; returns what `subprocess.run` does."""
    return subprocess.run(
        command(module, *arguments),
        env=environment(),
        timeout=LAUNCH_LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )


def together(*arguments: object):
    return launch(*arguments, module="tests.backends.together")


def succeeded(finished) -> None:
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def ones(tmp_path_factory, tiny: Models) -> Path:
    """What one process finds."""
    folder = tmp_path_factory.mktemp("launches") / "one"
    write_others(Path(tiny.untied).parent)
    scenarios = [*SAMPLED, "few_rows", *[f"in_bfloat16:{kind}" for kind in HALF]]
    scenarios += [f"train:{kind}" for kind in KINDS]
    scenarios += [f"estimate:{kind}" for kind in ESTIMATED]
    scenarios += [f"{half}:{kind}" for kind in RESUMED for half in ("first_half", "second_half")]
    run_scenarios(folder, tiny.untied, [begun(scenario, "one") for scenario in scenarios])
    return folder


@pytest.fixture(scope="module")
def twos(tiny: Models, ones: Path) -> Path:
    """What two processes find."""
    folder = ones.parent / "two"
    scenarios = [*SAMPLED, "few_rows", "failures", "train:dropout", "contract:lora"]
    scenarios += ["contract:full", *[f"in_bfloat16:{kind}" for kind in HALF]]
    scenarios += [f"train:{kind}" for kind in KINDS]
    scenarios += [f"estimate:{kind}" for kind in ESTIMATED]
    scenarios += [f"first_half:{kind}" for kind in (*RESUMED, "dropout")]
    scenarios += [f"second_half:{kind}:{first}" for kind in RESUMED for first in ("one", "two")]
    scenarios += ["second_half:dropout:two", "both_halves:dropout"]
    succeeded(together(folder, tiny.untied, *scenarios))
    return folder


def write_others(folder: Path) -> None:
    """Models with other layers (fused and transposed ones, experts, angles that lengths change),
    and one with a token that gives NaN."""
    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    mixtral = MixtralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    phi3 = Phi3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
        max_position_embeddings=256, original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        },
    )  # fmt: skip
    classes = {GPT2LMHeadModel: gpt2, MixtralForCausalLM: mixtral, Phi3ForCausalLM: phi3}
    for model, config in classes.items():
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, EOS, None
        model(config).save_pretrained(folder / config.model_type)
        character_tokenizer().save_pretrained(folder / config.model_type)
    damaged = LlamaForCausalLM.from_pretrained(folder / "untied")
    damaged.get_input_embeddings().weight.data[100] = torch.nan
    damaged.save_pretrained(folder / "nan")
    character_tokenizer().save_pretrained(folder / "nan")


def begun(scenario: str, launch_name: str) -> str:
    """A scenario that names the launch whose first half it goes on from."""
    return f"{scenario}:{launch_name}" if scenario.startswith("second_half") else scenario


def found(folder: Path, scenario: str, name: str):
    return np.load(folder / scenario.replace(":", "-") / f"{name}.npz")


def tensors(folder: Path, file: str) -> dict[str, np.ndarray]:
    names = ("adapter", "model") if file == "weights" else (file,)
    path = next(
        folder / f"{name}.safetensors"
        for name in names
        if (folder / f"{name}.safetensors").exists()
    )
    return load_file(path)


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], atol: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.shape == theirs[name].shape, name
        np.testing.assert_allclose(value, theirs[name], atol=atol, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(ones: Path, twos: Path, kind: str) -> None:
    ours, theirs = (
        {
            name: value
            for name, value in tensors(
                folder / f"train-{kind}" / "gradient" / "one", "optimizer"
            ).items()
            if name.endswith(".exp_avg")
        }
        for folder in (twos, ones)
    )
    assert max(np.abs(value).max() for value in theirs.values()) > 1e-3
    assert_close(ours, theirs, GRADIENT)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_one_process(ones: Path, twos: Path, kind: str) -> None:
    """Losses, global gradient norms, clipped updates, evaluation, checkpoint and export."""
    ours, theirs = found(twos, f"train:{kind}", "train"), found(ones, f"train:{kind}", "train")
    assert ours["parameters"] == theirs["parameters"]
    assert ours["num_tokens"].tolist() == theirs["num_tokens"].tolist()
    for name in ("loss", "norm"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    assert theirs["norm"].min() > 0.1, "the test is about clipped gradients"
    np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-4)
    for file in ("weights", "optimizer"):
        assert_close(
            tensors(twos / f"train-{kind}" / "steps" / "four", file),
            tensors(ones / f"train-{kind}" / "steps" / "four", file),
            AFTER_STEPS,
        )
    exported = sorted(path.name for path in (ones / f"train-{kind}" / "model").iterdir())
    assert sorted(path.name for path in (twos / f"train-{kind}" / "model").iterdir()) == exported


@pytest.mark.parametrize("kind", HALF)
def test_bfloat16_is_close_to_one_process(ones: Path, twos: Path, kind: str) -> None:
    """Two kinds of float in one layer; rounding to 8 bits leaves 2 % between two sums."""
    ours, theirs = (found(folder, f"in_bfloat16:{kind}", "half") for folder in (twos, ones))
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=2e-2)
    np.testing.assert_allclose(ours["norm"], theirs["norm"], rtol=5e-2)


@pytest.mark.parametrize("kind", ESTIMATED)
def test_an_estimate_counts_the_tokens_that_one_process_counts(
    ones: Path, twos: Path, kind: str
) -> None:
    """All are measured and leave nothing behind: the session after it trains as a first one."""
    ours, theirs = (found(folder, f"estimate:{kind}", "estimate") for folder in (twos, ones))
    assert ours["tokens"] == theirs["tokens"]
    # Apart from the seconds, the words are the same.
    said, expected = (re.sub(r"[\d.]+ s\b", "", str(one["basis"])) for one in (ours, theirs))
    assert said == expected
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)


def test_rows_that_leave_a_process_without_work(ones: Path, twos: Path) -> None:
    ours, theirs = found(twos, "few_rows", "few"), found(ones, "few_rows", "few")
    np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-5)
    np.testing.assert_allclose(ours["norm"], theirs["norm"], rtol=1e-4)


def test_samples_are_those_of_one_process(ones: Path, twos: Path) -> None:
    """From the published weights, with the same random numbers; training goes on beside it."""
    ours, theirs = found(twos, "sample", "sample"), found(ones, "sample", "sample")
    for name in ("tokens", "lengths", "stops"):
        assert ours[name].tolist() == theirs[name].tolist()
    np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-4)
    np.testing.assert_allclose(ours["later"], theirs["later"], atol=1e-4)


def test_full_rows_wait_for_those_of_all_processes(ones: Path, twos: Path) -> None:
    """GPT-2 has 64 positions: 33 tokens follow a prompt of 31."""
    ours, theirs = (found(folder, "sample_to_the_end@gpt2", "long") for folder in (twos, ones))
    assert theirs["lengths"].tolist() == [33, 63, 33, 63]
    assert ours["tokens"].tolist() == theirs["tokens"].tolist()


def test_a_prompt_without_numbers_is_an_error_of_its_own(ones: Path, twos: Path) -> None:
    for folder in (ones, twos):
        nan = found(folder, "sample_nan@nan", "nan")
        assert str(nan["message"]).startswith("after 0 tokens of a completion the logits are NaN")
        assert len(nan["tokens"]) > 0


@pytest.mark.parametrize("kind", RESUMED)
def test_a_checkpoint_goes_on_in_any_number_of_processes(
    ones: Path, twos: Path, kind: str, tiny: Models
) -> None:
    """One after two, two after one, two after two: as one after one."""
    run_scenarios(ones, tiny.untied, [f"second_half:{kind}:two"])
    for file in ("weights", "optimizer"):
        expected = tensors(ones / f"second_half-{kind}-one" / "whole", file)
        for folder, first in ((ones, "two"), (twos, "one"), (twos, "two")):
            resumed = folder / f"second_half-{kind}-{first}" / "whole"
            assert_close(tensors(resumed, file), expected, AFTER_STEPS)


def test_dropout_goes_on_exactly_in_as_many_processes(twos: Path) -> None:
    unbroken = tensors(twos / "both_halves-dropout" / "whole", "weights")
    resumed = tensors(twos / "second_half-dropout-two" / "whole", "weights")
    for name, value in unbroken.items():
        np.testing.assert_array_equal(resumed[name], value)


def test_errors_that_leave_all_in_step(twos: Path, ones: Path) -> None:
    """A user's error on one process only is raised by process 0; the next session works."""
    outcome = found(twos, "failures", "failures")
    messages = outcome["messages"].tolist()
    for message, expected in zip(
        messages,
        (
            "ZeroDivisionError: a bug in a user's loss",
            "BackendError: session 's0' refuses optim_step",
            "NonFiniteError: session 's1', step 1: the loss is inf",
            "NonFiniteError: session 's1' refuses optim_step",
            "BackendError: the loss '<lambda>' cannot be sent to the other processes",
            "BackendError: session 's2' refuses optim_step",
            "ImportError: no module named my_losses",
            "BackendError: session 's3' refuses optim_step",
            "BackendError: session 'second' cannot be opened beside 'good'",
        ),
        strict=True,
    ):
        assert message.startswith(expected), message
    assert outcome["loss"] == pytest.approx(found(ones, "train:lora", "train")["loss"][0], rel=1e-5)


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("die:1:raise", "error: process 1 of 2 failed: OutOfStep: a process left in the middle"),
        ("die:1:kill", "error: another process of this run is gone"),
        ("die:0:kill", "process 1: process 0 is gone"),
        ("leave_idle", "process 1: process 0 is gone"),
    ],
)
def test_a_process_that_fails_ends_all(
    scenario: str, message: str, tiny: Models, tmp_path: Path
) -> None:
    started = time.monotonic()
    finished = together(tmp_path, tiny.untied, scenario)
    assert finished.returncode != 0
    assert message in finished.stderr
    assert not list(tmp_path.rglob("reached"))
    assert time.monotonic() - started < LAUNCH_LIMIT_S / 2


SETTINGS = {
    "data.limit": 60,
    "eval.fraction": 0.2,
    "eval.min_rows": 1,
    "plan.batch_size": 8,
    "plan.epochs": 1,
    "plan.checkpoint_every": 2,
    "samples.num_prompts": 2,
    "samples.max_tokens": 8,
    "schedule.warmup": 2,
    "backend.device": "cpu",
    "backend.micro_batch_tokens": 150,
}


def recipe_arguments(tmp_path: Path, **changes: object) -> list[str]:
    settings = {**SETTINGS, "runs_dir": tmp_path / "runs", **changes}
    return [f"{key}={value}" for key, value in settings.items()]


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory) -> RunDir:
    """A run of the whole recipe in two processes."""
    folder = tmp_path_factory.mktemp("recipe")
    finished = launch(*recipe_arguments(folder), module="recipes.sft")
    succeeded(finished)
    [path] = [each.parent for each in (folder / "runs").rglob("run.json")]
    return RunDir.open(path)


def test_the_recipe_gives_the_metrics_of_one_process(run_of_two: RunDir, tmp_path: Path) -> None:
    """Losses, gradient norms and evaluations to 1e-4, relative; the same run directory."""
    _, expected = train_all(compose("sft", {**SETTINGS, "runs_dir": str(tmp_path)}))
    run = run_of_two
    assert run.record.state is RunState.SUCCEEDED and run.record.model_available
    assert len(run.metrics()) == len(expected.metrics())
    for ours, theirs in zip(run.metrics(), expected.metrics(), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not name.startswith("time/"):
                assert ours[name] == pytest.approx(value, rel=1e-4), name
    assert run.samples().keys() == expected.samples().keys()
    assert sorted(path.name for path in run.model_dir.iterdir()) == sorted(
        path.name for path in expected.model_dir.iterdir()
    )


def test_a_run_of_one_process_is_resumed_in_two(run_of_two: RunDir, tmp_path: Path) -> None:
    config = compose("sft", {**SETTINGS, "runs_dir": str(tmp_path / "runs")})
    _, stopped = train_all(config, stop_after=3)
    assert stopped.record.state is RunState.CANCELLED
    succeeded(launch(f"resume={stopped.path}", module="recipes.sft"))
    run = RunDir.open(stopped.path)
    assert run.record.state is RunState.SUCCEEDED
    for ours, theirs in zip(run.metrics(), run_of_two.metrics(), strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)


def test_a_stop_finishes_the_step_and_saves(tmp_path: Path) -> None:
    """SIGTERM to the launcher: process 0 needs the others to finish its step."""
    arguments = recipe_arguments(tmp_path, **{"plan.epochs": 500, "plan.checkpoint_every": 1000})
    with subprocess.Popen(
        command("recipes.sft", *arguments), env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + LAUNCH_LIMIT_S
        metrics = tmp_path / "runs"
        while not any(each.stat().st_size for each in metrics.rglob("metrics.jsonl")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.2)
        process.terminate()
        _, errors = process.communicate(timeout=LAUNCH_LIMIT_S)
    assert process.returncode != 0
    [path] = [each.parent for each in (tmp_path / "runs").rglob("run.json")]
    run = RunDir.open(path)
    assert run.record.state is RunState.CANCELLED, errors
    assert run.record.model_available
    assert run.checkpoints()[-1].step == run.metrics()[-1]["step"]


def test_what_to_correct_ends_all_with_2(tmp_path: Path) -> None:
    """A wrong config is one message of process 0; the others end with it."""
    arguments = recipe_arguments(tmp_path, **{"optimizer.kind": "muon", "lora": "null"})
    finished = launch(*arguments, module="recipes.sft")
    assert finished.returncode != 0
    assert finished.stderr.count("error: optimizer.kind=muon: this backend has adamw") == 1
    assert "exitcode  : 2" in finished.stderr
    assert "Traceback" not in finished.stderr.split("torch/distributed/elastic")[0]


def test_rows_are_split_by_their_tokens_in_whole_units() -> None:
    assert row_slices([5, 1, 1, 1, 2], rows_per_unit=1, num_slices=2) == [(0,), (1, 2, 3, 4)]
    assert row_slices([1, 1, 9, 9, 4, 4], rows_per_unit=2, num_slices=2) == [(2, 3), (0, 1, 4, 5)]
    assert row_slices([3], rows_per_unit=1, num_slices=3) == [(0,), (), ()]
    assert row_slices([], rows_per_unit=1, num_slices=2) == [(), ()]
    plans = sliced_micro_batches([4, 1, 3, 2, 5], rows_per_unit=1, max_tokens=5, num_slices=2)
    assert [[batch.rows for batch in plan] for plan in plans] == [[(4,), (3, 1)], [(0,), (2,)]]
