"""The main job on a real model: SmolLM2-135M-Instruct; `make test-real`.

`TUNEBOOK_PREFERENCES` may name a file of preference pairs to use instead of the built-in ones.
"""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from recipes import sft
from tests.running import train_all
from tunebook.compose import compose
from tunebook.opening import build_backend
from tunebook.render import render_prompt
from tunebook.render.lints import lint_rows
from tunebook.runs import RunDir, RunState
from tunebook.types import SamplingParams

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", autouse=True)
def _both_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def configured(tmp_path, smollm2, /, **overrides):
    values = {
        "model.name": str(smollm2),
        "runs_dir": str(tmp_path / "runs"),
        "plan.batch_size": 8,
        "plan.epochs": None,
        "plan.max_steps": 60,
        "plan.checkpoint_every": 20,
        "samples.num_prompts": 2,
        "samples.max_tokens": 24,
    }
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    return compose("sft", values)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, smollm2):
    return train_all(configured(tmp_path_factory.mktemp("real"), smollm2))


def test_the_rows_are_rendered_right(trained):
    """Exactly one end of turn per answer is trained, and nothing else than answers."""
    task, _ = trained
    assert lint_rows(task.rows.train, task.train_data, task.tokenizer, limit=100) == []
    rendered = task.train_data[0]
    supervised = task.tokenizer.decode(rendered.tokens[1:][rendered.mask > 0])
    answers = [m["content"] for m in task.rows.train[0].messages if m["role"] == "assistant"]
    assert supervised == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_60_steps_lower_the_held_out_loss_every_time(trained):
    _, run = trained
    history = run.history("eval/loss")
    assert [step for step, _ in history] == [20, 40, 60]
    values = [value for _, value in history]
    assert values[0] > values[1] > values[2]
    assert run.metrics()[0]["train/loss"] > 2 * values[-1]
    assert run.record.state is RunState.SUCCEEDED
    assert len(run.samples()) == 2


LOADING = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 12 + 30?"}],
                                       add_generation_prompt=True, return_dict=False)
with torch.no_grad():
    logits = model(torch.tensor([prompt])).logits[0, -1]
print(json.dumps({"prompt": prompt, "logprobs": logits.log_softmax(-1)[:200].tolist()}))
"""


def test_the_promoted_model_gives_the_same_numbers_in_peft(trained, smollm2, tmp_path):
    """In a fresh process, through peft and transformers alone."""
    task, run = trained
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(run.model_dir)],
        text=True,
        capture_output=True,
        check=True,
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    prompt = render_prompt([{"role": "user", "content": "What is 12 + 30?"}], task.tokenizer)
    assert theirs["prompt"] == prompt
    config = configured(tmp_path, smollm2, start_from=str(run.path))
    with build_backend(config) as backend:
        new = RunDir.create(tmp_path / "runs", "sft", None)
        session = sft.open_session(config, backend, new, None)
        data = [
            sft.Datum(torch.tensor([*prompt, token], dtype=torch.int32).numpy())
            for token in range(20)
        ]
        ours = [float(each[-1]) for each in session.forward(data).result()]
    assert ours == pytest.approx(theirs["logprobs"][:20], abs=1e-4)


def test_micro_batches_change_nothing(tmp_path, smollm2):
    """2,048 and 4,096 tokens at once: the same bits. One row at once: the same up to rounding.

    Rows that begin with the same system prompt share it while a group of them fits into a
    micro-batch, so very small ones add up gradients in another grouping; where a gradient is near
    Adam's epsilon, its last bits show.
    """
    adapters = []
    for micro_batch_tokens in (2048, 4096, 1):
        config = configured(
            tmp_path, smollm2, backend__micro_batch_tokens=micro_batch_tokens, plan__max_steps=2,
            samples__num_prompts=0,
        )  # fmt: skip
        _, run = train_all(config)
        adapters.append(load_file(run.checkpoints()[-1].ref.path / "adapter.safetensors"))
    apart = torch.cat(
        [(value - adapters[2][name]).abs().flatten() for name, value in adapters[0].items()]
    )
    for name, value in adapters[0].items():
        assert torch.equal(value, adapters[1][name]), name
    # Seen: 33 of 4,884,480 elements by more than 1e-6, none by more than 1.7e-5.
    assert float(apart.max()) < 1e-4
    assert float((apart > 1e-6).float().mean()) < 1e-4


def test_stop_and_resume_is_bit_identical(tmp_path, smollm2):
    short = {"plan__max_steps": 4, "plan__checkpoint_every": 2, "samples__num_prompts": 0}
    _, whole = train_all(configured(tmp_path / "whole", smollm2, **short))
    _, stopped = train_all(configured(tmp_path, smollm2, **short), stop_after=2)
    _, resumed = train_all(compose("sft", {"resume": str(stopped.path)}))
    ours = load_file(resumed.checkpoints()[-1].ref.path / "adapter.safetensors")
    theirs = load_file(whole.checkpoints()[-1].ref.path / "adapter.safetensors")
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_greedy_answers_equal_transformers(smollm2, tmp_path):
    from transformers import AutoModelForCausalLM

    config = configured(tmp_path, smollm2)
    tokenizer = sft.tokenizer_for(config)
    questions = [
        "What is the capital of France?",
        "Count from 1 to 5.",
        "Tom has 3 apples and buys 4 more. How many apples does he have? Think step by step.",
        "Hello!",
    ]
    prompts = [render_prompt([{"role": "user", "content": each}], tokenizer) for each in questions]
    greedy = SamplingParams(max_tokens=32, temperature=0.0, top_p=1.0, top_k=0, stop=(), seed=0)
    with build_backend(config) as backend:
        session = backend.open_session("greedy", config.lora.to_lora(), directory=tmp_path)
        answers = session.publish_weights().result().sample(prompts, greedy, 1).result()
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for prompt, [answer] in zip(prompts, answers, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, pad_token_id=0
        )
        assert answer.tokens.tolist() == expected[0, len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(answers[0][0].tokens)


# Preferences: 60 pairs to train on, 60 held out.


def configured_dpo(tmp_path, smollm2, /, **overrides):
    values = {
        "model.name": str(smollm2),
        "runs_dir": str(tmp_path / "runs"),
        "data.limit": 120,
        "eval.fraction": 0.5,
        "data.on_long_row": "truncate_prompt",
        "max_seq_len": 512,
        "plan.batch_size": 10,
        "plan.epochs": 2,
        "plan.checkpoint_every": 6,
        "optimizer.learning_rate": 2e-4,
        "samples.num_prompts": 0,
    }
    if path := os.environ.get("TUNEBOOK_PREFERENCES"):
        values["data.path"] = path
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    return compose("dpo", values)


@pytest.fixture(scope="module")
def preferring(tmp_path_factory, smollm2):
    return train_all(configured_dpo(tmp_path_factory.mktemp("real_dpo"), smollm2))


def test_the_pairs_are_rendered_right(preferring):
    task, _ = preferring
    assert len(task.rows.train) == len(task.rows.eval) == 60
    assert lint_rows(task.rows.train, task.train_data, task.tokenizer) == []
    [chosen, rejected] = (task.train_data[number] for number in task.train_data.data_of_row(0))
    for each, [message] in (
        (chosen, task.rows.train[0].chosen),
        (rejected, task.rows.train[0].rejected),
    ):
        trained = task.tokenizer.decode(each.tokens[1:][each.mask > 0])
        assert f"{message['content']}<|im_end|>".startswith(trained)


def test_preferences_raise_the_held_out_margin(preferring):
    """ln 2 at first; then the loss over 60 held-out pairs falls and their margin grows."""
    _, run = preferring
    assert run.metrics()[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-3)
    margins = [value for _, value in run.history("eval/margin")]
    losses = [value for _, value in run.history("eval/loss")]
    assert len(margins) == 2
    assert 0 < margins[0] < margins[1]
    assert losses[0] > losses[1] and losses[-1] < math.log(2)
    assert run.metrics()[-1]["eval/accuracy"] > 0.5
    assert run.record.state is RunState.SUCCEEDED


def test_twenty_steps_of_grpo_raise_the_reward(tmp_path, smollm2):
    """Short answers are rewarded; sampler and trainer agree to 1e-3 nats in float32."""
    config = compose(
        "grpo",
        {
            "model.name": str(smollm2),
            "runs_dir": str(tmp_path),
            "reward": "target_length",
            "reward.functions.target_length": {"minimum": 1, "maximum": 8, "margin": 24},
            "eval.fraction": 0.04,
            "plan.batch_size": 4,
            "plan.epochs": None,
            "plan.max_steps": 20,
            "plan.checkpoint_every": 10,
            "rollout.max_new_tokens": 24,
            "optimizer.learning_rate": 3e-4,
            "schedule.kind": "constant",
        },
    )
    _, run = train_all(config)
    rows = run.metrics()
    assert run.record.evaluation.best > rows[0]["start/reward"] + 0.1
    rewards = [row["train/reward"] for row in rows[1:]]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    gaps = [row["train/logprob_gap"] for row in rows[1:] if row["train/num_updates"]]
    assert len(gaps) > 10
    assert max(gaps) < 1e-3
