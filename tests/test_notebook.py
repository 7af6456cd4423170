"""What notebooks call: reports under a bar, tokens, curves."""

import re

import pytest

from recipes import dpo, sft
from tunebook.compose import compose
from tunebook.launch import start_run
from tunebook.notebook import show_curves, show_tokens, watched
from tunebook.opening import build_backend
from tunebook.runs import RunState

SETTINGS = {
    "data.limit": 40,
    "eval.fraction": 0.2,
    "plan.batch_size": 4,
    "plan.epochs": None,
    "plan.max_steps": 3,
    "samples.num_prompts": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebook")


def config_of(recipe, folder):
    return compose(recipe, {**SETTINGS, "runs_dir": str(folder / "runs")})


def test_watched_yields_what_training_yields_and_shows_it(folder, capsys):
    config = config_of("sft", folder)
    task = sft.prepare(config)
    run = start_run("sft", task)
    with build_backend(config) as backend:
        steps = [report.step for report in watched(sft.train(task, backend, run))]
    assert steps == [1, 2, 3] and run.record.state is RunState.SUCCEEDED
    assert re.search(r"^step 1/3  loss \d", capsys.readouterr().out, re.MULTILINE)
    png = show_curves(run)._repr_png_()
    assert png.startswith(b"\x89PNG") and b"png" not in repr(show_curves(run)).encode()


def test_closing_it_closes_the_training(folder):
    config = config_of("sft", folder)
    task = sft.prepare(config)
    run = start_run("sft", task)
    with build_backend(config) as backend:
        reports = watched(sft.train(task, backend, run))
        next(reports)
        reports.close()
    assert run.record.state is RunState.CANCELLED and run.record.model_available


def test_tokens_that_carry_loss_stand_out(folder):
    task = sft.prepare(config_of("sft", folder))
    page = show_tokens(task, rows=[0, 1])
    assert repr(page).count("«") == repr(page).count("»") >= 2
    html = page._repr_html_()
    assert html.count("<pre>") == 2
    first = html.split("<pre>")[1].split("</pre>")[0]
    trained = re.findall(r'<b title="id [\d, ]+, weight 1">(.*?)</b>', first)
    assert trained[-1] == "&lt;|im_end|&gt;"
    datum = task.train_data[task.train_data.data_of_row(task.train_data.report.kept_rows[0])[0]]
    assert len(trained) == int(datum.mask.sum())
    assert len(re.findall("<(?:b|span) ", first)) == len(datum.tokens)


def test_a_pair_is_shown_with_both_answers(folder):
    task = dpo.prepare(config_of("dpo", folder))
    assert show_tokens(task, rows=[0])._repr_html_().count("<pre>") == 2
