"""Who may import whom, read from the syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = ("plan", "split", "schedule", "stopping", "token_weights")
OURS = {"tunebook", "recipes", "configs", "loss_fns"}
LAZY = {
    "torch", "transformers", "datasets", "wandb", "matplotlib", "pandas", "pyarrow", "together", "httpx",
}  # fmt: skip


def python_files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path, *, top_level_only=False):
    """Dotted names of every import of a file; those under `if TYPE_CHECKING` are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(id(child) for child in ast.walk(node))
    nodes = tree.body if top_level_only else ast.walk(tree)
    names = set()
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def starts_with(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_losses_import_torch_and_nothing_of_ours():
    for path in python_files("loss_fns"):
        foreign = {name for name in imports(path) if starts_with(name, OURS - {"loss_fns"})}
        assert not foreign, path


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_only_types(module):
    for name in imports(ROOT / "tunebook" / f"{module}.py"):
        assert not starts_with(name, OURS) or starts_with(name, {"tunebook.types"}), name
        assert not starts_with(name, LAZY), name


def test_the_library_never_imports_a_recipe():
    for path in python_files("tunebook"):
        assert not any(starts_with(name, {"recipes", "configs"}) for name in imports(path)), path


def test_only_backends_and_the_server_import_losses():
    for path in python_files("tunebook"):
        if not {"backends", "serve"} & set(path.parts):
            assert not any(starts_with(name, {"loss_fns"}) for name in imports(path)), path


def test_recipes_do_not_import_each_other():
    for path in python_files("recipes"):
        assert not any(starts_with(name, {"recipes"}) for name in imports(path)), path


def test_backends_know_nothing_of_data_and_rollouts():
    forbidden = {"tunebook.data", "tunebook.rewards", "tunebook.rollouts", "tunebook.render"}
    for path in python_files("tunebook/backends"):
        assert not any(starts_with(name, forbidden) for name in imports(path)), path


def test_only_its_command_imports_the_server():
    for path in python_files("tunebook"):
        if "serve" not in path.parts:
            ours = {name for name in imports(path) if starts_with(name, {"tunebook.serve"})}
            assert ours <= {"tunebook.serve.command", "tunebook.serve.command.serve"}, path
            top = imports(path, top_level_only=True)
            assert not any(starts_with(name, {"tunebook.serve"}) for name in top), path


def test_only_build_calls_instantiate():
    for folder in ("tunebook", "recipes"):
        for path in python_files(folder):
            if path.name != "compose.py":
                assert "instantiate" not in path.read_text(encoding="utf-8"), path


def test_heavy_packages_are_imported_where_they_are_used():
    """`--help` and `--cfg job` answer at once."""
    for folder in ("tunebook", "recipes"):
        for path in python_files(folder):
            # What the command of the server loads, only it loads.
            behind_command = "serve" in path.parts and path.name != "command.py"
            if "local" not in path.parts and not behind_command:
                heavy = {
                    name for name in imports(path, top_level_only=True) if starts_with(name, LAZY)
                }
                assert not heavy, (path, heavy)


def test_the_hydra_launcher_costs_other_programs_nothing():
    """Hydra imports its plugins in every program that uses it."""
    [path] = python_files("hydra_plugins")
    for name in imports(path, top_level_only=True):
        assert not starts_with(name, OURS | LAZY), name


def test_nothing_names_a_machine():
    """Files of the project hold no path of somebody's machine and no secret-looking key."""
    marks = ["/home/" + "user", "/ro" + "ot/", "/wo" + "rk/"]
    for folder in (
        "tunebook",
        "recipes",
        "configs",
        "loss_fns",
        "hydra_plugins",
        "scripts",
        "tests",
    ):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".md", ".json"):
                text = path.read_text(encoding="utf-8")
                assert not any(mark in text for mark in marks), path
