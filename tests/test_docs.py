"""What the documents say of the code is so."""

import ast
import re
from pathlib import Path

import pytest

from scripts.docs_pages import error_classes
from tunebook import errors, runs_commands
from tunebook.backends.baseten import failures as baseten_failures
from tunebook.backends.remote.failures import StalledError
from tunebook.backends.tinker import failures as tinker_failures
from tunebook.backends.together import failures as together_failures
from tunebook.errors import TunebookError, WaitTimeout
from tunebook.runs import NoStepsError

TESTS = Path(__file__).parent
PROMISES = TESTS.parent / "docs" / "run_promises.md"
CATEGORIES = {"input", "capacity", "service", "numeric", "system"}


def rows():
    """The cells of every table row of the promises."""
    lines = PROMISES.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]


def test_every_promise_has_a_row_and_a_proof_or_a_reason():
    proofs = {cells[0]: cells[-1] for cells in rows() if re.fullmatch(r"[JD]\d+", cells[0])}
    assert list(proofs) == [f"J{n}" for n in range(1, 39)] + [f"D{n}" for n in range(1, 14)]
    for name, proof in proofs.items():
        assert "::test_" in proof or proof.startswith("does not apply: "), name


def test_every_test_that_is_named_exists():
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PROMISES.read_text(encoding="utf-8"))
    assert len(named) > 60
    for file, name in named:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file}::{name}"


def test_every_failure_code_is_documented():
    documented = {
        code: cells[1]
        for cells in rows()
        if len(cells) == 3 and cells[1] in CATEGORIES
        for code in re.findall(r"`(\w+)`", cells[0])
    }
    expected = {error.code: error.category for error in error_classes()}
    assert expected.pop("remote") not in CATEGORIES, "those of a service have a page of their own"
    assert "(errors/remote.md)" in PROMISES.read_text(encoding="utf-8")
    assert documented == {**expected, TunebookError.code: TunebookError.category}


def test_every_code_of_a_service_is_documented():
    failures = (baseten_failures, tinker_failures, together_failures)
    codes = {f"http_{status}" for each in failures for status in each.ANSWERS}
    codes |= {code.lower() for code in together_failures.DUTIES}
    codes |= {code.lower() for code, _ in baseten_failures.OF_CLASS.values()}
    for path in (TESTS.parent / "tunebook" / "backends").rglob("*.py"):
        written = re.findall(r'\bcode="(\w+)"', path.read_text(encoding="utf-8"))
        codes |= {code.lower() for code in written}
    page = (TESTS.parent / "docs" / "errors" / "remote.md").read_text(encoding="utf-8")
    heads = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert {code for head in heads for code in re.findall(r"`(\w+)`", head)} == codes


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (runs_commands.EXIT_CANCELLED, 3),
        (runs_commands.EXIT_INTERRUPTED_RUN, 4),
        (errors.RunFinalizingError.exit_code, 5),
        (StalledError.exit_code, 75),
        (WaitTimeout.exit_code, 124),
        (NoStepsError.exit_code, 1),
    ],
)
def test_exit_codes_are_those_of_the_document(code, found):
    assert code == found
    documented = {cells[0] for cells in rows() if len(cells) == 2}
    assert str(code) in documented
