"""Charts and curves as pictures: nothing is cut off, and what is marked is what it says."""

import warnings

import pytest
from matplotlib import rc_context

from tests.reports.made import made_sweep
from tunebook.curves import figure_of_curves, label_text
from tunebook.reports.charts import OTHER, Chart, Series, Style, keys_of, run_charts
from tunebook.reports.pictures import SETTINGS, figure_of
from tunebook.reports.sweep_page import sweep_charts
from tunebook.runs import Evaluation
from tunebook.sweeps.compare import compare_sweep

LONG = "data.path=/" + "long/" * 20 + "rows.jsonl"


@pytest.fixture(autouse=True)
def strict():
    """A layout that Matplotlib gives up is a warning."""
    with warnings.catch_warnings(), rc_context(SETTINGS):
        warnings.simplefilter("error")
        yield


def drawn(figure):
    figure.draw_without_rendering()
    return figure


def is_whole(figure, artist):
    box, page = artist.get_window_extent(), figure.bbox
    return box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1


def step_marks(axes):
    low, high = axes.get_xlim()
    return [mark for mark in axes.get_xticks() if low <= mark <= high]


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_labels_of_a_sweep_fit_and_leave_the_plot_its_room(tmp_path):
    sweep = made_sweep(tmp_path, rates=(1e-4, 1e-3), ranks=(4, 8))
    for trial in sweep.trials:
        object.__setattr__(trial, "label", f"{LONG} {trial.number} costs=$1 and $2")
    charts = {chart.name: chart for chart in sweep_charts(sweep, compare_sweep(sweep))}
    by_rate = charts["by_optimizer.learning_rate"]
    assert (by_rate.y_label, by_rate.x_label) == ("best eval/loss", "optimizer.learning_rate")
    assert by_rate.caption == "best eval/loss by optimizer.learning_rate"
    for chart in charts.values():
        figure = drawn(figure_of(chart))
        [axes] = figure.axes
        place = axes.get_position()
        assert place.width * 3.4 > 2.4 and place.height * figure.get_figheight() > 1.5
        texts = [text for legend in figure.legends for text in legend.get_texts()]
        for artist in (axes.xaxis.label, axes.yaxis.label, *figure.legends, *texts):
            assert is_whole(figure, artist)
        assert len(texts) == (len(chart.series) if len(chart.series) > 1 else 0)


def test_a_long_text_keeps_its_ends_and_is_no_formula():
    assert label_text("learning_rate", 13) == "learning_rate"
    assert label_text("abcdefghij", 6) == "abc…ij"
    assert label_text("$5", 6) == r"\$5"


def test_steps_are_marked_by_whole_numbers():
    chart = Chart("loss", "loss", [Series("", [(1, 3.0), (2, 2.0)], Style.LINE, 0)])
    assert step_marks(drawn(figure_of(chart)).axes[0]) == [1, 2]
    rows = [{"step": step, "train/loss": 1.0} for step in (1, 2)]
    figure = drawn(figure_of_curves(rows, title="t", evaluation=None, dpi=80))
    assert step_marks(figure.axes[0]) == [1, 2]


def test_a_run_of_one_step_shows_it():
    rows = [{"step": 1, "train/loss": 1.0, "train/learning_rate": 1e-3}]
    figure = drawn(figure_of_curves(rows, title="t", evaluation=None, dpi=80))
    assert [axes.lines[0].get_marker() for axes in figure.axes] == ["o", "o"]
    assert step_marks(figure.axes[0]) == [1]


def test_a_long_name_leaves_the_curves_their_width():
    rows = [{"step": step, "train/loss": 1.0} for step in range(5)]
    title = f"sft #1234: 2026-01-02_03-04-05_{'long-name_' * 8}"
    figure = drawn(figure_of_curves(rows, title=title, evaluation=None, dpi=80))
    assert figure.axes[0].get_position().width > 0.85
    shown = figure.axes[0].get_title(loc="left")
    assert shown.startswith("sft #1234: 2026") and shown.endswith("long-name_")
    assert "…" in shown


FALLING = [
    {"step": step, "train/loss": loss, "eval/loss": loss, "eval/accuracy": accuracy}
    for step, loss, accuracy in ((1, 1.0, 0.85), (2, 0.8, 0.8), (3, 0.6, 0.7))
]


def evaluated(metric, best, step):
    return Evaluation(metric, "down", best, step, best, 3, 3, step, False)


def test_the_best_evaluation_is_marked_where_it_was_chosen_and_nowhere_else():
    evaluation = evaluated("eval/loss", 0.6, 3)
    charts = {chart.name: chart for chart in run_charts(FALLING, evaluation=evaluation)}
    names = {name: [one.name for one in chart.series] for name, chart in charts.items()}
    assert names == {
        "loss": ["train loss", "eval loss", "best eval, step 3"],
        "accuracy": ["eval accuracy"],
    }
    loss, accuracy = figure_of_curves(FALLING, title="t", evaluation=evaluation, dpi=80).axes
    assert legend_of(loss) == ["train loss", "eval loss", "best eval, 0.6 at step 3"]
    assert legend_of(accuracy) == ["eval accuracy"]


def test_what_was_monitored_has_a_chart_though_it_was_only_evaluated():
    rows = [{"step": 0, "start/exactness": 0.1}]
    rows += [{"step": n, "train/loss": 1.0 / n, "eval/exactness": n / 9} for n in (1, 2, 3)]
    evaluation = evaluated("eval/exactness", 1 / 3, 3)
    [_, chart] = run_charts(rows, evaluation=evaluation)
    assert [one.name for one in chart.series] == ["eval exactness", "best eval, step 3"]
    assert list(chart.series[0].points) == [(0, 0.1), (1, 1 / 9), (2, 2 / 9), (3, 3 / 9)]
    axes = figure_of_curves(rows, title="t", evaluation=evaluation, dpi=80).axes
    assert [each.get_ylabel() for each in axes] == ["loss", "exactness"]
    assert legend_of(axes[1]) == ["eval exactness", "best eval, 0.3333 at step 3"]


def test_rewards_that_were_only_evaluated_are_drawn():
    rows = [{"step": n, "train/loss": 1.0, "eval/reward": 0.5} for n in (1, 2)]
    assert [chart.name for chart in run_charts(rows)] == ["reward", "loss"]


def test_trials_without_a_colour_share_a_key():
    line = [(1, 1.0), (2, 0.5)]
    others = [Series(f"{n}", line, Style.LINE, OTHER) for n in range(5)]
    best = [Series(f"best {n}", line, Style.LINE, n) for n in range(8)]
    chart = Chart("metric", "eval/loss", [*others, *best])
    keys = [text for text, _ in keys_of(chart)]
    assert keys == [*(f"best {n}" for n in range(8)), "the other 5"]
    [legend] = drawn(figure_of(chart)).legends
    assert [text.get_text() for text in legend.get_texts()] == keys
