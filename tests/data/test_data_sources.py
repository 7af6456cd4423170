"""Every way in: files of each kind, folders, globs, packages, functions, Hub datasets, mixtures."""

import gzip
import json
import os

import pytest

from tunebook.config import OnBadRow, SourceConfig
from tunebook.data.load import load_eval_rows, load_rows
from tunebook.data.rows import Kind
from tunebook.errors import ConfigError, DataError, EmptyDataError

PAIRS = [("one?", "1"), ("two?", "2"), ("three?", "3")]


def objects(pairs=PAIRS):
    return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]


def write_jsonl(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def loaded_pairs(loaded):
    return [(row.messages[0]["content"], row.messages[1]["content"]) for row in loaded.rows]


def conversations(data, **settings):
    return load_rows(data, kind=Kind.conversation, **settings)


def test_compressed_jsonl(tmp_path, make_data):
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(value) + "\n" for value in objects())
    loaded = conversations(make_data(path))
    assert loaded_pairs(loaded) == PAIRS
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(DataError, match="cannot be read"):
        conversations(make_data(path))


def test_json_list_has_physical_lines(tmp_path, make_data):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(objects(), indent=1), encoding="utf-8")
    loaded = conversations(make_data(path))
    assert loaded_pairs(loaded) == PAIRS
    assert [row.line for row in loaded.rows] == [2, 6, 10]


def test_json_object_is_one_row_and_json_lines_are_taken(tmp_path, make_data):
    one = tmp_path / "one.json"
    one.write_text(json.dumps(objects()[0], indent=2))
    assert loaded_pairs(conversations(make_data(one))) == PAIRS[:1]
    lines = write_jsonl(tmp_path / "lines.json", objects())
    assert loaded_pairs(conversations(make_data(lines))) == PAIRS


@pytest.mark.parametrize("on_bad_row", list(OnBadRow))
@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("cut.json", '[{"prompt": "a", "completion": "b"},\n {"prompt": ', 2),
        ("comma.json", '[{"prompt": "a", "completion": "b"}\n {"prompt": "c"}]', 2),
        ("after.json", '[{"prompt": "a", "completion": "b"}]\n\nmore', 1),
        (
            "twice.json",
            '[\n{"prompt": "a", "completion": "b"},\n{"prompt": "a", "prompt": "b"}]',
            3,
        ),
        ("object.json", '{"prompt": "a",\n "completion" "b"}', 2),
        ("quote.csv", 'prompt,completion\na,b\n"c"d,e\nf,g\n', 3),
    ],
)
def test_a_fault_that_hides_rows_is_never_skipped(
    name, text, line, on_bad_row, tmp_path, make_data
):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=r"Nothing after it can be read") as caught:
        conversations(make_data(path, on_bad_row=on_bad_row))
    assert f"{path}:{line}: " in str(caught.value)


def test_csv_lines_quotes_and_empty_cells(tmp_path, make_data):
    path = tmp_path / "rows.csv"
    path.write_bytes(
        b"\xef\xbb\xbfprompt,completion,answer\r\n"
        b'"two\nlines, quoted","say ""hi""",7\r\n'
        b"second,plain,\r\n"
    )
    loaded = conversations(make_data(path))
    assert loaded_pairs(loaded) == [("two\nlines, quoted", 'say "hi"'), ("second", "plain")]
    assert [row.line for row in loaded.rows] == [2, 4]
    assert [row.columns for row in loaded.rows] == [{"answer": "7"}, {}]


@pytest.mark.parametrize("blank", ["\n", "\r\n\r\n", "  \n", ",\n"])
def test_csv_lines_without_text_before_the_header_are_skipped(blank, tmp_path, make_data):
    path = tmp_path / "rows.csv"
    path.write_bytes(f"{blank}prompt,completion\na,b\n\nc,d\n".encode())
    loaded = conversations(make_data(path))
    assert loaded_pairs(loaded) == [("a", "b"), ("c", "d")]
    first = blank.count("\n") + 2
    assert [row.line for row in loaded.rows] == [first, first + 2]
    path.write_text(f"{blank}prompt,prompt\n", newline="")
    with pytest.raises(DataError, match=rf"rows\.csv:{first - 1}: the header names"):
        conversations(make_data(path))


def test_csv_faults_are_located(tmp_path, make_data):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\na,b\nc,d,e\nf,\n,\n")
    with pytest.raises(DataError) as caught:
        conversations(make_data(path))
    places = [(problem.line, problem.reason[:20]) for problem in caught.value.problems]
    assert [line for line, _ in places] == [3, 4, 5]
    assert caught.value.problems[0].reason.startswith("3 cells, but the header has 2")
    path.write_text("prompt,prompt\na,b\n")
    with pytest.raises(DataError, match=r"rows\.csv:1: the header names 'prompt' twice"):
        conversations(make_data(path))


def test_tsv(tmp_path, make_data):
    path = tmp_path / "rows.tsv"
    path.write_text("prompt\tcompletion\na, b\tc\n")
    assert loaded_pairs(conversations(make_data(path))) == [("a, b", "c")]


def test_parquet_nulls_of_other_rows_disappear(tmp_path, make_data):
    import pyarrow
    import pyarrow.parquet

    def call(name, arguments):
        return [{"type": "function", "function": {"name": name, "arguments": arguments}}]

    def row(name, arguments):
        return {
            "messages": [
                {"role": "user", "content": "go", "tool_calls": None},
                {"role": "assistant", "content": None, "tool_calls": call(name, arguments)},
            ],
            "score": float("nan"),
        }

    rows = [row("add", {"a": 1, "b": 2}), row("say", {"text": "x"})]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = conversations(make_data(path)).rows
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}
    assert second.messages[1]["tool_calls"][0]["function"]["arguments"] == {"text": "x"}
    assert second.messages[0] == {"role": "user", "content": "go"}
    assert (first.line, second.line, first.columns) == (1, 2, {})


def test_unreadable_parquet(tmp_path, make_data):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"rows\.parquet"):
        conversations(make_data(path))


def test_folder_and_glob_are_sorted(tmp_path, make_data):
    folder = tmp_path / "rows"
    (folder / "deeper").mkdir(parents=True)
    write_jsonl(folder / "b.jsonl", objects()[1:2])
    write_jsonl(folder / "a.jsonl", objects()[:1])
    write_jsonl(folder / ".hidden.jsonl", objects()[:1])
    (folder / "README.md").write_text("not data")
    write_jsonl(folder / "deeper" / "c.jsonl", objects()[2:])
    assert loaded_pairs(conversations(make_data(folder))) == PAIRS[:2]
    assert loaded_pairs(conversations(make_data(folder / "*.jsonl"))) == PAIRS[:2]
    assert loaded_pairs(conversations(make_data(folder / "**" / "*"))) == PAIRS
    loaded = conversations(make_data(folder))
    assert [row.file for row in loaded.rows] == [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


def test_places_without_rows_name_the_path(tmp_path, make_data):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmptyDataError, match=r"0 rows in .*empty"):
        conversations(make_data(tmp_path / "empty"))
    with pytest.raises(EmptyDataError, match=r"0 rows in .*nothing-\*"):
        conversations(make_data(tmp_path / "nothing-*.jsonl"))
    with pytest.raises(ConfigError, match="no such file"):
        conversations(make_data(tmp_path / "missing.jsonl"))
    (tmp_path / "rows.docx").write_text("x")
    with pytest.raises(ConfigError, match=r"Known: \.jsonl"):
        conversations(make_data(tmp_path / "rows.docx"))
    for name, text in [("e.json", "[]"), ("e.csv", "prompt,completion\n"), ("w.jsonl", " \n\n")]:
        (tmp_path / name).write_text(text)
        with pytest.raises(EmptyDataError, match=rf"0 rows in .*{name}"):
            conversations(make_data(tmp_path / name))


def test_relative_paths_start_where_the_user_stands(tmp_path, monkeypatch, make_data):
    write_jsonl(tmp_path / "rows.jsonl", objects())
    monkeypatch.chdir(tmp_path)
    loaded = conversations(make_data("rows.jsonl"))
    assert loaded.rows[0].file == str(tmp_path / "rows.jsonl")
    assert os.getcwd() == str(tmp_path)


def test_packaged_file(tmp_path, monkeypatch, make_data):
    package = tmp_path / "packaged_rows"
    package.mkdir()
    (package / "__init__.py").write_text("")
    write_jsonl(package / "rows.jsonl", objects())
    monkeypatch.syspath_prepend(tmp_path)
    assert loaded_pairs(conversations(make_data("pkg://packaged_rows/rows.jsonl"))) == PAIRS
    with pytest.raises(ConfigError, match="holds no 'other'"):
        conversations(make_data("pkg://packaged_rows/other"))


FUNCTIONS = """
def rows(number=3, text="x"):
    return [{"prompt": f"{text}{i}", "completion": str(i)} for i in range(number)]

def endless():
    i = 0
    while True:
        yield {"prompt": f"p{i}", "completion": str(i)}
        i += 1

def breaking():
    yield {"prompt": "a", "completion": "b"}
    raise RuntimeError("the server went away")

def text():
    return "prompt"

def odd():
    import datetime, decimal
    import numpy
    return [
        {"prompt": "a", "completion": "b", "when": datetime.date(2024, 5, 1), "n": numpy.int64(3)},
        {"prompt": "a", "completion": "b", "n": (1, 2), "nan": float("nan")},
        {"prompt": "a", "completion": "b", "price": decimal.Decimal("1")},
        {"prompt": "a", "completion": "b", "far": float("inf")},
        {"prompt": "a", "completion": "b", 3: "x"},
        {"prompt": "a", "completion": "b", "big": 10 ** 5000},
        "text",
    ]
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "row_functions_under_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "row_functions_under_test"


def test_function_with_arguments(functions, make_data):
    path = f"{functions}.rows"
    loaded = conversations(make_data(function=path, function_args={"number": 2, "text": "q"}))
    assert loaded_pairs(loaded) == [("q0", "0"), ("q1", "1")]
    assert (loaded.rows[1].file, loaded.rows[1].line) == (path, 2)
    assert loaded.sources[0].name == path


def test_rows_without_a_length_need_a_limit(functions, make_data):
    endless = f"{functions}.endless"
    with pytest.raises(ConfigError) as caught:
        conversations(make_data(function=endless))
    assert "plan.max_steps" in str(caught.value) and "data.limit" in str(caught.value)
    assert len(conversations(make_data(function=endless), unsized_limit=5).rows) == 5
    assert len(conversations(make_data(function=endless, limit=2), unsized_limit=5).rows) == 2


def test_function_faults(functions, make_data):
    with pytest.raises(DataError, match=r"raised RuntimeError at row 2: the server went away"):
        conversations(make_data(function=f"{functions}.breaking", limit=9))
    with pytest.raises(DataError, match=r"raised TypeError.*function_args=\{'size': 1\}"):
        conversations(make_data(function=f"{functions}.rows", function_args={"size": 1}))
    with pytest.raises(ConfigError, match="returned a str"):
        conversations(make_data(function=f"{functions}.text"))
    with pytest.raises(ConfigError, match="has no function 'gone'"):
        conversations(make_data(function=f"{functions}.gone"))
    with pytest.raises(ConfigError, match="cannot be imported"):
        conversations(make_data(function="no_such_module_here.rows"))
    with pytest.raises(ConfigError, match=r"package\.module\.function"):
        conversations(make_data(function="rows"))


def test_values_that_are_not_json(functions, make_data):
    loaded = conversations(make_data(function=f"{functions}.odd", on_bad_row=OnBadRow.skip))
    assert [row.columns for row in loaded.rows] == [{"when": "2024-05-01", "n": 3}, {"n": [1, 2]}]
    assert {problem.line: problem.field for problem in loaded.problems} == {
        3: "price",
        4: "far",
        5: "",
        6: "big",
        7: "",
    }


def test_hub_folder_and_saved_dataset(tmp_path, monkeypatch, make_data):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "hub_like"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", objects())
    write_jsonl(folder / "test.jsonl", objects()[:1])
    assert loaded_pairs(conversations(make_data(hub=str(folder)))) == PAIRS
    assert loaded_pairs(conversations(make_data(hub=str(folder), split="test"))) == PAIRS[:1]
    assert loaded_pairs(conversations(make_data(hub=str(folder), limit=2))) == PAIRS[:2]
    with pytest.raises(DataError, match=r"split validation.*cannot be loaded"):
        conversations(make_data(hub=str(folder), split="validation"))

    whole = datasets.Dataset.from_list(objects())
    whole.save_to_disk(tmp_path / "saved")
    loaded = conversations(make_data(hub=str(tmp_path / "saved")))
    assert loaded_pairs(loaded) == PAIRS
    assert loaded.rows[2].line == 3
    datasets.DatasetDict({"train": whole}).save_to_disk(tmp_path / "saved_splits")
    assert loaded_pairs(conversations(make_data(hub=str(tmp_path / "saved_splits")))) == PAIRS
    with pytest.raises(ConfigError, match=r"name it with data\.hub"):
        conversations(make_data(tmp_path / "saved_splits"))


def test_hub_out_of_reach(monkeypatch, tmp_path, make_data):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(DataError) as caught:
        conversations(make_data(hub="nobody/nothing", revision="v1"))
    message = str(caught.value)
    assert "data.hub=nobody/nothing" in message and "revision v1" in message
    assert "data.path" in message and "HF_TOKEN" in message


def test_mixture_keeps_sources_apart(tmp_path, make_data):
    one = write_jsonl(
        tmp_path / "one.jsonl", [{"id": i, **row} for i, row in enumerate(objects()[:2])]
    )
    other = write_jsonl(tmp_path / "other.jsonl", [{"id": 1, "question": "q", "reply": "r"}])
    sources = [
        SourceConfig(path=str(one), weight=2.0),
        SourceConfig(path=str(other), columns={"prompt": "question", "completion": "reply"}),
    ]
    loaded = conversations(make_data(sources=sources))
    assert [row.source for row in loaded.rows] == [0, 0, 1]
    assert [(info.name, info.rows, info.weight) for info in loaded.sources] == [
        (str(one), 2, 2.0),
        (str(other), 1, 1.0),
    ]
    assert loaded_pairs(loaded) == [*PAIRS[:2], ("q", "r")]
    assert loaded.warnings == []
    assert loaded.sources[0].fingerprint != loaded.sources[1].fingerprint


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "exactly one of data.path, data.hub and data.function or data.sources"),
        ({"path": "a.jsonl", "hub": "b/c"}, "data.path and data.hub are set"),
        ({"path": "a.jsonl", "sources": [SourceConfig(path="b")]}, "data.sources and data.path"),
        ({"limit": 3, "sources": [SourceConfig(path="b")]}, "data.sources and data.limit"),
        ({"weight": 3.0, "sources": [SourceConfig(path="b")]}, "data.sources and data.weight"),
        ({"sources": [SourceConfig()]}, "data.sources[0]: exactly one"),
        ({"path": "a.jsonl", "split": "test"}, "data.split is only read with data.hub"),
        ({"path": "a.jsonl", "function_args": {"a": 1}}, "data.function_args is only read with"),
        ({"path": "a.jsonl", "limit": 0}, "data.limit=0"),
        ({"path": "a.jsonl", "weight": 0.0}, "data.weight=0.0"),
        ({"path": "a.jsonl", "weight": float("nan")}, "data.weight=nan"),
    ],
)
def test_settings_that_do_not_fit_together(settings, words, make_data):
    with pytest.raises(ConfigError) as caught:
        conversations(make_data(**settings))
    assert words in str(caught.value)


def test_limit_stops_reading(tmp_path, make_data):
    path = write_jsonl(tmp_path / "rows.jsonl", objects())
    with path.open("a") as file:
        file.write("{broken\n")
    loaded = conversations(make_data(path, limit=3))
    assert (len(loaded.rows), loaded.num_read) == (3, 3)


def test_renames(tmp_path, make_data):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b", "hint": "c"}])
    swapped = make_data(path, columns={"prompt": "completion", "completion": "prompt"})
    assert loaded_pairs(conversations(swapped)) == [("b", "a")]
    hiding = conversations(make_data(path, columns={"completion": "hint"}))
    assert loaded_pairs(hiding) == [("a", "c")]
    assert hiding.rows[0].columns == {}
    with pytest.raises(ConfigError) as caught:
        conversations(make_data(path, columns={"completion": "output"}))
    assert "Its columns are: completion, hint, prompt" in str(caught.value)
    assert "data.columns.completion=output" in str(caught.value)


def test_a_renamed_column_that_some_rows_lack_is_located(tmp_path, make_data):
    rows = [{"q": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError) as caught:
        conversations(make_data(path, columns={"prompt": "q"}))
    (problem,) = caught.value.problems
    assert (problem.line, problem.field) == (2, "q")
    assert "the columns are prompt, completion" in problem.reason


def test_eval_rows_come_from_their_own_source(tmp_path, make_data):
    train = write_jsonl(tmp_path / "train.jsonl", [{"doc": "d", "id": "x", **objects()[0]}])
    held_out = write_jsonl(tmp_path / "eval.jsonl", objects()[1:])
    data = make_data(
        train, eval=SourceConfig(path=str(held_out), limit=1), id_column="id", group_column="doc"
    )
    loaded = load_eval_rows(data, kind=Kind.conversation)
    assert loaded is not None and loaded_pairs(loaded) == PAIRS[1:2]
    assert load_eval_rows(make_data(train), kind=Kind.conversation) is None
    with pytest.raises(ConfigError, match=r"data\.eval\.split is set, but no eval rows are named"):
        load_eval_rows(make_data(train, eval=SourceConfig(split="x")), kind=Kind.conversation)
    with pytest.raises(ConfigError, match=r"data\.eval\.path and data\.eval\.hub are set"):
        load_eval_rows(
            make_data(train, eval=SourceConfig(path="a", hub="b")), kind=Kind.conversation
        )


@pytest.mark.parametrize(
    ("row", "columns", "words"),
    [
        (
            {"q": "a", "a": "b"},
            {},
            "Rename columns with KEY.columns, our name first: KEY.columns={",
        ),
        ({"prompt": "a"}, {}, "name the answer's column: KEY.columns={completion: <column>}"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {},
            "train on the better side: KEY.columns={completion: chosen}",
        ),
        (
            {"prompt": "a", "completion": "b"},
            {"prompt": "q"},
            "but KEY.columns reads prompt from it",
        ),
        ({"prompt": " ", "completion": " "}, {}, "Check which columns hold the text (KEY.columns)"),
        ({"messages": []}, {}, "(KEY): every row was skipped, so nothing of it is left"),
    ],
)
def test_errors_name_the_columns_key_of_their_source(row, columns, words, tmp_path, make_data):
    rows = [row, {"q": "a", "completion": "b"}] if columns else [row]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    good = str(write_jsonl(tmp_path / "good.jsonl", objects()))
    source = SourceConfig(path=path, columns=columns)
    skip = {"on_bad_row": OnBadRow.skip} if "skipped" in words else {}

    def said(load, **settings):
        with pytest.raises(DataError) as caught:
            load(make_data(**settings, **skip), kind=Kind.conversation)
        return str(caught.value)

    assert words.replace("KEY", "data") in said(load_rows, path=path, columns=columns)
    assert words.replace("KEY", "data.eval") in said(load_eval_rows, path=good, eval=source)
    if "hold the text" not in words:
        sources = [SourceConfig(path=good), source]
        assert words.replace("KEY", "data.sources[1]") in said(load_rows, sources=sources)
