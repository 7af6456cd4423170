"""The peak of matrix products at a model's own shapes, and the share of it that a step reaches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import workload
from benchmarks.cases import Options, common_values, prepare, present, source, spec_for
from benchmarks.contest import hold
from benchmarks.contestant import fastest_exact_precision
from benchmarks.spec import LORA, RANK
from tunebook.backends.local.base_model import Architecture, read_architecture
from tunebook.backends.local.engine.products import linear, onednn_agrees
from tunebook.backends.local.lora import adapter_targets, features_of

ROWS = 1024
"""Tokens of one product, as in a micro-batch."""
REPEATS = 20
Shape = tuple[int, int]
"""Output and input features."""


def gemm(options: Options) -> dict[str, Any]:
    """Peak products, the floating-point operations of an SFT step, and the share it reaches.

    Counted: forward and input gradient of the frozen linears, all products of the adapters, and
    the head at tokens that carry loss, forward and backward. Not counted: attention, and all that
    is no matrix product.
    """
    architecture = read_architecture(options.model, revision=None, trust_remote_code=False)
    if architecture is None:
        raise ValueError(f"--model {options.model}: not a model of transformers' own code")
    steps = options.steps_of("gemm") + 1
    tokens = workload.sft_workload(
        workload.tokenizer_of(options.model),
        path=options.data,
        steps=steps,
        cache_dir=options.work / "cache",
        length_scale=options.length_scale,
        seed=options.seed,
    )
    names = [name for name in present(options.contestants, options.tell) if name != "plain"]
    shared = prepare(options, tokens)
    records = hold(
        [spec_for(options, "sft", name, steps, shared) for name in names],
        tell=options.tell,
    )
    timed = [row for step in tokens["steps"][1:] for row in step]
    computed = sum(len(row["tokens"]) - 1 for row in timed) / (steps - 1)
    scored = sum(sum(row["mask"]) for row in timed) / (steps - 1)
    linears = linear_shapes(architecture)
    head = features_of(architecture.head)
    peaks = measured_peaks([*linears, head], device=options.device)
    operations = step_operations(linears, head, tokens=computed, scored=scored)
    best_s = ideal_seconds(linears, head, peaks, options.dtype, tokens=computed, scored=scored)
    shares = {}
    for name, record in records.items():
        seconds = median(record.seconds())
        shares[name] = {
            "median_step_s": seconds,
            "gflops": operations / seconds / 1e9,
            "share_of_peak": best_s / seconds,
        }
    return {
        "case": "gemm",
        **common_values(options),
        "described": {
            "tokens computed per step": round(computed),
            "tokens that carry loss per step": round(scored),
            "operations per step": operations,
            "rows from": source(options.data),
        },
        "peaks": {f"{shape[0]} x {shape[1]}": values for shape, values in sorted(peaks.items())},
        "shares": shares,
        "ratios": {},
    }


def linear_shapes(architecture: Architecture) -> Counter[Shape]:
    """Shape -> how many frozen linear layers of the model have it."""
    targets = adapter_targets(architecture.model, architecture.head, LORA.target_modules)
    return Counter(features_of(module) for module in targets.values())


def step_operations(
    linears: Mapping[Shape, int], head: Shape, *, tokens: float, scored: float
) -> float:
    """Floating-point operations of one step.

    Args:
        linears: shape -> layers.
        head: shape of the output head.
        tokens: computed per step.
        scored: tokens that carry loss per step.
    """
    frozen = sum(count * out * inp for (out, inp), count in linears.items())
    adapters = sum(count * RANK * (out + inp) for (out, inp), count in linears.items())
    # Forward and input gradient of the base; forward, input and weight gradient of the adapters.
    return tokens * (4 * frozen + 6 * adapters) + scored * 4 * head[0] * head[1]


def ideal_seconds(
    linears: Mapping[Shape, int],
    head: Shape,
    peaks: Mapping[Shape, Mapping[str, float]],
    dtype: str,
    *,
    tokens: float,
    scored: float,
) -> float:
    """Seconds of a step's products if each ran at the peak of its shape; adapters at their layer's.

    Args:
        linears: shape -> layers.
        head: shape of the output head.
        peaks: shape -> way -> GFLOP/s.
        dtype: `fp32` or `bf16`.
        tokens: computed per step.
        scored: tokens that carry loss per step.
    """

    def peak(shape: Shape) -> float:
        return 1e9 * max(rate for way, rate in peaks[shape].items() if way.startswith(dtype))

    seconds = scored * 4 * head[0] * head[1] / peak(head)
    for shape, count in linears.items():
        out, inp = shape
        seconds += tokens * count * (4 * out * inp + 6 * RANK * (out + inp)) / peak(shape)
    return seconds


def measured_peaks(shapes: Sequence[Shape], *, device: str) -> dict[Shape, dict[str, float]]:
    """Shape -> way -> GFLOP/s, the best of some products; ways that round alike begin alike."""
    ways: dict[str, Callable[[Shape], float]] = {
        "fp32": lambda shape: rate(shape, torch.float32, device=device),
        medium_name(): lambda shape: rate_at_medium(shape, device=device),
        "bf16": lambda shape: rate(shape, torch.bfloat16, device=device),
    }
    if device == "cpu" and onednn_agrees():
        ways["fp32, oneDNN's operator"] = lambda shape: rate(shape, torch.float32, product=linear)
    return {
        shape: {way: measure(shape) for way, measure in ways.items()}
        for shape in dict.fromkeys(shapes)
    }


def medium_name() -> str:
    """What products at medium precision are called: only those that round to float32 are float32's.

    On a processor with matrix tiles (AMX) they round to bfloat16.
    """
    with matmul_precision("medium"):
        exact = fastest_exact_precision() == "medium"
    return "fp32, medium precision" if exact else "medium precision, which rounds to bf16"


def rate(
    shape: Shape,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear,
) -> float:
    """GFLOP/s of `[ROWS, I] @ [O, I]^T`."""
    out, inp = shape
    left = torch.randn(ROWS, inp, dtype=dtype, device=device)
    right = torch.randn(out, inp, dtype=dtype, device=device)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        product(left, right)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * ROWS * out * inp / min(seconds) / 1e9


def rate_at_medium(shape: Shape, *, device: str) -> float:
    """The same in float32 where torch may use oneDNN (CPU) or TF32 (CUDA)."""
    with matmul_precision("medium"):
        return rate(shape, torch.float32, device=device)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """The context in which float32 products have this precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
