"""Composing configs: defaults, overrides, typos, types, paths, resume."""

import importlib.resources
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import dpo, grpo, sft
from tunebook.compose import (
    build,
    build_function,
    compose,
    from_yaml,
    resumed_config,
    to_yaml,
)
from tunebook.composition_errors import SCHEMAS, recipe_keys
from tunebook.config import DPOConfig, Mask, SFTConfig
from tunebook.errors import ConfigError
from tunebook.key_suggestions import nearest_key
from tunebook.loss_listing import list_losses
from tunebook.recipe_help import FILE_GROUPS, file_keys, groups_of


def group_files(group):
    folder = importlib.resources.files("configs").joinpath(group)
    return sorted(
        file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")
    )


def run_recipe(*arguments, cwd=None, recipe="sft"):
    return subprocess.run(
        [sys.executable, "-m", f"recipes.{recipe}", *arguments],
        capture_output=True, text=True, cwd=cwd, check=False,
    )  # fmt: skip


def test_defaults_compose_to_the_schema():
    config = compose("sft")
    assert isinstance(config, SFTConfig)
    assert config.plan.batch_size == 16
    assert config.plan.epochs == 1
    assert config.data.mask is Mask.all_assistant
    assert config.tracker is None
    assert config.lora is not None and config.lora.to_lora().scale == 2.0


GROUPS = ["backend", "model", "data", "loss", "tracker", "experiment", "sweep"]
FILES = [
    *itertools.product(SCHEMAS, GROUPS),
    *itertools.product(["grpo"], ["reward", "environment"]),
]


def experiments(recipe):
    """Those of the recipe: `<recipe>_...`; SFT has all that name no recipe."""
    names = group_files("experiment")
    named = {name: name.partition("_")[0] for name in names}
    return [name for name in names if (named[name] if named[name] in SCHEMAS else "sft") == recipe]


@pytest.mark.parametrize(("recipe", "group"), FILES)
def test_every_file_composes(recipe, group):
    names = experiments(recipe) if group == "experiment" else group_files(group)
    for name in names:
        if name != "base":
            compose(recipe, [f"{group}={name}"])


@pytest.mark.parametrize("recipe", SCHEMAS)
def test_every_model_with_every_experiment_composes(recipe):
    models = [name for name in group_files("model") if name != "base"]
    for model, experiment in itertools.product(models, experiments(recipe)):
        config = compose(recipe, [f"model={model}", f"experiment={experiment}"])
        assert config.model.name


def test_the_defaults_of_dpo_compose_to_its_schema():
    config = compose("dpo")
    assert isinstance(config, DPOConfig)
    assert config.loss == {"_target_": "loss_fns.dpo.dpo_sigmoid", "beta": 0.1}
    assert config.data.path == "pkg://tunebook/assets/tiny_data/preferences.jsonl"
    assert from_yaml(to_yaml(config), "dpo") == config
    with pytest.raises(ConfigError, match=r"normalization"):
        compose("dpo", ["normalization.kind=token_mean"])


def test_an_experiment_applies_and_the_command_line_wins():
    config = compose("sft", ["experiment=gsm8k_smollm2", "plan.batch_size=4"])
    assert config.model.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (config.plan.batch_size, config.max_seq_len) == (4, 512)


TYPOS = [
    ("optimizer.lr", "optimizer.learning_rate"),
    ("optimizer.learning_rte", "optimizer.learning_rate"),
    ("trainer.learning_rte", "optimizer.learning_rate"),
    ("learning_rate", "optimizer.learning_rate"),
    ("lora.r", "lora.rank"),
    ("plan.epoch", "plan.epochs"),
    ("num_train_epochs", "plan.epochs"),
    ("max_length", "max_seq_len"),
    ("backend.micro_batch_token", "backend.micro_batch_tokens"),
    ("data.system_promt", "data.system_prompt"),
    ("data.eval.pth", "data.eval.path"),
    ("early_stopping.patince", "early_stopping.patience"),
]


@pytest.mark.parametrize(("typo", "meant"), TYPOS)
def test_a_misspelt_key_names_the_valid_one(typo, meant):
    """Case 89, on the command line and from a programmatic dict, at every depth."""
    added = [] if typo.startswith("backend.") else [[f"+{typo}=1"]]  # `build` judges these
    for overrides in ([f"{typo}=1"], *added, {typo: 1}):
        with pytest.raises(ConfigError) as raised:
            compose("sft", overrides)
        assert typo in str(raised.value)
        assert meant in str(raised.value)


def test_a_misspelt_key_in_a_file_names_the_valid_one(tmp_path):
    """Case 89 in YAML."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# @package _global_\noptimizer: {learning_rte: 1e-4}\n")
    done = run_recipe("--config-dir", str(tmp_path), "experiment=mine")
    assert done.returncode == 2
    assert "optimizer.learning_rte" in done.stderr and "optimizer.learning_rate" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_fails_fast_and_clearly(tmp_path):
    """Before anything heavy is imported (see below), with exit code 2, and writing nothing."""
    done = run_recipe("optimizer.lr=1e-4", cwd=tmp_path)
    assert done.returncode == 2
    assert "optimizer.learning_rate" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("recipe", "rate"), [("sft", "0.0002"), ("dpo", "0.0002"), ("grpo", "0.0002")]
)
def test_nothing_heavy_is_imported_to_answer(tmp_path, recipe, rate):
    code = (
        f"import sys\nfrom recipes.{recipe} import main\n"
        "try: main(['--cfg', 'job'])\nfinally:\n"
        " heavy = {'torch', 'transformers', 'datasets', 'wandb', 'matplotlib', 'pandas'}\n"
        " print('HEAVY', sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "HEAVY []" in done.stderr
    assert f"learning_rate: {rate}" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_key_with_its_meaning():
    done = run_recipe("--help")
    assert done.returncode == 0
    for key in (
        "optimizer.learning_rate",
        "plan.checkpoint_every",
        "lora.target_modules",
        "[q_proj,",
    ):
        assert key in done.stdout


def test_help_lists_the_keys_of_the_files_that_are_chosen():
    lines = run_recipe("--help", "backend=together", "tracker=wandb").stdout.splitlines()
    budget = "seconds that a request is tried again while the service is busy or away"
    assert f"backend.retry_budget  (180)  {budget}" in lines
    assert "tracker.project  (tunebook)  W&B project" in lines
    assert any(line.startswith("lora  ") and "null = full weights" in line for line in lines)
    assert not any(line.startswith("backend.device") for line in lines)
    found = [line for line in lines if line.startswith("  loss: ")]
    assert found == ["  loss: cross_entropy"]
    assert not any("reward:" in line or "environment:" in line for line in lines)


def test_every_key_of_a_file_has_a_comment_that_is_its_meaning():
    for recipe in SCHEMAS:
        groups = groups_of(recipe)
        for group in set(FILE_GROUPS) & set(groups):
            for name in groups[group]:
                for key in file_keys(group, name):
                    assert key.meaning, f"{group}/{name}.yaml: {key.name}"


def test_help_names_the_losses_that_fit_the_recipe():
    modules = {"sft": sft, "dpo": dpo, "grpo": grpo}
    losses = list_losses({name: module.COLUMNS for name, module in modules.items()})
    for recipe in SCHEMAS:
        fitting = {loss.name for loss in losses if recipe in loss.recipes}
        assert set(groups_of(recipe)["loss"]) == fitting


def test_help_of_dpo():
    done = run_recipe("--help", recipe="dpo")
    assert done.returncode == 0
    assert "python -m recipes.dpo key=value" in done.stdout
    assert "optimizer.learning_rate" in done.stdout and "normalization" not in done.stdout


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("eval.fraction=2", ["eval.fraction=2.0", "at most 1"]),
        ("plan.batch_size=0", ["plan.batch_size=0", "at least 1"]),
        ("lora.rank=0", ["lora.rank=0"]),
        ("lora.dropout=1.0", ["lora.dropout=1.0", "below 1"]),
        ("lora.target_modules=3", ["lora.target_modules=3", "all-linear"]),
        ("lora.target_modules=[]", ["lora.target_modules"]),
        ("schedule.warmup=2.5", ["schedule.warmup=2.5", "whole number"]),
        ("schedule.kind=step", ["schedule.kind", "cosine"]),
        ("optimizer.learning_rate=nan", ["optimizer.learning_rate=nan"]),
        ("optimizer.learning_rate=abc", ["optimizer.learning_rate", "abc"]),
        ("optimizer.kind=muon", ["optimizer.kind=muon", "lora=null"]),
        ("data.mask=foo", ["data.mask", "foo", "all_assistant"]),
        ("data.weight=0", ["data.weight=0.0"]),
        ("early_stopping.patience=0", ["early_stopping.patience=0"]),
        ("normalization.kind=fixed_horizon", ["normalization.horizon"]),
        ("normalization.horizon=5", ["normalization.horizon=5", "fixed_horizon"]),
        ("model=nosuch", ["model=nosuch", "smollm2_135m"]),
        ("model=qwen", ["model=qwen", "Did you mean model=qwen3_0_6b?"]),
        ("tracker=", ["tracker=: there is no", "Known: mlflow, none"]),
        ("tracker=[none,wandbb]", ["tracker=wandbb: there is no", "Did you mean tracker=wandb?"]),
        ("name=a=b", ["could not be read", "name='a=b'"]),
        ("~lora", ["lora has no value", "lora=null"]),
        ("name=a,b", ["name=a,b", "[value1,value2]", "--multirun"]),
    ],
)
def test_bad_values_name_key_value_and_what_is_allowed(override, words):
    with pytest.raises(ConfigError) as raised:
        compose("sft", [override])
    for word in words:
        assert word in str(raised.value)


def test_early_stopping_without_an_eval_set_is_a_contradiction():
    """Case 39: share 0 holds nothing out, so options that need it are refused."""
    with pytest.raises(ConfigError, match=r"early_stopping\.patience=3 needs an eval set"):
        compose("sft", ["early_stopping.patience=3", "eval.fraction=0"])


def test_list_values_and_equals_signs():
    """Case 94."""
    for line in ("lora.target_modules=[q_proj, v_proj]", "lora.target_modules=[q_proj,v_proj]"):
        config = compose("sft", [line])
        assert config.lora is not None
        assert config.lora.to_lora().target_modules == ("q_proj", "v_proj")
    assert compose("sft", ["name='a=b'"]).name == "a=b"


def test_programmatic_values_keep_their_type():
    """Case 91: nothing is parsed twice, and the saved config reads back equal."""
    config = compose(
        "sft",
        {
            "name": "1e5",
            "start_from": None,
            "data.system_prompt": "a: b",
            "data.columns": {"prompt": "true", "answer": "[a]"},
            "data.id_column": "null",
            "lora.target_modules": ["a", "b"],
        },
    )
    assert config.name == "1e5"
    assert config.start_from is None
    assert config.data.system_prompt == "a: b"
    assert config.data.columns == {"prompt": "true", "answer": "[a]"}
    assert config.data.id_column == "null"
    assert config.lora is not None and config.lora.target_modules == ["a", "b"]
    assert from_yaml(to_yaml(config), "sft") == config


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.columns={prompt: question}"],
        ["data.columns.prompt=question"],
        ["+data.columns.prompt=question"],
        {"data.columns.prompt": "question"},
        {"data.columns": {"prompt": "question"}},
    ],
)
def test_column_names_and_loss_arguments_are_free(overrides):
    assert compose("sft", overrides).data.columns == {"prompt": "question"}
    assert compose("sft", ["loss.factor=2"]).loss["factor"] == 2
    assert compose("sft", ["data.eval.columns.prompt=q"]).data.eval.columns == {"prompt": "q"}


@pytest.mark.parametrize("text", ["Pay ${amount} now", "${oc.env:HOME}", "a\\\\${b}", "$ {x} ${"])
def test_a_dollar_and_a_brace_are_text(text):
    """Kind of case 91: what is passed as a value is never an interpolation, also after a resume."""
    config = compose("sft", {"data.system_prompt": text, "name": text})
    assert (config.data.system_prompt, config.name) == (text, text)
    assert from_yaml(to_yaml(config), "sft") == config


def test_sections_may_be_nested_mappings():
    config = compose(
        "sft", {"optimizer": {"learning_rate": 1.0, "beta1": 0.5}, "data": {"limit": 3}}
    )
    assert (config.optimizer.learning_rate, config.optimizer.beta1, config.data.limit) == (
        1.0,
        0.5,
        3,
    )
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rte.*optimizer\.learning_rate"):
        compose("sft", {"optimizer": {"learning_rte": 1}})


def test_a_tracker_of_ones_own():
    for overrides in (
        ["tracker._target_=my.Tracker", "tracker.size=3"],
        {"tracker": {"_target_": "my.Tracker", "size": 3}},
    ):
        assert compose("sft", overrides).tracker == {"_target_": "my.Tracker", "size": 3}

    assert compose("sft", ["tracker={_target_: my.Tracker}"]).tracker == {"_target_": "my.Tracker"}


def test_null_is_the_choice_none_of_a_group_that_has_one():
    for overrides in (["tracker=null"], ["tracker=NULL"], {"tracker": None}, {"tracker": "null"}):
        assert compose("sft", overrides).tracker is None
    for overrides in (["environment=null"], {"environment": None}):
        assert compose("grpo", overrides).environment is None


@pytest.mark.parametrize("group", ["backend", "model", "data", "loss", "experiment", "sweep"])
def test_a_choice_that_is_no_name_is_refused(group):
    for overrides, line in (([f"{group}=3"], f"{group}=3"), ({group: None}, f"{group}=null")):
        with pytest.raises(ConfigError, match=f"^{line}: must be the name of one .*Known: "):
            compose("sft", overrides)


def test_a_choice_that_is_no_name_is_refused_on_the_command_line(tmp_path):
    for arguments in (["data=null"], ["--multirun", "data=null,tiny_chats"]):
        done = run_recipe(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert "must be the name of one of the files of data" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_key_of_a_section_that_is_null_is_refused(tmp_path):
    for overrides in (["lora=null", "lora.rank=8"], {"lora": None, "lora.rank": 8}):
        with pytest.raises(ConfigError, match=r"^lora\.rank: lora is null"):
            compose("sft", overrides)
    done = run_recipe("lora=null", "lora.rank=8", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_a_sweep_needs_multirun(tmp_path):
    done = run_recipe("sweep=learning_rate", cwd=tmp_path)
    assert done.returncode == 2
    assert "--multirun" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_full_weights():
    config = compose("sft", ["lora=null", "optimizer.kind=muon"])
    assert config.lora is None
    assert from_yaml(to_yaml(config), "sft") == config


def test_relative_paths_mean_where_the_user_stands(tmp_path, monkeypatch):
    """Case 92: absolute in the config, and the process stays where it was."""
    monkeypatch.chdir(tmp_path)
    config = compose("sft", ["data.path=rel.jsonl", "data.eval.path=sub/eval.jsonl"])
    assert config.data.path == str(tmp_path / "rel.jsonl")
    assert config.data.eval.path == str(tmp_path / "sub" / "eval.jsonl")
    assert config.runs_dir == str(tmp_path / "runs")
    assert os.getcwd() == str(tmp_path)
    assert compose("sft").data.path == "pkg://tunebook/assets/tiny_data/chats.jsonl"


def test_a_mixture():
    config = compose(
        "sft", ["data=mixture", "data.sources=[{path: /a.jsonl}, {path: /b.jsonl, weight: 2}]"]
    )
    assert [(source.path, source.weight) for source in config.data.sources] == [
        ("/a.jsonl", 1.0),
        ("/b.jsonl", 2.0),
    ]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            {"weigth": 2},
            "there is no 'weigth' in 'data.sources'. Did you mean data.sources.weight?",
        ),
        ({"file_path": "a"}, "Did you mean data.sources.path?"),
        ({"weight": "x"}, "data.sources.weight: Value 'x'"),
        ({"sources": []}, "Known: data.sources.path, data.sources.hub"),
    ],
)
def test_a_misspelt_key_of_one_of_several_sources_names_the_valid_one(item, message):
    line = ", ".join(f"{name}: {value}" for name, value in item.items())
    for overrides in ([f"data.sources=[{{{line}}}]"], {"data.sources": [item]}):
        with pytest.raises(ConfigError) as raised:
            compose("sft", overrides)
        assert message in str(raised.value)


@pytest.mark.parametrize("overrides", [{1: 2}, {None: 1}, [1], "seed=1"])
def test_overrides_of_another_kind_are_refused(overrides):
    with pytest.raises(ConfigError, match="overrides are a list of lines"):
        compose("sft", overrides)


@pytest.mark.parametrize("overrides", [[], {"seed": 1}])
def test_a_recipe_that_is_not_there_is_refused(overrides):
    with pytest.raises(ConfigError, match="no recipe 'sfd'; known recipes: sft, dpo, grpo"):
        compose("sfd", overrides)


def test_resume_takes_the_runs_own_config(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(compose("sft", ["seed=7", "plan.epochs=2"])))
    config = compose("sft", [f"resume={tmp_path}", "plan.epochs=3"])
    assert (config.seed, config.plan.epochs, config.resume) == (7, 3, str(tmp_path))
    same = compose("sft", {"resume": str(tmp_path), "plan.epochs": 3})
    assert same == config


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "optimizer.learning_rate=1",
        "data.path=x.jsonl",
        "model=tiny",
        "backend.dtype=bfloat16",
    ],
)
def test_resume_refuses_what_decided_the_past(tmp_path, override):
    (tmp_path / "config.yaml").write_text(to_yaml(compose("sft")))
    with pytest.raises(ConfigError, match="start_from"):
        compose("sft", [f"resume={tmp_path}", override])


WANDB = {
    "_target_": "tunebook.tracking.WandbTracker",
    "project": "tunebook",
    "entity": None,
    "mode": "online",
}
BOARD = {"_target_": "tunebook.other_trackers.TensorBoardTracker", "folder": None}
OWN = {"_target_": "my.Tracker", "size": 3}


@pytest.mark.parametrize(
    ("before", "overrides", "after"),
    [
        ("none", ["tracker=tensorboard"], BOARD),
        ("none", ["tracker=wandb", "tracker.project=x"], {**WANDB, "project": "x"}),
        ("none", ["tracker._target_=my.Tracker", "tracker.size=3"], OWN),
        ("none", {"tracker": "tensorboard"}, BOARD),
        ("none", {"tracker": OWN}, OWN),
        ("wandb", ["tracker=tensorboard", "tracker.folder=x"], {**BOARD, "folder": "x"}),
        ("wandb", ["tracker=none"], None),
        ("wandb", ["tracker=null"], None),
        ("wandb", ["~tracker"], None),
        ("wandb", {"tracker": None}, None),
        ("wandb", ["tracker.project=x"], {**WANDB, "project": "x"}),
        ("wandb", ["tracker={project: x}"], {**WANDB, "project": "x"}),
        ("wandb", ["tracker.group=x"], {**WANDB, "group": "x"}),
        ("wandb", {"tracker.project": "x"}, {**WANDB, "project": "x"}),
        ("wandb", {"tracker": OWN}, OWN),
        ("wandb", ["plan.epochs=3"], WANDB),
    ],
)
def test_resume_may_choose_another_tracker(tmp_path, before, overrides, after):
    """A choice replaces the tracker of the run, single keys change it."""
    (tmp_path / "config.yaml").write_text(to_yaml(compose("sft", [f"tracker={before}"])))
    resume = {"resume": str(tmp_path)} if isinstance(overrides, dict) else [f"resume={tmp_path}"]
    given = {**resume, **overrides} if isinstance(overrides, dict) else [*resume, *overrides]
    assert compose("sft", given).tracker == after


def test_resume_from_the_command_line_may_choose_another_tracker(tmp_path):
    """It comes as far as the run's record, which this folder has not."""
    (tmp_path / "config.yaml").write_text(to_yaml(compose("sft")))
    done = run_recipe(f"resume={tmp_path}", "tracker=tensorboard", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "there is no run.json in it" in done.stderr


def test_resume_names_a_key_that_the_backend_of_the_run_lacks(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(compose("sft")))
    expected = "backend.max_cost is a key of backend=tinker, together; this run has backend=local"
    with pytest.raises(ConfigError, match=expected):
        compose("sft", [f"resume={tmp_path}", "backend.max_cost=3"])


def test_resume_of_no_run(tmp_path):
    with pytest.raises(ConfigError, match="no run directory"):
        resumed_config("sft", str(tmp_path), [], {})


def test_build_refuses_what_the_target_does_not_take():
    with pytest.raises(ConfigError, match=r"backend\.devise.*backend\.device"):
        build({"_target_": "tunebook.backends.local.LocalBackend", "devise": "cpu"}, key="backend")
    with pytest.raises(ConfigError, match=r"^backend\.dtype=float16: must be one of auto"):
        build(
            {"_target_": "tunebook.backends.local.LocalBackend", "model": "x", "dtype": "float16"},
            key="backend",
        )
    with pytest.raises(ConfigError, match=r"loss\._target_=no\.such: cannot be imported"):
        build_function({"_target_": "no.such"}, key="loss")
    with pytest.raises(ConfigError, match=r"loss\._target_ is missing"):
        build_function({}, key="loss")


def test_a_name_that_a_module_lacks_is_told_from_a_module_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_lacking.py").write_text(
        "import math\n\n\ndef scaled(logprobs):\n    return 0\n"
    )
    with pytest.raises(ConfigError, match=r"my_lacking has no 'scald'; it has scaled$"):
        build_function({"_target_": "my_lacking.scald"}, key="loss")
    with pytest.raises(ConfigError, match=r"cannot be imported: No module named 'my_absent'"):
        build_function({"_target_": "my_absent.scaled"}, key="loss")


def test_build_function_binds_hyper_parameters(tmp_path, monkeypatch):
    """An own loss from the folder the user stands in."""
    (tmp_path / "my_losses.py").write_text(
        "def scaled(logprobs, *, token_weights, factor):\n    return factor * (token_weights * logprobs).sum(), {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    loss = build_function({"_target_": "my_losses.scaled", "factor": 2.0}, key="loss")
    assert loss.keywords == {"factor": 2.0}
    with pytest.raises(ConfigError, match=r"loss\.factr.*loss\.factor"):
        build_function({"_target_": "my_losses.scaled", "factr": 2.0}, key="loss")
    with pytest.raises(ConfigError, match=r"loss\._target.*loss\._target_"):
        build_function({"_target_": "my_losses.scaled", "_target": "x"}, key="loss")


def test_nearest_key_knows_nothing_near():
    assert nearest_key("zzzqqq", recipe_keys("sft")) is None


def test_every_schema_field_is_read_somewhere():
    """A key nobody reads would be a silent no-op."""
    root = Path(__file__).parent.parent
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("tunebook", "recipes")
        for path in (root / folder).rglob("*.py")
        if path.name not in ("config.py", "key_suggestions.py", "config_checks.py")
    )
    unread = [
        key for key in {*recipe_keys("sft"), *recipe_keys("dpo")}
        if not any(mark in sources for mark in (f".{key.rpartition('.')[2]}", f'"{key.rpartition(".")[2]}"'))
    ]  # fmt: skip
    unread = [key for key in unread if not key.startswith(("backend.", "loss.", "tracker."))]
    assert unread == []
