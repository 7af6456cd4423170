"""`report.html`: a run on one page that needs nothing but itself."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunebook.curves import plot_curves
from tunebook.plan_report import plan_text
from tunebook.report import summary_text
from tunebook.runs.directory import RunDir
from tunebook.runs.files import replace_text, without_surrogates

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f6f7f9; padding: 1rem; overflow-x: auto; font-size: 13px; }
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
        f"<pre>{_escaped(summary_text(run))}</pre>",
        f'<img alt="loss over steps" src="data:image/png;base64,{encoded}">',
        _samples(run.samples()),
        f"<h2>Plan</h2><pre>{_escaped(plan_text(run.read_plan()))}</pre>" if has_plan else "",
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_escaped(title)}'
        f"</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    path = run.path / "report.html"
    replace_text(path, page)
    return path


def _samples(samples: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """One column of answers for every step that was sampled."""
    if not samples:
        return ""
    steps = list(samples)
    head = "".join(f"<th>step {step}</th>" for step in steps)
    rows = [
        f"<tr><td>{_escaped(same_prompt[0].get('prompt'))}</td>"
        + "".join(f"<td>{_escaped(one.get('completion'))}</td>" for one in same_prompt)
        + "</tr>"
        for same_prompt in zip(*samples.values(), strict=False)
    ]
    return f"<h2>Answers</h2><table><tr><th>prompt</th>{head}</tr>{''.join(rows)}</table>"


def _escaped(text: Any) -> str:
    return html.escape(without_surrogates("" if text is None else str(text)))
