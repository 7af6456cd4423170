"""The contestants `trl` and `trl_tuned`: TRL's own trainers, whose loop waits for its turns.

`trl` is the trainer as it comes, apart from what must be equal for all: rows and their order,
adapter, optimizer and learning rate. `trl_tuned` is what an expert would make of it: the rows of a
step grouped by length into micro-batches, memory that is kept, oneDNN matrix products
(`benchmarks.contestant` sets the last two), and for DPO a reference that is computed once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.spec import (
    ADAM,
    ALPHA,
    BETA,
    GROUP_SIZE,
    LINEARS,
    NEW_TOKENS,
    RANK,
    Spec,
    read_workload,
)
from benchmarks.turns import Turns
from benchmarks.workload import PAIRS, PROMPTS, SFT_ROWS, reward_of
from tunebook.models import load_tokenizer, resolve_model

ADAPTER_SUFFIX = ".default.weight"
PREFIX = "base_model.model."


def compete(spec: Spec, turns: Turns) -> None:
    """Trains as the spec says, one step a turn."""
    make = {"sft": make_sft, "dpo": make_dpo, "grpo": make_grpo}[spec.case]
    trainer = make(spec, turns)
    load_start(trainer.model, Path(spec.adapter))
    args = trainer.args
    turns.facts(
        gradient_checkpointing=args.gradient_checkpointing,
        autocast_bf16=args.bf16,
        weights=str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
        micro_batch=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        optimizer=str(args.optim),
    )
    trainer.add_callback(WaitsForTurns(trainer))
    trainer.train()


class TakesTurns(Trainer):
    """Notes what the steps of a trainer do, and lets the clock run only for its own turns."""

    spec: Spec
    turns: Turns
    losses: list[float]
    measured: dict[str, Any]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        if self.state.global_step == 0:
            write_gradients(self.spec, model)
        return super()._clip_grad_norm(model)


class WaitsForTurns(TrainerCallback):
    """Waits before each step, and reports after it."""

    def __init__(self, trainer: TakesTurns) -> None:
        self._trainer = trainer

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.losses.clear()
        self._trainer.measured.clear()
        if not self._trainer.turns.wait():
            raise SystemExit(0)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        seconds = trainer.turns.seconds()
        trainer.turns.report(seconds=seconds, loss=[sum(trainer.losses)], **trainer.measured)


class SFT(TakesTurns, SFTTrainer):
    """TRL's SFT."""


class DPO(TakesTurns, DPOTrainer):
    """TRL's DPO over pairs that are tokenised already."""

    reference_seconds: float

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        dataset = super()._precompute_ref_logps(*args, **kwargs)
        self.reference_seconds = time.perf_counter() - started
        return dataset


class GRPO(TakesTurns, GRPOTrainer):
    """TRL's GRPO; the warm-up step trains on given completions instead of its own."""

    given: list[list[int]]

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        generated = super()._generate(*args, **kwargs)
        self.measured["rollout_seconds"] = time.perf_counter() - started
        return generated

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        completions, logprobs = super()._generate_single_turn(*args, **kwargs)
        self.measured["sampled_tokens"] = sum(map(len, completions))
        if self.state.global_step == 0:
            completions = [list(tokens) for tokens in self.given]
        return completions, logprobs


def make_sft(spec: Spec, turns: Turns) -> SFT:
    """SFT over rows that are tokenised already; `labels` say which tokens carry loss."""
    rows = []
    for step in read_workload(spec)["steps"]:
        for row in by_length(spec, step, lambda row: len(row["tokens"])):
            labels = [
                token if trained else -100
                for token, trained in zip(row["tokens"][1:], row["mask"], strict=True)
            ]
            rows.append({"input_ids": row["tokens"], "labels": [-100, *labels]})
    args = SFTConfig(max_length=None, **common(spec, SFT_ROWS))
    return started(SFT, spec, turns, args=args, train_dataset=Dataset.from_list(rows))


def make_dpo(spec: Spec, turns: Turns) -> DPO:
    """DPO; the reference is the base without adapter."""
    rows = [
        {f"{name}_ids": pair[name] for name in ("prompt", "chosen", "rejected")}
        for step in read_workload(spec)["steps"]
        for pair in by_length(spec, step, pair_length)
    ]
    tuned = spec.contestant == "trl_tuned"
    args = DPOConfig(
        beta=BETA,
        loss_type=["sigmoid"],
        max_length=None,
        precompute_ref_log_probs=tuned,
        **common(spec, PAIRS),
    )
    trainer = started(DPO, spec, turns, args=args, train_dataset=Dataset.from_list(rows))
    if tuned:
        turns.facts(reference_seconds=trainer.reference_seconds, reference_pairs=len(rows))
    return trainer


def make_grpo(spec: Spec, turns: Turns) -> GRPO:
    """GRPO; every completion has the full length, end tokens cannot be sampled."""
    workload = read_workload(spec)
    rows = [{"prompt": prompt["messages"]} for step in workload["steps"] for prompt in step]
    args = GRPOConfig(
        num_generations=GROUP_SIZE,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        generation_batch_size=PROMPTS * GROUP_SIZE,
        shuffle_dataset=False,
        **common(spec, PROMPTS * GROUP_SIZE),
    )
    trainer = started(
        GRPO,
        spec,
        turns,
        args=args,
        train_dataset=Dataset.from_list(rows),
        reward_funcs=distinct_tokens,
    )
    trainer.given = workload["completions"]
    return trainer


def distinct_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards of completions."""
    return [reward_of(tokens) for tokens in completion_ids]


def common(spec: Spec, rows: int) -> dict[str, Any]:
    """Arguments that all trainers share.

    Args:
        spec: of the contestant.
        rows: of one optimizer step.
    """
    size = min(spec.micro_batch, rows) if spec.contestant == "trl_tuned" else rows
    model_options: dict[str, Any] = {}
    if spec.dtype == "bf16" and spec.trl_bf16 == "weights":
        model_options["dtype"] = "bfloat16"
    return {
        "output_dir": str(Path(spec.folder) / "output"),
        "model_init_kwargs": model_options,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": rows // size,
        "max_steps": spec.steps,
        "learning_rate": spec.learning_rates[0],
        "lr_scheduler_type": "constant",
        "adam_beta1": ADAM["beta1"],
        "adam_beta2": ADAM["beta2"],
        "adam_epsilon": ADAM["eps"],
        "weight_decay": ADAM["weight_decay"],
        "max_grad_norm": ADAM["max_grad_norm"],
        "bf16": spec.dtype == "bf16" and spec.trl_bf16 == "autocast",
        "gradient_checkpointing": spec.checkpointing,
        "train_sampling_strategy": "sequential",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": spec.device == "cpu",
    }


def started(kind: type[Any], spec: Spec, turns: Turns, **arguments: Any) -> Any:
    """A trainer of one kind, with a new adapter on all linear layers."""
    trainer = kind(
        model=resolve_model(spec.model),
        processing_class=load_tokenizer(spec.model),
        peft_config=LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            target_modules=list(LINEARS),
            task_type="CAUSAL_LM",
        ),
        **arguments,
    )
    trainer.spec, trainer.turns, trainer.losses, trainer.measured = spec, turns, [], {}
    return trainer


def by_length(spec: Spec, rows: list[Any], length: Any) -> list[Any]:
    """The rows of a step, longest first where the contestant is tuned."""
    return sorted(rows, key=length, reverse=True) if spec.contestant == "trl_tuned" else rows


def pair_length(pair: dict[str, Any]) -> int:
    """Tokens that either side of a pair is padded to."""
    return len(pair["prompt"]) + max(len(pair["chosen"]), len(pair["rejected"]))


def adapter_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """`<layer>.lora_A` and `<layer>.lora_B` -> parameter of the adapter that is trained."""
    return {
        name.removeprefix(PREFIX).removesuffix(ADAPTER_SUFFIX): parameter
        for name, parameter in model.named_parameters()
        if name.endswith(ADAPTER_SUFFIX)
    }


def load_start(model: Any, folder: Path) -> None:
    """Copies the common adapter into the model's own."""
    values = load_file(folder / "adapter_model.safetensors")
    parameters = adapter_parameters(model)
    assert {f"{PREFIX}{name}.weight" for name in parameters} == values.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[f"{PREFIX}{name}.weight"])


def write_gradients(spec: Spec, model: Any) -> None:
    """Writes the gradient of every adapter weight under its name."""
    gradients = {}
    for name, parameter in adapter_parameters(model).items():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.float().cpu().numpy()
    np.savez(spec.gradients, **gradients)
