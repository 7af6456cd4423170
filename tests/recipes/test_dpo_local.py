"""The DPO recipe on the built-in model and the local backend: the numbers themselves."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from recipes import dpo
from tests.running import train_all
from tunebook.backends.local.engine import engine
from tunebook.compose import compose
from tunebook.opening import build_backend
from tunebook.render.lints import lint_rows
from tunebook.runs import RunDir, RunState
from tunebook.split import Side

pytestmark = pytest.mark.xdist_group("dpo")

LN2 = math.log(2)
SETTINGS = {
    "data.limit": 60,
    "eval.fraction": 0.2,
    "eval.min_rows": 1,
    "plan.batch_size": 8,
    "plan.epochs": 1,
    "plan.checkpoint_every": 2,
    "samples.num_prompts": 0,
    "optimizer.learning_rate": 1e-3,
}
PAIR_KEYS = (
    "loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logprob",
    "rejected_logprob", "gap", "chosen_length", "rejected_length", "kl",
)  # fmt: skip


def configured(tmp_path, /, **overrides):
    values = {**SETTINGS, "runs_dir": str(tmp_path / "runs")}
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    return compose("dpo", values)


def run_all(config, *, stop_after=None):
    _, run = train_all(config, stop_after=stop_after)
    return run


def adapter_at(run, step):
    [path] = [each.ref.path for each in run.checkpoints() if each.step == step]
    return load_file(path / "adapter.safetensors")


def metrics_without_time(run):
    return [
        {key: value for key, value in row.items() if not key.startswith("time/")}
        for row in run.metrics()
    ]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run_all(configured(tmp_path_factory.mktemp("unbroken")))


def test_the_first_loss_is_ln_2_and_everything_is_logged(unbroken):
    first, last = unbroken.metrics()[0], unbroken.metrics()[-1]
    assert first["train/loss"] == pytest.approx(LN2, abs=1e-3)
    assert first["train/margin"] == pytest.approx(0.0, abs=1e-3)
    assert first["train/kl"] == pytest.approx(0.0, abs=1e-3)
    for name in PAIR_KEYS:
        assert math.isfinite(first[f"train/{name}"]) and math.isfinite(last[f"eval/{name}"]), name
    assert first["train/grad_norm"] > 0 and first["train/pairs"] == 8
    for side, row in (("train", first), ("eval", last)):
        gap = row[f"{side}/chosen_logprob"] - row[f"{side}/rejected_logprob"]
        assert row[f"{side}/gap"] == pytest.approx(gap)
        rewards = row[f"{side}/chosen_reward"] - row[f"{side}/rejected_reward"]
        assert row[f"{side}/margin"] == pytest.approx(rewards, abs=1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [1, 150, 100_000])
def test_micro_batches_change_nothing(unbroken, tmp_path, micro_batch_tokens):
    """Case 6: ln 2 at first for a micro-batch of one pair and of all; then the same to 1e-5."""
    run = run_all(configured(tmp_path, backend__micro_batch_tokens=micro_batch_tokens))
    assert run.metrics()[0]["train/loss"] == pytest.approx(LN2, abs=1e-3)
    for ours, theirs in zip(run.metrics(), unbroken.metrics(), strict=True):
        for name in PAIR_KEYS:
            if name == "accuracy" and ours["step"] == 1:
                continue  # of equal policies, rounding decides
            assert ours[f"train/{name}"] == pytest.approx(theirs[f"train/{name}"], abs=1e-4), name
    assert run.history("eval/loss")[-1][1] == pytest.approx(
        unbroken.history("eval/loss")[-1][1], abs=1e-5
    )
    expected = adapter_at(unbroken, 6)
    for name, value in adapter_at(run, 6).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("dpo", LN2),
        ("dpo_conservative", LN2),
        ("dpo_robust", LN2),
        ("dpo_hinge", 1.0),
        ("ipo", 25.0),  # (0 - 1 / (2 * 0.1))^2
        ("dpo_sigmoid_norm", LN2),
        ("apo_zero", 1.0),
        ("apo_down", 1.0),
    ],
)
def test_the_first_loss_of_every_loss_with_a_reference(tmp_path, loss, expected):
    """At the reference all log-ratios are 0, which gives each loss a value known beforehand."""
    lines = [f"{key}={value}" for key, value in SETTINGS.items()]
    config = compose("dpo", [*lines, f"loss={loss}", f"runs_dir={tmp_path}"])
    run = run_all(config, stop_after=1)
    assert run.metrics()[0]["train/loss"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_losses_without_a_reference_train(tmp_path, loss):
    lines = [f"{key}={value}" for key, value in SETTINGS.items()]
    config = compose("dpo", [*lines, f"loss={loss}", f"runs_dir={tmp_path}"])
    run = run_all(config)
    history = [value for _, value in run.history("eval/loss")]
    assert history[-1] < history[0]
    assert not (run.data_dir / "reference").exists()


def test_the_prompt_of_a_pair_is_computed_once(tmp_path, monkeypatch):
    """In scoring and in training: each stream holds prompt + both answers, not two whole rows."""
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"{n} " + "a b c d e f g h " * 4, "chosen": f"yes {n}", "rejected": f"no {n}"}
        for n in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = []
    lay_out = engine.lay_out

    def counted(operations, groups):
        stream = lay_out(operations, groups)
        counts.append(stream.num_tokens)
        return stream

    monkeypatch.setattr(engine, "lay_out", counted)
    config = configured(
        tmp_path, data__path=str(path), data__limit=None, eval__fraction=0, plan__batch_size=4,
        plan__checkpoint_every=0,
    )  # fmt: skip
    task, _ = train_all(config)
    expected = 0
    for row in range(4):
        chosen, rejected = (
            task.train_data[n].tokens[:-1] for n in task.train_data.data_of_row(row)
        )
        shared = int(np.argmax(chosen[: len(rejected)] != rejected[: len(chosen)]))
        assert shared > 30
        expected += len(chosen) + len(rejected) - shared
    scored, trained = counts[-2:]  # before them, the engine was compared with the model's own code
    assert trained == expected
    assert scored <= expected  # prompts that begin alike may share more, without a backward pass


def test_scoring_twice_gives_the_same_numbers(tmp_path):
    """Case 52: nothing random is left in it."""
    config = configured(tmp_path)
    task = dpo.prepare(config)
    data = dpo.step_data(task, [0, 1], {})
    with build_backend(config) as backend:
        session = backend.open_session("a", config.lora.to_lora(), directory=tmp_path)
        once, again = session.forward(data).result(), session.forward(data).result()
    for one, other in zip(once, again, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("stop_after", [2, 3])
def test_stop_and_resume_is_bit_identical(unbroken, tmp_path, stop_after):
    """Cases 33 and 85: 3 + 3 steps are 6, to the last bit, against the reference of the start."""
    stopped = run_all(configured(tmp_path), stop_after=stop_after)
    assert stopped.record.state is RunState.CANCELLED
    resumed = run_all(compose("dpo", {"resume": str(stopped.path)}))
    expected = adapter_at(unbroken, 6)
    for name, value in adapter_at(resumed, 6).items():
        assert torch.equal(value, expected[name]), name
    assert metrics_without_time(resumed) == metrics_without_time(unbroken)
    for side in ("train", "eval"):
        file = f"data/reference/{side}.npy"
        assert (resumed.path / file).read_bytes() == (unbroken.path / file).read_bytes()


def test_the_reference_is_what_the_model_gives(unbroken):
    """Against transformers: summed log-probs of the answers, prompt and padding left out."""
    from transformers import AutoModelForCausalLM

    task = dpo.prepare(compose("dpo", {"resume": str(unbroken.path), "plan.epochs": 2}))
    found = dpo.reference_of(task, None, unbroken, 6)[Side.train]
    model = AutoModelForCausalLM.from_pretrained(
        "tunebook/assets/tiny_model", dtype=torch.float32
    ).eval()
    for number in range(6):
        each = task.train_data[number]
        tokens = torch.from_numpy(each.tokens).long()
        with torch.no_grad():
            logprobs = model(tokens[None, :-1]).logits[0].log_softmax(-1)
        scored = logprobs.gather(1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(
            found.column(number, each.mask), np.where(each.mask != 0, scored, 0), atol=1e-4
        )


@pytest.mark.parametrize("batch_size", [1, 5])
def test_evaluation_does_not_depend_on_its_batch_size(unbroken, tmp_path, batch_size):
    """The same numbers as with batches of 8, for the same weights."""
    config = configured(tmp_path, plan__batch_size=batch_size, start_from=str(unbroken.path))
    base = configured(tmp_path, plan__batch_size=batch_size)
    task = dpo.prepare(base)
    with build_backend(config) as backend:
        start = backend.open_session("start", base.lora.to_lora(), directory=tmp_path / "a")
        run = RunDir.create(tmp_path / "runs", "dpo", None)
        reference = dpo.reference_of(task, start, run, 0)
        start.close()
        trained = dpo.open_session(config, backend, run, None)
        found = dpo.evaluate(task, trained, reference)
    best = unbroken.record.evaluation.best_step
    [row] = [row for row in unbroken.metrics() if row["step"] == best]
    for name in PAIR_KEYS:
        assert found[f"eval/{name}"] == pytest.approx(row[f"eval/{name}"], abs=1e-4), name


def test_full_weights(tmp_path):
    config = configured(tmp_path, lora=None, optimizer__learning_rate=1e-4)
    run = run_all(config)
    assert run.metrics()[0]["train/loss"] == pytest.approx(LN2, abs=1e-3)
    assert run.history("eval/loss")[-1][1] < LN2
    assert (run.model_dir / "model.safetensors").is_file()


def test_after_sft_the_reference_is_the_tuned_policy(tmp_path):
    """A chain by start_from: the adapter goes on, and its own start is what it is compared with."""
    tuned = run_all(
        compose(
            "sft",
            {"data.limit": 40, "eval.fraction": 0, "plan.batch_size": 8, "samples.num_prompts": 0,
             "optimizer.learning_rate": 2e-3, "runs_dir": str(tmp_path / "runs")},
        )
    )  # fmt: skip
    run = run_all(configured(tmp_path, start_from=str(tuned.path)))
    fresh = run_all(configured(tmp_path), stop_after=1)
    first = run.metrics()[0]
    assert first["train/loss"] == pytest.approx(LN2, abs=1e-3)
    assert abs(first["train/chosen_logprob"] - fresh.metrics()[0]["train/chosen_logprob"]) > 0.01
    ours, theirs = (np.load(one.data_dir / "reference" / "train.npy") for one in (run, fresh))
    assert ours.shape == theirs.shape and np.abs(ours - theirs).max() > 0.01
    assert str(tuned.path) in run.read_plan()["reference"]
    again = run_all(configured(tmp_path, start_from=str(run.path)), stop_after=1)
    assert again.metrics()[0]["train/loss"] == pytest.approx(LN2, abs=1e-3)


def test_the_pairs_are_rendered_right(unbroken):
    task = dpo.prepare(compose("dpo", {"resume": str(unbroken.path), "plan.epochs": 2}))
    assert lint_rows(task.rows.train, task.train_data, task.tokenizer) == []


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The whole job, as `experiment=dpo_quickstart` does it, with a larger exam."""
    runs_dir = tmp_path_factory.mktemp("learned")
    return run_all(
        compose(
            "dpo",
            ["experiment=dpo_quickstart", "eval.fraction=0.1", f"runs_dir={runs_dir}",
             "samples.num_prompts=2", "seed=0"],
        )
    )  # fmt: skip


def test_it_learns_to_tell_right_sums_from_near_misses(learned):
    """Held-out accuracy from one half, as every policy beside itself has, to above 0.85."""
    assert learned.metrics()[0]["train/loss"] == pytest.approx(LN2, abs=1e-3)
    best = learned.record.evaluation.best_step
    [row] = [row for row in learned.metrics() if row["step"] == best]
    assert row["eval/accuracy"] > 0.85
    assert row["eval/margin"] > 0.8
    assert row["eval/loss"] < 0.5
    # Preferring is not forgetting: the chosen answers are about as likely as before.
    assert row["eval/chosen_logprob"] > learned.metrics()[0]["train/chosen_logprob"] - 1.5
    assert len(learned.samples()) == 2


LOADING = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
rows = json.loads(sys.argv[2])
sums = []
for tokens, mask in rows:
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    scored = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    sums.append(float(scored[torch.tensor(mask) != 0].sum()))
probe = tokenizer.apply_chat_template(
    [{"role": "user", "content": "What is 12 + 30?"}], add_generation_prompt=True, return_dict=False
)
print(json.dumps({"probe": probe, "sums": sums}))
"""


def test_the_promoted_model_loads_by_itself_and_prefers_the_chosen(learned):
    """Case 87: adapter, tokenizer and chat template, in a fresh process without tunebook."""
    task = dpo.prepare(compose("dpo", {"resume": str(learned.path), "plan.epochs": 9}))
    rows = [
        (each.tokens.tolist(), each.mask.tolist())
        for each in (task.eval_data[number] for number in range(20))
    ]
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(learned.model_dir), json.dumps(rows)],
        text=True, capture_output=True, check=True, cwd="/",
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    assert found["probe"] == task.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    reference = dpo.reference_of(task, None, learned, 1)[Side.eval]
    ratios = [
        total - float(reference.column(number, task.eval_data[number].mask).sum())
        for number, total in enumerate(found["sums"])
    ]
    preferred = [
        chosen > rejected for chosen, rejected in zip(ratios[0::2], ratios[1::2], strict=True)
    ]
    assert sum(preferred) >= 7


# The command line, in processes of its own.


def start(*arguments, cwd, **options):
    environment = {**os.environ, "TUNEBOOK_HOME": f"{cwd}_home"}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


SMALL = ("data.limit=40", "plan.batch_size=8", "eval.fraction=0.2", "eval.min_rows=1")


def test_command_line_run(tmp_path):
    process = start("tunebook.cli", "dpo", *SMALL, "samples.num_prompts=2", cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    for part in ("step 1/4  loss 0.693", "accuracy 0.", "eval/accuracy", "4 planned, 4 an epoch"):
        assert part in out, part
    [path] = (tmp_path / "runs" / "dpo").iterdir()
    for name in ("data/reference/train.npy", "data/reference/eval.npy", "model/adapter_config.json",
                 "report.html", "samples/step_000000.jsonl", "samples/step_000004.jsonl"):  # fmt: skip
        assert (path / name).is_file(), name


def test_a_killed_reference_pass_is_done_again(tmp_path):
    """SIGKILL while the reference is scored; the resumed run scores it whole."""
    process = start("recipes.dpo", "plan.batch_size=400", "samples.num_prompts=0", cwd=tmp_path)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("runs/dpo/*/data/.reference.*.tmp/train.npy")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    [path] = (tmp_path / "runs" / "dpo").iterdir()
    assert not (path / "data" / "reference").exists()
    process = start("recipes.dpo", f"resume={path}", cwd=tmp_path)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    run = RunDir.open(path)
    assert run.record.state is RunState.SUCCEEDED
    assert run.metrics()[0]["train/loss"] == pytest.approx(LN2, abs=1e-3)
    assert not list((path / "data").glob(".reference.*"))


def test_a_dry_run_estimates_and_inspect_shows_both_sides(tmp_path):
    process = start("recipes.dpo", *SMALL, "dry_run=true", cwd=tmp_path)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "GiB peak memory" in out and "one step of 16 rows" in " ".join(out.split())
    process = start(
        "tunebook.cli", "inspect", "--recipe", "dpo", "--limit", "1", *SMALL, cwd=tmp_path
    )
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert " chosen  " in out and " rejected  " in out and "no findings" in out
    process = start(
        "tunebook.cli", "inspect", "--recipe", "dpo", "--html", "x.html", *SMALL, cwd=tmp_path
    )
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    page = (tmp_path / "x.html").read_text()
    assert " chosen · " in page and " rejected · " in page
