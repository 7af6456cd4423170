"""The notebooks: they run from top to bottom, and what they show can be published."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from scripts.run_notebooks import MAX_BYTES, NOTEBOOKS, problems, run_notebook

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
BAR = re.compile(r"step +(\d+)/(\d+) ")
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def bars(notebook):
    """`(done, total)` of every bar that is left in the outputs."""
    shown = [
        BAR.match(output.data.get("text/plain", ""))
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "display_data"
    ]
    return [tuple(map(int, found.groups())) for found in shown if found]


def test_there_are_eight():
    assert [path.stem[:2] for path in PATHS] == [f"{number:02}" for number in range(1, 9)]


@each_notebook
def test_what_is_committed_can_be_published(path):
    notebook = nbformat.read(path, as_version=4)
    assert problems(notebook) == []
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "it was not run from top to bottom"
    assert any(cell.outputs for cell in code_cells(notebook))


@each_notebook
def test_it_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)
    notebook = run_notebook(path, tmp_path)
    assert problems(notebook) == []
    assert all(done == total for done, total in bars(notebook))
    trainings = sum(cell.source.count("watched(") for cell in code_cells(notebook))
    assert len(bars(notebook)) >= trainings > 0 or path.stem in ("02_data", "05_sweep")


def with_output(**fields):
    cell = new_code_cell("1", outputs=[new_output(**fields)])
    return new_notebook(cells=[cell])


def displayed(**data):
    return with_output(
        output_type="display_data", data={key.replace("__", "/"): data[key] for key in data}
    )


def printed(text):
    return with_output(output_type="stream", name="stdout", text=text)


def with_widgets():
    return new_notebook(metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {}}})


def invalid():
    notebook = printed("fine")
    notebook.cells[0].pop("source")
    return notebook


@pytest.mark.parametrize(
    ("notebook", "problem"),
    [
        (with_widgets(), r"metadata\.widgets"),
        (invalid(), "not a valid notebook"),
        (printed("saved in /" + "home/ann/runs/1"), "the path '/home/ann/runs/1'"),
        (displayed(text__html="<p>/" + "Users/ann/a</p>"), "the path '/Users/ann/a"),
        (printed("key hf_" + "a1B" * 12), "looks like a secret"),
        (printed("10%\r20%\r"), "drawn over"),
        (printed("x" * MAX_BYTES), "bytes, more than"),
        (with_output(output_type="error", ename="KeyError", evalue="", traceback=[]), "KeyError"),
        (displayed(**{"application__vnd.jupyter.widget-view+json": "{}"}), "a widget"),
    ],
)
def test_what_cannot_be_published_is_found(notebook, problem):
    [found] = problems(notebook)
    assert re.search(problem, found)


def test_what_is_fine_is_fine():
    for text in ("runs/sft/1", "pkg://tunebook/assets/tiny_model", "and/or", "</home>", "1/2"):
        assert problems(printed(text)) == []
    assert problems(displayed(image__png="/ro" + "ot/" * 100)) == []


def test_files_of_a_notebook_stay_in_its_folder(tmp_path):
    """Also its errors name the cell, and nothing of the run is kept in the file."""
    folder = tmp_path / "there"
    folder.mkdir()
    path = tmp_path / "n.ipynb"
    cell = new_code_cell("open('made.txt', 'w').close(); 6 * 7", metadata={"scrolled": True})
    empty = new_code_cell("display({'text/plain': ''}, raw=True)")
    nbformat.write(new_notebook(cells=[cell, empty]), path)
    before = path.read_bytes()
    notebook = run_notebook(path, folder)
    assert (folder / "made.txt").exists() and path.read_bytes() == before
    assert notebook.cells[0].metadata == {}
    assert notebook.cells[0].outputs[0].data == {"text/plain": "42"}
    assert notebook.cells[1].outputs == [], "a display that shows nothing"
    assert isinstance(path, Path)
