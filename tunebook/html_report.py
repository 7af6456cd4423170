"""`report.html`: a run on one page that needs nothing but itself."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunebook.curves import plot_curves
from tunebook.plan_report import plan_text
from tunebook.report import reward_text, summary_text
from tunebook.runs.directory import RunDir
from tunebook.runs.files import replace_text, without_surrogates
from tunebook.text_tables import UNLIMITED_WIDTH

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f6f7f9; padding: 1rem; font-size: 13px; white-space: pre-wrap;
  overflow-wrap: anywhere; }
img { max-width: 100%; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #ddd; padding: .5rem; text-align: left; vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #e6e6e6; }
  pre { background: #22252b; }
  img { background: #fff; }
}
"""


def write_html_report(run: RunDir) -> Path:
    """Writes `report.html` and `curves.png` of a run, and returns the path of the page."""
    evaluation = run.record.evaluation
    title = f"{run.record.recipe} #{run.record.number}: {run.path.name}"
    picture = plot_curves(
        run.metrics(),
        run.path / "curves.png",
        title=title,
        best_step=None if evaluation is None else evaluation.best_step,
    )
    has_plan = (run.path / "plan.json").is_file()
    parts = [
        f"<h1>{escaped(title)}</h1>",
        f"<pre>{escaped(summary_text(run, width=UNLIMITED_WIDTH))}</pre>",
        image(picture, words="loss over steps"),
        _samples(run.samples()),
        _rollouts(run.last_rollouts()),
        _plan(run.read_plan()) if has_plan else "",
    ]
    path = run.path / "report.html"
    replace_text(path, page(title, parts))
    return path


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page under a title.

    Args:
        title: as text.
        parts: of its body, as HTML.
    """
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escaped(title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def image(file: Path, *, words: str) -> str:
    """A PNG inside the page, and in words what it shows."""
    encoded = base64.b64encode(file.read_bytes()).decode("ascii")
    return f'<img alt="{escaped(words)}" src="data:image/png;base64,{encoded}">'


def _plan(plan: Mapping[str, Any]) -> str:
    return f"<h2>Plan</h2><pre>{escaped(plan_text(plan, width=UNLIMITED_WIDTH))}</pre>"


def _samples(samples: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """One column of answers for every step that was sampled, and one of those expected."""
    if not samples:
        return ""
    by_prompt = list(zip(*samples.values(), strict=False))
    has_expected = any(answers[0].get("expected") for answers in by_prompt)
    head = ["prompt", *(f"step {step}" for step in samples), *(["expected"] * has_expected)]
    rows = [
        [
            answers[0].get("prompt"),
            *(_answer(one) for one in answers),
            *([answers[0].get("expected")] * has_expected),
        ]
        for answers in by_prompt
    ]
    lines = [table_line("th", head), *(table_line("td", row) for row in rows)]
    return f"<h2>Answers</h2><table>{''.join(lines)}</table>"


def _answer(sample: Mapping[str, Any]) -> str | None:
    if "reward" not in sample:
        return sample.get("completion")
    return f"{sample.get('completion')}\n\nreward {reward_text(sample['reward'])}"


def _rollouts(rollouts: Sequence[Mapping[str, Any]]) -> str:
    """What the last step was trained on."""
    if not rollouts:
        return ""
    lines = [table_line("th", ["prompt", "completion", "reward", "advantage"])]
    for one in rollouts:
        advantage = one.get("advantage")
        cells = [
            one.get("prompt"),
            one.get("completion"),
            reward_text(one.get("reward")),
            "" if advantage is None else f"{advantage:+.2f}",
        ]
        lines.append(table_line("td", cells))
    return f"<h2>Trained on in the last step</h2><table>{''.join(lines)}</table>"


def table_line(tag: str, cells: Sequence[Any]) -> str:
    """A row of a table, its cells as text."""
    return f"<tr>{''.join(f'<{tag}>{escaped(cell)}</{tag}>' for cell in cells)}</tr>"


def escaped(text: Any) -> str:
    """Text as HTML shows it; None is empty."""
    return html.escape(without_surrogates("" if text is None else str(text)))
