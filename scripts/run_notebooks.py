"""Runs notebooks from top to bottom and keeps what they showed: `make notebooks`.

    python scripts/run_notebooks.py [notebooks/01_sft.ipynb ...]

Each runs in an empty folder of its own, so that its outputs name no folder of anybody.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from tunebook.runs import contains_secret

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
TIMEOUT_S = 300
"""Of one cell; a machine may be busy."""
MAX_BYTES = 300_000
"""Of a notebook with its outputs."""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
PERSONAL_PATH = re.compile(
    r"(?<![\w.:/<-])/(?:home|root|Users|tmp|var|private|opt|usr|mnt|work|workspace)/\w"
    r"|\b[A-Z]:\\+Users\\"
)


def run_notebook(path: Path, folder: Path) -> NotebookNode:
    """The notebook with the outputs of this run, in the form in which it is kept.

    Args:
        path: of the notebook.
        folder: where it runs and leaves its files.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
    notebook.metadata = nbformat.from_dict(METADATA)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    # Commands are shown as `tunebook ...`, which is what they are once its folder is on the PATH.
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    client.execute(env={**os.environ, "PATH": scripts, "IPYTHONDIR": str(folder / ".ipython")})
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not is_empty(output)]
    return notebook


def is_empty(output: NotebookNode) -> bool:
    """Whether it shows nothing, as what a display leaves that has cleared itself."""
    return output.output_type == "display_data" and not any(output.data.values())


def problems(notebook: NotebookNode) -> list[str]:
    """Why the notebook should not be published, a sentence each."""
    found: list[str] = []
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        found.append(f"not a valid notebook: {error}")
    if "widgets" in notebook.metadata:
        found.append("metadata.widgets: GitHub refuses to show the notebook")
    size = len(nbformat.writes(notebook))
    if size > MAX_BYTES:
        found.append(f"{size} bytes, more than {MAX_BYTES}")
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                found.append(f"cell {number}: it ended with {output.ename}")
            for kind, text in texts(output).items():
                where = f"cell {number}, {kind}"
                if "widget" in kind:
                    found.append(f"{where}: a widget, which a reader cannot see")
                if (path := PERSONAL_PATH.search(text)) is not None:
                    found.append(f"{where}: the path {text[path.start() :][:40]!r} of a machine")
                if contains_secret(text, os.environ):
                    found.append(f"{where}: looks like a secret")
                if "\r" in text:
                    found.append(f"{where}: a line that was drawn over, which prints as many")
    return found


def texts(output: NotebookNode) -> dict[str, str]:
    """What an output holds, by kind; pictures are empty."""
    if output.output_type == "stream":
        return {output.name: output.text}
    if output.output_type == "error":
        return {"traceback": "\n".join(output.traceback)}
    data: dict[str, Any] = output.data
    return {kind: "" if kind.startswith("image/") else str(text) for kind, text in data.items()}


def main() -> int:
    """Runs the notebooks named, or all; returns 1 if one of them should not be published."""
    parser = argparse.ArgumentParser(description="Runs notebooks and keeps their outputs.")
    parser.add_argument(
        "notebooks", nargs="*", type=Path, default=sorted(NOTEBOOKS.glob("*.ipynb"))
    )
    faulty = 0
    for path in parser.parse_args().notebooks:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TUNEBOOK_HOME"] = str(Path(folder) / "home")
            notebook = run_notebook(path, Path(folder))
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size // 1000} kB", flush=True)
        for problem in problems(notebook):
            faulty += 1
            print(f"  {problem}", flush=True)
    return int(faulty > 0)


if __name__ == "__main__":
    sys.exit(main())
