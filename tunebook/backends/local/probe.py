"""An estimate of a run from one measured step."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tunebook.backends.base import Session
from tunebook.types import AdamParams, Datum, Estimate, Workload

# Measured again within this time, for a figure without first-call costs and what else the machine
# happened to do.
REPEATING_S = 10.0
MOST_STEPS = 4
# A rate of 0 leaves the weights as they are; the step costs the same.
PROBE_STEP = AdamParams(
    learning_rate=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one step took."""

    step_s: float
    forward_s: float
    peak_memory_bytes: int | None


@dataclass(slots=True)
class PeakMemory:
    """Peak memory of a block, filled in at its end; None where it cannot be told."""

    bytes: int | None = field(default=None)


def measure(session: Session, sample: Sequence[Datum], device: torch.device) -> Measurement:
    """Times a training step and an evaluation of `sample`."""
    with peak_memory(device) as peak:
        taken = [timed(lambda: _train_step(session, sample), device)]
        while len(taken) < MOST_STEPS and sum(taken) < REPEATING_S:
            taken.append(timed(lambda: _train_step(session, sample), device))
        forward_s = timed(lambda: session.forward(sample).result(), device)
    return Measurement(step_s=min(taken), forward_s=forward_s, peak_memory_bytes=peak.bytes)


def extrapolate(
    workload: Workload,
    measured: Measurement,
    *,
    computed_tokens: Callable[[Sequence[int]], int],
    device: str,
) -> Estimate:
    """The whole run at the measured cost per computed token.

    Args:
        workload: the run.
        measured: on its sample.
        computed_tokens: how many tokens rows of given lengths cost.
        device: in words.
    """

    def computed(lengths: Sequence[int]) -> int:
        return computed_tokens([max(1, length - 1) for length in lengths])

    sample_tokens = computed([len(datum.tokens) for datum in workload.sample])
    # Rows meet in other steps in every epoch; batches in file order stand for them.
    batches = [
        workload.lengths[first : first + workload.batch_size]
        for first in range(0, len(workload.lengths), workload.batch_size)
    ]
    epochs = workload.planned_steps / len(batches)
    train_computed = epochs * sum(computed(batch) for batch in batches)
    forward_computed = workload.num_evaluations * computed(workload.eval_lengths)
    forward_computed += computed(workload.scored_lengths)
    training_s = train_computed * measured.step_s / sample_tokens
    seconds = training_s + forward_computed * measured.forward_s / sample_tokens
    return Estimate(
        seconds=seconds,
        train_tokens=workload.train_tokens,
        peak_memory_bytes=measured.peak_memory_bytes,
        price=None,
        basis=(
            f"measured on {device}: one step of {len(workload.sample)} rows took "
            f"{measured.step_s:.2f} s for {sample_tokens} computed tokens, its evaluation "
            f"{measured.forward_s:.2f} s; scaled to the {round(train_computed)} tokens that the "
            f"plan trains on and the {round(forward_computed)} that it only evaluates"
            + ("" if measured.peak_memory_bytes is None else "; memory is the peak of that step")
        ),
    )


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that `run` takes, work still on the device included."""
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - started


@contextmanager
def peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Records the peak memory of a block: of the device, or of the process on a CPU."""
    peak = PeakMemory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_resident_peak()
    yield peak
    if device.type == "cuda":
        peak.bytes = torch.cuda.max_memory_allocated(device)
    elif device.type == "cpu":
        peak.bytes = resident_peak()


def reset_resident_peak() -> None:
    """Starts a new high-water mark of this process, where the system has one that can be reset."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        # Without it the mark is that of the whole life of the process: an upper bound.
        return


def resident_peak() -> int | None:
    """Bytes of the high-water mark of this process; None where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _train_step(session: Session, sample: Sequence[Datum]) -> None:
    session.forward_backward(sample, _sum_of_nll)
    session.optim_step(PROBE_STEP).result()


def _sum_of_nll(logprobs: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    return -logprobs.sum(), {}
