"""Rows to tokens with the model's own chat template, and a mask that says which carry loss."""

from tunebook.render.cache import (
    Rendered,
    RenderedRows,
    RenderReport,
    link_rendered,
    read_frozen,
)
from tunebook.render.pairs import RenderedPair, render_preference
from tunebook.render.prompts import render_prompt
from tunebook.render.rows import render_pairs, render_prompts, render_rows

__all__ = [
    "RenderReport",
    "Rendered",
    "RenderedPair",
    "RenderedRows",
    "link_rendered",
    "read_frozen",
    "render_pairs",
    "render_preference",
    "render_prompt",
    "render_prompts",
    "render_rows",
]
