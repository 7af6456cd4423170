"""Tables of results; `python -m benchmarks.report` writes RESULTS.md from the JSON files."""

from __future__ import annotations

from typing import Any

GIB = 2**30


def table(result: dict[str, Any]) -> str:
    """A result as text for a terminal and for Markdown."""
    return "\n".join([f"\n### {title(result)}", "", *lines(result)])


def title(result: dict[str, Any]) -> str:
    """Case, device and dtype."""
    return f"{result['case']}, {result['device']}, {result['dtype']}"


def lines(result: dict[str, Any]) -> list[str]:
    """The lines of a result's table."""
    if "runs" in result:
        return run_lines(result)
    return contest_lines(result)


def contest_lines(result: dict[str, Any]) -> list[str]:
    """Contestants with medians, errors and memory, then the ratios."""
    entries = result["contestants"]
    extra = [
        key for key in next(iter(entries.values())) if key.startswith(("median_", "reference_"))
    ]
    extra.remove("median_step_s")
    rows = [
        ["contestant", "step (s)", *extra, "tokens/s", "peak GiB", "gradient error", "loss error"]
    ]
    for name, entry in entries.items():
        rows.append(
            [
                name,
                f"{entry['median_step_s']:.2f}",
                *(f"{entry[key]:.2f}" for key in extra),
                f"{entry['tokens_per_s']:.0f}",
                f"{entry['peak_memory'] / GIB:.1f}",
                f"{entry['errors']['gradient']:.1e}",
                f"{entry['errors']['loss']:.1e}",
            ]
        )
    ratio_rows = [["ratio of times", *next(iter(result["ratios"].values()))]]
    for part, values in result["ratios"].items():
        ratio_rows.append([part, *map(shown_ratio, values.values())])
    return [*markdown(rows), "", *markdown(ratio_rows)]


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


def shown_ratio(value: float | None) -> str:
    """A ratio, or why there is none."""
    return "refused: not the same" if value is None else f"{value:.2f}"


def markdown(rows: list[list[str]]) -> list[str]:
    """A Markdown table with aligned columns; the first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [shown[0], "| " + " | ".join("-" * width for width in widths) + " |", *shown[1:]]
