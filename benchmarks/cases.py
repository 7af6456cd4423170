"""The cases that are contests: SFT, DPO and GRPO, and several adapters at once."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import workload
from benchmarks.adapter import write_start
from benchmarks.contest import (
    BOUNDS,
    Child,
    Errors,
    Record,
    errors_of,
    hold,
    ratios,
)
from benchmarks.spec import Spec
from tunebook.models import resolve_model

CONTESTANTS = ("trl", "trl_tuned", "plain", "ours")
TIMED_STEPS = {"sft": 5, "dpo": 3, "grpo": 3, "adapters": 6, "memory": 500, "gemm": 5}
TUNED_MICRO_BATCH = {"sft": 4, "dpo": 1, "grpo": 8}
LEARNING_RATE = 1e-4
SWEEP = (3e-5, 1e-4, 3e-4, 1e-3)
"""Learning rates of the adapters that are trained at once."""
EPOCHS = (1, 3)
"""Of DPO, over which the cost of a reference that is computed once is spread."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    model: str
    device: str
    dtype: str
    data: Path | None
    preferences: Path | None
    prompts: Path | None
    contestants: tuple[str, ...]
    steps: int | None
    """Timed steps; None = as the case has it."""
    threads: int
    checkpointing: str
    """`off`, or `on` as TRL has it unless told otherwise."""
    trl_bf16: str
    micro_batch: int | None
    length_scale: float
    seed: int
    work: Path
    """Scratch folder of this invocation."""
    tell: Callable[[str], None]

    def steps_of(self, case: str) -> int:
        """Timed steps of a case."""
        return TIMED_STEPS[case] if self.steps is None else self.steps


def present(contestants: tuple[str, ...], tell: Callable[[str], None]) -> tuple[str, ...]:
    """The contestants whose packages are installed."""
    missing = [name for name in ("trl", "peft") if find_spec(name) is None]
    skipped = [name for name in contestants if name.startswith("trl") and missing]
    if skipped:
        tell(
            f"{' and '.join(skipped)} skipped: {' and '.join(missing)} not installed. "
            "For these: pip install -c constraints.txt -e '.[bench]'"
        )
    return tuple(name for name in contestants if name not in skipped)


def sft(options: Options) -> dict[str, Any]:
    """A step of SFT: 8 rows, loss on the answers, mean over their tokens."""
    steps = options.steps_of("sft") + 1
    tokens = workload.sft_workload(
        workload.tokenizer_of(options.model),
        path=options.data,
        steps=steps,
        cache_dir=options.work / "cache",
        length_scale=options.length_scale,
        seed=options.seed,
    )
    rows = [row for step in tokens["steps"][1:] for row in step]
    return contest(
        "sft",
        options,
        tokens,
        tokens_per_step=sum(len(row["tokens"]) for row in rows) / (steps - 1),
        described={
            "rows per step": workload.SFT_ROWS,
            "tokens that carry loss per step": sum(sum(row["mask"]) for row in rows) / (steps - 1),
            "rows from": source(options.data),
        },
    )


def dpo(options: Options) -> dict[str, Any]:
    """A step of DPO: 4 pairs of up to 512 tokens a side.

    `plain`, `ours` and `trl_tuned` compute the reference once; its time is spread over the steps.
    """
    steps = options.steps_of("dpo") + 1
    pairs = workload.dpo_workload(
        workload.tokenizer_of(options.model),
        path=options.preferences,
        steps=steps,
        cache_dir=options.work / "cache",
        length_scale=options.length_scale,
        seed=options.seed,
    )
    lengths = [
        2 * len(pair["prompt"]) + len(pair["chosen"]) + len(pair["rejected"])
        for step in pairs["steps"][1:]
        for pair in step
    ]
    result = contest(
        "dpo",
        options,
        pairs,
        tokens_per_step=sum(lengths) / (steps - 1),
        described={"pairs per step": workload.PAIRS, "pairs from": source(options.preferences)},
        once=reference_seconds,
    )
    return result


def grpo(options: Options) -> dict[str, Any]:
    """A step of GRPO: 4 prompts, 8 completions each, 64 tokens a completion.

    Everybody samples the same number of tokens: TRL by `min_new_tokens`, ours from a copy of the
    model folder whose configs name no end token.
    """
    steps = options.steps_of("grpo") + 1
    prompts = workload.grpo_workload(
        workload.tokenizer_of(options.model),
        path=options.prompts,
        steps=steps,
        cache_dir=options.work / "cache",
        length_scale=options.length_scale,
        seed=options.seed,
    )
    sampled = workload.PROMPTS * workload.GROUP_SIZE * workload.NEW_TOKENS
    endless = without_end(Path(resolve_model(options.model)), options.work / "endless")
    result = contest(
        "grpo",
        options,
        prompts,
        tokens_per_step=sampled,
        described={
            "prompts per step": workload.PROMPTS,
            "completions per prompt": workload.GROUP_SIZE,
            "tokens per completion": workload.NEW_TOKENS,
            "prompts from": source(options.prompts),
        },
        models={"ours": str(endless), "plain": str(endless)},
        parts={"rollout": rollout_seconds, "training": training_seconds},
    )
    for name, values in result["contestants"].items():
        counts = {step["sampled_tokens"] for step in values["steps"]}
        if counts != {sampled}:
            raise ValueError(f"{name} sampled {counts} tokens a step, not {sampled}")
    return result


def rollout_seconds(record: Record) -> list[float]:
    """Seconds of sampling in the steps that count."""
    return [step["rollout_seconds"] for step in record.steps[1:]]


def training_seconds(record: Record) -> list[float]:
    """Seconds of everything but sampling in the steps that count."""
    return [step["seconds"] - step["rollout_seconds"] for step in record.steps[1:]]


def reference_seconds(record: Record, *, per_step: int) -> float:
    """Seconds of the reference for the pairs of one step, where it was computed beforehand."""
    facts = record.facts
    if "reference_seconds" not in facts:
        return 0.0
    return facts["reference_seconds"] / facts["reference_pairs"] * per_step


def adapters(options: Options) -> dict[str, Any]:
    """Four adapters trained at once, against the same four one after the other.

    Start-up counts: every run is a process of its own. Between runs that take their steps alone,
    nothing is interleaved.
    """
    steps = options.steps_of("adapters")
    tokens = workload.sft_workload(
        workload.tokenizer_of(options.model),
        path=options.data,
        steps=steps,
        cache_dir=options.work / "cache",
        length_scale=options.length_scale,
        seed=options.seed,
    )
    runs = [
        ("ours at once", "ours", (SWEEP,)),
        ("ours in turn", "ours", tuple((r,) for r in SWEEP)),
    ]
    for name in present(options.contestants, options.tell):
        if name.startswith("trl"):
            runs.append((f"{name} in turn", name, tuple((rate,) for rate in SWEEP)))
    shared = prepare(options, tokens)
    entries: dict[str, Any] = {}
    for label, contestant, groups in runs:
        seconds, losses, memory = 0.0, [], 0
        for index, rates in enumerate(groups):
            spec = replace(
                spec_for(options, "sft", contestant, steps, shared),
                learning_rates=rates,
                folder=str(options.work / f"{label.replace(' ', '_')}_{index}"),
            )
            started = time.perf_counter()
            record = run_alone(spec)
            seconds += time.perf_counter() - started
            losses += [list(each) for each in zip(*(s["loss"] for s in record.steps), strict=True)]
            memory = max(memory, *(step["peak_memory"] for step in record.steps))
        options.tell(f"{label}: {seconds:.1f} s")
        entries[label] = {"seconds": seconds, "losses": losses, "peak_memory": memory}
    expected = entries["ours at once"]["losses"]
    bound = 10 * BOUNDS[options.dtype].loss
    for entry in entries.values():
        entry["loss_error"] = max(
            abs(loss - wanted) / max(abs(wanted), 0.1)
            for losses, row in zip(entry["losses"], expected, strict=True)
            for loss, wanted in zip(losses, row, strict=True)
        )
    return {
        "case": "adapters",
        **common_values(options),
        "described": {"adapters": len(SWEEP), "steps of each": steps, "learning rates": SWEEP},
        "bounds": {"loss of any step": bound},
        "runs": entries,
        "ratios": {
            f"{label} / ours at once": (
                entry["seconds"] / entries["ours at once"]["seconds"]
                if entry["loss_error"] <= bound
                else None
            )
            for label, entry in entries.items()
            if label != "ours at once"
        },
    }


def run_alone(spec: Spec) -> Record:
    """Everything that a contestant does in its life, without anybody else."""
    child = Child(spec)
    try:
        child.get_ready()
        while not child.finished:
            child.take_step()
    finally:
        child.end()
    return child.record


@dataclass(frozen=True, slots=True)
class Shared:
    """Files that all contestants read."""

    adapter: Path
    workload: Path


def prepare(options: Options, tokens: dict[str, Any]) -> Shared:
    """Writes what contestants share."""
    path = options.work / "workload.json"
    path.write_text(json.dumps(tokens), encoding="utf-8")
    return Shared(write_start(options.model, options.work / "adapter"), path)


def spec_for(options: Options, case: str, contestant: str, steps: int, shared: Shared) -> Spec:
    """The spec of one contestant."""
    return Spec(
        contestant=contestant,
        case=case,
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        steps=steps,
        learning_rates=(LEARNING_RATE,),
        adapter=str(shared.adapter),
        workload=str(shared.workload),
        folder=str(options.work / f"{case}_{contestant}"),
        threads=options.threads,
        checkpointing=options.checkpointing == "on",
        trl_bf16=options.trl_bf16,
        micro_batch=options.micro_batch or TUNED_MICRO_BATCH[case],
    )


def contest(
    case: str,
    options: Options,
    tokens: dict[str, Any],
    *,
    tokens_per_step: float,
    described: dict[str, Any],
    models: dict[str, str] | None = None,
    parts: dict[str, Callable[[Record], list[float]]] | None = None,
    once: Callable[..., float] | None = None,
) -> dict[str, Any]:
    """The result of one contest, ready for its file.

    Args:
        case: its name.
        options: of the command line.
        tokens: the workload.
        tokens_per_step: real tokens, for tokens per second.
        described: what else a reader should know of the workload.
        models: contestant -> model, where it is not that of the options.
        parts: name -> seconds of a part of the steps, compared for itself.
        once: seconds of what is done once per row, per step.
    """
    shared = prepare(options, tokens)
    names = present(options.contestants, options.tell)
    specs = {name: spec_for(options, case, name, len(tokens["steps"]), shared) for name in names}
    for name, model in (models or {}).items():
        if name in specs:
            specs[name] = replace(specs[name], model=model)
    reference = reference_spec(options, case, specs, models or {}, shared)
    reference_record = None
    if reference.contestant not in specs or options.dtype != "fp32":
        options.tell("the float32 gradient that all are compared with")
        reference_record = hold([reference], tell=options.tell)[reference.contestant]
    records = hold(list(specs.values()), tell=options.tell)
    reference_record = reference_record or records[reference.contestant]
    errors = {
        name: errors_of(specs[name], record, reference=reference, reference_record=reference_record)
        for name, record in records.items()
    }
    bounds = BOUNDS[options.dtype]
    result = {
        "case": case,
        **common_values(options),
        "described": {"real tokens per step": round(tokens_per_step), **described},
        "bounds": asdict(bounds),
        "contestants": {
            name: entry(record, errors[name], tokens_per_step=tokens_per_step)
            for name, record in records.items()
        },
        "ratios": {"step": ratios(records, errors, bounds, of=Record.seconds)},
    }
    for part, seconds_of in (parts or {}).items():
        result["ratios"][part] = ratios(records, errors, bounds, of=seconds_of)
        for name, record in records.items():
            result["contestants"][name][f"median_{part}_s"] = median(seconds_of(record))
    if once is not None:
        for epochs in EPOCHS:
            label = f"step with reference, {epochs} epoch{'s' if epochs > 1 else ''}"
            result["ratios"][label] = ratios(
                records,
                errors,
                bounds,
                of=lambda record, epochs=epochs: [
                    seconds + once(record, per_step=workload.PAIRS) / epochs
                    for seconds in record.seconds()
                ],
            )
        for name, record in records.items():
            seconds = once(record, per_step=workload.PAIRS)
            result["contestants"][name]["reference_s_per_step"] = seconds
    shutil.rmtree(options.work / "workload.json", ignore_errors=True)
    return result


def reference_spec(
    options: Options, case: str, specs: dict[str, Spec], models: dict[str, str], shared: Shared
) -> Spec:
    """Whom everybody's gradient is compared with: `plain`, in float32."""
    if "plain" in specs and options.dtype == "fp32":
        return specs["plain"]
    return replace(
        spec_for(options, case, "plain", 1, shared),
        dtype="fp32",
        model=models.get("plain", options.model),
        folder=str(options.work / f"{case}_reference"),
    )


def entry(record: Record, errors: Errors, *, tokens_per_step: float) -> dict[str, Any]:
    """One contestant's part of a result."""
    seconds = median(record.seconds())
    return {
        "median_step_s": seconds,
        "tokens_per_s": tokens_per_step / seconds,
        "peak_memory": max(step["peak_memory"] for step in record.steps),
        "errors": asdict(errors),
        "facts": record.facts,
        "steps": record.steps,
    }


def common_values(options: Options) -> dict[str, Any]:
    """Settings that belong into every result."""
    return {
        "model": options.model,
        "device": options.device,
        "dtype": options.dtype,
        "seed": options.seed,
    }


def source(path: Path | None) -> str:
    """Where rows came from, without the folder."""
    return "the generator" if path is None else path.name


def without_end(model: Path, folder: Path) -> Path:
    """A copy of a model folder, by links, whose configs name no end token; returns its path."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            values = json.loads(path.read_text(encoding="utf-8"))
            # Null, not absent: a config class may have an end token of its own by default.
            values["eos_token" if path.name == "tokenizer_config.json" else "eos_token_id"] = None
            (folder / path.name).write_text(json.dumps(values, indent=2), encoding="utf-8")
        else:
            (folder / path.name).symlink_to(path)
    return folder
