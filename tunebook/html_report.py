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
    encoded = base64.b64encode(picture.read_bytes()).decode("ascii")
    has_plan = (run.path / "plan.json").is_file()
    parts = [
        f"<h1>{_escaped(title)}</h1>",
        f"<pre>{_escaped(summary_text(run, width=UNLIMITED_WIDTH))}</pre>",
        f'<img alt="loss over steps" src="data:image/png;base64,{encoded}">',
        _samples(run.samples()),
        _rollouts(run.last_rollouts()),
        _plan(run.read_plan()) if has_plan else "",
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_escaped(title)}'
        f"</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    path = run.path / "report.html"
    replace_text(path, page)
    return path


def _plan(plan: Mapping[str, Any]) -> str:
    return f"<h2>Plan</h2><pre>{_escaped(plan_text(plan, width=UNLIMITED_WIDTH))}</pre>"


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
    lines = [_table_line("th", head), *(_table_line("td", row) for row in rows)]
    return f"<h2>Answers</h2><table>{''.join(lines)}</table>"


def _answer(sample: Mapping[str, Any]) -> str | None:
    if "reward" not in sample:
        return sample.get("completion")
    return f"{sample.get('completion')}\n\nreward {reward_text(sample['reward'])}"


def _rollouts(rollouts: Sequence[Mapping[str, Any]]) -> str:
    """What the last step was trained on."""
    if not rollouts:
        return ""
    lines = [_table_line("th", ["prompt", "completion", "reward", "advantage"])]
    for one in rollouts:
        advantage = one.get("advantage")
        cells = [
            one.get("prompt"),
            one.get("completion"),
            reward_text(one.get("reward")),
            "" if advantage is None else f"{advantage:+.2f}",
        ]
        lines.append(_table_line("td", cells))
    return f"<h2>Trained on in the last step</h2><table>{''.join(lines)}</table>"


def _table_line(tag: str, cells: Sequence[Any]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_escaped(cell)}</{tag}>' for cell in cells)}</tr>"


def _escaped(text: Any) -> str:
    return html.escape(without_surrogates("" if text is None else str(text)))
