"""The rows of a run, loaded and split: from their sources, or from the frozen snapshot of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.compose import as_dict
from tunebook.config import RecipeConfig
from tunebook.data.duplicates import cross_split_duplicates
from tunebook.data.ledger import dataset_key, ledger_path, read_ledger, write_ledger
from tunebook.data.load import load_eval_rows, load_rows
from tunebook.data.rows import Kind, Row, SourceInfo, content_hash, without_trained
from tunebook.data.snapshot import read_snapshot, write_snapshot
from tunebook.data.sources import source_place
from tunebook.errors import ConfigError, DataError, RunError
from tunebook.models import load_tokenizer, tunebook_home
from tunebook.runs import RunDir
from tunebook.runs.redaction import contains_secret
from tunebook.split import RowIdentity, Side, eval_row_count, remembered_side, split_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.render import RenderedRows


SEPARATE = "rows of data.eval"
"""The split rule of a run whose eval rows come from a source of their own."""


@dataclass(frozen=True)
class PreparedRows:
    """Train and eval rows, and how they came to be that."""

    train: Sequence[Row]
    eval: Sequence[Row]
    source_weights: tuple[float, ...]
    """Appearances per epoch of the rows of each source."""
    manifest: dict[str, Any]
    """What was read and left out, kept with the snapshot."""
    split: dict[str, Any]
    """What `split.json` holds."""
    warnings: tuple[str, ...]


_shared: ContextVar[dict[str, PreparedRows] | None] = ContextVar("shared", default=None)


@dataclass(frozen=True)
class HeldOut:
    """Train rows divided into two sides."""

    train: list[Row]
    eval: list[Row]
    wanted: int
    """Rows that the settings ask to hold out."""
    remembered: int
    """Rows whose side an earlier run over the dataset decided."""
    ledger: Path
    """Where that is remembered."""


def prepare_rows(config: RecipeConfig, *, kind: Kind) -> PreparedRows:
    """The rows of a new run, read from their sources and split; writes nothing.

    Args:
        config: of the run.
        kind: what the recipe trains on.

    Raises:
        ConfigError, DataError: as `load_rows`; also when the split leaves nothing to train on.
    """
    if contains_secret(config.data.system_prompt or "", os.environ):
        raise ConfigError(
            "data.system_prompt holds the value of a secret environment variable, or a key. It "
            "would be trained into the model and stand in every row of the run's data; take it out"
        )
    loaded = load_rows(config.data, kind=kind, unsized_limit=_unsized_limit(config))
    held_out = load_eval_rows(config.data, kind=kind)
    warnings = list(loaded.warnings)
    problems = [asdict(problem) for problem in loaded.problems]
    if held_out is not None:
        train, evaluation = loaded.rows, held_out.rows
        warnings += [f"data.eval: {warning}" for warning in held_out.warnings]
        problems += [asdict(problem) for problem in held_out.problems]
        rule = SEPARATE
    else:
        held = _hold_out(loaded.rows, config)
        train, evaluation = held.train, held.eval
        rule = _split_rule(config, held)
        if not evaluation and config.eval.fraction > 0:
            warnings.append(_why_no_eval(config, held))
    if not train:
        raise ConfigError(
            f"{len(loaded.rows)} usable rows, of which {len(evaluation)} are held out: nothing is "
            "left to train on. Need at least 2 rows, or a smaller eval.fraction"
        )
    duplicates = cross_split_duplicates(train, evaluation)
    if duplicates.exact or duplicates.normalised:
        warnings += duplicates.lines()
    return PreparedRows(
        train=train,
        eval=evaluation,
        source_weights=tuple(source.weight for source in loaded.sources),
        manifest={
            "sources": [_source(info) for info in loaded.sources],
            "rows_read": loaded.num_read,
            "rows_skipped": len(problems),
            "problems": problems,
            "warnings": warnings,
        },
        split={
            "rule": rule,
            "train_rows": len(train),
            "eval_rows": len(evaluation),
            "exact_duplicates_across": len(duplicates.exact),
            "normalised_duplicates_across": len(duplicates.normalised),
        },
        warnings=tuple(warnings),
    )


def rows_of_run(directory: Path, *, split: Mapping[str, Any]) -> PreparedRows:
    """The rows that an earlier run froze.

    Args:
        directory: `data/` of the run.
        split: its `split.json`.

    Raises:
        DataError: the snapshot was changed or is incomplete.
    """
    snapshot = read_snapshot(directory)
    return PreparedRows(
        train=snapshot.train,
        eval=snapshot.eval,
        source_weights=tuple(source["weight"] for source in snapshot.manifest["sources"]),
        manifest=snapshot.manifest,
        split=dict(split),
        warnings=tuple(snapshot.manifest["warnings"]),
    )


@contextmanager
def sharing_rows() -> Iterator[None]:
    """A block in which configs with the same data get the same rows, read once."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def rows_for(config: RecipeConfig, *, kind: Kind) -> PreparedRows:
    """The rows of a config: those of the run that it resumes, else from the sources.

    Raises:
        ConfigError, DataError: as `prepare_rows` and `rows_of_run`.
    """
    if config.resume is None:
        shared = _shared.get()
        if shared is None:
            return prepare_rows(config, kind=kind)
        key = json.dumps(
            [as_dict(config)[name] for name in ("data", "eval")]
            + [kind.value, _unsized_limit(config)],
            sort_keys=True,
        )
        if key not in shared:
            shared[key] = prepare_rows(config, kind=kind)
        return shared[key]
    run = RunDir.open(config.resume)
    run.require_prepared()
    return rows_of_run(run.data_dir, split=run.read_split())


def tokenizer_for(config: RecipeConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a config's model.

    Raises:
        ConfigError: it cannot be loaded.
    """
    model = config.model
    return load_tokenizer(
        model.tokenizer or model.name,
        revision=model.revision,
        chat_template=model.chat_template,
        trust_remote_code=model.trust_remote_code,
    )


def render_side(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: RecipeConfig, *, side: Side
) -> RenderedRows | None:
    """The data of one side of the split, from the cache if it was rendered before; None if empty.

    A run that goes on takes the tokens that it froze, whatever became of template and tokenizer.

    Args:
        rows: conversations of that side.
        tokenizer: of the model.
        config: masks and policies.
        side: of the split.
    """
    from tunebook.render import render_rows

    render = partial(
        render_rows,
        mask=config.data.mask,
        max_seq_len=config.max_seq_len,
        on_blank_answer=config.data.on_blank_answer,
    )
    return _rendered_side(rows, tokenizer, config, side, render)


def render_pair_side(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: RecipeConfig, *, side: Side
) -> RenderedRows | None:
    """As `render_side`, of preference rows: two data a row, chosen then rejected."""
    from tunebook.render import render_pairs

    render = partial(
        render_pairs,
        max_seq_len=config.max_seq_len,
        on_blank_answer=config.data.on_blank_answer,
    )
    return _rendered_side(rows, tokenizer, config, side, render)


def render_prompt_side(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: RecipeConfig,
    *,
    side: Side,
    max_tokens: int,
) -> RenderedRows | None:
    """As `render_side`, of prompt rows: one datum a row, nothing of it trained.

    Args:
        rows: prompts of that side.
        tokenizer: of the model.
        config: policies.
        side: of the split.
        max_tokens: of the longest prompt.
    """
    from tunebook.render import render_prompts

    return _rendered_side(
        rows, tokenizer, config, side, partial(render_prompts, max_tokens=max_tokens)
    )


def _rendered_side(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: RecipeConfig,
    side: Side,
    render: Callable[..., RenderedRows],
) -> RenderedRows | None:
    from tunebook.display import counting
    from tunebook.render import read_frozen

    if not rows:
        return None
    if config.resume is not None:
        frozen = read_frozen(frozen_tokens(RunDir.open(config.resume), side), rows)
        if frozen is not None:
            return frozen
    with _of_side(config, side), counting(f"rendering {side} rows") as progress:
        return render(
            rows,
            tokenizer,
            on_long_row=config.data.on_long_row,
            on_bad_row=config.data.on_bad_row,
            cache_dir=tunebook_home(),
            progress=progress,
        )


@contextmanager
def _of_side(config: RecipeConfig, side: Side) -> Iterator[None]:
    """A block of which errors about eval rows say so; train rows are what is meant otherwise."""
    try:
        yield
    except DataError as error:
        if side is Side.train:
            raise
        given = config.data.eval.is_given
        origin = f"data.eval, {source_place(config.data.eval)}" if given else "held out"
        raise type(error)(f"Eval rows ({origin}): {error}", error.problems) from error


def kept_rows(
    rows: PreparedRows, train_data: RenderedRows, eval_data: RenderedRows | None
) -> list[Row]:
    """The eval rows that can be used, or the train rows where there is no eval split."""
    if eval_data is not None:
        return [rows.eval[row] for row in eval_data.report.kept_rows]
    return [rows.train[row] for row in train_data.report.kept_rows]


def frozen_tokens(run: RunDir, side: Side) -> Path:
    """Where a run keeps the rendered data of one side."""
    return run.data_dir / "tokens" / side.value


def freeze(
    rows: PreparedRows, run: RunDir, *, train_data: RenderedRows, eval_data: RenderedRows | None
) -> str:
    """Writes rows and tokens into a new run; returns the fingerprint of the rows."""
    from tunebook.render import link_rendered

    fingerprint = write_snapshot(
        run.data_dir, train=rows.train, eval=rows.eval, manifest=rows.manifest
    )
    link_rendered(train_data, frozen_tokens(run, Side.train))
    if eval_data is not None:
        link_rendered(eval_data, frozen_tokens(run, Side.eval))
    return fingerprint


def remember_split(rows: PreparedRows, config: RecipeConfig, *, has_trained: bool = False) -> None:
    """Makes the split of a run that is about to train that of every later run over its dataset.

    Args:
        rows: of the run.
        config: of the run.
        has_trained: it goes on with weights trained on these rows, whatever others hold out.

    Raises:
        RunError: another run has fixed it otherwise in the meantime.
    """
    if rows.split["rule"] == SEPARATE:
        return
    key = _ledger_key(config)
    train, held_out = ([_identity(row, config) for row in side] for side in (rows.train, rows.eval))
    train_names, eval_names = (
        {name for row in side for name in row.names} for side in (train, held_out)
    )
    # A name on both sides says nothing: each of its rows has a name of its own.
    assignments = dict.fromkeys(train_names - eval_names, Side.train)
    assignments |= dict.fromkeys(eval_names - train_names, Side.eval)
    # A run that holds nothing out decides nothing for later ones, yet trains on no exam of others.
    merged = _sides(write_ledger(key, assignments) if held_out else read_ledger(key))
    trained = sum(remembered_side(row, merged) is Side.train for row in held_out)
    examined = sum(remembered_side(row, merged) is Side.eval for row in train)
    if (trained or examined) and not has_trained:
        raise RunError(
            f"Another run over this dataset has fixed the split meanwhile, with {trained} of these "
            f"eval rows on the training side and {examined} of these train rows held out. Prepare "
            "this run again; it will use that split"
        )


def _hold_out(rows: Sequence[Row], config: RecipeConfig) -> HeldOut:
    settings = config.eval
    num_eval = eval_row_count(
        len(rows),
        fraction=settings.fraction,
        min_rows=settings.min_rows,
        max_rows=settings.max_rows,
    )
    key = _ledger_key(config)
    identities = [_identity(row, config) for row in rows]
    remembered = _sides(read_ledger(key))
    split = split_rows(identities, num_eval=num_eval, remembered=remembered)
    return HeldOut(
        train=[rows[index] for index in split.train],
        eval=[rows[index] for index in split.eval],
        wanted=num_eval,
        remembered=sum(remembered_side(row, remembered) is not None for row in identities),
        ledger=ledger_path(key),
    )


def _sides(ledger: Mapping[str, str]) -> dict[str, Side]:
    return {name: Side(side) for name, side in ledger.items()}


def _ledger_key(config: RecipeConfig) -> str:
    settings = config.eval
    return dataset_key(
        config.data,
        fraction=settings.fraction,
        min_rows=settings.min_rows,
        max_rows=settings.max_rows,
    )


def _identity(row: Row, config: RecipeConfig) -> RowIdentity:
    content, text = f"content:{_written_hash(row)}", f"content:{row.text_hash}"
    if row.group is not None:
        return RowIdentity(f"group:{row.group}", content, text)
    if config.data.id_column is not None:
        return RowIdentity(f"id:{row.id}", content, text)
    return RowIdentity(content, content, text)


def _written_hash(row: Row) -> str:
    """The row's content hash without what is trained of it.

    Unlike `text_hash`, it tells apart how the turns were written: existing ledgers know rows by it,
    and its rank decides who is held out.
    """
    turns = (row.messages, row.chosen, row.rejected)
    if not any("trained" in turn for side in turns for turn in side):
        return row.content_hash
    return content_hash(
        kind=row.kind,
        messages=without_trained(row.messages),
        chosen=without_trained(row.chosen),
        rejected=without_trained(row.rejected),
        num_prompt=row.num_prompt,
        plain=row.plain,
        tools=row.tools,
        answer_columns={},
    )


def _split_rule(config: RecipeConfig, held: HeldOut) -> str:
    if config.eval.fraction == 0:
        return "nothing is held out (eval.fraction=0)"
    by = config.data.group_column or config.data.id_column or "content"
    kept = ""
    if held.remembered:
        kept = (
            f"; {held.remembered} rows keep the side that an earlier run over this dataset gave "
            f"them ({held.ledger})"
        )
    share = f"eval.fraction={config.eval.fraction:g}"
    return f"{len(held.eval)} rows held out by a hash of their {by} ({share}){kept}"


def _why_no_eval(config: RecipeConfig, held: HeldOut) -> str:
    settings = config.eval
    num_rows = len(held.train)
    share = f"{settings.fraction:g} of {num_rows} rows"
    whole_rows = eval_row_count(
        num_rows, fraction=settings.fraction, min_rows=0, max_rows=settings.max_rows
    )
    way_out = "Raise eval.fraction"
    if whole_rows == 0:
        reason = f"{share} is less than one row"
    elif held.wanted == 0:
        reason = f"{share} is less than eval.min_rows={settings.min_rows}"
        way_out = "Lower eval.min_rows, raise eval.fraction"
    else:
        reason = "rows that belong together are too many for the share that is held out"
    return (
        f"no eval rows: {reason}. Nothing is evaluated, and the last checkpoint becomes the model. "
        f"{way_out}, or name eval rows with data.eval.path"
    )


def _source(info: SourceInfo) -> dict[str, Any]:
    return asdict(info)


def _unsized_limit(config: RecipeConfig) -> int | None:
    """Rows that a run of `max_steps` steps can use at most, for a source without a length."""
    if config.plan.max_steps is None:
        return None
    return config.plan.max_steps * config.plan.batch_size
