"""The rows of a run, loaded and split: from their sources, or from the frozen snapshot of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config import RecipeConfig
from tunebook.data.duplicates import cross_split_duplicates
from tunebook.data.ledger import dataset_key, read_ledger, write_ledger
from tunebook.data.load import load_eval_rows, load_rows
from tunebook.data.rows import Kind, Row, SourceInfo
from tunebook.data.snapshot import read_snapshot, write_snapshot
from tunebook.errors import ConfigError, RunError
from tunebook.models import load_tokenizer, tunebook_home
from tunebook.runs import RunDir
from tunebook.split import RowIdentity, Side, eval_row_count, split_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.render import RenderedRows


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
    ledger: tuple[str, Mapping[str, Side]] | None
    """Key of the split ledger and the assignments to remember; None = nothing was held out."""


def prepare_rows(config: RecipeConfig, *, kind: Kind) -> PreparedRows:
    """The rows of a new run, read from their sources and split; writes nothing.

    Args:
        config: of the run.
        kind: what the recipe trains on.

    Raises:
        ConfigError, DataError: as `load_rows`; also when the split leaves nothing to train on.
    """
    loaded = load_rows(config.data, kind=kind, unsized_limit=_unsized_limit(config))
    held_out = load_eval_rows(config.data, kind=kind)
    warnings = list(loaded.warnings)
    problems = [asdict(problem) for problem in loaded.problems]
    ledger = None
    if held_out is not None:
        train, evaluation = loaded.rows, held_out.rows
        warnings += [f"data.eval: {warning}" for warning in held_out.warnings]
        problems += [asdict(problem) for problem in held_out.problems]
        rule = "data.eval"
    else:
        train, evaluation, ledger = _hold_out(loaded.rows, config)
        rule = _split_rule(config)
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
        ledger=ledger,
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
        ledger=None,
    )


def rows_for(config: RecipeConfig, *, kind: Kind) -> PreparedRows:
    """The rows of a config: those of the run that it resumes, else from the sources.

    Raises:
        ConfigError, DataError: as `prepare_rows` and `rows_of_run`.
    """
    if config.resume is None:
        return prepare_rows(config, kind=kind)
    run = RunDir.open(config.resume)
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
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, config: RecipeConfig, *, what: str
) -> RenderedRows | None:
    """The data of one side of the split, from the cache if it was rendered before; None if empty.

    Args:
        rows: of that side.
        tokenizer: of the model.
        config: masks and policies.
        what: the side, for the progress bar.
    """
    from tunebook.display import counting
    from tunebook.render import render_rows

    if not rows:
        return None
    with counting(f"rendering {what} rows") as progress:
        return render_rows(
            rows,
            tokenizer,
            mask=config.data.mask,
            max_seq_len=config.max_seq_len,
            on_long_row=config.data.on_long_row,
            on_blank_answer=config.data.on_blank_answer,
            on_bad_row=config.data.on_bad_row,
            cache_dir=tunebook_home(),
            progress=progress,
        )


def freeze_rows(rows: PreparedRows, directory: Path) -> str:
    """Remembers the split of a new run and writes its snapshot; returns the data's fingerprint.

    Raises:
        RunError: another run over the dataset fixed its split otherwise in the meantime.
    """
    if rows.ledger is not None:
        key, assignments = rows.ledger
        merged = write_ledger(key, assignments)
        if any(merged[name] != side for name, side in assignments.items()):
            raise RunError(
                "Another run over this dataset has fixed the split while this one was prepared, "
                "with other rows. Start this run again; it will use the split that is remembered"
            )
    return write_snapshot(directory, train=rows.train, eval=rows.eval, manifest=rows.manifest)


def _hold_out(
    rows: Sequence[Row], config: RecipeConfig
) -> tuple[list[Row], list[Row], tuple[str, Mapping[str, Side]]]:
    settings = config.eval
    num_eval = eval_row_count(
        len(rows),
        fraction=settings.fraction,
        min_rows=settings.min_rows,
        max_rows=settings.max_rows,
    )
    key = dataset_key(
        config.data,
        fraction=settings.fraction,
        min_rows=settings.min_rows,
        max_rows=settings.max_rows,
    )
    split = split_rows(
        [_identity(row, config) for row in rows],
        num_eval=num_eval,
        remembered={name: Side(side) for name, side in read_ledger(key).items()},
    )
    train = [rows[index] for index in split.train]
    return train, [rows[index] for index in split.eval], (key, split.assignments)


def _identity(row: Row, config: RecipeConfig) -> RowIdentity:
    content = f"content:{row.content_hash}"
    if row.group is not None:
        return RowIdentity(f"group:{row.group}", content)
    if config.data.id_column is not None:
        return RowIdentity(f"id:{row.id}", content)
    return RowIdentity(content, content)


def _split_rule(config: RecipeConfig) -> str:
    by = config.data.group_column or config.data.id_column or "content"
    settings = config.eval
    return (
        f"lowest keyed hash of {by}: {settings.fraction:g} of the rows, none below "
        f"{settings.min_rows}, at most {settings.max_rows}"
    )


def _source(info: SourceInfo) -> dict[str, Any]:
    return asdict(info)


def _unsized_limit(config: RecipeConfig) -> int | None:
    """Rows that a run of `max_steps` steps can use at most, for a source without a length."""
    if config.plan.max_steps is None:
        return None
    return config.plan.max_steps * config.plan.batch_size
