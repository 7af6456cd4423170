"""Builds backends and opens sessions as a config says."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunebook.backends.base import Backend, Capabilities, Session
from tunebook.columns import loss_name
from tunebook.compose import build, build_function
from tunebook.config import GRPOConfig, RecipeConfig
from tunebook.errors import ConfigError
from tunebook.processes import num_processes
from tunebook.runs import Checkpoint, RunDir, newest_checkpoint
from tunebook.types import CheckpointRef, Workload

LOCAL = "tunebook.backends.local.LocalBackend"
SHARDED = "tunebook.backends.local.distributed.ShardedBackend"
TOGETHER = "tunebook.backends.together.TogetherBackend"
TINKER = "tunebook.backends.tinker.TinkerBackend"
BASETEN = "tunebook.backends.baseten.BasetenBackend"
SERVICES = frozenset({TOGETHER, TINKER, BASETEN})
ON_TOGETHER = "together://"
"""What the id of a checkpoint on that service is written behind, in `start_from`."""
ON_SERVICE = ("tinker://", "bt://")
"""What paths of checkpoints on other services begin with."""


@dataclass(frozen=True, slots=True)
class CheckedBackend:
    """What a config's backend is going to do."""

    trainable_parameters: int | None
    """None = it knows only when it opens, which checking does not do."""
    has_generator: bool
    bills: bool
    """Using it costs money; see `price_of`."""
    downgrades: tuple[str, ...]
    """What of the adapter it does not do as the config says, as `setting:action:cause`."""


def build_backend(config: RecipeConfig) -> Backend:
    """The backend of a config; nothing is loaded or created until a session is opened.

    Where a launcher has started several processes, the local backend is the one that uses them.

    Raises:
        ConfigError: several processes, and a backend that cannot use them.
    """
    model = config.model
    backend = dict(config.backend)
    if num_processes() > 1:
        if backend.get("_target_") not in (LOCAL, SHARDED):
            raise ConfigError(
                f"{num_processes()} processes were started, which only backend=local can use; "
                "start one without torchrun"
            )
        backend["_target_"] = SHARDED
    if backend.get("_target_") in SERVICES:
        backend["service_model"] = backend.pop("model", None) or config.model.name
    if backend.get("_target_") == TOGETHER:
        backend = _for_together(backend, config)
    if backend.get("_target_") == BASETEN:
        backend = _for_baseten(backend, config)
    return build(
        backend,
        key="backend",
        model=model.name,
        revision=model.revision,
        tokenizer=model.tokenizer,
        chat_template=model.chat_template,
        trust_remote_code=model.trust_remote_code,
        allow_pickle=model.allow_pickle,
    )


def _for_together(backend: dict[str, Any], config: RecipeConfig) -> dict[str, Any]:
    """The keys of the backend, what is left open filled in by what the run needs."""
    filled = {**backend, "optimizer": config.optimizer.kind.value}
    if filled.get("generator_replicas") is None:
        filled["generator_replicas"] = 1 if isinstance(config, GRPOConfig) else 0
    return filled


def _for_baseten(backend: dict[str, Any], config: RecipeConfig) -> dict[str, Any]:
    """The same of that backend, whose trainers are chosen by how long rows are."""
    filled = {**backend, "max_seq_len": config.max_seq_len}
    if filled.get("sampler") is None:
        filled["sampler"] = "pinned" if isinstance(config, GRPOConfig) else "none"
    return filled


def check_backend(
    config: RecipeConfig,
    *,
    samples: bool = False,
    num_sessions: int = 1,
    temperature: float = 1.0,
    stop: Sequence[str | int] = (),
) -> CheckedBackend:
    """What the config's backend is going to do, if it can do what the config asks for.

    Args:
        config: of the run.
        samples: the recipe cannot do without a generator.
        num_sessions: sessions that are open at a time.
        temperature: that log-probs are trained at.
        stop: what ends a completion.

    Raises:
        ConfigError: names the setting and what the backend can do.
    """
    backend = build_backend(config)
    can = backend.capabilities
    if samples and not can.has_generator:
        raise ConfigError("this backend does not sample, which this recipe needs; use another one")
    if temperature != 1 and not can.temperature:
        raise ConfigError(
            f"rollout.temperature={temperature:g}: this backend trains log-probs of temperature 1 "
            "only, so the ratio to the sampler's would be wrong; use rollout.temperature=1"
        )
    ids = [each for each in stop if isinstance(each, int)]
    if ids and not can.stop_ids:
        raise ConfigError(
            f"rollout.stop={ids}: this backend stops at strings only, not at token ids; write them "
            "as strings"
        )
    if num_sessions > 1 and (config.lora is None or can.max_sessions < num_sessions):
        why = (
            "lora=null trains the base itself"
            if config.lora is None
            else (f"this backend has {can.max_sessions}")
        )
        raise ConfigError(
            f"The KL term (kl.beta) or the loss compares with a reference, so {num_sessions} "
            f"sessions are open at a time, but {why}. Set kl.beta=0 and choose a loss without a "
            "reference, or train an adapter on a backend that takes more sessions"
        )
    if config.lora is None and not can.full_weight:
        raise ConfigError("lora=null: this backend trains adapters only, not full weights")
    if config.optimizer.kind.value not in can.optimizers:
        raise ConfigError(
            f"optimizer.kind={config.optimizer.kind.value}: this backend has "
            f"{', '.join(sorted(can.optimizers))}"
        )
    if can.max_seq_len is not None and config.max_seq_len > can.max_seq_len:
        raise ConfigError(
            f"max_seq_len={config.max_seq_len}: the model takes at most {can.max_seq_len} tokens"
        )
    start = None
    if config.resume is None:
        start = starting_point(config.start_from, files=can.files)
    trainable = backend.check(config.lora.to_lora() if config.lora else None, start)
    name = loss_name(build_function(config.loss, key="loss"))
    if can.losses is not None and name not in can.losses:
        raise ConfigError(
            f"loss {name!r}: this backend computes {', '.join(sorted(can.losses))} only"
        )
    return CheckedBackend(trainable, can.has_generator, can.bills, _lora_downgrades(config, can))


def _lora_downgrades(config: RecipeConfig, can: Capabilities) -> tuple[str, ...]:
    if config.lora is None:
        return ()
    lora = config.lora.to_lora()
    found: list[str] = []
    if can.lora_alpha is not None and not math.isclose(lora.scale * lora.rank, can.lora_alpha):
        found.append(f"lora.alpha:ignored:the_service_has_{can.lora_alpha:g}")
    if lora.dropout > 0 and not can.lora_dropout:
        found.append("lora.dropout:ignored:not_on_the_service")
    return tuple(found)


def price_of(config: RecipeConfig, workload: Workload) -> dict[str, Any]:
    """What a run is expected to take on a backend that bills, for its plan.

    Raises:
        ConfigError: it is expected to cost more than the config allows.
    """
    with closing(build_backend(config)) as backend:
        return asdict(backend.estimate(workload))


def open_session(
    config: RecipeConfig, backend: Backend, run: RunDir, resumed: Checkpoint | None
) -> Session:
    """The session a run trains in: fresh, begun from other weights, or going on exactly.

    Args:
        config: of the run.
        backend: opened by the caller.
        run: its `checkpoints/` takes the session's files.
        resumed: the checkpoint to go on from, optimizer state included.
    """
    if resumed is not None:
        restore, with_optimizer = resumed.ref, True
    else:
        start = starting_point(config.start_from, files=backend.capabilities.files)
        restore, with_optimizer = start, False
    return backend.open_session(
        f"{run.record.recipe}-{run.record.id}",
        config.lora.to_lora() if config.lora else None,
        directory=run.checkpoints_dir,
        restore=restore,
        with_optimizer=with_optimizer,
    )


def open_start(config: RecipeConfig, backend: Backend, run: RunDir) -> Session:
    """A session with the weights that the run began from, never stepped: the reference policy."""
    return backend.open_session(
        f"{run.record.recipe}-{run.record.id}-reference",
        config.lora.to_lora() if config.lora else None,
        directory=run.checkpoints_dir,
        restore=starting_point(config.start_from, files=backend.capabilities.files),
        with_optimizer=False,
    )


def open_checkpoint(
    config: RecipeConfig, backend: Backend, run: RunDir, ref: CheckpointRef
) -> Session:
    """A session with the weights of a checkpoint, to sample from or to export."""
    return backend.open_session(
        f"{run.record.recipe}-{run.record.id}-{ref.name}",
        config.lora.to_lora() if config.lora else None,
        directory=run.checkpoints_dir,
        restore=ref,
        with_optimizer=False,
    )


def weights_digest(start_from: str | None) -> str | None:
    """32 hex digits over the weights that `start_from` names; None where it names none.

    Weights that are gone have a digest of their own, so a run that needs them again is told. What a
    service keeps never changes, so its id stands for it.
    """
    if start_from is None:
        return None
    try:
        start = starting_point(start_from, files=True)
    except ConfigError:
        return "gone"
    assert start is not None
    digest = hashlib.sha256()
    if not start.path.is_dir():
        digest.update(start.location.encode())
    for file in sorted(start.path.glob("*.safetensors")):
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            while block := opened.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()[:32]


def starting_point(start_from: str | None, *, files: bool) -> CheckpointRef | None:
    """The weights that `start_from` names: the model of a run, a checkpoint, or an adapter.

    Args:
        start_from: a folder, `together://<id of a training checkpoint>`,
            `tinker://<run>/weights/<name>`, or `bt://loops:<run>/weights/<name>`.
        files: whether the backend begins from folders; else a run stands for the checkpoint on the
            service that its model came from.

    Raises:
        ConfigError: nothing there, or a run without a model or checkpoint.
    """
    if start_from is None:
        return None
    if start_from.startswith(ON_TOGETHER):
        name = start_from.removeprefix(ON_TOGETHER)
        return CheckpointRef(name=name, location=name, has_optimizer=True)
    if start_from.startswith(ON_SERVICE):
        return CheckpointRef(
            name=start_from.rpartition("/")[2], location=start_from, has_optimizer=True
        )
    path = Path(start_from)
    if not path.is_dir():
        raise ConfigError(f"start_from={start_from}: no such folder")
    if not (path / "run.json").is_file():
        return CheckpointRef(name=path.name, location=str(path), has_optimizer=False)
    run = RunDir.open(path)
    checkpoints = run.checkpoints()
    if run.record.model_available:
        promoted = run.record.evaluation.promoted_step if run.record.evaluation else None
        of_model = [one for one in checkpoints if one.step == promoted]
        newest = newest_checkpoint(of_model or checkpoints)
        if not files and newest is not None and not newest.ref.path.is_absolute():
            return newest.ref
        return CheckpointRef(name="model", location=str(run.model_dir), has_optimizer=False)
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        raise ConfigError(f"start_from={start_from}: the run has neither a model nor a checkpoint")
    return newest.ref
