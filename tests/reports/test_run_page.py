"""The page about a run."""

import json

import pytest

from tests.reports.made import finish, planned_run
from tests.reports.reading import Page
from tunebook.reports.charts import run_charts, throughput
from tunebook.reports.pictures import write_pictures
from tunebook.reports.run_page import config_differences, write_run_report
from tunebook.runs import RunDir, StopReason


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finish(planned_run(tmp_path_factory.mktemp("made")))


@pytest.fixture(scope="module")
def page(run):
    return Page(write_run_report(run))


def test_the_page_says_what_was_planned_and_done(run, page):
    for part in (
        "succeeded: plan.max_steps is reached",
        "60 planned",
        "Planned and done",
        "eval/loss",
        "early stopping: disabled (no eval set)",
        "tokens a second, median step",
        "before training",
        "after step 60",
        "yes yes yes yes",
        "What is 2 + 2? <b>&",
        str(run.path.name),
        "To train further:",
    ):
        assert part in page.text, part
    assert (run.path / "curves.png").is_file()


def test_the_page_needs_nothing_but_itself(page):
    assert not {"script", "img", "iframe"} & set(page.tags)
    assert page.targets == ["data:,"]


def test_the_page_draws_each_curve_with_a_label(run, page):
    names = [chart.name for chart in run_charts(run.metrics(), evaluation=run.record.evaluation)]
    assert names == ["loss", "learning_rate", "throughput", "grad_norm"]
    assert page.tags.count("svg") == len(names)
    assert page.tags.count("circle") == 6 + 1  # evaluations, and the best of them


def test_the_page_shows_which_tokens_are_trained(run, page):
    sample = json.loads((run.path / "mask_sample.json").read_text())
    assert len(sample) == 3
    trained = ["".join(p["text"] for p in one["pieces"] if p["weight"]) for one in sample]
    rows = [
        json.loads(line) for line in (run.path / "data" / "train.jsonl").read_text().splitlines()
    ]
    for text, row in zip(trained, rows, strict=False):
        assert row["messages"][-1]["content"] in text
    assert "What is trained, token by token" in page.text


def test_the_page_names_what_departs_from_the_defaults(run):
    found = config_differences("sft", run.read_config())
    assert found["plan.max_steps"] == (None, 60)
    assert found["data.limit"] == (None, 60)
    assert set(found) == {
        "data.limit", "eval.fraction", "eval.min_rows", "plan.batch_size", "plan.epochs",
        "plan.max_steps",
    }  # fmt: skip


def test_a_policy_shows_its_reward_first(tmp_path):
    made = finish(RunDir.create(tmp_path, "grpo", None), policy=True)
    assert [chart.name for chart in run_charts(made.metrics())][:2] == ["reward", "loss"]
    text = Page(write_run_report(made)).text
    for part in ("Trained on in the last step", "unscored", "+1.20", "reward 1"):
        assert part in text, part


def test_what_people_wrote_is_text(tmp_path):
    made = RunDir.create(tmp_path, "sft", None)
    made.write_plan(
        {"model": "<script>m</script>", "hash": "abc", "warnings": ["many words " * 40]}
    )
    with made.attempt(planned_steps=2):
        made.write_samples(0, [{"prompt": "<b>p</b>", "completion": "a & b \ud800"}])
        for step in (1, 2):
            made.log_metrics(step, {"train/loss": 1.0 / step})
        made.write_samples(2, [{"prompt": "<b>p</b>", "completion": "</td><script>x"}])
        made.finish(StopReason.COMPLETED, steps=2)
    page = Page(write_run_report(made))
    for part in ("<b>p</b>", "a & b", "</td><script>x", "<script>m</script>", "many words " * 40):
        assert part in page.text, part
    assert "script" not in page.tags and "b" in page.tags
    assert "expected" not in page.text


def test_a_page_about_a_fresh_run(tmp_path):
    text = Page(write_run_report(RunDir.create(tmp_path, "sft", None))).text
    assert "has not started" in text and "Answers" not in text


def test_throughput_leaves_out_what_is_unknown():
    rows = [
        {"step": 1, "train/tokens": 100, "time/step_s": 0.5},
        {"step": 2, "train/tokens": None, "time/step_s": 0.5},
        {"step": 3, "train/tokens": 100, "time/step_s": 0.0},
    ]
    assert throughput(rows) == [(1, 200.0)]


def test_pictures_for_a_paper(run, tmp_path):
    paths = write_pictures(
        run_charts(run.metrics(), evaluation=run.record.evaluation), tmp_path / "figures"
    )
    assert [path.name for path in paths] == [
        "loss.png", "learning_rate.png", "throughput.png", "grad_norm.png",
    ]  # fmt: skip
    for path in paths:
        head = path.read_bytes()[:24]
        assert head[:4] == b"\x89PNG"
        assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (1020, 720)
