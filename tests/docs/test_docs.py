"""The documentation: links lead somewhere, every error has its page, and what it shows works."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import typer
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from scripts.docs_pages import error_classes, error_head, generated_pages
from tunebook.cli import app, recipe_names
from tunebook.compose import compose
from tunebook.data.load import load_rows
from tunebook.data.rows import Kind
from tunebook.data.sources import sources_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
KINDS = {"sft": Kind.conversation, "dpo": Kind.preference, "grpo": Kind.prompt}
OF_SERVICE = "backend=together"


def blocks(page, language):
    return [
        (title, text)
        for found, title, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if found == language
    ]


def with_blocks(*languages):
    pages = [page for page in PAGES if any(blocks(page, one) for one in languages)]
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to stand in, from which files can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def lay_files(folder):
    """Puts every file that a page shows with its name into a folder."""
    for page in PAGES:
        for language in ("python", "json"):
            for title, text in blocks(page, language):
                if title:
                    (folder / title).write_text(text, encoding="utf-8")


def test_every_error_has_its_page_and_every_page_its_error():
    written = {page.stem for page in (DOCS / "errors").glob("*.md")} - {"index"}
    assert written == {error.code for error in error_classes()}
    for code in written:
        assert "**What to do.**" in (DOCS / "errors" / f"{code}.md").read_text() or code == "remote"
        assert error_head(code).startswith(f"# {code}\n")


def test_categories_and_exit_codes_are_those_of_the_classes():
    from tunebook import errors, runs
    from tunebook.resources import live

    classes = {name: each for module in (errors, runs, live) for name, each in vars(module).items()}
    checked = 0
    for error in error_classes():
        cls = classes.get(error.name)
        if cls is not None:
            assert (cls.code, cls.category, cls.exit_code) == (
                error.code, error.category, error.exit_code,
            )  # fmt: skip
            checked += 1
    assert checked >= 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = (page.parent / target.partition("#")[0]).resolve()
        made = str(path.relative_to(DOCS)) if path.is_relative_to(DOCS) else ""
        assert path.is_file() or made in generated_pages(), f"{page}: {target}"


def test_generated_pages_hold_what_the_code_says():
    made = {path: make() for path, make in generated_pages().items()}
    assert (
        "| `optimizer.learning_rate` | `0.0002` | Peak learning rate. |"
        in made["reference/config_sft.md"]
    )
    assert "| `rollout.group_size` | `8` |" in made["reference/config_grpo.md"]
    assert (
        "| `backend.base_weights` | `full` |"
        in made["reference/config_sft.md"].partition("## Groups")[0]
    )
    assert "### backend=tinker\n" in made["reference/config_grpo.md"]
    assert "### environment=calculator\n" in made["reference/config_grpo.md"]
    assert "One of all_assistant, last_assistant, all." in made["reference/config_sft.md"]
    assert "| `cross_entropy` | sft" in made["reference/losses.md"]
    assert "## exact_number" in made["reference/rewards.md"]
    assert "## tunebook runs wait" in made["reference/commands.md"]
    assert "`--timeout`" in made["reference/commands.md"]
    assert "#### Session.forward_backward" in made["reference/api_backends.md"]
    assert "[`non_finite`](non_finite.md)" in made["errors/index.md"]
    for text in made.values():
        tables = [line for line in text.splitlines() if line.startswith("|")]
        assert all(line.endswith("|") for line in tables)


def test_every_page_is_in_the_navigation():
    import yaml

    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w/]+\.md", str(yaml.safe_load(text)["nav"])))
    written = {str(page.relative_to(DOCS)) for page in PAGES}
    wanted = {name for name in written | set(generated_pages()) if not name.startswith("errors/")}
    assert wanted <= listed <= written | set(generated_pages())


@with_blocks("bash")
def test_commands_are_commands_and_their_configs_compose(page, here):
    lay_files(here)
    for _, text in blocks(page, "bash"):
        for line in text.splitlines():
            check_line(line)


def notebook_commands(path):
    """The commands of a notebook: quoted in its text, or lines of its code for the shell."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            quoted = re.findall(r"`+([^`]+)`+", cell.source)
            yield from (" ".join(each.split()) for each in quoted if each.startswith("tunebook "))
        else:
            yield from re.findall(r"^[!%$]+ *(tunebook .*)$", cell.source, re.MULTILINE)
            for found in re.findall(r"\[\s*(\"tunebook\"[^\]]*)\]", cell.source):
                yield shlex.join(ast.literal_eval(f"[{found}]"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_commands_of_a_notebook_are_commands(path):
    for line in notebook_commands(path):
        check_line(line)


def test_commands_of_notebooks_are_found(tmp_path):
    path = tmp_path / "n.ipynb"
    text = new_markdown_cell("Run `tunebook inspect\nsft data.path=x` or `tunebook losses`.")
    code = new_code_cell('1\n!tunebook runs list\nrun(["tunebook", "sft", "seed=1"])')
    nbformat.write(new_notebook(cells=[text, code]), path)
    found = list(notebook_commands(path))
    assert found[:2] == ["tunebook inspect sft data.path=x", "tunebook losses"]
    assert found[2:] == ["tunebook runs list", "tunebook sft seed=1"]
    with pytest.raises(AssertionError, match="sft"):
        check_line(found[0])
    assert sum(1 for each in NOTEBOOKS for _ in notebook_commands(each)) >= 6


def check_line(line):
    words = shlex.split(line, comments=True)
    if not words:
        return
    assert words[0] == "tunebook", line
    words = [word for word in words if "<" not in word]
    if words[1] in recipe_names():
        check_config(words[1], words[2:])
    elif words[1] == "inspect":
        options = [i for i, word in enumerate(words) if word == "--limit"]
        skipped = {j for i in options for j in (i, i + 1)}
        check_config("sft", [w for j, w in enumerate(words[2:], 2) if j not in skipped])
    else:
        check_command(words[1:])


def check_config(recipe, words):
    sweep = "--multirun" in words
    overrides = [word for word in words if not word.startswith("--")]
    for override in overrides:
        key, equals, value = override.partition("=")
        assert equals, override
        if sweep and "," in value and not value.startswith("{"):
            overrides = [each for each in overrides if each != override]
            overrides += [f"{key}={value.split(',')[0]}"]
        if sweep and override == "sweep=learning_rate":
            assert (ROOT / "configs" / "sweep" / "learning_rate.yaml").is_file()
            overrides = [each for each in overrides if each != override]
    data = compose(recipe, overrides).data
    if all(is_shown(source) for _, source in sources_of(data)):
        assert load_rows(data, kind=KINDS[recipe]).rows


def is_shown(source):
    """Whether the rows are in a file, or made by a function, that a page shows."""
    return bool(source.function) or (source.path is not None and Path(source.path).is_file())


def check_command(words):
    command = typer.main.get_command(app)
    words = list(words)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not getattr(command, "commands", {}) or command.invoke_without_command, words
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known, words


@with_blocks("python")
def test_python_of_a_page_runs(page, here):
    lay_files(here)
    if page.stem == "run_record":
        run_python(DOCS / "howto" / "own_loss.md")  # it looks at runs that are there
    run_python(page)


def run_python(page):
    names = {}
    for title, text in blocks(page, "python"):
        ast.parse(text)
        if not title:
            exec(compile(text, str(page), "exec"), names)


@pytest.mark.skipif(shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None, reason="the extra `docs` is not installed")  # fmt: skip
def test_the_site_is_built_without_a_warning(tmp_path):
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Peak learning rate" in (site / "reference/config_sft/index.html").read_text()
    assert "<h1" in (site / "errors/non_finite/index.html").read_text()
