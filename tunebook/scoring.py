"""Scores completions with the reward functions of a config.

A reward is any function `reward(completion, *, <columns>, <arguments>) -> float | None`, sync or
async, or a class whose instances are called so; which columns it wants is told from its signature.
`make_scorer` checks all of it without running anything; inside `with scorer:` the functions run in
processes of their own, concurrently and each call within its time (see `tunebook.reward_pool`).

A completion that some reward could not judge has no total: a partial sum would be compared with
whole ones. It is *unscored*, never 0, and counted by the kind of what happened.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tunebook.compose import build_function
from tunebook.config import OnRewardError, RewardConfig
from tunebook.errors import ConfigError, DataError, RewardError, RowProblem, listed
from tunebook.reward_pool import Call, Outcome, RewardPool, RewardSpec
from tunebook.runs.redaction import redact
from tunebook.types import Metrics

LOG = logging.getLogger("tunebook")

GIVEN_COLUMNS = {
    "prompt": "the messages that were answered",
    "messages": "the whole conversation, the completion included",
    "stop_reason": "`stop`, or `length` where the completion ran into its limit",
    "num_tokens": "sampled tokens of the completion",
}
"""What a recipe gives rewards besides the columns of the row."""

FAILURES = ("exception", "timeout", "crashed", "not_a_number")
"""Kinds of problems that `reward.on_error` is about. The others, `none` and what a reward raises as
`Unscored`, are a reward's own decision not to judge."""

SHOWN_PROMPT = 80
"""Characters of a prompt in messages."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion to score, and what rewards may ask for by name."""

    completion: str
    columns: Mapping[str, Any]
    """The columns of the row and those of `GIVEN_COLUMNS`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why one reward has no value for one completion."""

    reward: str
    kind: str
    """exception, timeout, crashed (its process ended), not_a_number (NaN and infinities too), none,
    missing_column, or the kind that the reward raised as `Unscored`."""
    message: str
    prompt: str
    """The end of the prompt, for people to find it; empty where there is none."""
    traceback: str | None = None

    def __str__(self) -> str:
        where = f" on the prompt {self.prompt!r}" if self.prompt else ""
        return f"reward {self.reward!r}{where}: {self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class Score:
    """What the rewards say of one completion."""

    total: float | None
    """Sum of weight x reward; None = unscored: a reward with a weight other than 0 has no value."""
    parts: dict[str, float | None]
    """Name of the reward -> its value, not weighted; None = it could not judge."""
    problems: tuple[Problem, ...] = ()
    """One for every None in `parts`."""
    notes: dict[str, str] = field(default_factory=dict[str, str])
    """Name of the reward -> what it noticed besides, `no_answer` for example."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One reward function of a config, checked."""

    name: str
    weight: float
    required: tuple[str, ...]
    """Columns it cannot do without."""
    optional: tuple[str, ...]
    """Columns it takes where they are there."""
    takes_all: bool
    """It takes every column (`**columns`)."""
    spec: RewardSpec

    def columns_of(self, sample: Sample) -> dict[str, Any]:
        """The columns of a sample that are passed to it.

        Raises:
            KeyError: the sample lacks a column it needs.
        """
        if self.takes_all:
            missing = [name for name in self.required if name not in sample.columns]
            if missing:
                raise KeyError(missing[0])
            return dict(sample.columns)
        columns = {name: sample.columns[name] for name in self.required}
        optional = {name for name in self.optional if name in sample.columns}
        return columns | {name: sample.columns[name] for name in optional}


def make_scorer(config: RewardConfig, columns: Collection[str]) -> Scorer:
    """The scorer of a config, its functions found and checked; nothing runs yet.

    Args:
        config: the `reward` section.
        columns: names that samples will have: those of the rows, and `GIVEN_COLUMNS`. `check_rows`
            then finds single rows that lack one.

    Raises:
        ConfigError: names the reward, and the key, value or column that is wrong.
    """
    if not config.functions:
        raise ConfigError(
            "reward.functions is empty: name a reward, for example reward=exact_number, or "
            "reward.functions.mine._target_=my_package.my_reward"
        )
    if not (0 < config.timeout_s < math.inf):
        raise ConfigError(f"reward.timeout_s={config.timeout_s}: must be above 0 (seconds)")
    if config.max_concurrency < 1:
        raise ConfigError(f"reward.max_concurrency={config.max_concurrency}: must be at least 1")
    rewards = tuple(_make_reward(name, node, columns) for name, node in config.functions.items())
    if all(reward.weight == 0 for reward in rewards):
        raise ConfigError("reward.functions: every weight is 0, so there is nothing to learn from")
    return Scorer(
        rewards,
        timeout_s=config.timeout_s,
        max_concurrency=config.max_concurrency,
        on_error=config.on_error,
    )


class Scorer:
    """Scores completions while its `with` block is open; may be opened again after it."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        timeout_s: float,
        max_concurrency: int,
        on_error: OnRewardError,
    ) -> None:
        self.rewards = tuple(rewards)
        self._timeout_s = timeout_s
        self._max_concurrency = max_concurrency
        self._on_error = on_error
        self._pool: RewardPool | None = None
        self._told: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        """Starts the processes that rewards run in, and loads the rewards there.

        Raises:
            RewardError: a reward cannot be imported or built in another process.
        """
        assert self._pool is None, "a scorer is opened once at a time"
        self._pool = RewardPool(
            [reward.spec for reward in self.rewards],
            timeout_s=self._timeout_s,
            max_concurrency=self._max_concurrency,
        )
        try:
            self._pool.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """A score for every sample, in order.

        The first problem of each reward and kind is logged with its place; all are in the scores.

        Raises:
            RewardError: with `reward.on_error=fail`, at the first reward that raises, takes too
                long, ends its process or returns no finite number; holds its traceback.
        """
        assert self._pool is not None, "score inside `with scorer:`"
        calls: list[Call] = []
        places: list[tuple[int, Reward]] = []
        outcomes: list[dict[str, Outcome]] = [{} for _ in samples]
        for index, sample in enumerate(samples):
            for reward in self.rewards:
                try:
                    columns = reward.columns_of(sample)
                except KeyError as error:
                    missing = f"the row has no column {error.args[0]!r}"
                    outcomes[index][reward.name] = Outcome(None, "missing_column", missing)
                    continue
                calls.append(Call(reward.name, sample.completion, columns))
                places.append((index, reward))
        with contextlib.closing(self._pool.run(calls)) as ended:
            for call, outcome in ended:
                index, reward = places[call]
                outcomes[index][reward.name] = outcome
                if outcome.kind in FAILURES and self._on_error is OnRewardError.fail:
                    raise _failure(_problem(reward.name, outcome, samples[index]))
        scores = [
            self._score_of(sample, found) for sample, found in zip(samples, outcomes, strict=True)
        ]
        self._tell(problem for score in scores for problem in score.problems)
        return scores

    def _score_of(self, sample: Sample, outcomes: Mapping[str, Outcome]) -> Score:
        parts = {reward.name: outcomes[reward.name].reward for reward in self.rewards}
        total: float | None = 0.0
        for reward in self.rewards:
            part = parts[reward.name]
            if reward.weight == 0 or total is None:
                continue
            total = None if part is None else total + reward.weight * part
        return Score(
            total=total,
            parts=parts,
            problems=tuple(
                _problem(name, outcomes[name], sample)
                for name, part in parts.items()
                if part is None
            ),
            notes={name: one.note for name, one in outcomes.items() if one.note is not None},
        )

    def _tell(self, problems: Iterable[Problem]) -> None:
        """Logs the first problem of each reward and kind; the metrics count the rest."""
        for problem in problems:
            if (problem.reward, problem.kind) not in self._told:
                self._told.add((problem.reward, problem.kind))
                LOG.warning(
                    "A completion is unscored (further ones are only counted): %s%s",
                    problem,
                    f"\n{problem.traceback}" if problem.traceback else "",
                )


def check_rows(
    scorer: Scorer,
    rows: Iterable[tuple[str, int, Collection[str]]],
    *,
    given: Collection[str] = tuple(GIVEN_COLUMNS),
) -> None:
    """Returns if every row has the columns that the rewards need.

    Args:
        rows: file, line and the names of the columns of each row.
        given: columns that are there besides.

    Raises:
        DataError: locates each row that lacks one.
    """
    problems = [
        RowProblem(file, line, name, f"reward {reward.name!r} needs this column")
        for file, line, columns in rows
        for reward in scorer.rewards
        for name in reward.required
        if name not in columns and name not in given
    ]
    if problems:
        lines = ["Rows lack columns that rewards need:", *listed(problems)]
        raise DataError("\n".join(lines), problems)


def score_metrics(scores: Sequence[Score]) -> Metrics:
    """What a batch of scores comes to, for logging.

    `reward` (mean total) and `reward/<name>` (mean part) are over what has a value, and left out if
    nothing has; `unscored` counts completions without a total; `unscored/<kind>` problems;
    `<note>/<name>` is the share of the completions a reward noted so. A part that is None always
    comes with a problem, so nothing is lost in a mean unseen.
    """
    metrics: Metrics = {"unscored": float(sum(score.total is None for score in scores))}
    totals = [score.total for score in scores if score.total is not None]
    if totals:
        metrics["reward"] = math.fsum(totals) / len(totals)
    for name in scores[0].parts if scores else ():
        parts = [part for score in scores if (part := score.parts[name]) is not None]
        if parts:
            metrics[f"reward/{name}"] = math.fsum(parts) / len(parts)
    kinds = Counter(problem.kind for score in scores for problem in score.problems)
    notes = Counter((note, name) for score in scores for name, note in score.notes.items())
    metrics |= {f"unscored/{kind}": float(count) for kind, count in kinds.items()}
    metrics |= {f"{note}/{name}": count / len(scores) for (note, name), count in notes.items()}
    return metrics


def _make_reward(name: str, node: Any, columns: Collection[str]) -> Reward:
    key = f"reward.functions.{name}"
    if not isinstance(node, Mapping):
        raise ConfigError(f"{key}={node}: must be a section with `_target_`, a dotted path")
    arguments = {each: value for each, value in node.items() if each != "weight"}
    weight = node.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"{key}.weight={weight}: must be a finite number")
    bound = build_function(arguments, key=key)
    target = bound.func
    if isinstance(target, type):
        _refuse_weight(target, key)
        _check_constructor(bound, key)
        try:
            function: Any = bound()
        except (TypeError, ValueError) as error:
            # Without the values: one of them may be a secret in the wrong place.
            raise ConfigError(f"{key}: {error}") from error
        bound_names: set[str] = set()
    else:
        function, bound_names = bound, set(bound.keywords)
    if not callable(function):
        raise ConfigError(f"{key}._target_={node['_target_']}: instances of it cannot be called")
    required, optional, takes_all = _columns_of(function, bound_names, key)
    for each in sorted(bound_names & set(GIVEN_COLUMNS)):
        raise ConfigError(f"{key}.{each} is set, but {each!r} is a column that the recipe gives")
    for each in required:
        if each not in columns:
            raise ConfigError(
                f"reward {name!r} needs {each!r}, which is neither a column of the rows or the "
                f"recipe ({', '.join(sorted(columns))}) nor set as {key}.{each}"
            )
    spec = RewardSpec(name, _is_async(function), _load_of(node["_target_"], bound, function, key))
    return Reward(name, float(weight), required, optional, takes_all, spec)


def _check_constructor(bound: functools.partial[Any], key: str) -> None:
    """Raises if the class needs an argument that the config does not give."""
    for name, parameter in inspect.signature(bound).parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic:
            raise ConfigError(f"{key}.{name} is missing, and the reward needs it")


def _refuse_weight(function: Any, key: str) -> None:
    if "weight" in inspect.signature(function).parameters:
        raise ConfigError(
            f"{key}: it has a parameter `weight`, but {key}.weight is its weight in the sum; "
            "rename the parameter"
        )


def _columns_of(
    function: Any, bound: Collection[str], key: str
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Required and optional columns of a reward, and whether it takes all there are."""
    parameters = list(inspect.signature(function).parameters.values())
    takes_completion = parameters and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    if not takes_completion or parameters[0].name in ("completions", "prompts"):
        raise ConfigError(
            f"{key}: its first parameter must be the text of one completion, as in "
            "`def reward(completion, *, answer)`; it is called once for each"
        )
    _refuse_weight(function, key)
    named = [
        each
        for each in parameters[1:]
        if each.name not in bound and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    required = tuple(each.name for each in named if each.default is each.empty)
    optional = tuple(each.name for each in named if each.default is not each.empty)
    return required, optional, any(each.kind is each.VAR_KEYWORD for each in parameters)


def _is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    call = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(call)


def _load_of(path: str, bound: functools.partial[Any], function: Any, key: str) -> dict[str, Any]:
    """How a worker process gets at the function: by its path, or by value where no module has it.

    Raises:
        ConfigError: it has neither.
    """
    if path.partition(".")[0] != "__main__":
        return {"path": path, "arguments": dict(bound.keywords)}
    import dill

    try:
        return {"pickled": dill.dumps(function, recurse=True)}
    except Exception as error:  # whatever an object in it raises when it is pickled
        raise ConfigError(
            f"{key}._target_={path}: rewards run in processes of their own, and this one cannot "
            f"be sent there ({type(error).__name__}: {error}). Put it into a module, a .py file "
            "beside the notebook or script, and name that"
        ) from error


def _problem(name: str, outcome: Outcome, sample: Sample) -> Problem:
    assert outcome.kind is not None
    return Problem(
        reward=name,
        kind=outcome.kind,
        message=redact(outcome.message, os.environ),
        prompt=prompt_text(sample.columns.get("prompt")),
        traceback=redact(outcome.traceback, os.environ) if outcome.traceback else None,
    )


def prompt_text(prompt: Any) -> str:
    """The last message of a prompt, shortened."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        last = prompt[-1] if prompt else ""
        prompt = last.get("content", "") if isinstance(last, Mapping) else last
    text = " ".join(str(prompt or "").split())
    return text if len(text) <= SHOWN_PROMPT else "..." + text[-SHOWN_PROMPT:]


def _failure(problem: Problem) -> RewardError:
    trace = f"\n{problem.traceback.rstrip()}" if problem.traceback else ""
    return RewardError(
        f"{problem}. reward.on_error=fail ends the run here; with skip it goes on and the "
        f"completion is unscored.{trace}"
    )
