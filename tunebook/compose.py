"""From YAML files and overrides to a checked config, and from config nodes to objects.

`compose` is the way in for code and notebooks, `hydra_main` for the command line; both end in
`parse`, and past it code sees only the schema dataclass. `build` is the only caller of
`hydra.utils.instantiate`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunebook.choices import DATA_OF_A_LOSS, explain_no_choice
from tunebook.composition_errors import (
    SCHEMAS,
    config_groups,
    explain_composition_error,
    is_composition_error,
    recipe_keys,
)
from tunebook.config import DataConfig, GRPOConfig, RecipeConfig
from tunebook.config_checks import check_ranges
from tunebook.errors import ConfigError, RunError, TunebookError
from tunebook.key_suggestions import explain_unknown_key, nearest_key, schema_keys

ConfigT = TypeVar("ConfigT", bound=RecipeConfig)
LAUNCHER = "hydra_plugins.tunebook_launcher.SweepLauncher"


def compose(recipe: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RecipeConfig:
    """The config of a recipe, from its defaults and overrides.

    Args:
        recipe: name of a primary config, for example `sft`.
        overrides: lines as on the command line, or a mapping from dotted keys to values, which keep
            their type and are never parsed (`{"name": "1e5"}` stays a string).

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or one out of range.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    if recipe not in SCHEMAS:
        raise ConfigError(f"there is no recipe {recipe!r}; known recipes: {', '.join(SCHEMAS)}")
    register_schemas()
    lines, values = _split_overrides(recipe, overrides)
    try:
        with initialize_config_module("configs", version_base="1.3"):
            config = hydra_compose(recipe, overrides=readable_overrides(lines))
    except Exception as error:
        raise explain_composition_error(error, recipe, lines=lines) from error
    for key, value in values.items():
        own = "resume" in values and key.startswith("backend.")
        _update(config, key, value, recipe, add=own or _is_free(key))
    resume = config.get("resume")
    if resume:
        return resumed_config(recipe, str(resume), lines, values, composed=config)
    return parse(config, recipe)


def register_schemas() -> None:
    """Makes the schema of every recipe, and the launcher of sweeps, known to Hydra."""
    from hydra.core.config_store import ConfigStore

    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(name=f"{name}_schema", node=schema, provider="tunebook")
    launcher = {"_target_": LAUNCHER}
    ConfigStore.instance().store(
        group="hydra/launcher", name="tunebook", node=launcher, provider="tunebook"
    )


def parse(config: DictConfig, recipe: str) -> RecipeConfig:
    """The checked schema dataclass, with paths made absolute.

    Raises:
        ConfigError: a missing value, or one out of range.
    """
    _refuse_extra_keys(config, recipe)
    try:
        parsed = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise explain_composition_error(error, recipe) from error
    assert isinstance(parsed, SCHEMAS[recipe])
    for field in dataclasses.fields(parsed):
        if getattr(parsed, field.name) == MISSING:
            raise ConfigError(
                f"{field.name} has no value; give one, or {field.name}=null where it is optional"
            )
    parsed.tracker = parsed.tracker or None
    if isinstance(parsed, GRPOConfig):
        parsed.environment = parsed.environment or None
    _make_paths_absolute(parsed)
    check_ranges(parsed)
    return parsed


def to_yaml(config: RecipeConfig) -> str:
    """The config as YAML text that `from_yaml` reads back to an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(config)))


def from_yaml(text: str, recipe: str) -> RecipeConfig:
    """The config that `to_yaml` wrote.

    Raises:
        ConfigError: a key that the schema does not know, or a bad value.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(SCHEMAS[recipe]), OmegaConf.create(text))
    except OmegaConfBaseException as error:
        raise explain_composition_error(error, recipe) from error
    assert isinstance(merged, DictConfig)
    return parse(merged, recipe)


FREE_SECTION = re.compile(
    r"(data|data\.eval)\.(columns|function_args)[.=]|reward\.functions[.=]"
    r"|(loss|tracker|environment)(\.[^=]*=|=\{)"
)
"""Keys below these are names of the user's own: of columns, and of a function's arguments."""


def readable_overrides(lines: Sequence[str]) -> list[str]:
    """Override lines as Hydra takes them, so that nobody has to know how.

    `++` is put before keys that need not exist. Of a run that goes on those of the backend are
    among them: it has its own, whatever the default. `null` means the file `none` of a group that
    has one.
    """
    resumes = any(line.startswith("resume=") for line in lines)

    def readable(line: str) -> str:
        if FREE_SECTION.match(line) or (resumes and line.startswith("backend.")):
            return f"++{line}"
        group = re.sub("=null *$", "", line, flags=re.IGNORECASE)
        return f"{group}=none" if group != line and "none" in _files_of(group) else line

    return [readable(line) for line in lines]


def _files_of(group: str) -> Sequence[str]:
    return config_groups().get(group, ())


def _is_chosen(section: str, changes: Mapping[str, Any], config: DictConfig) -> bool:
    """Whether what was composed of a section replaces that of the run, instead of changing it."""
    given = changes.get(section, {})
    named = not isinstance(given, Mapping) or "_target_" in given
    return named or f"{section}._target_" in changes or config[section] is None


def _is_free(key: str) -> bool:
    return FREE_SECTION.match(f"{key}={{") is not None


RESUMABLE = (
    "plan.epochs", "plan.max_steps", "plan.checkpoint_every", "plan.hash", "plan.probe",
    "early_stopping", "checkpoints", "limits", "tracker", "samples", "dry_run", "strict", "sweep",
    "backend.device", "backend.micro_batch_tokens", "backend.recompute",
    "backend.generator_memory", "health", "reward.timeout_s", "reward.max_concurrency",
    "backend.model_resources_id", "backend.base_url", "backend.gpu_type",
    "backend.generator_replicas", "backend.inactive_timeout", "backend.ready_timeout",
    "backend.keep_alive", "backend.stall_timeout", "backend.retry_budget", "backend.recover",
    "backend.max_cost", "backend.tokens_per_second", "backend.price_per_million_tokens",
    "backend.checkpoint_ttl", "backend.sampler", "backend.scope", "backend.max_runs",
    "backend.submit_timeout",
)  # fmt: skip
"""Keys that may change when a run goes on; all others decided what was already trained."""


def run_path(text: str, runs_dir: str) -> str:
    """The absolute path that a path, a run's number or its id names; an address stays as it is."""
    from tunebook.runs import find_run

    if "://" in text:
        return text  # the id of something that a service keeps
    path = os.path.abspath(os.path.expanduser(text))
    if os.path.exists(path):
        return path
    try:
        return str(find_run(Path(runs_dir).expanduser().absolute(), text).path)
    except RunError:
        return path


def resumed_config(
    recipe: str,
    resume: str,
    lines: Sequence[str],
    values: Mapping[str, Any],
    *,
    composed: DictConfig | None = None,
) -> RecipeConfig:
    """The config of an earlier run, with the overrides of this start applied to it.

    Args:
        recipe: of the run.
        resume: the run: its directory, number or id.
        lines: overrides as on the command line.
        values: overrides by dotted key.
        composed: what the overrides make of the defaults; None where there are none.

    Raises:
        ConfigError: no such run, or an override that would change what was trained already.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    path = Path(run_path(resume, "runs" if composed is None else composed.runs_dir))
    file = path / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"resume={resume}: {path} is no run directory (it has no config.yaml)")
    changes: dict[str, Any] = {
        override.key_or_group: override.value()
        for override in OverridesParser.create().parse_overrides(list(lines))
    }
    changes.update(values)
    changes.pop("resume", None)
    changes.pop("runs_dir", None)
    if changes.get("start_from") is not None:
        raise ConfigError(
            "start_from and resume are both set: resume goes on with a run exactly, start_from "
            "begins a new one from its weights"
        )
    for key in changes:
        if not any(key == name or key.startswith(name + ".") for name in RESUMABLE):
            raise ConfigError(
                f"{key} cannot change when a run goes on, it decided what was already trained. "
                f"Resumable: {', '.join(RESUMABLE)}. For anything else start a new run with "
                f"start_from={resume}"
            )
    before = from_yaml(file.read_text(encoding="utf-8"), recipe)
    config = OmegaConf.merge(OmegaConf.structured(SCHEMAS[recipe]), escaped(before))
    assert isinstance(config, DictConfig)
    OmegaConf.set_struct(config, True)
    config.dry_run = False  # a dry run that is resumed is trained
    whole = [each for each in ("tracker", "sweep") if _is_chosen(each, changes, config)]
    for key, value in changes.items():
        section = key.partition(".")[0]
        if section in whole and composed is not None:
            config[section] = composed[section]
        else:
            _update(config, key, value, recipe, add=_is_free(key))
    config.resume = str(path)
    return parse(config, recipe)


def build(node: Mapping[str, Any], *, key: str, **arguments: Any) -> Any:
    """The object that a config node names by `_target_`.

    Args:
        node: `_target_` and keyword arguments.
        key: where the node stands in the config, for messages.
        arguments: passed besides the node's own.

    Raises:
        ConfigError: the target cannot be imported, or does not take one of the arguments or values.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    target = _target(node, key)
    _check_arguments(target, {**node, **arguments}, key)
    try:
        return instantiate(dict(node), **arguments, _convert_="all")
    except InstantiationException as error:
        # What the target itself refuses is said in its own words.
        if isinstance(error.__cause__, TunebookError):
            raise error.__cause__ from None
        raise


def build_function(node: Mapping[str, Any], *, key: str) -> functools.partial[Any]:
    """The function that a config node names, with its hyper-parameters bound.

    Raises:
        ConfigError: as in `build`.
    """
    target = _target(node, key)
    parameters = {name: value for name, value in node.items() if name != "_target_"}
    _check_arguments(target, parameters, key)
    return functools.partial(target, **parameters)


class Sweeping(Protocol):
    """What makes one sweep of the runs of a command line; see `tunebook.sweeps`."""

    def begin(self, config: DictConfig) -> Path:
        """The folder of the sweep, before its jobs are known.

        Args:
            config: of the command line, without any value that is swept.
        """
        ...

    def overrides(self, jobs: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        """The override lines of the jobs, where those given only say which sweep goes on."""
        ...

    def train(
        self, jobs: Sequence[tuple[Sequence[str], RecipeConfig]], *, first: int, whole: bool
    ) -> list[float | None]:
        """Trains jobs; returns the best value of what each monitored, None where there is none.

        Args:
            jobs: override lines and config of each.
            first: number of the first of them.
            whole: whether they are all jobs of the sweep.
        """
        ...

    def end(self) -> int:
        """Cleans up, on every way out; returns the exit code."""
        ...


class HydraTask:
    """What Hydra calls for each config, or hands to a launcher."""

    def __init__(
        self, recipe: str, execute: Callable[[RecipeConfig], int], sweep: Sweeping | None
    ) -> None:
        self.recipe = recipe
        self.sweep = sweep
        self.codes: list[int] = []
        self.failures: list[Exception] = []
        self._execute = execute
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """For a launcher that takes the task to other processes, where there is no sweep."""
        return {**self.__dict__, "sweep": None}

    def __call__(self, config: DictConfig) -> None:
        """Runs one config as a run of its own."""
        # Caught here: Hydra would first print its own lines about any exception.
        try:
            _check_single(config)
            self.codes.append(self._execute(self.parsed(config)))
        except Exception as error:
            if os.getpid() != self._process:  # a launcher of other machines brings it home
                raise
            self.failures.append(error)

    def parsed(self, config: DictConfig) -> RecipeConfig:
        """The checked config of a run, which Hydra is about to start."""
        from hydra.core.hydra_config import HydraConfig

        if not config.resume:
            return parse(config, self.recipe)
        lines = list(HydraConfig.get().overrides.task)
        return resumed_config(self.recipe, str(config.resume), lines, {}, composed=config)


def hydra_main(
    recipe: str,
    execute: Callable[[RecipeConfig], int],
    argv: Sequence[str] | None = None,
    *,
    sweep: Sweeping | None = None,
) -> int:
    """Runs a recipe from the command line; returns the exit code.

    Hydra's own flags (`--cfg job`, `--multirun`, `--config-dir`) work as documented by Hydra.

    Args:
        recipe: name of the primary config.
        execute: runs one composed config and returns its exit code.
        argv: arguments after the program's name; None = those of the process.
        sweep: trains the configs of `--multirun`, unless another launcher is chosen.
    """
    import hydra

    register_schemas()
    task = HydraTask(recipe, execute, sweep)
    # Composition errors come to us instead of being printed with advice on Hydra's internals.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    own_argv = sys.argv
    arguments = list(own_argv[1:] if argv is None else argv)
    _check_flags(arguments, recipe)
    # Hydra's parser takes no flag in the middle of overrides.
    arguments.sort(key=lambda each: each not in ("--multirun", "-m"))
    sys.argv = [own_argv[0], *readable_overrides(arguments)]
    try:
        hydra.main(config_path="pkg://configs", config_name=recipe, version_base="1.3")(task)()
    except Exception as error:
        if is_composition_error(error):
            raise explain_composition_error(error, recipe, lines=arguments) from error
        raise
    finally:
        sys.argv = own_argv
        if sweep is not None:
            task.codes.append(sweep.end())
    if task.failures:
        raise task.failures[0]
    return max(task.codes, default=0)


def _check_flags(arguments: Sequence[str], recipe: str) -> None:
    """Returns if Hydra knows all flags; else it would print its own usage and end the process."""
    from hydra._internal.utils import get_args_parser

    known = get_args_parser()._option_string_actions
    for argument in arguments:
        flag, _, value = argument.partition("=")
        # As argparse does, a flag may be cut short where that is unique.
        if re.match("--[A-Za-z]", flag) and not any(each.startswith(flag) for each in known):
            meant = nearest_key(flag.lstrip("-").replace("-", "_"), recipe_keys(recipe))
            raise ConfigError(
                f"{argument}: there is no such flag. Settings are given as key=value, for example "
                f"{meant or 'plan.max_steps'}={value or '...'}; --help lists them"
            )


def _check_single(config: DictConfig) -> None:
    """Raises where a sweep was chosen, or a setting of one, and nothing will make a sweep of it."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    several = hydra.mode is RunMode.MULTIRUN
    chosen = hydra.runtime.choices.get("sweep")
    if chosen is not None and not several:
        raise ConfigError(f"sweep={chosen} makes several runs: add --multirun")
    sweep = config.sweep
    settings = {
        "max_at_once": sweep.max_at_once,
        "max_cost": sweep.max_cost,
        "resume": sweep.resume,
        "halving.rungs": sweep.halving.rungs or None,
    }
    given = [name for name, value in settings.items() if value is not None]
    if given and several:
        raise ConfigError(
            f"sweep.{given[0]}: this launcher starts every run by itself; use the one of tunebook "
            "(hydra/launcher=tunebook), which trains them together"
        )
    if given:
        raise ConfigError(f"sweep.{given[0]} is about several runs: add --multirun")


def _refuse_extra_keys(config: DictConfig, recipe: str) -> None:
    """Raises for a key that `+key=value` or a file put there and nobody reads."""
    known = set(schema_keys(SCHEMAS[recipe]))
    sections = {key.rpartition(".")[0] for key in known}

    def check(node: DictConfig, prefix: str) -> None:
        for name in node:
            key = f"{prefix}{name}"
            if key not in known:
                raise ConfigError(explain_unknown_key(_leaf(node, name, key), recipe_keys(recipe)))
            if key in sections and not OmegaConf.is_missing(node, name) and node[name] is not None:
                check(node[name], f"{key}.")

    check(config, "")


def _leaf(node: DictConfig, name: Any, key: str) -> str:
    """The first key inside an unknown section, which is what a person wrote."""
    while isinstance(node[name], DictConfig) and len(node[name]):
        node, name = node[name], next(iter(node[name]))
        key = f"{key}.{name}"
    return key


def _split_overrides(
    recipe: str, overrides: Sequence[str] | Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Override lines for Hydra (group choices among them), and values to set as they are."""
    for each in [overrides] if isinstance(overrides, str) else overrides:
        if each is overrides or not isinstance(each, str):
            raise ConfigError(
                f"{each!r}: overrides are a list of lines, such as ['seed=1'], or a mapping whose "
                "keys are strings"
            )
    if not isinstance(overrides, Mapping):
        return list(overrides), {}
    groups = {
        "backend", "model", "data", "loss", "tracker", "experiment", "sweep", "reward",
        "environment",
    }  # fmt: skip
    sections = {key.rpartition(".")[0] for key in schema_keys(SCHEMAS[recipe])}
    lines: list[str] = []
    values: dict[str, Any] = {}

    def take(key: str, value: Any) -> None:
        if key in groups and isinstance(value, str | int | float | None):
            lines.append(f"{key}={'null' if value is None else value}")
        elif key in sections and isinstance(value, Mapping):
            for name, each in value.items():
                take(f"{key}.{name}", each)
        else:
            values[key] = _literal(value)

    for key, value in overrides.items():
        take(key, value)
    return lines, values


def _literal(value: Any) -> Any:
    """A value in which `${` is text, not an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {name: _literal(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_literal(each) for each in value]
    return value


def _update(config: DictConfig, key: str, value: Any, recipe: str, *, add: bool = False) -> None:
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=add)
    except AttributeError as error:
        if isinstance(error, OmegaConfBaseException):
            raise explain_composition_error(error, recipe, key=key) from error
        raise ConfigError(explain_unknown_key(key, recipe_keys(recipe))) from error
    except Exception as error:
        if is_composition_error(error):
            raise explain_composition_error(error, recipe, key=key) from error
        raise


def _target(node: Mapping[str, Any], key: str) -> Any:
    import hydra.utils

    path = node.get("_target_")
    if not path:
        if no_choice := explain_no_choice(key, node):
            raise ConfigError(no_choice)
        raise ConfigError(f"{key}._target_ is missing: give the dotted path of what to use")
    if "" not in sys.path:  # the console script does not look where the user stands
        sys.path.insert(0, "")
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # we say it ourselves
    try:
        return hydra.utils.get_object(str(path))
    except Exception as error:
        cause = error.__cause__ or error
        raise ConfigError(
            f"{key}._target_={path}: {_missing_name(str(path)) or f'cannot be imported: {cause}'}"
        ) from error


def _missing_name(path: str) -> str | None:
    """What a module has instead of what a dotted path asks; None = that is not the trouble."""
    module_name, _, name = path.rpartition(".")
    module = sys.modules.get(module_name)  # the attempt to import the path has imported it
    if module is None or hasattr(module, name):
        return None
    own = [
        each
        for each, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module_name
    ]
    has = f"it has {', '.join(own[:8])}" if own else "it defines nothing that can be called"
    return f"{module_name} has no {name!r}; {has}"


def _check_arguments(target: Any, arguments: Mapping[str, Any], key: str) -> None:
    signature = inspect.signature(target)
    accepted = {
        name for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }  # fmt: skip
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in arguments:
        if name != "_target_" and name not in accepted and not takes_any:
            settings = accepted - DATA_OF_A_LOSS if key == "loss" else accepted
            known = [f"{key}.{each}" for each in ("_target_", *sorted(settings))]
            raise ConfigError(explain_unknown_key(f"{key}.{name}", known))


def _make_paths_absolute(config: RecipeConfig) -> None:
    """Relative paths mean the folder the user stands in; the record must not depend on it."""
    for source in _sources(config.data):
        if source.path is not None and not source.path.startswith("pkg://"):
            source.path = os.path.abspath(os.path.expanduser(source.path))
    config.runs_dir = os.path.abspath(os.path.expanduser(config.runs_dir))
    for name in ("start_from", "resume"):
        value = getattr(config, name)
        if value is not None:
            setattr(config, name, run_path(value, config.runs_dir))
    for name in ("name", "tokenizer", "chat_template"):
        value = getattr(config.model, name)
        if value is not None and Path(value).expanduser().exists():
            setattr(config.model, name, os.path.abspath(os.path.expanduser(value)))


def _sources(data: DataConfig) -> list[Any]:
    return [data, *data.sources, data.eval]


def escaped(config: RecipeConfig) -> dict[str, Any]:
    """The config as plain values for YAML, in which `${` in a string stays text."""
    return _literal(as_dict(config))


def as_dict(config: RecipeConfig) -> dict[str, Any]:
    """The config as plain values, enums by their name."""

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return value

    return plain(dataclasses.asdict(config))
