"""What the SFT recipe does around the numbers: order of rows, saves, stops, promotion, resume.

A fake backend stands in for the computing, so every step can fail and every call is seen.
"""

import json
import shutil
from dataclasses import replace

import pytest

from recipes import sft
from tests.fakes import FakeBackend
from tunebook.compose import compose
from tunebook.errors import ConfigError, NonFiniteError, RunError
from tunebook.launch import plan_run, start_run
from tunebook.models import tunebook_home
from tunebook.runs import RunDir, RunState, StopReason


def write_rows(path, count, *, start=0):
    rows = [
        {"messages": [
            {"role": "user", "content": f"What is {number} + 1?"},
            {"role": "assistant", "content": f"{number + 1}"},
        ]}
        for number in range(start, start + count)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def configure(tmp_path):
    """A function that composes a config over `count` small rows."""

    def make(count=10, /, **overrides):
        path = tmp_path / "rows.jsonl"
        if not path.exists():
            write_rows(path, count)
        values = {
            "data.path": str(path),
            "runs_dir": str(tmp_path / "runs"),
            "eval.fraction": 0.2,
            "eval.min_rows": 1,
            "plan.batch_size": 2,
            "samples.num_prompts": 0,
        }
        values.update({key.replace("__", "."): value for key, value in overrides.items()})
        return compose("sft", values)

    return make


def run_all(config, backend):
    task = sft.prepare(config)
    run = start_run("sft", task)
    reports = list(sft.train(task, backend, run))
    return task, RunDir.open(run.path), reports


def resume(run, backend, **overrides):
    values = {"resume": str(run.path)}
    values.update({key.replace("__", "."): value for key, value in overrides.items()})
    return run_all(compose("sft", values), backend)


def test_152_rows_batch_8_three_epochs_plan_57_steps(configure):
    config = configure(
        160, plan__batch_size=8, plan__epochs=3, eval__fraction=0.05, eval__min_rows=8
    )
    task = sft.prepare(config)
    assert (len(task.rows.train), len(task.rows.eval)) == (152, 8)
    assert (task.plan.steps_per_epoch, task.plan.planned_steps) == (19, 57)
    assert task.summary["planned_steps"] == 57


def test_prepare_opens_nothing_and_writes_nothing(configure, tmp_path):
    sft.prepare(configure())
    assert not (tmp_path / "runs").exists()


def test_evaluates_and_saves_at_the_planned_steps(configure):
    """Case 46: 11 steps with intervals of 5, and the reports agree with the record."""
    backend = FakeBackend()
    _, run, reports = run_all(
        configure(plan__epochs=None, plan__max_steps=11, plan__checkpoint_every=5), backend
    )
    assert [report.step for report in reports if report.evaluation] == [5, 10, 11]
    assert [report.step for report in reports if report.checkpoint] == [5, 10, 11]
    assert [step for step, _ in run.history("eval/loss")] == [5, 10, 11]
    assert run.record.outcome.stop_reason is StopReason.MAX_STEPS
    assert run.record.state is RunState.SUCCEEDED


def test_evaluation_only_goes_forward(configure):
    """Case 48: no gradient and no step between an evaluation's calls."""
    backend = FakeBackend()
    run_all(configure(plan__checkpoint_every=2), backend)
    trained = [call for call in backend.calls if call in ("forward_backward", "optim_step")]
    assert trained == ["forward_backward", "optim_step"] * 4
    assert backend.calls.count("forward") == 2  # one batch of two eval rows, twice


@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_crash_repeats_and_skips_nothing(configure, fails_at):
    """Case 32: after a crash at any step, the restored lineage has each batch exactly once."""
    config = configure(15, plan__checkpoint_every=2, eval__fraction=0.2, plan__batch_size=2)
    unbroken = FakeBackend()
    _, _, reports = run_all(config, unbroken)
    assert len(reports) == 6

    backend = FakeBackend(fail_at_step=fails_at)
    task = sft.prepare(config)
    run = start_run("sft", task)
    with pytest.raises(RuntimeError, match="the service went away"):
        list(sft.train(task, backend, run))
    assert RunDir.open(run.path).record.state is RunState.FAILED
    backend.fail_at_step = None
    _, run, reports = resume(run, backend)
    assert backend.lineage == unbroken.lineage
    assert reports[0].step == (fails_at - 1) // 2 * 2 + 1
    # One value for every step along the final lineage.
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5, 6]
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("stop_after", [4, 5, 8, 14])
def test_stop_and_resume_sees_the_same_rows(configure, stop_after):
    """Case 33: 10 rows, batch 2, stopped inside an epoch and at its edge; resume restores all."""
    config = configure(10, eval__fraction=0, plan__epochs=3, plan__checkpoint_every=0)
    unbroken = FakeBackend()
    run_all(config, unbroken)
    assert len(unbroken.lineage) == 15

    backend = FakeBackend()
    task = sft.prepare(config)
    run = start_run("sft", task)
    steps = sft.train(task, backend, run)
    for report in steps:
        if report.step == stop_after:
            steps.close()
    stopped = RunDir.open(run.path)
    assert stopped.record.state is RunState.CANCELLED
    assert stopped.record.outcome.stop_reason is StopReason.CANCELLED
    assert stopped.record.model_available
    assert [checkpoint.step for checkpoint in stopped.checkpoints()] == [stop_after]

    backend.with_optimizer.clear()
    backend.calls.clear()
    _, run, reports = resume(run, backend)
    assert backend.with_optimizer[0] is True  # case 85
    assert f"save step_{stop_after:06d}" not in backend.calls  # case 117
    assert backend.lineage == unbroken.lineage
    assert [report.step for report in reports] == list(range(stop_after + 1, 16))
    assert run.record.state is RunState.SUCCEEDED


def test_raising_epochs_trains_exactly_the_added_steps(configure):
    backend = FakeBackend()
    _, run, _ = run_all(configure(plan__epochs=1), backend)
    with pytest.raises(ConfigError, match=r"all 4 planned steps are made.*plan\.epochs"):
        resume(run, backend)
    _, run, reports = resume(run, backend, plan__epochs=2)
    assert [report.step for report in reports] == [5, 6, 7, 8]
    whole = FakeBackend()
    run_all(configure(plan__epochs=2), whole)
    assert backend.lineage == whole.lineage
    assert (run.path / "plan.before_2.json").exists()


def test_the_best_checkpoint_is_the_result_and_survives_rotation(configure):
    backend = FakeBackend(nll=[3.0, 1.0, 2.0, 2.5, 2.2, 2.1])
    _, run, reports = run_all(configure(15, plan__checkpoint_every=1, checkpoints__keep=2), backend)
    assert [report.is_best for report in reports] == [True, True, False, False, False, False]
    assert [checkpoint.step for checkpoint in run.checkpoints()] == [2, 6]
    assert (run.model_dir / "exported").read_text() == "step_000002"
    evaluation = run.record.evaluation
    assert (evaluation.best, evaluation.best_step, evaluation.last, evaluation.count) == (
        1.0,
        2,
        pytest.approx(2.1),
        6,
    )
    assert (evaluation.promoted_step, evaluation.promoted_before_last_eval) == (2, True)


def test_early_stopping(configure):
    """Case 43: [1.0, 0.9, 0.95, 0.96, 0.97], patience 2: stops after evaluation 4, best is 2."""
    backend = FakeBackend(nll=[1.0, 0.9, 0.95, 0.96, 0.97, 0.98])
    config = configure(15, plan__checkpoint_every=1, early_stopping__patience=2)
    _, run, reports = run_all(config, backend)
    assert len(reports) == 4
    assert run.record.outcome.stop_reason is StopReason.EARLY_STOPPING
    assert run.record.outcome.steps == 4
    assert run.record.state is RunState.SUCCEEDED
    assert run.record.evaluation.best_step == 2


def test_a_run_that_stopped_early_is_not_resumed_by_mistake(configure):
    backend = FakeBackend(nll=[1.0, 1.1, 1.2, 0.9, 0.8, 0.7])
    _, run, reports = run_all(
        configure(15, plan__checkpoint_every=1, early_stopping__patience=2), backend
    )
    assert len(reports) == 3
    with pytest.raises(ConfigError, match=r"would stop at once.*early_stopping\.patience"):
        resume(run, backend)
    _, run, reports = resume(run, backend, early_stopping__patience=None)
    assert [report.step for report in reports] == [4, 5, 6]
    assert run.record.evaluation.best_step == 6


def test_early_stopping_remembers_over_a_resume(configure):
    """Case 42: 1.0, 1.1, 1.2, [resume], 1.3 with patience 3 stops right after 1.3."""
    backend = FakeBackend(nll=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    config = configure(15, plan__checkpoint_every=1, early_stopping__patience=3)
    task = sft.prepare(config)
    run = start_run("sft", task)
    steps = sft.train(task, backend, run)
    for report in steps:
        if report.step == 3:
            steps.close()
    _, run, reports = resume(run, backend)
    assert [report.step for report in reports] == [4]
    assert run.record.outcome.stop_reason is StopReason.EARLY_STOPPING
    assert run.record.evaluation.best_step == 1


def test_nan_is_never_best(configure):
    """Case 45."""
    nan = float("nan")
    backend = FakeBackend(nll=[nan, 1.0, nan, 1.2, 1.3, 1.4])
    _, run, _ = run_all(configure(15, plan__checkpoint_every=1), backend)
    assert (run.record.evaluation.best, run.record.evaluation.best_step) == (1.0, 2)


def test_all_nan_is_a_failure(configure):
    """Case 45: a best checkpoint is wanted and there is none."""
    task = sft.prepare(configure(plan__checkpoint_every=1))
    run = start_run("sft", task)
    with pytest.raises(NonFiniteError, match="never a finite number"):
        list(sft.train(task, FakeBackend(nll=float("nan")), run))
    record = RunDir.open(run.path).record
    assert record.state is RunState.FAILED
    assert (record.failure.code, record.failure.category) == ("non_finite", "numeric")
    assert not record.model_available


def test_a_downgrade_is_recorded_and_strict_refuses_it(configure):
    overrides = {"eval__fraction": 0.05, "eval__min_rows": 8, "early_stopping__patience": 2}
    _, run, _ = run_all(configure(**overrides), FakeBackend())
    assert run.record.outcome.downgrades == ["early_stopping:disabled:no_eval_set"]
    assert run.record.evaluation is None
    with pytest.raises(ConfigError, match="early_stopping:disabled:no_eval_set"):
        sft.prepare(configure(**overrides, strict=True))


@pytest.mark.parametrize(
    ("patience", "every", "effective"),
    [(1, 2, True), (2, 2, False), (2, 0, False), (4, 1, True), (5, 1, False), (1, 20, False)],
)
def test_patience_that_cannot_stop_anything_is_a_downgrade(configure, patience, every, effective):
    """6 steps, evaluated every 2: at 2, 4 and 6; patience 1 may stop at 4, patience 2 at the end.

    What it may do shows by a loss that only rises.
    """
    overrides = {"early_stopping__patience": patience, "plan__checkpoint_every": every}
    backend = FakeBackend(nll=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    task, run, reports = run_all(configure(15, **overrides), backend)
    assert (len(reports) < task.plan.planned_steps) is effective
    token = "early_stopping:ineffective:too_few_evaluations"
    assert run.record.outcome.downgrades == ([] if effective else [token])
    if not effective:
        with pytest.raises(ConfigError, match=token):
            sft.prepare(configure(15, **overrides, strict=True))


@pytest.mark.parametrize(("max_seq_len", "fits"), [(64, False), (1024, True)])
def test_samples_for_which_there_is_no_room_are_a_downgrade(configure, max_seq_len, fits):
    """An answer of 64 tokens leaves no token for its prompt."""
    overrides = {"samples__num_prompts": 4, "samples__max_tokens": 64, "max_seq_len": max_seq_len}
    task = sft.prepare(configure(**overrides))
    assert len(task.prompts) == (2 if fits else 0)  # the eval rows
    assert task.downgrades == (() if fits else ("samples:disabled:no_prompt_fits",))
    if not fits:
        with pytest.raises(ConfigError, match="samples:disabled:no_prompt_fits"):
            sft.prepare(configure(**overrides, strict=True))


def test_evaluations_before_a_resume_count_for_patience(configure):
    """At 1 and 2, then on at 4 and 6: patience 2 may still stop at 4."""
    config = configure(15, plan__checkpoint_every=1, early_stopping__patience=2)
    task = sft.prepare(config)
    run = start_run("sft", task)
    steps = sft.train(task, FakeBackend(), run)
    for report in steps:
        if report.step == 2:
            steps.close()
    for every, downgrades in ((2, ()), (0, ("early_stopping:ineffective:too_few_evaluations",))):
        again = compose("sft", {"resume": str(run.path), "plan.checkpoint_every": every})
        assert sft.prepare(again).downgrades == downgrades


def test_without_an_eval_split_the_last_checkpoint_is_the_result(configure):
    _, run, _ = run_all(configure(eval__fraction=0, plan__checkpoint_every=2), FakeBackend())
    assert (run.model_dir / "exported").read_text() == "step_000005"
    assert run.record.model_available


def test_unknown_monitor_lists_the_metrics(configure):
    """Case 47, before anything is opened."""
    with pytest.raises(ConfigError, match=r"eval/accurcy.*eval/loss, eval/perplexity"):
        sft.prepare(configure(eval__monitor="eval/accurcy"))


def test_another_monitor_decides(configure):
    backend = FakeBackend(nll=[1.0, 0.5, 0.7, 0.8])
    _, run, _ = run_all(
        configure(plan__checkpoint_every=1, eval__monitor="eval/perplexity"), backend
    )
    assert run.record.evaluation.metric == "eval/perplexity"
    assert run.record.evaluation.best == pytest.approx(1.6487213)


@pytest.mark.parametrize(("warmup", "said"), [(100, True), (6, False), (0.5, False)])
def test_a_warmup_beyond_the_plan_is_said(configure, warmup, said):
    """6 steps of a warm-up of 100 get to 6/100 of 2e-4."""
    summary = sft.prepare(configure(15, schedule__warmup=warmup)).summary
    found = [each for each in summary["warnings"] if "schedule.warmup" in each]
    assert len(found) == said
    if said:
        assert "plan of 6 steps" in found[0] and "gets to 1.2e-05 " in found[0]
        assert "optimizer.learning_rate=0.0002" in found[0]


def test_the_plan_hash(configure, tmp_path):
    config = configure()
    known = sft.prepare(config).summary["hash"]
    assert sft.prepare(configure(name="other", checkpoints__keep=1)).summary["hash"] == known
    assert sft.prepare(configure(plan__batch_size=3)).summary["hash"] != known
    assert sft.prepare(configure(seed=1)).summary["hash"] != known
    write_rows(tmp_path / "rows.jsonl", 10, start=1)
    assert sft.prepare(configure()).summary["hash"] != known


def rows_of(task):
    return {
        side: {row.messages[0]["content"] for row in rows}
        for side, rows in (("train", task.rows.train), ("eval", task.rows.eval))
    }


@pytest.mark.parametrize("min_rows", [1, 6])
def test_a_run_prepared_before_another_trained_holds_out_what_that_one_did(
    configure, tmp_path, min_rows
):
    """A dry run over 25 rows, which hold out 5 or (below 6) none; then a run over 40, with 8."""
    early = sft.prepare(configure(25, eval__min_rows=min_rows))
    planned = plan_run("sft", early, 0.0)
    write_rows(tmp_path / "rows.jsonl", 40)
    grown, _, _ = run_all(configure(eval__min_rows=min_rows), FakeBackend())
    assert rows_of(early)["train"] & rows_of(grown)["eval"]
    message = r"has fixed the split meanwhile, with \d of .* and [1-9] of these train rows held out"
    with pytest.raises(RunError, match=message):
        start_run("sft", early)
    with pytest.raises(RunError, match=message):
        resume(planned, FakeBackend())
    write_rows(tmp_path / "rows.jsonl", 25)
    again, _, _ = run_all(configure(eval__min_rows=min_rows), FakeBackend())
    assert not rows_of(again)["train"] & rows_of(grown)["eval"]


def test_a_run_that_has_trained_goes_on_whatever_became_of_the_ledger(configure, tmp_path):
    run = stopped_after_one_step(configure(25, plan__checkpoint_every=1), FakeBackend())
    shutil.rmtree(tunebook_home() / "ledgers")
    write_rows(tmp_path / "rows.jsonl", 40)
    grown, _, _ = run_all(configure(plan__checkpoint_every=1), FakeBackend())
    task, run, _ = resume(run, FakeBackend())
    assert rows_of(task)["train"] & rows_of(grown)["eval"]
    assert run.record.state is RunState.SUCCEEDED


def test_added_rows_move_nobody_across_the_split(configure, tmp_path):
    """Every run over a dataset sits the same exam, also after it has grown."""
    task, _, _ = run_all(configure(10), FakeBackend())
    held_out = {row.messages[0]["content"] for row in task.rows.eval}
    trained = {row.messages[0]["content"] for row in task.rows.train}
    assert len(held_out) == 2
    write_rows(tmp_path / "rows.jsonl", 30)
    grown = sft.prepare(configure())
    assert len(grown.rows.eval) == 6
    assert held_out < {row.messages[0]["content"] for row in grown.rows.eval}
    assert trained < {row.messages[0]["content"] for row in grown.rows.train}


def test_a_separate_eval_file(configure, tmp_path):
    evaluation = write_rows(tmp_path / "eval.jsonl", 3, start=100)
    task = sft.prepare(configure(10, data__eval__path=str(evaluation)))
    assert (len(task.rows.train), len(task.rows.eval)) == (10, 3)


def test_the_run_trains_on_its_snapshot(configure, tmp_path):
    """The source may change or vanish; the run goes on with what it froze."""
    config = configure(10, plan__checkpoint_every=1)
    unbroken = FakeBackend()
    run_all(config, unbroken)
    backend = FakeBackend()
    task = sft.prepare(config)
    run = start_run("sft", task)
    steps = sft.train(task, backend, run)
    next(steps)
    steps.close()
    (tmp_path / "rows.jsonl").unlink()
    resume(run, backend)
    assert backend.lineage == unbroken.lineage


def test_a_mixture_is_drawn_by_weight(configure, tmp_path):
    one = write_rows(tmp_path / "one.jsonl", 4)
    two = write_rows(tmp_path / "two.jsonl", 4, start=50)
    config = compose(
        "sft",
        {
            "data": "mixture",
            "data.sources": [{"path": str(one)}, {"path": str(two), "weight": 2.0}],
            "runs_dir": str(tmp_path / "runs"),
            "eval.fraction": 0,
            "plan.batch_size": 3,
            "samples.num_prompts": 0,
        },
    )
    backend = FakeBackend()
    task, _, reports = run_all(config, backend)
    assert task.plan.train_rows == 12
    assert len(reports) == 4
    seen = [tuple(tokens) for batch in backend.lineage for tokens in batch]
    assert sorted(seen.count(tokens) for tokens in set(seen)) == [1] * 4 + [2] * 4


def test_a_loss_that_needs_what_the_recipe_lacks(configure):
    with pytest.raises(ConfigError, match=r"'needs_advantages' needs 'advantages'.*token_weights"):
        sft.prepare(configure(loss___target_="tests.recipes.test_sft_flow.needs_advantages"))


def test_a_loss_is_tried_before_anything_is_opened(configure):
    """Case 59, for a loss of ones own: its refusal is a config error of `prepare`."""
    own = {"loss___target_": "tests.recipes.test_sft_flow.scaled"}
    with pytest.raises(ConfigError, match=r"^loss\.factor=-1: must be above 0$"):
        sft.prepare(configure(**own, loss__factor=-1))
    assert sft.prepare(configure(**own, loss__factor=2)).loss_fn.keywords == {"factor": 2}


def scaled(logprobs, *, token_weights, factor):
    if factor <= 0:
        raise ValueError(f"factor={factor}: must be above 0")
    return -factor * (token_weights * logprobs).sum(), {}


def needs_advantages(logprobs, *, advantages, token_weights):
    raise AssertionError("never called")


def test_a_backend_that_cannot(configure):
    with pytest.raises(ConfigError, match=r"max_seq_len=5000000: the model takes at most"):
        sft.prepare(configure(max_seq_len=5_000_000))
    for key, value in (("base_weights", "nf4"), ("generator", "vllm")):
        setting = {"backend__device": "cpu", f"backend__{key}": value}
        with pytest.raises(ConfigError, match=rf"^backend\.{key}={value}: .*needs a CUDA device"):
            sft.prepare(configure(**setting))


def test_start_from_takes_weights_only_and_begins_at_step_0(configure):
    _, first, _ = run_all(configure(), FakeBackend())
    checkpoint = first.checkpoints()[-1]
    backend = FakeBackend()
    task = sft.prepare(configure())  # the local backend would refuse to begin from a fake's files
    task = replace(task, config=replace(task.config, start_from=str(checkpoint.ref.path)))
    reports = list(sft.train(task, backend, start_run("sft", task)))
    assert backend.with_optimizer[0] is False
    assert reports[0].step == 1


def test_a_second_writer_is_refused(configure):
    task = sft.prepare(configure())
    run = start_run("sft", task)
    steps = sft.train(task, FakeBackend(), run)
    next(steps)
    with pytest.raises(Exception, match="training this run"):
        next(sft.train(task, FakeBackend(), RunDir.open(run.path)))
    steps.close()


def interrupt_promotion(backend, config):
    """A run whose steps are all made and whose promotion fails."""
    backend.fail_export = True
    task = sft.prepare(config)
    run = start_run("sft", task)
    with pytest.raises(OSError, match="disk full"):
        list(sft.train(task, backend, run))
    backend.fail_export = False
    return RunDir.open(run.path)


@pytest.mark.parametrize("patience", [None, 2])
def test_a_run_that_only_lacks_its_promotion_can_be_finished(configure, patience):
    """A full disk at the end loses nothing: resume promotes, and trains no further step."""
    backend = FakeBackend(nll=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    config = configure(15, plan__checkpoint_every=1, early_stopping__patience=patience)
    run = interrupt_promotion(backend, config)
    assert run.record.state is RunState.FAILED and not run.record.model_available
    _, run, reports = resume(run, backend)
    assert reports == []
    assert run.record.state is RunState.SUCCEEDED and run.record.model_available
    reason = StopReason.COMPLETED if patience is None else StopReason.EARLY_STOPPING
    assert run.record.outcome.stop_reason is reason
    assert run.record.outcome.steps == (6 if patience is None else 3)
    assert (run.model_dir / "exported").read_text() == "step_000001"


def snapshot_of(run):
    return {
        path.relative_to(run.path): path.read_bytes()
        for path in sorted(run.path.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_a_refused_second_starter_changes_nothing(configure):
    task = sft.prepare(configure(plan__checkpoint_every=1))
    run = start_run("sft", task)
    steps = sft.train(task, FakeBackend(), run)
    next(steps)
    before = snapshot_of(run)
    second = sft.prepare(compose("sft", {"resume": str(run.path), "plan.epochs": 9}))
    with pytest.raises(RunError, match="training this run"):
        start_run("sft", second)
    assert snapshot_of(run) == before
    steps.close()


def test_a_dry_run_of_a_resume_changes_nothing(configure, capsys):
    _, run, _ = run_all(configure(), FakeBackend())
    before = snapshot_of(run)
    code = sft.main([f"resume={run.path}", "plan.epochs=4", "dry_run=true", "plan.probe=false"])
    assert code == 0
    assert "the run is as it was" in capsys.readouterr().out
    assert snapshot_of(run) == before


def stopped_after_one_step(config, backend):
    task = sft.prepare(config)
    run = start_run("sft", task)
    steps = sft.train(task, backend, run)
    next(steps)
    steps.close()
    return RunDir.open(run.path)


def test_an_edited_config_is_refused(configure):
    run = stopped_after_one_step(configure(), FakeBackend())
    file = run.path / "config.yaml"
    file.write_text(file.read_text().replace("learning_rate: 0.0002", "learning_rate: 0.02"))
    with pytest.raises(ConfigError, match=r"config\.yaml in it was edited.*start_from"):
        resume(run, FakeBackend())


def test_a_resumed_run_trains_the_tokens_that_it_froze(configure, tmp_path):
    """Another chat template, tokenizer or package afterwards cannot change what is trained."""
    template = tmp_path / "template.jinja"
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    text += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template.write_text(text)
    config = configure(model__chat_template=str(template), plan__checkpoint_every=1)
    whole = FakeBackend()
    run_all(config, whole)
    backend = FakeBackend()
    run = stopped_after_one_step(config, backend)
    template.write_text(text.replace("<|im_start|>{{", "<|im_start|>the {{"))
    resume(run, backend)
    assert backend.lineage == whole.lineage


def test_a_longer_plan_says_that_the_learning_rate_may_jump(configure):
    _, run, _ = run_all(configure(), FakeBackend())
    task = sft.prepare(compose("sft", {"resume": str(run.path), "plan.epochs": 3}))
    assert any("12 steps instead of 4" in warning for warning in task.summary["warnings"])


def test_a_lost_best_checkpoint_is_said(configure):
    backend = FakeBackend(nll=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5])
    run = interrupt_promotion(backend, configure(15, plan__checkpoint_every=1, checkpoints__keep=9))
    shutil.rmtree(run.path / "checkpoints" / "step_000001")
    _, run, _ = resume(run, backend)
    assert run.record.outcome.downgrades == ["promotion:next_best:best_checkpoint_missing"]
    assert (run.record.evaluation.best_step, run.record.evaluation.promoted_step) == (1, 2)


def test_closing_after_the_last_step_is_no_cancellation(configure):
    task = sft.prepare(configure())
    run = start_run("sft", task)
    steps = sft.train(task, FakeBackend(), run)
    for report in steps:
        if report.step == report.planned_steps:
            steps.close()
    assert RunDir.open(run.path).record.state is RunState.SUCCEEDED


def test_a_run_is_named_by_its_number(configure, tmp_path):
    run = stopped_after_one_step(configure(), FakeBackend())
    runs_dir = str(tmp_path / "runs")
    config = compose("sft", {"resume": "1", "runs_dir": runs_dir})
    assert config.resume == str(run.path)
    assert compose("sft", {"start_from": run.record.id, "runs_dir": runs_dir}).start_from == str(
        run.path
    )


def test_what_start_from_names_is_looked_for_in_prepare(configure):
    with pytest.raises(ConfigError, match="no such folder"):
        sft.prepare(configure(start_from="nowhere"))


def test_a_loss_parameter_that_is_a_column(configure):
    with pytest.raises(ConfigError, match=r"loss\.token_weights is set"):
        sft.prepare(configure(loss__token_weights=1.0))
