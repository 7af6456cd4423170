"""JSON that fits a schema."""

import json

import pytest

pytest.importorskip("jsonschema")

from tests.rewards.scorers import samples_of, scorer_of
from tunebook.errors import ConfigError
from tunebook.rewards import JsonSchema, NotedReward

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
STRICT = JsonSchema(schema=PERSON, allow_fence=False)
FENCED = JsonSchema(schema=PERSON, allow_fence=True)


@pytest.mark.parametrize("text", ['{"name": "A"}', ' {"name": "A", "age": 3}\n'])
def test_what_fits_scores_one(text):
    assert STRICT(text) == FENCED(text) == 1.0
    assert FENCED(f"```json\n{text}\n```") == FENCED(f"```\n{text}\n```\n") == 1.0


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("type", "[]"),
        ("required", "{}"),
        ("type of a property", '{"name": 5}'),
        ("integer", '{"name": "A", "age": 1.5}'),
        ("minimum", '{"name": "A", "age": -1}'),
        ("nothing more", '{"name": "A", "x": 1}'),
    ],
)
def test_each_rule_has_a_value_that_breaks_it(rule, text):
    reward = STRICT(text)
    assert reward == 0.0 and not isinstance(reward, NotedReward), rule


@pytest.mark.parametrize(
    "text",
    [
        "", "no JSON", '{"name": "A"', '{"name": "A"} and more', "{'name': 'A'}", '{"name": NaN}',
        "[" * 100_000, "1" * 10_000, '```json\n{"name": "A"}\n```', "\ud800",
    ],
)  # fmt: skip
def test_what_is_no_json_is_wrong_and_counted_apart(text):
    reward = STRICT(text)
    assert reward == 0.0 and isinstance(reward, NotedReward) and reward.note == "no_answer"


def test_a_schema_may_be_a_file_and_recursive(tmp_path):
    tree = {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(tree))
    reward = JsonSchema(schema=str(file), allow_fence=False)
    assert [reward(text) for text in ("[[], [[]]]", "[1]")] == [1.0, 0.0]
    assert reward("[" * 900 + "]" * 900) == 0.0  # deeper than it can be checked


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (None, "not given"),
        (5, "is 5"),
        ("nowhere.json", "nowhere.json"),
        ({"type": "strnig"}, "is no JSON schema"),
    ],
)
def test_a_bad_schema_is_refused(schema, words):
    with pytest.raises(ConfigError) as raised:
        JsonSchema(schema=schema, allow_fence=False)
    assert words in str(raised.value)


def test_nothing_is_fetched_for_a_reference():
    """It raises, so that the completion is unscored and the config's author hears of it."""
    elsewhere = {"$ref": "http://127.0.0.1:9/schema.json"}
    node = {"_target_": "tunebook.rewards.JsonSchema", "schema": elsewhere, "allow_fence": False}
    with scorer_of({"it": node}) as scorer:
        [score] = scorer.score(samples_of("{}"))
    assert score.total is None
    assert score.problems[0].kind == "exception" and "127.0.0.1" in score.problems[0].message
