"""A few rendered rows, token by token with their loss weights, kept with a run for its report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.inspect import Piece, heading_of, html_piece, pieces_of, shown_rows
from tunebook.render.codec import Codec
from tunebook.reports.page import escaped
from tunebook.runs.directory import RunDir
from tunebook.runs.files import read_json, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from tunebook.data.rows import Row
    from tunebook.render import RenderedRows

FILE = "mask_sample.json"
NUM_ROWS = 3
MOST_TOKENS = 400
"""Of a datum; what comes after is left out."""


def write_mask_sample(
    run: RunDir,
    rows: Sequence[Row],
    rendered: RenderedRows,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Keeps the first rows that are trained on, so that a report needs neither data nor model."""
    codec = Codec(tokenizer)
    sample: list[dict[str, Any]] = []
    for row, data in shown_rows(rendered, NUM_ROWS):
        for datum in data:
            item = rendered[datum]
            where, what = heading_of(rows[row], datum, rendered, item)
            head = f"{Path(where).name} · {what}"
            pieces = pieces_of(item, codec, limit=MOST_TOKENS)
            left = len(item.tokens) - sum(len(piece.ids) for piece in pieces)
            shown = [asdict(piece) for piece in pieces]
            sample.append({"heading": head, "pieces": shown, "tokens_left_out": left})
    run.write_once(FILE, to_json(sample) + "\n")


def mask_sample_html(run: RunDir) -> str:
    """The kept rows as HTML; nothing for a run that has none."""
    file = run.path / FILE
    if not file.is_file():
        return ""
    sample = read_json(file)
    blocks = "".join(map(_block, sample))
    if not any(piece["weight"] for each in sample for piece in each["pieces"]):
        return f"<h3>Rendered prompts</h3>{blocks}" if blocks else ""
    legend = (
        '<p class="tokens small"><b class="on">trained</b> <b class="part">trained with another '
        "weight</b> not trained; hover over a token for its id, position and weight</p>"
    )
    return f"<h3>What is trained, token by token</h3>{legend}{blocks}"


def _block(sample: dict[str, Any]) -> str:
    tokens = "".join(html_piece(Piece(**piece)) for piece in sample["pieces"])
    count = sample["tokens_left_out"]
    left = f'<p class="faint small">and {count:,} more tokens</p>' if count else ""
    head = escaped(sample["heading"])
    return f'<p class="small">{head}</p><pre class="tokens">{tokens}</pre>{left}'
