"""The SFT recipe on the built-in model and the local backend: the numbers themselves."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from recipes import sft
from tests.running import train_all
from tunebook.compose import compose
from tunebook.errors import (
    DataError,
    EmptyDataError,
    NonFiniteError,
    NoTextError,
    NothingSupervisedError,
)
from tunebook.opening import build_backend
from tunebook.runs import RunDir, RunState

pytestmark = pytest.mark.xdist_group("sft")

SETTINGS = {
    "data.limit": 60,
    "eval.fraction": 0.2,
    "eval.min_rows": 1,
    "plan.batch_size": 8,
    "plan.epochs": 1,
    "plan.checkpoint_every": 2,
    "samples.num_prompts": 0,
    "schedule.warmup": 2,
}


def configured(tmp_path, /, **overrides):
    values = {**SETTINGS, "runs_dir": str(tmp_path / "runs")}
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    return compose("sft", values)


def run_all(config, *, stop_after=None):
    _, run = train_all(config, stop_after=stop_after)
    return run


def adapter_at(run, step):
    [path] = [each.ref.path for each in run.checkpoints() if each.step == step]
    return load_file(path / "adapter.safetensors")


def losses(run):
    return [row["train/loss"] for row in run.metrics()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run_all(configured(tmp_path_factory.mktemp("unbroken")))


def test_training_lowers_the_held_out_loss(unbroken):
    history = [value for _, value in unbroken.history("eval/loss")]
    assert len(history) == 3
    assert history[0] > history[1] > history[2]
    assert unbroken.record.state is RunState.SUCCEEDED
    assert unbroken.record.model_available


@pytest.mark.parametrize("micro_batch_tokens", [1, 150, 100_000])
def test_micro_batches_change_nothing(unbroken, tmp_path, micro_batch_tokens):
    """Equal loss and equal adapter (1e-6, fp32), train and eval, for any micro-batch size (case 3)."""
    run = run_all(configured(tmp_path, backend__micro_batch_tokens=micro_batch_tokens))
    assert losses(run) == pytest.approx(losses(unbroken), abs=1e-6)
    assert run.history("eval/loss")[-1][1] == pytest.approx(
        unbroken.history("eval/loss")[-1][1], abs=1e-6
    )
    expected = adapter_at(unbroken, 6)
    for name, value in adapter_at(run, 6).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("stop_after", "dropout"), [(2, 0.0), (3, 0.0), (3, 0.3)])
def test_stop_and_resume_is_bit_identical(unbroken, tmp_path, stop_after, dropout):
    """Cases 85 and 33: 6 steps equal k + the rest, to the last bit, with dropout too."""
    whole = unbroken
    if dropout:
        whole = run_all(configured(tmp_path / "whole", lora__dropout=dropout))
    stopped = run_all(configured(tmp_path, lora__dropout=dropout), stop_after=stop_after)
    assert stopped.record.state is RunState.CANCELLED
    resumed = run_all(compose("sft", {"resume": str(stopped.path)}))
    expected = adapter_at(whole, 6)
    for name, value in adapter_at(resumed, 6).items():
        assert torch.equal(value, expected[name]), name
    keys = ("train/loss", "train/grad_norm", "train/learning_rate")
    for ours, theirs in zip(resumed.metrics(), whole.metrics(), strict=True):
        assert [ours[key] for key in keys] == [theirs[key] for key in keys]


def test_a_run_begun_from_another_can_be_resumed(unbroken, tmp_path):
    """Its config names where it began; going on does not begin there again."""
    chained = {"start_from": str(unbroken.path), "plan__epochs": None, "plan__max_steps": 4}
    whole = run_all(configured(tmp_path / "whole", **chained))
    stopped = run_all(configured(tmp_path, **chained), stop_after=2)
    resumed = run_all(compose("sft", {"resume": str(stopped.path)}))
    assert losses(resumed) == losses(whole)


def test_logged_loss_is_the_token_mean(tmp_path):
    """Case 3: the first loss equals sum(NLL) / sum(supervised tokens) of its rows."""
    config = configured(tmp_path)
    task = sft.prepare(config)
    first = sft.step_rows(task.plan, task.sources, seed=config.seed, step=1)
    data = sft.step_data(task, first)
    with build_backend(config) as backend:
        session = backend.open_session("check", config.lora.to_lora(), directory=tmp_path)
        logprobs = session.forward(data).result()
    masks = [torch.from_numpy(datum.columns["token_weights"]) != 0 for datum in data]
    nll = -sum(float(each[mask].sum()) for each, mask in zip(logprobs, masks, strict=True))
    run = run_all(config, stop_after=1)
    assert losses(run)[0] == pytest.approx(nll / sum(int(mask.sum()) for mask in masks), abs=1e-5)


def test_evaluation_does_not_depend_on_its_batch_size(tmp_path):
    """Also what is logged at one step for plans of different batch size: eval before any step."""
    values = []
    for batch_size in (1, 5):
        config = configured(tmp_path, plan__batch_size=batch_size)
        task = sft.prepare(config)
        with build_backend(config) as backend:
            session = backend.open_session("eval", config.lora.to_lora(), directory=tmp_path)
            values.append(sft.evaluate(task, session)["eval/loss"])
    assert values[0] == pytest.approx(values[1], abs=1e-6)


def test_raising_epochs_on_a_finished_run(unbroken, tmp_path):
    run = run_all(configured(tmp_path))
    longer = run_all(compose("sft", {"resume": str(run.path), "plan.epochs": 2}))
    assert len(longer.metrics()) == 12
    assert losses(longer)[:6] == losses(unbroken)
    assert longer.record.outcome.steps == 12


def test_full_weights_with_muon(tmp_path):
    config = configured(tmp_path, lora=None, optimizer__kind="muon", optimizer__learning_rate=1e-3)
    run = run_all(config, stop_after=4)
    assert run.history("eval/loss")[1][1] < run.history("eval/loss")[0][1]
    assert (run.model_dir / "model.safetensors").is_file()


def test_start_from_a_run_begins_with_its_model(unbroken, tmp_path):
    run = run_all(configured(tmp_path, start_from=str(unbroken.path)), stop_after=1)
    assert run.metrics()[0]["step"] == 1
    [before] = unbroken.model_dir.glob("*.safetensors")
    started = load_file(before)
    assert losses(run)[0] < losses(unbroken)[0]
    assert any(value.any() for name, value in started.items() if "lora_B" in name)


def test_a_nan_loss_fails_the_run(tmp_path):
    """Case 8: exit code 1 and a reason that names the step; nothing is exported."""
    config = configured(tmp_path, loss___target_="tests.recipes.test_sft_local.nan_loss")
    with pytest.raises(NonFiniteError):
        run_all(config)
    [path] = (tmp_path / "runs" / "sft").iterdir()
    record = RunDir.open(path).record
    assert (record.state, record.failure.code) == (RunState.FAILED, "non_finite")
    assert not record.model_available
    assert RunDir.open(path).checkpoints() == []


def nan_loss(logprobs, *, token_weights):
    """Not finite on real batches only; on the few tokens it is tried on in `prepare` it is."""
    factor = float("nan") if token_weights.numel() > 20 else 1.0
    return (logprobs * token_weights).sum() * factor, {}


# Data that cannot be trained: three distinct errors, and the counts of what is left out.


def rows_file(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return str(path)


def turns(question, answer, **extra):
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer, **extra},
    ]


def test_three_distinct_errors(tmp_path):
    with pytest.raises(EmptyDataError, match="0 rows"):
        sft.prepare(configured(tmp_path, data__path=rows_file(tmp_path, [])))
    blank = rows_file(tmp_path, [turns(" ", "")])
    with pytest.raises(NoTextError):
        sft.prepare(configured(tmp_path, data__path=blank, data__on_blank_answer="end_token"))
    masked = rows_file(tmp_path, [turns("Hi", "Hello", weight=0)])
    with pytest.raises(NothingSupervisedError, match="all_assistant"):
        sft.prepare(configured(tmp_path, data__path=masked))


def test_eval_rows_of_which_nothing_is_left_are_said_to_be_eval_rows(tmp_path):
    train = rows_file(tmp_path, [turns(f"Say {n}.", str(n)) for n in range(20)])
    path = tmp_path / "held_out.jsonl"
    long = [{"messages": turns("word " * 200, str(n))} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in long))
    config = configured(tmp_path, data__path=train, data__eval__path=str(path), max_seq_len=64)
    with pytest.raises(NothingSupervisedError) as caught:
        sft.prepare(config)
    assert str(caught.value).startswith(f"Eval rows (data.eval, {path}): No token of 3 rows")
    config = configured(
        tmp_path, data__path=train, data__eval__path=str(path), data__on_long_row="error",
        max_seq_len=64,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"^Eval rows \(data\.eval, .*3 rows are longer") as located:
        sft.prepare(config)
    assert [problem.line for problem in located.value.problems] == [1, 2, 3]


def test_100_rows_of_which_82_are_too_long(tmp_path):
    """Case 30: 18 usable rows, batch 32: one step on 18 rows."""
    rows = [turns(f"Say {n}.", "1 " * (2 if n < 18 else 200)) for n in range(100)]
    config = configured(
        tmp_path, data__path=rows_file(tmp_path, rows), data__limit=None, data__on_long_row="skip",
        max_seq_len=64, plan__batch_size=32, eval__fraction=0,
    )  # fmt: skip
    task = sft.prepare(config)
    assert task.plan.planned_steps == 1
    assert task.plan.train_rows == 18
    assert task.summary["train"]["kept"] == 18
    assert sum(task.summary["train"]["dropped"].values()) == 82
    assert task.summary["warnings"]
    run = run_all(config)
    assert run.metrics()[0]["train/num_tokens"] > 18


def test_bad_rows_are_located_or_skipped_and_counted(tmp_path):
    path = tmp_path / "mixed.jsonl"
    good = [json.dumps({"messages": turns(f"Say {n}.", str(n))}) for n in range(4)]
    path.write_text("\n".join([good[0], "{", good[1], '{"messages": []}', *good[2:]]) + "\n")
    with pytest.raises(DataError) as raised:
        sft.prepare(configured(tmp_path, data__path=str(path)))
    assert f"{path}:2" in str(raised.value) and f"{path}:4" in str(raised.value)
    task = sft.prepare(configured(tmp_path, data__path=str(path), data__on_bad_row="skip"))
    assert (task.summary["rows_read"], task.summary["rows_skipped"]) == (6, 2)
    assert [problem["line"] for problem in task.rows.manifest["problems"]] == [2, 4]


def test_weights_file_supervises_only_the_last_answer(tmp_path):
    """Case 10 through the whole recipe."""
    config = configured(
        tmp_path, data__path="tests/inputs/cases/weights.jsonl", data__limit=None, eval__fraction=0
    )
    task = sft.prepare(config)
    [datum] = sft.step_data(task, [0])
    supervised = datum.tokens[1:][datum.columns["token_weights"] > 0]
    assert task.tokenizer.decode(supervised) == "charlie<|im_end|>"


# The command line, in processes of its own.


def start(*arguments, cwd, **options):
    environment = {**os.environ, "TUNEBOOK_HOME": f"{cwd}_home"}
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.sft", *arguments],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


SMALL = ("data.limit=40", "plan.batch_size=8", "eval.fraction=0.2", "eval.min_rows=1")


def test_command_line_run_show_and_data(tmp_path):
    process = start(*SMALL, "name=first", "samples.num_prompts=2", cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "4 planned" in out and "succeeded" in out
    assert "\r" not in out
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]
    [path] = (tmp_path / "runs" / "sft").iterdir()
    assert path.name.endswith("_first")
    for name in ("config.yaml", "plan.json", "split.json", "run.json", "events.jsonl", "metrics.jsonl",
                 "checkpoints.jsonl", "model/adapter_config.json", "report.html", "data/manifest.json"):  # fmt: skip
        assert (path / name).is_file(), name
    assert sorted(each.name for each in (path / "samples").iterdir()) == [
        "step_000000.jsonl",
        "step_000004.jsonl",
    ]


def test_dry_run_then_train_exactly_that(tmp_path):
    process = start(*SMALL, "dry_run=true", cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "GiB peak memory" in out
    [path] = (tmp_path / "runs" / "sft").iterdir()
    plan = json.loads((path / "plan.json").read_text())
    assert plan["estimate"]["seconds"] > 0
    assert not (path / "metrics.jsonl").exists()
    process = start(f"resume={path}", f"plan.hash={plan['hash']}", cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert RunDir.open(path).record.state is RunState.SUCCEEDED
    process = start(*SMALL, "seed=5", f"plan.hash={plan['hash']}", cwd=tmp_path)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert plan["hash"] in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_promotes_and_leaves_a_record(tmp_path, number, code):
    process = start(
        "plan.epochs=50", "plan.checkpoint_every=0", "samples.num_prompts=0", cwd=tmp_path
    )
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("runs/sft/*/metrics.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == code, err
    [path] = (tmp_path / "runs" / "sft").iterdir()
    run = RunDir.open(path)
    assert run.record.state is RunState.CANCELLED
    assert run.record.model_available
    assert run.checkpoints()[-1].step == run.record.outcome.steps > 0


def test_a_failed_run_exits_1_without_a_traceback(tmp_path):
    (tmp_path / "my_loss.py").write_text(
        "def broken(logprobs, *, token_weights):\n"
        "    factor = float('nan') if token_weights.numel() > 20 else 1.0\n"
        "    return (logprobs * token_weights).sum() * factor, {}\n"
    )
    process = start(*SMALL, "loss._target_=my_loss.broken", cwd=tmp_path)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "step 1" in err


def test_a_bad_file_exits_2_before_anything_is_made(tmp_path):
    process = start("data.path=nowhere.jsonl", cwd=tmp_path)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "nowhere.jsonl" in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_merge_writes_one_model_and_overwrites_nothing(unbroken, tmp_path):
    command = [
        sys.executable,
        "-m",
        "tunebook.cli",
        "merge",
        str(unbroken.path),
        str(tmp_path / "merged"),
    ]
    done = subprocess.run(
        [*command, "--dtype", "float32"], text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "28 layers merged" in done.stdout
    adapter = adapter_at(unbroken, 6)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file("tunebook/assets/tiny_model/model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    update = 2.0 * adapter[f"{name}.lora_B"] @ adapter[f"{name}.lora_A"]
    torch.testing.assert_close(
        merged[f"{name}.weight"], base[f"{name}.weight"].float() + update, rtol=0, atol=1e-6
    )
    again = subprocess.run(command, text=True, capture_output=True, check=False)
    assert again.returncode == 2
    assert "not empty" in again.stderr


def test_multirun_makes_one_run_for_each_value(tmp_path):
    """Case 92: relative paths mean the launch directory, in several runs as in one."""
    rows = [turns(f"Say {n}.", str(n)) for n in range(12)]
    rows_file(tmp_path, rows)
    process = start(
        "--multirun", "optimizer.learning_rate=1e-4,2e-4", "data.path=rows.jsonl", "eval.fraction=0",
        "plan.batch_size=8", "samples.num_prompts=0", cwd=tmp_path,
    )  # fmt: skip
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    runs = [RunDir.open(path) for path in sorted((tmp_path / "runs" / "sft").iterdir())]
    assert [run.read_config()["optimizer"]["learning_rate"] for run in runs] == [1e-4, 2e-4]
    assert all(run.read_config()["data"]["path"] == str(tmp_path / "rows.jsonl") for run in runs)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rows.jsonl", "runs"]
