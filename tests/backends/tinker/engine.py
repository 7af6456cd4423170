"""What the server of the tests computes: models, samplers and checkpoints over the local backend."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as wire

from loss_fns import policy
from loss_fns.cross_entropy import cross_entropy
from tunebook.backends.base import Generator, Session
from tunebook.backends.local import LocalBackend
from tunebook.types import (
    AdamParams,
    CheckpointRef,
    Datum,
    LoraConfig,
    SamplingParams,
    StopReason,
)

ALPHA = 32.0
GROUPS = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
    "train_unembed": ("lm_head",),
}
NUMPY = {wire.DTYPE_FLOAT32: np.float32, wire.DTYPE_INT64: np.int64}
STOPS = {StopReason.STOP: wire.STOP_REASON_STOP, StopReason.LENGTH: wire.STOP_REASON_LENGTH}


class Refused(Exception):
    """A request that fails by what the user sent."""


@dataclass
class Model:
    """One training client's model."""

    id: str
    session: Session
    lora: dict[str, Any]
    next_seq: int = 1
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    steps: int = 0


class Engine:
    """All that the server has; its operations run one at a time."""

    def __init__(self, model: str, home: Path) -> None:
        torch.set_num_threads(1)
        self.base_model = model
        self.home = home
        self.backend = LocalBackend(model=model, device="cpu")
        self.models: dict[str, Model] = {}
        self.generators: dict[str, Callable[[], Generator]] = {}
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.results: dict[str, tuple[bytes, str]] = {}
        self.finished = threading.Condition()
        self._numbers = itertools.count()
        self._worker = ThreadPoolExecutor(1)

    @property
    def max_seq_len(self) -> int | None:
        return self.backend.capabilities.max_seq_len

    def submit(self, request_id: str, work: Callable[[], tuple[bytes, str]]) -> None:
        """Runs work behind what was submitted before; its result is then kept."""
        self._worker.submit(self._run, request_id, work)

    def submit_in_turn(
        self, model: Model, seq: int, request_id: str, work: Callable[[], tuple[bytes, str]]
    ) -> None:
        """The same, once all operations of the model with lower numbers are submitted."""
        model.waiting[seq] = partial(self.submit, request_id, work)
        while model.next_seq in model.waiting:
            model.waiting.pop(model.next_seq)()
            model.next_seq += 1

    def _run(self, request_id: str, work: Callable[[], tuple[bytes, str]]) -> None:
        import json

        try:
            result = work()
        except Exception as error:
            category = "user" if isinstance(error, Refused) else "server"
            result = json.dumps({"error": str(error), "category": category}).encode(), "json"
        with self.finished:
            self.results[request_id] = result
            self.finished.notify_all()

    def create(self, model_id: str, lora: dict[str, Any], path: str | None, optimizer: bool):
        """Opens a model: fresh, or from a checkpoint."""
        restore = None
        if path is not None:
            found = self.checkpoints.get(path)
            if found is None:
                raise Refused(f"{path} is not there")
            lora, restore = found["lora"], CheckpointRef("x", str(found["folder"]), True)
        targets = [name for key, names in GROUPS.items() if lora[key] for name in names]
        inner = not lora["train_unembed"] and lora["train_attn"] and lora["train_mlp"]
        config = LoraConfig(
            rank=lora["rank"],
            alpha=ALPHA,
            dropout=0.0,
            target_modules="all-linear" if inner else tuple(targets),
            seed=lora.get("seed") or 0,
            rslora=False,
        )
        lora = {**lora, "config": config}
        session = self._open(model_id, config, restore, optimizer)
        self.models[model_id] = Model(model_id, session, lora)

    def _open(
        self, name: str, lora: LoraConfig, restore: CheckpointRef | None, with_optimizer: bool
    ) -> Session:
        return self.backend.open_session(
            name,
            lora,
            directory=self.home / f"session-{next(self._numbers)}",
            restore=restore,
            with_optimizer=with_optimizer,
        )

    def close(self, prefix: str) -> None:
        """Closes the models of a session."""
        for model_id in [each for each in self.models if each.startswith(prefix)]:
            self.models.pop(model_id).session.close()

    def forward_backward(self, model: Model, request: wire.ForwardBackwardRequest) -> bytes:
        """A pass; log-probs are real ones at every position."""
        rows = [_datum(each) for each in request.data]
        found = model.session.forward([Datum(row.tokens) for row in rows]).result()
        output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        if not request.forward_only:
            loss_fn = _loss(request)
            metrics = model.session.forward_backward(rows, loss_fn).result()
            output.metrics["loss:sum"] = metrics["loss"]
        record = output.loss_fn_outputs.add(num_datums=len(rows))
        values = [each.numpy().astype(np.float32) for each in found]
        ends = np.cumsum([0, *(4 * len(each) for each in values)]).astype(np.int64)
        tensor = record.fields["logprobs"]
        tensor.data = np.concatenate(values).tobytes()
        tensor.offsets = ends.tobytes()
        tensor.dtype = wire.DTYPE_FLOAT32
        return output.SerializeToString()

    def optim_step(self, model: Model, adam: dict[str, float]) -> dict[str, Any]:
        """A step with exactly what was sent."""
        params = AdamParams(
            learning_rate=adam["learning_rate"],
            beta1=adam["beta1"],
            beta2=adam["beta2"],
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
            max_grad_norm=adam["grad_clip_norm"],
        )
        metrics = model.session.optim_step(params).result()
        model.steps += 1
        return {"metrics": dict(metrics)}

    def save(self, model: Model, name: str, kind: str, ttl: int | None) -> str:
        """Saves under a path of a kind; a name can be taken once."""
        path = f"tinker://{model.id}/{kind}/{name}"
        if path in self.checkpoints:
            raise Refused(f"{path} is there already")
        ref = model.session.save(f"{kind}-{name}").result()
        folder = ref.path
        if kind == "external_weights":
            folder = model.session.export(
                ref, self.home / f"export-{next(self._numbers)}" / "model"
            )
        self.checkpoints[path] = {"folder": folder, "lora": model.lora, "ttl": ttl}
        return path

    def publish(self, model: Model, sampler_id: str, kind: str) -> None:
        """Makes a sampler: of a copy of the weights, or of what the model has at any time."""
        if kind == "inflight":
            generator = model.session.publish_weights().result()
            for other in [each for each in self.generators if each.startswith(f"{model.id}/")]:
                self.generators[other] = lambda: generator
            self.generators[sampler_id] = lambda: generator
            return
        ref = model.session.save(f"copy-{next(self._numbers)}").result()
        copy = self._open(sampler_id, model.lora["config"], ref, False)
        generator = copy.publish_weights().result()
        self.generators[sampler_id] = lambda: generator

    def sample(self, sampler_id: str, body: dict[str, Any]) -> bytes:
        """Completions of one prompt."""
        given = body["sampling_params"]
        stop = given.get("stop") or ()
        top_k = given.get("top_k", -1)
        params = SamplingParams(
            max_tokens=given["max_tokens"],
            temperature=given.get("temperature", 1.0),
            top_p=given.get("top_p", 1.0),
            top_k=0 if top_k == -1 else top_k,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=given.get("seed"),
        )
        prompt = [token for chunk in body["prompt"]["chunks"] for token in chunk["tokens"]]
        generator = self.generators[sampler_id]()
        [completions] = generator.sample([prompt], params, body["num_samples"]).result()
        output = wire.SampleResponse()
        for each in completions:
            output.sequences.add(
                stop_reason=STOPS[each.stop_reason],
                tokens=each.tokens.astype(np.int32).tobytes(),
                logprobs=each.logprobs.astype(np.float32).tobytes(),
            )
        return output.SerializeToString()


def _datum(message: wire.Datum) -> Datum:
    tokens = np.concatenate(
        [np.frombuffer(chunk.encoded_text.tokens, np.int32) for chunk in message.model_input]
    )
    inputs = {
        name: np.frombuffer(tensor.dense, NUMPY[tensor.dtype])
        for name, tensor in message.loss_fn_inputs.items()
    }
    targets = inputs.pop("target_tokens")
    if len(targets) != len(tokens) or (tokens[1:] != targets[:-1]).any():
        raise Refused("target_tokens have to be the tokens behind those of model_input")
    columns: dict[str, Any] = {
        "token_weights": inputs.pop("weights", np.ones(len(targets), np.float32))
    }
    for theirs, ours in (("logprobs", "sampling_logprobs"), ("advantages", "advantages")):
        if theirs in inputs:
            columns[ours] = inputs.pop(theirs)
    if inputs:
        raise Refused(f"unknown loss_fn_inputs: {', '.join(inputs)}")
    return Datum(np.append(tokens, targets[-1]).astype(np.int32), columns)


def _loss(request: wire.ForwardBackwardRequest) -> Any:
    """The loss with the service's defaults, which are none of ours."""
    config = dict(request.loss_fn_config)
    if request.loss_fn == "cross_entropy":
        return cross_entropy
    if request.loss_fn == "importance_sampling":
        return policy.importance_sampling
    if request.loss_fn in ("ppo", "cispo"):
        return partial(
            getattr(policy, request.loss_fn),
            clip_low=config.get("clip_low_threshold", 0.8),
            clip_high=config.get("clip_high_threshold", 1.2),
        )
    if request.loss_fn == "dro":
        return partial(policy.dro, beta=config["beta"])
    raise Refused(f"there is no loss {request.loss_fn}")
