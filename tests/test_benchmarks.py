"""The benchmarks run: contestants on the tiny model, one timed step, without TRL where it is missing."""

import json
from importlib.util import find_spec

import pytest

from benchmarks.__main__ import main
from benchmarks.contest import BOUNDS, Errors, Record, ratios
from benchmarks.report import document
from benchmarks.workload import ANSWER, chat_texts, group_advantages, words

TINY = ["--model", "pkg://tunebook/assets/tiny_model", "--length-scale", "0.1"]


def run(tmp_path, *arguments):
    """The result of one case."""
    assert main([*arguments, *TINY, "--out", str(tmp_path)]) == 0
    [file] = tmp_path.glob("*.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("case", ["sft", "dpo", "grpo"])
def test_ours_and_plain_compete(case, tmp_path):
    result = run(tmp_path, case, "--steps", "1", "--contestants", "plain,ours")
    assert set(result["contestants"]) == {"plain", "ours"}
    for entry in result["contestants"].values():
        assert len(entry["steps"]) == 2
        assert entry["errors"]["gradient"] < 1e-3
        assert entry["peak_memory"] > 0
    assert result["ratios"]["step"]["plain / ours"] > 0
    assert f"## {case}, cpu, fp32" in document([result])


def test_bf16_is_compared_with_float32(tmp_path):
    result = run(tmp_path, "sft", "--steps", "1", "--dtype", "bf16", "--contestants", "ours")
    assert 1e-4 < result["contestants"]["ours"]["errors"]["gradient"] < 0.25


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed (extra `bench`)")
@pytest.mark.parametrize("case", ["sft", "dpo", "grpo"])
def test_trl_computes_the_same(case, tmp_path):
    result = run(tmp_path, case, "--steps", "1", "--contestants", "trl,trl_tuned,plain,ours")
    assert set(result["contestants"]) == {"trl", "trl_tuned", "plain", "ours"}
    assert all(value is not None for value in result["ratios"]["step"].values())


def test_without_trl_its_contestants_are_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.cases.find_spec", lambda name: None)
    result = run(tmp_path, "sft", "--steps", "1")
    assert set(result["contestants"]) == {"plain", "ours"}
    assert "trl and trl_tuned skipped: trl and peft not installed" in capsys.readouterr().out


def test_adapters_at_once_have_the_losses_of_adapters_in_turn(tmp_path):
    result = run(tmp_path, "adapters", "--steps", "2", "--contestants", "ours")
    assert result["runs"]["ours in turn"]["loss_error"] < 1e-3
    assert set(result["ratios"]) == {"ours in turn / ours at once"}
    assert "ours at once" in document([result])


def test_a_contestant_that_computes_something_else_gets_no_ratio():
    records = {name: Record(steps=[{"seconds": 1.0}, {"seconds": 2.0}]) for name in ("trl", "ours")}
    errors = {
        "trl": Errors(gradient=0.01, worst_layer=0.01, loss=0.0),
        "ours": Errors(gradient=0.0, worst_layer=0.0, loss=0.0),
    }
    found = ratios(records, errors, BOUNDS["fp32"], of=Record.seconds)
    assert found == {"trl / ours": None}


def test_generated_rows_are_seeded_and_as_long_as_asked():
    assert chat_texts(3, length_scale=1.0, seed=1) == chat_texts(3, length_scale=1.0, seed=1)
    assert chat_texts(3, length_scale=1.0, seed=1) != chat_texts(3, length_scale=1.0, seed=2)
    import random

    rng = random.Random(0)
    lengths = sorted(len(words(rng, ANSWER, 1.0).split()) for _ in range(2001))
    assert lengths[1000] == pytest.approx(86, abs=4)


def test_advantages_are_centred_and_scaled():
    advantages = group_advantages([0.0, 1.0, 2.0])
    assert advantages == pytest.approx([-1.0, 0.0, 1.0], abs=1e-3)


def test_the_way_through_a_server_gives_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    result = run(tmp_path / "out", "served", "--steps", "1")
    assert result["ratios"]["step"]["served / local"] > 0
    assert "## served" in document([result])
