"""Finding, listing and comparing runs."""

from pathlib import Path

import pytest

from tunebook.errors import RunError
from tunebook.runs import (
    Evaluation,
    RunDir,
    StopReason,
    compare_runs,
    find_run,
    list_runs,
    numbering,
    page_runs,
)
from tunebook.runs.listing import COST


def finished(root: Path, name: str, *, learning_rate: float, best: float) -> RunDir:
    run = RunDir.create(root, "sft", name)
    run.write_config({"optimizer": {"learning_rate": learning_rate, "beta1": 0.9}, "lora": None})
    with run.attempt(planned_steps=2):
        for step in (1, 2):
            run.log_metrics(step, {"train/loss": best * 2 / step, "train/tokens": 100})
        run.set_evaluation(Evaluation("eval/loss", "down", best, 2, best, 2, 1, 2, False))
        run.finish(StopReason.COMPLETED, steps=2)
    return run


def test_a_run_is_found_by_path_number_id_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter(["abcdefgh", "abzzzzzz", "bcdefghi"])
    monkeypatch.setattr(numbering, "new_id", lambda: next(ids))
    runs = [RunDir.create(tmp_path, "sft", f"r{n}") for n in range(3)]
    for text in (str(runs[1].path), "2", "#2", "abzzzzzz", "abz", runs[1].path.name):
        assert find_run(tmp_path, text).path == runs[1].path, text
    with pytest.raises(RunError, match="ambiguous"):
        find_run(tmp_path, "ab")
    for text in ("4", "zz", "", "#"):
        with pytest.raises(RunError, match="neither a run directory"):
            find_run(tmp_path, text)


def test_runs_are_listed_by_number_over_recipes(tmp_path: Path) -> None:
    made = [RunDir.create(tmp_path, recipe, None) for recipe in ("sft", "dpo", "sft")]
    (tmp_path / "sft" / "half_made").mkdir()
    assert [run.path for run in list_runs(tmp_path)] == [run.path for run in made]
    with pytest.raises(RunError, match="no such folder"):
        list_runs(tmp_path / "missing")


def test_a_comparison_shows_what_differs_and_what_came_out(tmp_path: Path) -> None:
    runs = [
        finished(tmp_path, "a", learning_rate=1e-4, best=0.5),
        finished(tmp_path, "b", learning_rate=2e-4, best=0.25),
    ]
    found = compare_runs(runs)
    assert found.differences == {"optimizer.learning_rate": [1e-4, 2e-4]}
    assert found.results["best eval/loss"] == [0.5, 0.25]
    assert found.results["best step"] == [2, 2]
    assert found.results["tokens"] == [200, 200]
    assert found.results["steps"] == [2, 2]
    assert all(seconds > 0 for seconds in found.results["training seconds"])


def test_a_run_without_results_compares_as_unknown(tmp_path: Path) -> None:
    done = finished(tmp_path, "a", learning_rate=1e-4, best=0.5)
    fresh = RunDir.create(tmp_path, "sft", None)
    fresh.write_config({"optimizer": {"learning_rate": 1e-4}, "lora": None})
    found = compare_runs([done, fresh])
    assert found.differences == {"optimizer.beta1": [0.9, None]}
    assert found.results["best eval/loss"] == [0.5, None]
    assert found.results["state"] == ["succeeded", "pending"]


def test_what_a_run_has_cost_follows_what_its_service_bills(tmp_path: Path) -> None:
    """Hours where the plan has seconds, else the part of the planned tokens; nothing elsewhere."""
    estimates = (
        {"price": 6.0, "seconds": 7200.0},
        {"price": 6.0, "seconds": None},
        {"price": None, "seconds": 7200.0},
        None,
    )
    runs = []
    for number, estimate in enumerate(estimates):
        run = RunDir.create(tmp_path, "sft", f"r{number}")
        run.write_config({"seed": 0})
        run.write_plan({"planned_steps": 8} | ({"estimate": estimate} if estimate else {}))
        with run.attempt(planned_steps=8):
            run.finish(StopReason.EARLY_STOPPING, steps=2)
        runs.append(run)
    costs = compare_runs(runs).results[COST]
    seconds = runs[0].record.timing.training_s
    assert seconds is not None
    assert costs == [pytest.approx(3.0 * seconds / 3600), 1.5, None, None]
    assert COST not in compare_runs(runs[2:]).results


def test_pages_tile_the_runs(tmp_path: Path) -> None:
    for number in range(7):
        RunDir.create(tmp_path, ("sft", "dpo")[number % 2], None)
    seen, cursor = [], None
    while True:
        page = page_runs(tmp_path, limit=3, cursor=cursor)
        assert page.total == 7
        seen += [run.record.number for run in page.runs]
        if page.next_cursor is None:
            break
        cursor = page.next_cursor
        assert not cursor.isdecimal()  # nobody is to compute one
    assert seen == list(range(1, 8))
    assert [run.record.number for run in page_runs(tmp_path).runs] == seen


def test_a_run_that_is_added_meanwhile_shifts_no_page(tmp_path: Path) -> None:
    for _ in range(4):
        RunDir.create(tmp_path, "sft", None)
    first = page_runs(tmp_path, limit=2)
    RunDir.create(tmp_path, "dpo", None)
    second = page_runs(tmp_path, limit=2, cursor=first.next_cursor)
    assert [run.record.number for run in second.runs] == [3, 4]
    assert second.total == 5 and second.next_cursor is not None


@pytest.mark.parametrize("cursor", ["", "x", "3", "YWZ0ZXIgLTE=", "ö", "YWZ0ZXI="])
def test_a_cursor_that_no_page_gave_is_refused(tmp_path: Path, cursor: str) -> None:
    RunDir.create(tmp_path, "sft", None)
    with pytest.raises(RunError, match="no page gave this cursor"):
        page_runs(tmp_path, cursor=cursor)


@pytest.mark.parametrize("limit", [0, -1, 101])
def test_a_page_has_1_to_100_runs(tmp_path: Path, limit: int) -> None:
    with pytest.raises(RunError, match="between 1 and 100"):
        page_runs(tmp_path, limit=limit)
