"""Pages of the documentation that are made from the code when it is built, so that no copy rots.

MkDocs loads this file as a hook (`mkdocs.yml`). A page `docs/errors/<code>.md` is what a person
wrote about an error; what its class says is put above it here.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # MkDocs imports a hook by its path
    sys.path.insert(0, str(ROOT))

API = {
    "runs": ("runs/control", "runs/starting", "runs/status", "runs/listing", "runs/directory"),
    "recipes": ("compose", "launch", "opening", "preparation"),
    "backends": ("backends/base", "types"),
    "losses_and_advantages": (
        "token_weights",
        "advantages",
        "plan",
        "split",
        "schedule",
        "stopping",
    ),
    "reports": ("reports/charts", "reports/run_page", "reports/sweep_page", "sweeps/compare"),
}
"""Page of the reference -> modules of `tunebook` whose public names it lists."""
WITHOUT_CLASS = {
    "process_lost": ("system", 4, "The process of a run is gone without having said how it ended."),
    "internal": ("system", 1, "An error that tunebook does not know; the traceback is printed."),
    "out_of_memory": ("capacity", 1, "The machine or the GPU has no memory left."),
    "service_unreachable": ("service", 1, "A connection failed or timed out."),
    "remote": ("as the page says", 1, "The service refused or failed, with a code of its own."),
}
"""Codes that no class carries: category, exit code, meaning."""


KEY_HEAD = ("| key | default | meaning |", "| --- | --- | --- |")


@dataclass(frozen=True, slots=True)
class ErrorClass:
    """What the source says about an error that a person can meet."""

    name: str
    bases: tuple[str, ...]
    code: str | None
    category: str | None
    exit_code: int | None
    meaning: str


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages; called by MkDocs."""
    from mkdocs.structure.files import File

    for path, make in generated_pages().items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Puts what its class says above the text about an error; called by MkDocs."""
    folder, _, name = page.file.src_uri.rpartition("/")
    code = name.removesuffix(".md")
    if folder != "errors" or code == "index":
        return markdown
    return f"{error_head(code)}\n{markdown}"


def generated_pages() -> dict[str, Callable[[], str]]:
    """Path of every generated page, and what makes its text."""
    return {
        **{f"reference/config_{name}.md": _recipe_maker(name) for name in ("sft", "dpo", "grpo")},
        "reference/losses.md": losses_page,
        "reference/rewards.md": rewards_page,
        "reference/commands.md": commands_page,
        **{f"reference/api_{name}.md": _api_maker(name) for name in API},
        "errors/index.md": errors_page,
    }


def _recipe_maker(recipe: str) -> Callable[[], str]:
    return lambda: config_page(recipe)


def _api_maker(name: str) -> Callable[[], str]:
    return lambda: api_page(name)


def config_page(recipe: str) -> str:
    """Every key of a recipe with its default and meaning, the groups of files and their keys."""
    from tunebook.recipe_help import (
        FILE_GROUPS,
        chosen_files,
        file_keys,
        groups_of,
        recipe_keys,
    )

    lines = [
        f"# Keys of {recipe}",
        "",
        f"Type them as `tunebook {recipe} key=value`; `tunebook {recipe} --help` prints the same.",
    ]
    section = None
    for key in recipe_keys(recipe):
        head = key.name.partition(".")[0]
        if head != section:
            section = head
            lines += ["", f"## {head}", "", *KEY_HEAD]
        cells = (f"`{key.name}`", f"`{key.default}`", key.meaning)
        lines.append(_line(cells))
    groups = groups_of(recipe)
    lines += ["", "## Groups", "", "`group=file` takes a file of `configs/`.", ""]
    lines += ["| group | files |", "| --- | --- |"]
    lines += [_line((f"`{name}`", ", ".join(files))) for name, files in groups.items()]
    chosen = chosen_files(recipe, ())
    for group in FILE_GROUPS:
        for name in groups.get(group, []):
            keys = file_keys(group, name)
            if keys and name != chosen[group]:
                lines += ["", f"### {group}={name}", "", *KEY_HEAD]
                lines += [_line((f"`{key.name}`", f"`{key.default}`", key.meaning)) for key in keys]
    return "\n".join(lines) + "\n"


def losses_page() -> str:
    """Every loss with its columns and parameters."""
    from recipes import dpo, grpo, sft
    from tunebook.loss_listing import list_losses

    modules = {"sft": sft, "dpo": dpo, "grpo": grpo}
    lines = [
        "# Losses",
        "",
        "`loss=<name>` picks one, `loss.<parameter>=...` sets its parameters. A loss of your own: "
        "[how to](../howto/own_loss.md).",
        "",
        "| loss | recipes | what it is | columns | parameters |",
        "| --- | --- | --- | --- | --- |",
    ]
    for loss in list_losses({name: module.COLUMNS for name, module in modules.items()}):
        parameters = ", ".join(f"`{key}={value}`" for key, value in loss.parameters.items())
        lines.append(
            _line(
                (
                    f"`{loss.name}`",
                    ", ".join(loss.recipes),
                    loss.summary,
                    ", ".join(f"`{one}`" for one in loss.columns),
                    parameters,
                )
            )
        )
    return "\n".join(lines) + "\n"


def rewards_page() -> str:
    """Every built-in reward with its columns and settings."""
    from tunebook.reward_listing import list_rewards

    lines = [
        "# Rewards",
        "",
        "`reward=<name>` picks one. A reward of your own: [how to](../howto/own_reward.md).",
    ]
    for reward in list_rewards():
        columns = [
            *(f"`{name}`" for name in reward.columns),
            *(f"`{name}` (if there)" for name in reward.optional_columns),
        ]
        lines += ["", f"## {reward.name}", "", reward.meaning, ""]
        lines.append(f"Columns: {', '.join(columns) or 'none'}.")
        if reward.settings:
            lines += ["", "| key | default |", "| --- | --- |"]
            head = f"reward.functions.{reward.name}"
            lines += [
                _line((f"`{head}.{key}`", f"`{_short(value)}`"))
                for key, value in reward.settings.items()
            ]
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Every command with its arguments and options."""
    import typer

    from tunebook.cli import app

    root = typer.main.get_command(app)
    lines = ["# Commands", "", "`tunebook --help` and `tunebook <command> --help` print the same."]
    for name, command in _commands(root, "tunebook"):
        lines += ["", f"## {name}", "", inspect.cleandoc(command.help or "")]
        rows = [_parameter(each) for each in command.params if each.name != "help"]
        if rows:
            lines += ["", "| argument | meaning |", "| --- | --- |", *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if not children or getattr(command, "invoke_without_command", False):
        yield name, command
    for child, each in sorted(children.items()):
        yield from _commands(each, f"{name} {child}")


def _parameter(parameter: Any) -> tuple[str, str]:
    named = parameter.param_type_name == "option"
    shown = ", ".join(parameter.opts) if named else str(parameter.metavar or parameter.name)
    return f"`{shown}`", getattr(parameter, "help", None) or ""


def api_page(name: str) -> str:
    """Public names of some modules with their signatures and docstrings."""
    lines = [f"# {name.replace('_', ' ').capitalize()}"]
    for module in API[name]:
        tree = ast.parse((ROOT / "tunebook" / f"{module}.py").read_text(encoding="utf-8"))
        lines += ["", f"## tunebook.{module.replace('/', '.')}", "", ast.get_docstring(tree) or ""]
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                lines += _documented(node)
    return "\n".join(lines) + "\n"


def _documented(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    lines = ["", f"### {node.name}", ""]
    if isinstance(node, ast.FunctionDef):
        lines += ["```python", _signature(node), "```", ""]
        return [*lines, _prose(ast.get_docstring(node))]
    lines += [_prose(ast.get_docstring(node))]
    for field, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_"):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            lines.append(f"\n- `{ast.unparse(field)}` {text}".rstrip())
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            lines += ["", f"#### {node.name}.{method.name}", "", "```python", _signature(method)]
            lines += ["```", "", _prose(ast.get_docstring(method))]
    return lines


def _signature(node: ast.FunctionDef) -> str:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def _prose(docstring: str | None) -> str:
    """A docstring as Markdown: the lists of `Args` and `Raises` become lists."""
    lines: list[str] = []
    for line in (docstring or "").splitlines():
        item = re.match(r"    (\S[^:]*): (.*)", line)
        if re.fullmatch(r"(Args|Raises|Returns|Source):", line.strip()):
            lines += [f"**{line.strip()[:-1]}**", ""]
        elif item is not None:
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            lines.append(line.strip() if line.startswith("        ") else line)
    return "\n".join(lines)


def errors_page() -> str:
    """All codes in one table."""
    lines = [
        "# Errors",
        "",
        "An error that a person can act on is one paragraph on standard error. Its code is in "
        "`failure.code` of `run.json` where a run failed by it.",
        "",
        "| code | category | exit code | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for error in error_classes():
        cells = (
            f"[`{error.code}`]({error.code}.md)", error.category or "", str(error.exit_code),
            error.meaning,
        )  # fmt: skip
        lines.append(_line(cells))
    return "\n".join(lines) + "\n"


def error_head(code: str) -> str:
    """The heading of the page about an error, and what its class says."""
    [error] = [each for each in error_classes() if each.code == code]
    return "\n".join(
        [
            f"# {code}",
            "",
            error.meaning,
            "",
            "| class | category | exit code |",
            "| --- | --- | --- |",
            _line(
                (
                    f"`{error.name}`" if error.name else "",
                    error.category or "",
                    str(error.exit_code),
                )
            ),
            "",
        ]
    )


@cache
def error_classes() -> tuple[ErrorClass, ...]:
    """Every code that an error class of the source sets, by code; and those without a class."""
    found: dict[str, ErrorClass] = {}
    for path in sorted((ROOT / "tunebook").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = _read_class(node)
    errors = [
        _inherited(each, found)
        for each in found.values()
        if each.code is not None and "TunebookError" in _ancestors(each, found)
    ]
    errors += [
        ErrorClass("", (), code, category, exit_code, meaning)
        for code, (category, exit_code, meaning) in WITHOUT_CLASS.items()
    ]
    return tuple(sorted(errors, key=lambda error: str(error.code)))


def _read_class(node: ast.ClassDef) -> ErrorClass:
    values: dict[str, Any] = {}
    for each in node.body:
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant):
            values[ast.unparse(each.targets[0])] = each.value.value
    docstring = ast.get_docstring(node) or ""
    return ErrorClass(
        name=node.name,
        bases=tuple(ast.unparse(base) for base in node.bases),
        code=values.get("code"),
        category=values.get("category"),
        exit_code=values.get("exit_code"),
        meaning=" ".join(docstring.split("\n\n")[0].split()),
    )


def _ancestors(error: ErrorClass, known: dict[str, ErrorClass]) -> list[str]:
    names: list[str] = []
    for base in error.bases:
        names += [base, *(_ancestors(known[base], known) if base in known else [])]
    return names


def _inherited(error: ErrorClass, known: dict[str, ErrorClass]) -> ErrorClass:
    """With what it does not set itself taken from the classes above it."""
    category, exit_code = error.category, error.exit_code
    for name in _ancestors(error, known):
        above = known.get(name)
        if above is not None:
            category = above.category if category is None else category
            exit_code = above.exit_code if exit_code is None else exit_code
    return replace(error, category=category, exit_code=exit_code)


def _line(cells: Sequence[str]) -> str:
    texts = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(texts)} |"


def _short(value: Any) -> str:
    text = str(value).splitlines()
    return "" if not text else text[0][:60] + ("..." if len(text) > 1 or len(text[0]) > 60 else "")
