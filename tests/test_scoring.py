"""Scoring: columns by signature, sums, what is unscored, limits of time, and nothing left behind."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.rewards.processes import children, is_alive, wait_until
from tests.rewards.scorers import HERE, samples_of, scorer_of
from tunebook.errors import ConfigError, DataError, RewardError
from tunebook.scoring import Sample, Score, check_rows, score_metrics

ROOT = Path(__file__).parent.parent


def scores_of(functions, *completions, **settings):
    with scorer_of(functions, **settings) as scorer:
        return scorer.score(samples_of(*completions))


def kinds_of(score):
    return [problem.kind for problem in score.problems]


# Columns and settings, told before anything runs.


@pytest.mark.parametrize(
    "node",
    [
        "matches",
        "by_position",
        "awaited",
        {"_target_": HERE + "scaled", "factor": 1},
        {"_target_": HERE + "Same", "value": 1},
        {"_target_": HERE + "SameAwaited", "value": 1},
    ],
)
def test_a_reward_gets_the_columns_it_names(node):
    scores = scores_of({"it": node}, "yes", "no")
    assert [score.total for score in scores] == [1.0, 0.0]
    assert [score.parts for score in scores] == [{"it": 1.0}, {"it": 0.0}]


def test_columns_that_are_optional_or_all():
    functions = {
        "all": "everything",
        "rest": "needs_and_takes_everything",
        "bonus": "optional",
        "bound": {"_target_": HERE + "optional", "bonus": 7},
    }
    with scorer_of(functions, columns=("answer",)) as scorer:
        [bare, rich] = scorer.score(
            [
                Sample("x", {"answer": "a"}),
                Sample("x", {"answer": "a", "bonus": 3.0}),
            ]
        )
    assert bare.parts == {"all": 1.0, "rest": 0.0, "bonus": 1.0, "bound": 7.0}
    assert rich.parts == {"all": 2.0, "rest": 1.0, "bonus": 3.0, "bound": 7.0}


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({}, ["reward.functions is empty", "reward=exact_number"]),
        ({"it": 3}, ["reward.functions.it=3", "_target_"]),
        ({"it": {"factor": 1}}, ["reward.functions.it._target_ is missing"]),
        ({"it": "nowhere"}, ["reward.functions.it._target_", "has no 'nowhere'; it has", "matches"]),
        ({"it": {"_target_": "nowhere.at_all"}}, ["it._target_=nowhere.at_all", "cannot be imported"]),
        ({"it": {"_target_": HERE + "matches", "answr": 1}}, ["it.answr", "it.answer"]),
        ({"it": {"_target_": HERE + "scaled"}}, ["'it'", "'factor'", "it.factor", "answer, prompt"]),
        ({"it": {"_target_": HERE + "optional", "weight": "x"}}, ["it.weight=x"]),
        ({"it": {"_target_": HERE + "optional", "weight": float("inf")}}, ["it.weight=inf"]),
        ({"it": {"_target_": HERE + "optional", "weight": True}}, ["it.weight=True"]),
        ({"it": {"_target_": HERE + "optional", "weight": 0}}, ["every weight is 0"]),
        ({"it": "many"}, ["reward.functions.it", "one completion"]),
        ({"it": "no_completion"}, ["reward.functions.it", "one completion"]),
        ({"it": "with_weight"}, ["reward.functions.it", "rename the parameter"]),
        ({"it": {"_target_": HERE + "Same"}}, ["reward.functions.it.value is missing"]),
        ({"it": {"_target_": HERE + "Same", "value": -1}}, ["reward.functions.it: value=-1"]),
        ({"it": {"_target_": HERE + "NotCallable"}}, ["cannot be called"]),
        ({"it": {"_target_": "tunebook.rewards.LLMJudge", "prompt": "x"}}, ["it.prompt"]),
    ],
)  # fmt: skip
def test_a_config_that_cannot_run_names_reward_key_and_what_there_is(functions, words):
    with pytest.raises(ConfigError) as raised:
        scorer_of(functions)
    for word in words:
        assert word in str(raised.value)


def test_what_the_recipe_gives_cannot_be_set():
    node = {"_target_": HERE + "needs_and_takes_everything", "prompt": "x"}
    with pytest.raises(ConfigError, match=r"it\.prompt is set, but 'prompt' is a column"):
        scorer_of({"it": node})


@pytest.mark.parametrize(("key", "value"), [("timeout_s", 0.0), ("at_once", 0)])
def test_limits_have_to_be_positive(key, value):
    with pytest.raises(ConfigError, match=r"reward\.\w+=0"):
        scorer_of({"it": "length"}, **{key: value})


def test_rows_that_lack_a_column_are_located():
    scorer = scorer_of({"it": "matches"})
    check_rows(scorer, [("a.jsonl", 1, {"answer"})])
    with pytest.raises(DataError) as raised:
        check_rows(scorer, [("a.jsonl", 1, {"answer"}), ("a.jsonl", 2, {"anser"})])
    [problem] = raised.value.problems
    assert (problem.file, problem.line, problem.field) == ("a.jsonl", 2, "answer")
    with scorer:
        [score] = scorer.score([Sample("yes", {})])
    assert (score.total, kinds_of(score)) == (None, ["missing_column"])


# Sums.


def test_the_total_is_the_weighted_sum():
    """0.5 x 1 - 2 x 3 = -5.5; weight 0 is only watched, and its None does no harm."""
    functions = {
        "one": {"_target_": HERE + "matches", "weight": 0.5},
        "three": {"_target_": HERE + "length", "weight": -2},
        "watched": {"_target_": HERE + "odd", "weight": 0},
    }
    [score] = scores_of(functions, "yes")
    assert (score.total, score.parts) == (-5.5, {"one": 1.0, "three": 3.0, "watched": 1.0})
    [score] = scores_of(functions, "none")
    assert (score.total, score.parts["watched"]) == (-8.0, None)


def test_a_missing_part_leaves_no_partial_sum():
    [good, bad] = scores_of({"one": "length", "two": "odd"}, "true", "none")
    assert (good.total, good.parts) == (5.0, {"one": 4.0, "two": 1.0})
    assert (bad.total, bad.parts) == (None, {"one": 4.0, "two": None})


@pytest.mark.parametrize("function", ["odd", "odd_awaited"])
@pytest.mark.parametrize(
    ("completion", "kind", "words"),
    [
        ("raise", "exception", "ValueError: the reward is broken"),
        ("exit", "exception", "SystemExit"),
        ("die", "crashed", "exit code 3"),
        ("none", "none", "None"),
        ("nan", "not_a_number", "nan"),
        ("inf", "not_a_number", "-inf"),
        ("text", "not_a_number", "'1.0' (str)"),
        ("list", "not_a_number", "list"),
        ("huge", "not_a_number", "int"),
        ("coroutine", "not_a_number", "async def"),
        ("unscored", "no_paper", "the printer is empty"),
    ],
)
def test_what_is_no_reward_is_unscored_and_counted(function, completion, kind, words):
    """Case 66: never 0, and the others of the batch are scored as if nothing had been."""
    scores = scores_of({"it": function}, "fine", completion, "true")
    assert [score.total for score in scores] == [1.0, None, 1.0]
    [problem] = scores[1].problems
    assert (problem.reward, problem.kind) == ("it", kind)
    assert words in problem.message
    assert problem.prompt == f"about {completion}"
    metrics = score_metrics(scores)
    assert metrics["unscored"] == metrics[f"unscored/{kind}"] == 1
    assert metrics["reward"] == metrics["reward/it"] == 1.0


def test_notes_are_counted_beside_the_reward():
    scores = scores_of({"it": "odd"}, "noted", "fine")
    assert [score.notes for score in scores] == [{"it": "noticed"}, {}]
    assert score_metrics(scores) == {
        "unscored": 0.0, "reward": 0.625, "reward/it": 0.625, "noticed/it": 0.5,
    }  # fmt: skip


def test_metrics_without_any_score_have_no_mean():
    [score] = scores_of({"it": "odd"}, "none")
    assert score_metrics([score]) == {"unscored": 1.0, "unscored/none": 1.0}
    assert score_metrics([]) == {"unscored": 0.0}
    assert Score(None, {}).total is None


def test_rewards_print_and_read_without_harm(capfd):
    """Their standard streams are not those that results travel on."""
    [score] = scores_of({"it": "odd"}, "print")
    assert score.total == 1.0
    assert "a line on standard output" in capfd.readouterr().err


def test_the_first_problem_of_a_kind_is_told_once_with_its_place(caplog):
    caplog.set_level(logging.WARNING, logger="tunebook")
    with scorer_of({"it": "odd"}) as scorer:
        for _ in range(2):
            scorer.score(samples_of("raise", "raise", "none"))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "reward 'it' on the prompt 'about raise': exception" in told[0]
    assert "examples.py" in told[0] and "raise ValueError" in told[0]
    assert "none" in told[1]


def test_secrets_in_messages_are_redacted(monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_API_KEY", "s3cr3t-s3cr3t-s3cr3t")
    [score] = scores_of({"it": "odd"}, "secret")
    [problem] = score.problems
    for text in (problem.message, problem.traceback, caplog.text):
        assert "s3cr3t" not in text
    assert "key [redacted]" in problem.message


def test_order_and_large_columns_survive():
    """Columns beyond what a pipe holds, for more calls than a batch."""
    completions = [f"{'x' * 3000}{number}" for number in range(200)]
    scores = scores_of({"it": "length", "too": "matches"}, *completions)
    assert [score.parts["it"] for score in scores] == [len(text) for text in completions]
    with scorer_of({"it": "matches"}) as scorer:
        big = "y" * 5_000_000
        [score] = scorer.score([Sample(big, {"answer": big})])
    assert score.total == 1.0


def test_no_samples_and_a_second_opening():
    scorer = scorer_of({"it": "length"})
    with scorer:
        assert scorer.score([]) == []
    with scorer:
        assert scorer.score(samples_of("abc"))[0].total == 3.0


# on_error.


@pytest.mark.parametrize("function", ["odd", "odd_awaited"])
def test_case_64_one_of_16_raises(function):
    """`skip` scores 15 and counts 1."""
    completions = ["fine"] * 7 + ["raise"] + ["fine"] * 8
    scores = scores_of({"it": function}, *completions)
    assert [score.total for score in scores] == [1.0] * 7 + [None] + [1.0] * 8
    assert score_metrics(scores) == {
        "unscored": 1.0, "unscored/exception": 1.0, "reward": 1.0, "reward/it": 1.0,
    }  # fmt: skip


def test_case_64_fail_ends_the_program_with_the_traceback(tmp_path):
    """While another reward would run for 1000 seconds; no process stays."""
    script = f"""
import sys
from tests.rewards.scorers import samples_of, scorer_of
from tunebook.display import report_error
node = {{"_target_": "tests.rewards.examples.writes_pid", "folder": {str(tmp_path)!r}}}
file = {str(tmp_path / "pids")!r}
raising = {{"_target_": "tests.rewards.examples.raises_when_there", "file": file}}
try:
    with scorer_of({{"stays": node, "raising": raising}}, timeout_s=1000, fail=True) as scorer:
        scorer.score(samples_of("fine"))
except Exception as error:
    sys.exit(report_error(error))
"""
    done = run_script(script)
    assert done.returncode == 1
    assert "reward 'raising' on the prompt 'about fine': exception" in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert 'raise ValueError("the other one runs")' in done.stderr
    assert "reward.on_error=fail" in done.stderr
    for pid in (tmp_path / "pids").read_text().split():
        assert wait_until(lambda pid=pid: not is_alive(int(pid)))


@pytest.mark.parametrize("completion", ["die", "nan", "text"])
def test_fail_is_about_every_fault_of_a_reward(completion):
    with pytest.raises(RewardError, match="reward 'it'"):
        scores_of({"it": "odd"}, "fine", completion, fail=True)


def test_fail_is_about_time_too():
    with pytest.raises(RewardError, match=r"no answer within 0\.5 s"):
        scores_of({"it": "endless"}, "fine", "endless", timeout_s=0.5, fail=True)


@pytest.mark.parametrize("completion", ["none", "unscored"])
def test_fail_lets_a_reward_decide_not_to_judge(completion):
    """Case 66: a judge that is overloaded ends no run."""
    scores = scores_of({"it": "odd"}, "fine", completion, fail=True)
    assert [score.total for score in scores] == [1.0, None]


# Time limits; nothing is left.


@pytest.mark.parametrize("function", ["endless", "endless_in_c"])
def test_case_65_endless_loops_leave_nothing_behind(function):
    """20 calls that never end, among others that do."""
    threads = threading.active_count()
    before = children()
    with scorer_of({"it": function}, timeout_s=1.0, at_once=20) as scorer:
        scores = scorer.score(samples_of(*["fine", "endless"] * 20))
        assert [score.total for score in scores] == [1.0, None] * 20
        assert all(kinds_of(score) == ["timeout"] for score in scores[1::2])
        assert score_metrics(scores)["unscored/timeout"] == 20
        again = scorer.score(samples_of("fine"))
    assert again[0].total == 1.0
    assert children() == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("function", ["endless_awaiting", "endless_blocking", "never_cancelled"])
def test_case_65_async_rewards_end_in_time_too(function):
    """Also one that blocks the event loop of all, or does not let itself be cancelled."""
    before = children()
    scores = scores_of({"it": function}, "fine", "endless", "fine", "fine", timeout_s=1.0)
    assert [score.total for score in scores] == [1.0, None, 1.0, 1.0]
    assert kinds_of(scores[1]) == ["timeout"]
    assert children() == before


def run_script(script, *, cwd=None):
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, timeout=60, check=False, cwd=cwd, env=script_environ(),
    )  # fmt: skip


def script_environ():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_program(tmp_path, number):
    """Ctrl-C and worse, while a reward runs that has started a process of its own."""
    script = f"""
from tests.rewards.scorers import samples_of, scorer_of
node = {{"_target_": "tests.rewards.examples.writes_pid", "folder": {str(tmp_path)!r}}}
with scorer_of({{"it": node}}, timeout_s=1000) as scorer:
    scorer.score(samples_of("fine"))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.DEVNULL, env=script_environ()
    ) as program:
        file = tmp_path / "pids"
        assert wait_until(lambda: file.exists() and len(file.read_text().split()) == 2, seconds=60)
        program.send_signal(number)
        assert program.wait(timeout=30) != 0
    for pid in file.read_text().split():
        assert wait_until(lambda pid=pid: not is_alive(int(pid)))


def test_scoring_inside_a_running_event_loop():
    """As in a notebook."""

    async def cell():
        return scores_of({"sync": "matches", "async": "awaited"}, "yes", "no")

    assert [score.total for score in asyncio.run(cell())] == [2.0, 0.0]


def test_rewards_of_a_script_or_notebook_are_sent_by_value(tmp_path):
    """With what they use of it: a global, a function, an import."""
    script = """
import math
from tunebook.config import OnRewardError, RewardConfig
from tunebook.scoring import Sample, make_scorer

FACTOR = 3

def doubled(value):
    return 2 * value

def mine(completion, *, answer):
    return FACTOR * doubled(math.sqrt(float(answer)))

async def mine_async(completion):
    return FACTOR

class Mine:
    def __init__(self, *, plus):
        self.plus = plus

    def __call__(self, completion):
        return FACTOR + self.plus

functions = {
    "mine": {"_target_": "__main__.mine"},
    "mine_async": {"_target_": "__main__.mine_async"},
    "made": {"_target_": "__main__.Mine", "plus": 1},
}
config = RewardConfig(functions, 20.0, 8, OnRewardError.fail)
with make_scorer(config, ["answer"]) as scorer:
    print(scorer.score([Sample("x", {"answer": "16"})])[0].parts)
"""
    done = run_script(script, cwd=tmp_path)
    assert done.stdout == "{'mine': 24.0, 'mine_async': 3.0, 'made': 4.0}\n", done.stderr


def test_what_cannot_be_sent_names_the_way_out(tmp_path):
    script = """
import threading
from tunebook.config import OnRewardError, RewardConfig
from tunebook.errors import ConfigError
from tunebook.scoring import make_scorer

LOCK = (one for one in [1])

def mine(completion):
    return next(LOCK)

config = RewardConfig({"mine": {"_target_": "__main__.mine"}}, 20.0, 8, OnRewardError.fail)
try:
    make_scorer(config, [])
except ConfigError as error:
    print(error)
"""
    done = run_script(script, cwd=tmp_path)
    assert "reward.functions.mine._target_=__main__.mine" in done.stdout, done.stderr
    assert "Put it into a module" in done.stdout


def test_a_module_that_another_process_cannot_import_fails_on_opening(monkeypatch):
    import types

    before = children()
    module = types.ModuleType("only_here")
    module.mine = lambda completion: 1.0
    monkeypatch.setitem(sys.modules, "only_here", module)
    scorer = scorer_of({"it": {"_target_": "only_here.mine"}})
    with pytest.raises(RewardError, match=r"'it' cannot be loaded.*only_here"), scorer:
        pass
    assert children() == before


def test_a_module_that_ends_its_process_fails_on_opening(tmp_path, monkeypatch):
    before = children()
    elsewhere = f"import os\nif os.getpid() != {os.getpid()}:\n    os._exit(7)\n"
    file = tmp_path / "ends_when_imported.py"
    file.write_text(f"{elsewhere}def mine(completion):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    scorer = scorer_of({"it": {"_target_": "ends_when_imported.mine"}})
    with pytest.raises(RewardError, match=r"ended while starting .exit code 7"), scorer:
        pass
    assert children() == before


# Concurrency.


def test_async_rewards_run_together_up_to_the_limit():
    """Each waits until four run; none sees a fifth."""
    node = {"_target_": HERE + "num_running", "wanted": 4}
    scores = scores_of({"it": node}, *"abcdefgh", at_once=4)
    assert [score.total for score in scores] == [4.0] * 8


def test_plain_rewards_run_in_several_processes_where_they_wait(tmp_path):
    """Each waits until three processes have been there."""
    node = {"_target_": HERE + "meets_others", "folder": str(tmp_path), "wanted": 3}
    scores = scores_of({"it": node}, *"abcdef", at_once=3)
    assert [score.total for score in scores] == [1.0] * 6
    assert len(list(tmp_path.iterdir())) == 3


def test_one_at_a_time_still_scores_both_kinds():
    scores = scores_of({"sync": "matches", "async": "awaited"}, *["yes", "no"] * 20, at_once=1)
    assert [score.total for score in scores] == [2.0, 0.0] * 20


def test_workers_import_nothing_heavy():
    """What makes them cheap to start."""
    script = (
        "import sys; before = set(sys.modules); import tunebook.reward_worker; "
        "import tunebook.rewards; "
        "heavy = {'torch', 'numpy', 'transformers', 'omegaconf', 'asyncio', 'sympy', 'dill'}; "
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    assert run_script(script).stdout == "[]\n"
