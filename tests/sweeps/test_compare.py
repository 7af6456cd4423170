"""The table of a sweep: what differs, the best first."""

import csv
import io
import json
import re

import pytest

from tests.sweeps.test_multirun import SMALL, run, sweep_in
from tunebook.cli import main
from tunebook.errors import RunError
from tunebook.reports.sweep_page import sweep_charts
from tunebook.sweeps.compare import compare_sweep, find_sweep
from tunebook.sweeps.record import SweepDir


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("compared")
        patch.chdir(path)
        patch.syspath_prepend(str(path))
        code = run(*SMALL, "optimizer.learning_rate=1e-6,1e-2", "loss._target_=loss_fns.cross_entropy.cross_entropy,tests.recipes.test_sft_local.nan_loss", "name=mine")  # fmt: skip
    assert code == 1
    return path


def test_the_best_comes_first_and_a_failed_one_has_no_value(folder):
    table = compare_sweep(sweep_in(folder))
    assert table.metric == "eval/loss"
    rates = [row["optimizer.learning_rate"] for row in table.rows]
    assert rates[:2] == [1e-2, 1e-6]
    assert [row["state"] for row in table.rows] == ["succeeded", "succeeded", "failed", "failed"]
    best = [row["best eval/loss"] for row in table.rows]
    assert best[0] < best[1] and best[2:] == [None, None]
    assert all(row["tokens"] > 0 and row["seconds"] > 0 for row in table.rows[:2])
    assert [row["trial"] for row in table.rows] == [2, 0, 1, 3]
    assert "loss is nan" in table.rows[2]["why"]


def test_as_csv_json_and_text(folder, capsys):
    sweep = sweep_in(folder)
    assert sweep.path.name.endswith("_mine")
    for arguments in (["--csv"], ["--json"], []):
        with pytest.raises(SystemExit) as raised:
            main(["runs", "compare", str(sweep.path), *arguments])
        assert raised.value.code == 0
        out = capsys.readouterr().out
        if arguments == ["--csv"]:
            rows = list(csv.DictReader(io.StringIO(out)))
        elif arguments == ["--json"]:
            rows = json.loads(out)["rows"]
        else:
            assert out.splitlines()[0].split()[:3] == ["trial", "run", "loss._target_"]
            continue
        assert [int(row["trial"]) for row in rows] == [2, 0, 1, 3]
        assert float(rows[0]["optimizer.learning_rate"]) == 1e-2
    assert find_sweep(folder / "runs", sweep.path.name).path == sweep.path


def test_the_page_shows_every_trial_and_leads_to_its_run(folder):
    sweep = sweep_in(folder)
    page = (sweep.path / "report.html").read_text()
    assert "<svg" in page and "http" not in page
    assert page.count("<tr>") == 5
    links = re.findall('href="([^"]+html)"', page)
    pages = [sweep.run_of(sweep.trials[trial]).path / "report.html" for trial in (2, 0)]
    assert [(sweep.path / link).resolve() for link in links] == pages
    assert all(each.is_file() for each in pages)
    charts = sweep_charts(sweep, compare_sweep(sweep))
    assert [chart.name for chart in charts[2:]] == ["by_optimizer.learning_rate"]


def test_what_is_no_sweep_is_said(folder, tmp_path):
    with pytest.raises(RunError, match="name two runs or more, or one sweep"):
        find_sweep(folder / "runs", "1")
    (tmp_path / "sweep.json").write_text('{"recipe": "sft", "trials": [{"number": 1}]}')
    with pytest.raises(RunError, match="damaged"):
        SweepDir.open(tmp_path)
