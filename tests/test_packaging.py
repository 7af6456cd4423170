"""The wheel, installed in a clean environment, runs a recipe from another directory."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = ("data.limit=24", "plan.batch_size=8", "eval.fraction=0", "samples.num_prompts=1")

pytestmark = [pytest.mark.packaging, pytest.mark.xdist_group("packaging")]


def call(*command, cwd, **environment):
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    return subprocess.run(
        [str(each) for each in command],
        cwd=cwd, env={**kept, **environment}, text=True, capture_output=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    done = call(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        folder,
        ROOT,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = folder.glob("tunebook-*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """`bin` of an environment that holds the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    assert call(sys.executable, "-m", "venv", folder, cwd=folder).returncode == 0
    done = call(
        folder / "bin" / "python", "-m", "pip", "install", "--quiet",
        "--constraint", ROOT / "constraints.txt", wheel, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="in one process")
def test_groups_of_tests_stay_in_one_process(request):
    """Else what a module makes once, such as the environment here, is made in every process."""
    assert request.node.nodeid.endswith("@packaging")


def test_the_wheel_holds_all_packages_and_assets(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "tunebook/py.typed", "recipes/sft.py", "configs/sft.yaml", "configs/model/tiny.yaml",
        "recipes/dpo.py", "configs/dpo.yaml", "configs/experiment/dpo_quickstart.yaml",
        "loss_fns/dpo.py", "tunebook/assets/tiny_data/preferences.jsonl",
        "loss_fns/cross_entropy.py", "tunebook/assets/tiny_model/model.safetensors",
        "tunebook/assets/tiny_data/chats.jsonl", "hydra_plugins/tunebook_launcher.py",
    ):  # fmt: skip
        assert name in names
    assert not any(name.startswith("tests/") for name in names)


@pytest.mark.parametrize("how", ["console script", "module"])
def test_a_recipe_runs_from_another_directory(clean, tmp_path, how):
    start = (
        [clean / "tunebook", "sft"]
        if how == "console script"
        else [clean / "python", "-m", "recipes.sft"]
    )
    done = call(*start, *SMALL, cwd=tmp_path, TUNEBOOK_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = (tmp_path / "runs" / "sft").iterdir()
    assert (run / "model" / "adapter_model.safetensors").is_file()
    assert str(ROOT) not in done.stdout
    shown = call(clean / "tunebook", "runs", "list", cwd=tmp_path)
    assert shown.returncode == 0 and "succeeded" in shown.stdout


def test_config_and_help_answer(clean, tmp_path):
    done = call(clean / "python", "-m", "recipes.sft", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0 and "learning_rate: 0.0002" in done.stdout
    assert call(clean / "tunebook", "--help", cwd=tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_checkout_runs_without_being_installed(tmp_path):
    """From the root of a checkout, `python -m recipes.sft` finds its packages by itself."""
    done = call(
        sys.executable,
        "-m",
        "recipes.sft",
        *SMALL,
        f"runs_dir={tmp_path}",
        cwd=ROOT,
        TUNEBOOK_HOME=str(tmp_path / "home"),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_of_torch_do_not_spin_for_long(given, found):
    """The setting counts when torch is loaded, so it has to be there before, whatever is imported."""
    code = (
        "import os, sys\n"
        "class Look:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': print(os.environ.get('GOMP_SPINCOUNT'))\n"
        "sys.meta_path.insert(0, Look())\n"
        "from recipes import sft\n"
        "import torch\n"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**clean, **given}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:1] == [str(found)]
