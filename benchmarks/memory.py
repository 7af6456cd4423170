"""Whether memory stays flat over many steps. The peaks of real steps are part of the SFT case."""

from __future__ import annotations

from typing import Any

from benchmarks import workload
from benchmarks.cases import Options, common_values, prepare, present, run_alone, spec_for

WINDOW = 50
"""Steps within which everything should have been allocated once."""
FLAT = 1.02
"""Growth from then on that is still called flat."""


def memory(options: Options) -> dict[str, Any]:
    """Resident memory in the first and in the last 50 steps, on short generated rows, each alone.

    The highest of the 50 counts, since what is freed may be given back at some steps only.
    """
    steps = options.steps_of("memory")
    tokens = workload.short_sft_workload(
        workload.tokenizer_of(options.model),
        steps=steps,
        cache_dir=options.work / "cache",
        seed=options.seed,
    )
    shared = prepare(options, tokens)
    entries = {}
    for name in present(options.contestants, options.tell):
        record = run_alone(spec_for(options, "sft", name, steps, shared))
        held = [step["memory"] for step in record.steps]
        early, last = max(held[:WINDOW]), max(held[-WINDOW:])
        options.tell(f"{name}: {early / 2**20:.0f} MiB, then {last / 2**20:.0f} MiB")
        entries[name] = {
            "early": early,
            "last": last,
            "growth": last / early,
            "peak_memory": max(step["peak_memory"] for step in record.steps),
            "every_10_steps": held[::10],
        }
    return {
        "case": "memory",
        **common_values(options),
        "described": {
            "steps": steps,
            "window": min(WINDOW, steps),
            "rows": "short, generated",
        },
        "flatness": entries,
        "flat_up_to": FLAT,
        "ratios": {},
    }
