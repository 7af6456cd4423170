"""Whether memory stays flat over many steps. The peaks of real steps are part of the SFT case."""

from __future__ import annotations

from typing import Any

from benchmarks import workload
from benchmarks.cases import Options, common_values, prepare, present, run_alone, spec_for

EARLY = 50
"""The step by which everything should have been allocated."""
FLAT = 1.02
"""Growth from then on that is still called flat."""


def memory(options: Options) -> dict[str, Any]:
    """Resident memory at step 50 and at the end, on short generated rows, each contestant alone."""
    steps = options.steps_of("memory")
    tokens = workload.short_sft_workload(
        workload.tokenizer_of(options.model),
        steps=steps,
        cache_dir=options.work / "cache",
        seed=options.seed,
    )
    shared = prepare(options, tokens)
    early = min(EARLY, steps) - 1
    entries = {}
    for name in present(options.contestants, options.tell):
        record = run_alone(spec_for(options, "sft", name, steps, shared))
        held = [step["memory"] for step in record.steps]
        options.tell(f"{name}: {held[early] / 2**20:.0f} MiB, then {held[-1] / 2**20:.0f} MiB")
        entries[name] = {
            "early": held[early],
            "last": held[-1],
            "growth": held[-1] / held[early],
            "peak_memory": max(step["peak_memory"] for step in record.steps),
            "every_10_steps": held[::10],
        }
    return {
        "case": "memory",
        **common_values(options),
        "described": {"steps": steps, "early step": early + 1, "rows": "short, generated"},
        "flatness": entries,
        "flat_up_to": FLAT,
        "ratios": {},
    }
