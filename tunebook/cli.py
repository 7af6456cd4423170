"""The `tunebook` command."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tunebook import __version__
from tunebook.errors import ConfigError
from tunebook.recipe_files import RECIPES, recipe_files
from tunebook.report_commands import add_report_commands
from tunebook.runs_commands import (
    PASS_ON,
    AsJson,
    OneRun,
    Root,
    add_run_commands,
    runs_app,
)

DEBUG_VARIABLE = "TUNEBOOK_DEBUG"

app = typer.Typer(
    name="tunebook",
    help="A cookbook of post-training recipes for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
rewards_app = typer.Typer(
    help="List the built-in rewards, or try rewards on saved completions.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
app.add_typer(rewards_app, name="rewards")
resources_app = typer.Typer(
    help="List and stop what may bill on a service.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(resources_app, name="resources")

SWEEP_OR_RUNS = "Folder of a sweep; or runs, each by its directory, number (12 or #12) or id."


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its code.

    An error that a person can act on is one paragraph on standard error; `--debug` before the
    command, or `TUNEBOOK_DEBUG=1`, adds the traceback.
    """
    try:
        app(args=None if argv is None else list(argv))
    except Exception as error:
        from tunebook.display import report_error

        sys.exit(report_error(error))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tunebook {__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def recipe_names() -> dict[str, str]:
    """Name -> first line of the docstring of every recipe, without importing any."""
    return {name: _summary_line(file) for name, file in recipe_files().items()}


@app.command(
    "inspect",
    context_settings={**PASS_ON, "allow_interspersed_args": True},
    options_metavar="[OPTIONS] [KEY=VALUE]...",
)
def _inspect(
    context: typer.Context,
    recipe: Annotated[str, typer.Option(help="Recipe whose config is meant.")] = "sft",
    html: Annotated[
        Path | None, typer.Option(help="Write the rows to this web page instead.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Rows to show.", min=1)] = 5,
) -> None:
    """Show train rows token by token with their loss weights, and check them.

    It looks at the train side of the split that a run would make. Settings are given as to the
    recipe, for example data.path=rows.jsonl model.name=some/model. Exit code 1 = errors found;
    warnings alone are 0.
    """
    inspect_main = _recipe_module(recipe).inspect_main
    raise typer.Exit(inspect_main(list(context.args), html=html, limit=limit))


@app.command("merge")
def _merge(
    run: OneRun,
    directory: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    root: Root = Path("runs"),
) -> None:
    """Write the base model of a run with its adapter added, as one model."""
    from tunebook.backends.local.export import merge_adapter
    from tunebook.runs.files import check_writable
    from tunebook.runs.listing import find_run

    found = find_run(root, run)
    if not (found.model_dir / "adapter_config.json").is_file():
        raise ConfigError(f"{found.model_dir}: holds no adapter, so there is nothing to merge")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: is there already and not empty; name another folder")
    check_writable(directory.absolute().parent, str(directory))
    model = found.read_config()["model"]
    report = merge_adapter(
        model["name"],
        found.model_dir,
        directory,
        dtype=dtype,
        revision=model["revision"],
        trust_remote_code=model["trust_remote_code"],
        allow_pickle=model["allow_pickle"],
    )
    print(
        f"{report.path}: {report.num_layers} layers merged in float32 and written in "
        f"{report.dtype}; logits on a probe differ by at most {report.max_logit_difference:.2g} "
        "from base plus adapter"
        + (". --dtype float32 keeps all of it." if report.dtype != "float32" else ".")
    )
    if report.untied_head:
        print("The output head was adapted, so it is no longer tied to the input embedding.")


@app.command("serve")
def _serve(
    model: Annotated[
        str, typer.Option(help="Folder, Hub id, pkg:// address, or a choice of `model=` as tiny.")
    ],
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; else the same.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 = any that is free.")] = 8000,
    home: Annotated[
        Path | None, typer.Option(help="Folder of the server's state; goes on from what it holds.")
    ] = None,
    token_env: Annotated[
        str, typer.Option(help="Variable with the token that clients must show.")
    ] = "TUNEBOOK_SERVE_TOKEN",
    max_sessions: Annotated[
        int, typer.Option(help="Adapters of a resource that train at a time.")
    ] = 5,
    price_per_hour: Annotated[
        float, typer.Option(help="US dollars that cost estimates name.", min=0)
    ] = 0.0,
    faults: Annotated[
        Path | None, typer.Option(help="Plan of faults to make on purpose, for tests of clients.")
    ] = None,
    rates: Annotated[
        str, typer.Option(help="How often clients may call: none, or hosted.")
    ] = "none",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:<number> or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    micro_batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens computed at once; else as many as memory holds.", min=1),
    ] = None,
) -> None:
    """Serve a model over Together's post-training protocol, trained on this machine.

    Point the `together` SDK, or backend=together, at it with TOGETHER_BASE_URL. It keeps what it
    does in its home and goes on from there when started again.
    """
    from tunebook.serve.command import serve

    serve(
        model=model,
        name=name,
        host=host,
        port=port,
        home=home,
        token_env=token_env,
        max_sessions=max_sessions,
        price_per_hour=price_per_hour,
        faults=faults,
        rates=rates,
        engine={"device": device, "dtype": dtype, "micro_batch_tokens": micro_batch_tokens},
    )


@app.command("losses")
def _losses(as_json: AsJson = False) -> None:
    """List the losses: what each reads and takes, and the recipes it fits.

    Choose one with loss=NAME and set what it takes with loss.PARAMETER=VALUE. One of your own is
    loss._target_=my_package.my_loss, a function of log-probs and named columns like these.
    """
    from dataclasses import asdict

    from tunebook.display import make_console
    from tunebook.loss_listing import list_losses
    from tunebook.text_tables import columns_fit, print_columns

    losses = list_losses({name: _recipe_module(name).COLUMNS for name in recipe_names()})
    if as_json:
        _print_json([asdict(loss) for loss in losses])
        return
    columns = {
        "loss": [loss.name for loss in losses],
        "recipe": [", ".join(loss.recipes) for loss in losses],
        "parameters": [
            " ".join(f"{name}={value}" for name, value in loss.parameters.items())
            for loss in losses
        ],
        "columns": [", ".join(loss.columns) for loss in losses],
        "what it is": [loss.summary for loss in losses],
    }
    layouts = [columns]
    for heading in ("columns", "what it is"):
        layouts.append({key: cells for key, cells in layouts[-1].items() if key != heading})
    console = make_console()
    fitting = next((one for one in layouts if columns_fit(console, one)), layouts[-1])
    print_columns(console, fitting)


@runs_app.command("compare")
def _compare(
    runs: Annotated[list[str], typer.Argument(metavar="SWEEP | RUN RUN...", help=SWEEP_OR_RUNS)],
    root: Root = Path("runs"),
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, of a sweep.")] = False,
) -> None:
    """Put runs side by side: where their configs differ, and what came out.

    A sweep is one table with a line for each of its runs, the best first.
    """
    from tunebook.runs.listing import compare_runs, find_run

    if len(runs) == 1:
        from tunebook.sweeps.compare import find_sweep, print_sweep

        print_sweep(find_sweep(root, runs[0]), as_json=as_json, as_csv=as_csv)
        return
    if as_csv:
        raise ConfigError("runs compare --csv: name one sweep; runs that are named are for --json")
    comparison = compare_runs([find_run(root, run) for run in runs])
    if as_json:
        _print_json(
            {
                "runs": [str(run.path) for run in comparison.runs],
                "differences": comparison.differences,
                "results": comparison.results,
            }
        )
        return
    names = [f"#{run.record.number}" for run in comparison.runs]
    _print_side_by_side("config", names, comparison.differences)
    _print_side_by_side("results", names, comparison.results)


@runs_app.command("data")
def _data(
    run: OneRun,
    split: Annotated[str, typer.Option(help="train or eval.")] = "train",
    search: Annotated[str | None, typer.Option(help="Only rows that contain this text.")] = None,
    offset: Annotated[int, typer.Option(help="Rows to skip.")] = 0,
    limit: Annotated[int, typer.Option(help="Rows to show.")] = 25,
    root: Root = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Page through exactly the rows that a run trained or was evaluated on."""
    from tunebook.data.snapshot import page_snapshot
    from tunebook.runs.listing import find_run

    folder = find_run(root, run).data_dir
    page = page_snapshot(folder, split=split, search=search, offset=offset, limit=limit)
    if as_json:
        rows = [
            {"index": index, **row.to_json()}
            for index, row in zip(page.indices, page.rows, strict=True)
        ]
        _print_json({"rows": rows, "total": page.total, "next_offset": page.next_offset})
        return
    for index, row in zip(page.indices, page.rows, strict=True):
        _print_row(index, row)
    if search:
        print(_matches_text(len(page.rows), split, search, offset, page.next_offset is not None))
    else:
        print(f"{len(page.rows)} of {page.total:,} {split} rows, from offset {offset}.")
    if page.next_offset is not None:
        print(f"More with --offset {page.next_offset}")


@rewards_app.callback()
def _rewards(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is not None:
        return
    from tunebook.display import make_console
    from tunebook.reward_listing import list_rewards

    rewards = list_rewards()
    if as_json:
        _print_json([dataclasses.asdict(reward) for reward in rewards])
        return
    from rich.text import Text

    console = make_console()
    for reward in rewards:
        console.print(Text(f"reward={reward.name}", style="bold"), soft_wrap=True)
        console.print(Text(f"  {reward.meaning}"), soft_wrap=True)
        optional = [f"{name} (if there)" for name in reward.optional_columns]
        columns = ", ".join([*reward.columns, *optional])
        console.print(Text(f"  columns: {columns or 'none'}"), soft_wrap=True)
        for name, value in reward.settings.items():
            key = f"reward.functions.{reward.name}.{name}"
            console.print(Text(f"  {key}={_setting_cell(value)}"), soft_wrap=True)
    print(
        "Further ones beside it: reward.functions.<name>._target_=<path> and, in the sum, "
        "reward.functions.<name>.weight=<number>.\n"
        "Only your own: reward=base reward.functions.mine._target_=my_package.my_reward"
    )


@rewards_app.command(
    "test",
    context_settings={**PASS_ON, "allow_interspersed_args": True},
    options_metavar="--file FILE [OPTIONS] [REWARD | KEY=VALUE]...",
)
def _test_rewards(
    context: typer.Context,
    file: Annotated[
        Path, typer.Option(help="Rows with `completion` and the columns that rewards need.")
    ],
    repeats: Annotated[int, typer.Option(help="Passes that are compared.")] = 3,
    hack_rows: Annotated[int, typer.Option(help="Prompts to try hacks on; 0 = none.", min=0)] = 8,
    as_json: AsJson = False,
) -> None:
    """Score saved completions, compare repeated passes, and try known hacks.

    Settings are given as to `tunebook grpo`, or the reward by name alone: exact_number. Exit code
    1 = passes differ, or a completion could not be scored. A hack that scores is only reported.
    """
    from tunebook.display import make_console
    from tunebook.reward_trial import show_trial, trial_config, try_rewards

    trial = try_rewards(trial_config(context.args), file, repeats=repeats, hack_rows=hack_rows)
    if as_json:
        _print_json(dataclasses.asdict(trial))
    else:
        show_trial(trial, make_console())
    raise typer.Exit(0 if trial.passed else 1)


@resources_app.command("list")
def _list_resources(as_json: AsJson = False) -> None:
    """List what may bill: the ledger of this machine, joined with the service's own list.

    Asked are the services of TOGETHER_API_KEY or TOGETHER_BASE_URL, and of BASETEN_API_KEY or
    LOOPS_BASE_URL, besides those in the ledger.
    Exit code 1 = a service could not be asked, so that more may be there.
    """
    from tunebook.display import make_console
    from tunebook.resources import Ledger
    from tunebook.resources.commands import list_resources, price_text
    from tunebook.text_tables import print_columns

    listing = list_resources(Ledger.of_user())
    shown = listing.shown
    if as_json:
        _print_json([dataclasses.asdict(one) for one in shown])
    elif shown:
        print_columns(
            make_console(),
            {
                "resource": [one.name for one in shown],
                "state": [one.state for one in shown],
                "price per hour": [price_text(one) for one in shown],
                "since": [_cell(one.since) for one in shown],
                "owner": [one.owner for one in shown],
                "run": [_cell(one.run) for one in shown],
                "service": [one.base_url for one in shown],
            },
        )
    elif not listing.problems:
        print("Nothing bills.")
    for problem in listing.problems:
        print(problem, file=sys.stderr)
    raise typer.Exit(1 if listing.problems else 0)


@resources_app.command("stop")
def _stop_resources(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RESOURCE]...", help="Ids, as listed.")
    ] = None,
    all_of_them: Annotated[
        bool, typer.Option("--all", help="All of the ledger, those of live runs too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Stop them with the sessions that are active on them.")
    ] = False,
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Only close the entry: the service is gone for good."),
    ] = False,
) -> None:
    """Stop resources. Exit code 1 = one could not be stopped, and stays in the ledger.

    `--all` leaves alone what is not in the ledger: name it.
    """
    from tunebook.resources import Ledger
    from tunebook.resources.commands import (
        choose,
        forget_resources,
        list_resources,
        stop_resources,
    )

    if bool(names) == all_of_them:
        raise ConfigError("resources stop: name resources, or --all")
    ledger = Ledger.of_user()
    listing = list_resources(ledger)
    chosen = [one for one in listing.shown if one.key] if not names else choose(listing, names)
    if not chosen:
        print("Nothing in the ledger may bill.")
        return
    for one in chosen:
        print(f"{one.name}  {one.state}  {one.owner}  {one.base_url}")
    if not yes:
        typer.confirm(f"{'Forget' if forget else 'Stop'} {len(chosen)}?", abort=True)
    if forget:
        _print_outcomes(forget_resources(ledger, chosen))
    else:
        _print_outcomes(stop_resources(ledger, chosen, force=force))


@resources_app.command("reap")
def _reap_resources() -> None:
    """Stop what processes that died, on this machine, left behind.

    What a run was attached to, and what live processes own, is left alone. Exit code 1 = something
    could not be stopped, and stays in the ledger.
    """
    from tunebook.resources import Ledger
    from tunebook.resources.commands import reap_resources

    _print_outcomes(reap_resources(Ledger.of_user()))


def _print_outcomes(outcomes: Iterable[Any]) -> None:
    """Prints what became of each resource, as it comes; exits with 1 if one of them failed."""
    count = failures = 0
    for outcome in outcomes:
        print(f"{outcome.name}: {outcome.text}", file=sys.stderr if outcome.failed else None)
        count += 1
        failures += outcome.failed
    if not count:
        print("Nothing in the ledger may bill.")
    raise typer.Exit(1 if failures else 0)


add_run_commands(app, lambda name: _recipe_module(name))
add_report_commands(app)


def _add_recipe_command(name: str, summary: str) -> None:
    @app.command(
        name, context_settings=PASS_ON, add_help_option=False, help=summary, short_help=summary
    )
    def _recipe(context: typer.Context) -> None:
        try:
            code = _recipe_module(name).main(list(context.args))
        except KeyboardInterrupt as error:
            from tunebook.display import report_error

            code = report_error(error)
        raise typer.Exit(code or 0)


def _recipe_module(name: str) -> Any:
    if name not in recipe_names():
        known = ", ".join(recipe_names()) or "none is installed"
        raise ConfigError(f"there is no recipe {name!r}; known recipes: {known}")
    return importlib.import_module(f"{RECIPES}.{name}")


def _summary_line(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or file.stem
    return docstring.splitlines()[0]


def _print_json(value: Any) -> None:
    from tunebook.runs.files import to_json

    sys.stdout.write(to_json(value, indent=2) + "\n")


def _print_side_by_side(
    title: str, names: Sequence[str], values: Mapping[str, Sequence[Any]]
) -> None:
    """Prints a column for every run, or a line for every value where columns do not fit."""
    from rich.text import Text

    from tunebook.display import make_console
    from tunebook.text_tables import columns_fit, print_columns

    console = make_console()
    keys = list(values) or ["no differences"]
    cells = [[_cell(one) for one in row] for row in values.values()] or [[""] * len(names)]
    columns = {title: keys, **dict(zip(names, zip(*cells, strict=True), strict=True))}
    if columns_fit(console, columns):
        print_columns(console, columns)
        return
    console.print(Text(title, style="bold"))
    for key, row in zip(keys, cells, strict=True):
        console.print(Text(key), soft_wrap=True)
        for name, cell in zip(names, row, strict=True):
            console.print(Text(f"  {name}  {cell}"), soft_wrap=True)


def _print_row(index: int, row: Any) -> None:
    from rich.text import Text

    from tunebook.display import make_console

    console = make_console()
    where = f"{row.file}:{row.line}" + (f" id {row.id}" if row.id is not None else "")
    console.print(Text(f"[{index}] {where}", style="bold"), soft_wrap=True)
    turns = [
        *((message["role"], message) for message in row.messages),
        *(("chosen", message) for message in row.chosen),
        *(("rejected", message) for message in row.rejected),
    ]
    for role, message in turns:
        console.print(Text(f"  {role}: {message.get('content') or ''}"), soft_wrap=True)


def _matches_text(shown: int, split: str, search: str, offset: int, more: bool) -> str:
    """How many rows match is known only when the last of them is on the page."""
    if not shown:
        return f"No {split} row matches {search!r}{' from this offset on' if offset else ''}."
    if more and not offset:
        return f"The first {shown} {split} rows that match {search!r}."
    if more:
        return f"Matches {offset + 1} to {offset + shown} of {search!r} among the {split} rows."
    words = "row matches" if offset + shown == 1 else "rows match"
    where = f"; these are the last {shown}" if offset else ""
    return f"{offset + shown} {split} {words} {search!r}{where}."


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("\n", "\\n")


def _setting_cell(value: Any) -> str:
    """A value of a config as YAML has it, shortened."""
    if isinstance(value, str):
        first, *more = value.splitlines()
        return f"{first[:60]}..." if more or len(first) > 60 else value
    return json.dumps(value)


for _name, _text in recipe_names().items():
    _add_recipe_command(_name, _text)


if __name__ == "__main__":
    main()
