"""Tables of results; `python -m benchmarks.report` writes RESULTS.md from the JSON files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NOTES = FOLDER / "NOTES.md"
"""What the figures mean, written by hand; the end of RESULTS.md."""
GIB = 2**30
ORDER = ("sft", "dpo", "grpo", "adapters", "memory", "served", "startup", "rendering", "gemm")
PARTS = (
    ("median_step_s", "step (s)"),
    ("median_rollout_s", "rollout (s)"),
    ("median_training_s", "training (s)"),
    ("reference_s_per_step", "reference per step (s)"),
)
FLAGS = {
    "gradient_checkpointing": "gradient checkpointing",
    "autocast_bf16": "bf16 autocast",
    "weights": "weights",
    "micro_batch": "micro-batch",
    "accumulation": "accumulation",
    "keeps_freed_memory": "glibc keeps freed memory",
    "float32_products": "float32 products at",
    "threads": "threads",
}
HEADER = """\
# Benchmark results

The local backend against TRL and PEFT: the same model, tokens, masks, adapter at the start,
optimizer and learning rate. `make bench` repeats them; `python -m benchmarks.report` writes this
file from `benchmarks/results/`.

- Contestants are processes of one environment that stay alive and take their steps in turn, so
  that a machine that gets slower does so for all. **A ratio is the median over the rounds** of a
  contestant's time over ours; absolute medians stand beside it. The first step warms up and does
  not count.
- `trl` is TRL's trainer as it comes. What must be equal for all is set: rows and their order,
  batch, adapter, AdamW with its learning rate, precision. Gradient checkpointing is off unless the
  flags below say otherwise (TRL turns it on by default, which is slower).
- `trl_tuned` is an expert's TRL: rows of a step grouped by length into micro-batches with gradient
  accumulation, glibc told to keep freed memory, float32 products at
  `float32_matmul_precision("medium")` (oneDNN) where that still rounds to float32 (with AMX it does
  not); for DPO a precomputed reference.
- `plain` is our backend without its fast path, `ours` with it.
- **Errors** are those of loss and adapter gradient in the warm-up step, relative to `plain` in
  float32 (norm of the difference over all adapter weights). Above a bound, which is in the JSON
  file, no ratio is reported.
- Tokens per second count real tokens, never padding; in GRPO only sampled ones. Peak memory is that
  of the process (resident; the loading of libraries and model included), or what torch allocated
  on a GPU.
"""
NO_CUDA = """\
**No CUDA figures.** The same code runs with `--device cuda --dtype bf16`; it has not been run on a
GPU yet.
"""


def main() -> int:
    """Writes RESULTS.md; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--out", type=Path, default=FOLDER / "RESULTS.md")
    arguments = parser.parse_args()
    results = [json.loads(path.read_text()) for path in sorted(arguments.results.glob("*.json"))]
    if not results:
        print(f"{arguments.results}: no results; run python -m benchmarks first", file=sys.stderr)
        return 2
    results.sort(key=lambda result: ORDER.index(result["case"]))
    arguments.out.write_text(document(results), encoding="utf-8")
    print(arguments.out)
    return 0


def document(results: list[dict[str, Any]]) -> str:
    """RESULTS.md as text."""
    parts = [HEADER]
    if all(result["device"] != "cuda" for result in results):
        parts.append(NO_CUDA)
    for result in results:
        parts.append(table(result) + "\n\n" + "\n".join(footnotes(result)))
    parts.append(NOTES.read_text(encoding="utf-8"))
    return "\n".join(parts).rstrip() + "\n"


def table(result: dict[str, Any]) -> str:
    """A result as text for a terminal and for Markdown."""
    return "\n".join([f"\n## {title(result)}", "", *lines(result)])


def title(result: dict[str, Any]) -> str:
    """Case, device and dtype."""
    dtype = "" if result["dtype"] == "any" else f", {result['dtype']}"
    return f"{result['case']}, {result['device']}{dtype}"


def lines(result: dict[str, Any]) -> list[str]:
    """The lines of a result's table."""
    if "contestants" in result:
        return contest_lines(result)
    if "runs" in result:
        return run_lines(result)
    if "flatness" in result:
        return flatness_lines(result)
    if "peaks" in result:
        return gemm_lines(result)
    return time_lines(result)


def contest_lines(result: dict[str, Any]) -> list[str]:
    """Contestants with medians, errors and memory, then the ratios."""
    entries = result["contestants"]
    parts = [each for each in PARTS if each[0] in next(iter(entries.values()))]
    rows = [
        [
            "contestant",
            *(shown for _, shown in parts),
            "tokens/s",
            "peak GiB",
            "gradient error",
            "loss error",
        ]
    ]
    for name, entry in entries.items():
        rows.append(
            [
                name,
                *(f"{entry[key]:.2f}" for key, _ in parts),
                f"{entry['tokens_per_s']:.0f}",
                f"{entry['peak_memory'] / GIB:.1f}",
                f"{entry['errors']['gradient']:.1e}",
                f"{entry['errors']['loss']:.1e}",
            ]
        )
    return [*markdown(rows), "", *ratio_lines(result)]


def ratio_lines(result: dict[str, Any]) -> list[str]:
    """The ratios, a part of the step in each line."""
    rows = [["ratio of times", *next(iter(result["ratios"].values()))]]
    for part, values in result["ratios"].items():
        rows.append([part, *map(shown_ratio, values.values())])
    return markdown(rows)


def run_lines(result: dict[str, Any]) -> list[str]:
    """Whole runs with their wall time."""
    rows = [["run", "seconds", "peak GiB", "loss error", "ratio"]]
    for name, entry in result["runs"].items():
        key = next((key for key in result["ratios"] if key.startswith(f"{name} / ")), None)
        rows.append(
            [
                name,
                f"{entry['seconds']:.1f}",
                f"{entry['peak_memory'] / GIB:.1f}",
                f"{entry['loss_error']:.1e}",
                "1" if key is None else shown_ratio(result["ratios"][key]),
            ]
        )
    return markdown(rows)


def flatness_lines(result: dict[str, Any]) -> list[str]:
    """Memory early and late."""
    described = result["described"]
    rows = [
        [
            "contestant",
            f"MiB up to step {described['window']}",
            f"MiB from step {described['steps'] - described['window']}",
            "growth",
            "flat",
        ]
    ]
    for name, entry in result["flatness"].items():
        flat = entry["growth"] <= result["flat_up_to"]
        rows.append(
            [
                name,
                f"{entry['early'] / 2**20:.0f}",
                f"{entry['last'] / 2**20:.0f}",
                f"{entry['growth']:.3f}",
                "yes" if flat else "no",
            ]
        )
    return markdown(rows)


def time_lines(result: dict[str, Any]) -> list[str]:
    """Things with their wall time."""
    ratios = next(iter(result["ratios"].values()), {})
    rows = [["what", "median (s)", "first (s)", "per second", "ratio"]]
    for name, entry in result["times"].items():
        key = next((key for key in ratios if key.startswith(f"{name} / ")), None)
        rows.append(
            [
                name,
                f"{entry['median_s']:.2f}",
                f"{entry['first_s']:.2f}",
                entry["unit"],
                "" if key is None else shown_ratio(ratios[key]),
            ]
        )
    return markdown(rows)


def gemm_lines(result: dict[str, Any]) -> list[str]:
    """Peaks by shape, and the share of them that steps reach."""
    peaks = result["peaks"]
    rows = [["shape (out x in), GFLOP/s", *next(iter(peaks.values()))]]
    for shape, values in peaks.items():
        rows.append([shape, *(f"{value:.0f}" for value in values.values())])
    shares = [["contestant", "step (s)", "GFLOP/s", "share of peak"]]
    for name, entry in result["shares"].items():
        shares.append(
            [
                name,
                f"{entry['median_step_s']:.2f}",
                f"{entry['gflops']:.0f}",
                f"{100 * entry['share_of_peak']:.0f} %",
            ]
        )
    return [*markdown(rows), "", *markdown(shares)]


def footnotes(result: dict[str, Any]) -> list[str]:
    """Workload, flags, machine, versions and command."""
    notes = [f"- {key}: {shown(value)}" for key, value in result["described"].items()]
    for name, entry in result.get("contestants", {}).items():
        facts = entry["facts"]
        flags = ", ".join(f"{FLAGS[key]} {facts[key]}" for key in FLAGS if key in facts)
        notes.append(f"- `{name}`: {flags}")
    where = result["circumstances"]
    machine = where["machine"]
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    notes += [
        f"- {where['date']}: {machine['processor']}, {machine['cores']} cores "
        f"({machine['cpu_capability']}), {machine.get('memory_gib', '?')} GiB{gpu}; load before "
        f"{where['load_before']}",
        f"- Python {where['python']}, {versions}",
        f"- `{where['command']}`",
    ]
    return notes


def shown(value: Any) -> str:
    """A value of the description."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def shown_ratio(value: float | None) -> str:
    """A ratio, or why there is none."""
    return "refused: not the same" if value is None else f"{value:.2f}"


def markdown(rows: list[list[str]]) -> list[str]:
    """A Markdown table with aligned columns; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown_rows = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return [shown_rows[0], rule, *shown_rows[1:]]


if __name__ == "__main__":
    sys.exit(main())
