"""The page about a sweep."""

import pytest

from tests.reports.made import made_sweep
from tests.reports.reading import Page
from tunebook.reports.charts import OTHER, Style
from tunebook.reports.run_page import write_run_report
from tunebook.reports.sweep_page import sweep_charts, write_sweep_report
from tunebook.sweeps.compare import compare_sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return made_sweep(tmp_path_factory.mktemp("made"), pending=1)


def test_the_page_shows_every_trial_and_the_best_first(sweep):
    for trial in sweep.trials:
        run = sweep.run_of(trial)
        if run is not None and trial.number != 1:
            write_run_report(run)
    page = Page(write_sweep_report(sweep))
    assert "7 trials: 5 succeeded, 1 failed, 1 pending" in page.text
    assert "best trialtrial" in page.text
    assert "the loss of step 2 is nan" in page.text
    assert "train/loss, smoothed" in page.text and "61,120" in page.text
    assert "summed over trials" in page.text
    assert f"sft --multirun sweep.resume={sweep.path}" in page.text
    links = [target for target in page.targets if target.endswith("report.html")]
    assert len(links) == 5
    assert all((sweep.path / target).is_file() for target in links)
    assert not {"script", "img"} & set(page.tags)


def test_curves_of_all_trials_and_the_result_over_each_key(sweep):
    charts = {chart.name: chart for chart in sweep_charts(sweep, compare_sweep(sweep))}
    assert list(charts) == ["metric", "train_loss", "by_lora.rank", "by_optimizer.learning_rate"]
    assert len(charts["metric"].series) == 5 and len(charts["train_loss"].series) == 6
    [rates] = charts["by_optimizer.learning_rate"].series
    assert rates.style is Style.DOTS and len(rates.points) == 5
    assert charts["by_optimizer.learning_rate"].x_is_log
    assert not charts["by_lora.rank"].x_is_log
    assert rates.labels[0].startswith("4: learning_rate=0.0016 rank=4: ")


def test_more_trials_than_colours_leave_them_to_the_best(tmp_path):
    sweep = made_sweep(tmp_path, rates=(1e-4, 2e-4, 3e-4, 4e-4, 5e-4))
    charts = {chart.name: chart for chart in sweep_charts(sweep, compare_sweep(sweep))}
    colours = [series.colour for series in charts["train_loss"].series]
    assert colours.count(OTHER) == 2 and colours[:2] == [OTHER, OTHER]
    assert sorted(colours[2:]) == list(range(8))


def test_a_folder_with_a_space_is_quoted_for_the_shell_and_for_hydra(tmp_path):
    folder = tmp_path / "my runs"
    folder.mkdir()
    sweep = made_sweep(folder, rates=(1e-4, 1e-3), ranks=(4,), pending=1)
    text = Page(write_sweep_report(sweep)).text
    assert f"""sft --multirun 'sweep.resume="{sweep.path}"'""" in text
    assert f"runs compare '{sweep.path}'" in text
