"""What a Loops trainer does, computed by the local engine. Legend: T scored tokens of a row.

As on the service, gradients are divided at `optim_step` only: token losses by all tokens of the
step, preference pairs by all pairs, sums (`skip_token_normalization`) by nothing. So the rows of a
step are kept, and their gradients are computed when it is known what to divide by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loss_fns.cross_entropy import cross_entropy
from loss_fns.dpo import dpo_conservative
from tunebook.backends.base import LossFn
from tunebook.backends.local import LocalBackend
from tunebook.backends.local.session import LocalSession
from tunebook.types import AdamParams, CheckpointRef, Datum, LoraConfig

MASKED = -100
"""Target of a token that is in no loss."""
SUMS, TOKENS, PAIRS = "sums", "tokens", "pairs"
"""What the gradient of a request is divided by."""


class Refused(Exception):
    """A request that is wrong in itself; HTTP 400."""


@dataclass(frozen=True)
class Wanted:
    """The rows of one request with the loss that is wanted of them."""

    data: list[Datum]
    loss_fn: LossFn
    divisor: str
    count: float
    """Of what it is divided by."""

    def divided(self, total: float) -> list[Datum]:
        """The rows with the divisor of the step in their weights."""
        if self.divisor == SUMS:
            return self.data
        name = "pair_weights" if self.divisor == PAIRS else "weights"
        return [
            replace(datum, columns={**datum.columns, name: _scaled(datum.columns[name], total)})
            for datum in self.data
        ]


class Trainer:
    """The adapter of one run."""

    def __init__(self, run_id: str, backend: LocalBackend, home: Path, *, alpha: float, seed: int):
        self.run_id = run_id
        self._backend = backend
        self._home = home / run_id
        self._alpha = alpha
        self._seed = seed
        self._session: LocalSession | None = None
        self._rank = 0
        self._waiting: list[Wanted] = []
        self._num_opened = 0

    @property
    def session(self) -> LocalSession:
        assert self._session is not None, "init_trainer_server comes first"
        return self._session

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def run(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The result of an operation."""
        return getattr(self, name)(body)

    def init_trainer_server(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._rank = body["lora_rank"]
        self._open(None)
        return {"step": 0, "lora_rank": self._rank}

    def forward(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._scored(read_rows(body))

    def forward_backward(self, body: Mapping[str, Any]) -> dict[str, Any]:
        wanted = read_rows(body)
        result = self._scored(wanted)
        self._waiting.append(wanted)
        return result

    def optim_step(self, body: Mapping[str, Any]) -> dict[str, Any]:
        kinds = {wanted.divisor for wanted in self._waiting}
        if len(kinds) != 1:
            raise ValueError(f"one step has gradients divided by {sorted(kinds) or 'nothing'}")
        total = sum(wanted.count for wanted in self._waiting)
        for wanted in self._waiting:
            unit = 2 if wanted.divisor == PAIRS else 1
            self.session.forward_backward(
                wanted.divided(total), wanted.loss_fn, rows_per_unit=unit
            ).result()
        self._waiting = []
        asked = dict(body["adam_params"])
        params = AdamParams(max_grad_norm=asked.pop("grad_clip_norm"), **asked)
        return {"metrics": self.session.optim_step(params).result()}

    def save_state(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._save("weights", body["name"])
        return {"mode": "trainer", "path": self.path("weights", body["name"])}

    def save_weights_for_sampler(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._save("sampler_weights", body["name"])
        path = self.path("sampler_weights", body["name"])
        return {"version": self.session.step, "path": path}

    def load_state(self, body: Mapping[str, Any], *, with_optimizer: bool = False) -> dict:
        folder = self.folder(body["path"])
        if not folder.is_dir():
            raise FileNotFoundError(f"no checkpoint {body['path']}")
        self._open(CheckpointRef(folder.name, str(folder), True), with_optimizer=with_optimizer)
        return {"step": self.session.step}

    def load_state_with_optimizer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self.load_state(body, with_optimizer=True)

    def path(self, kind: str, name: str) -> str:
        return f"bt://loops:{self.run_id}/{kind}/{name}"

    def folder(self, path: str) -> Path:
        """Where a checkpoint of any run is."""
        run_id, kind, name = path.removeprefix("bt://loops:").split("/")
        return self._home.parent / run_id / kind / name

    def lora(self) -> LoraConfig:
        return LoraConfig(self._rank, self._alpha, 0.0, "all-linear", self._seed, False)

    def _open(self, restore: CheckpointRef | None, *, with_optimizer: bool = True) -> None:
        self.close()
        self._waiting = []
        self._num_opened += 1
        self._session = self._backend.open_session(
            f"{self.run_id}-{self._num_opened}",
            self.lora(),
            directory=self._home / "scratch",
            restore=restore,
            with_optimizer=with_optimizer,
        )

    def _save(self, kind: str, name: str) -> None:
        if self._waiting:
            raise ValueError("a gradient waits for its step")
        saved = self.session.save("saved").result()
        target = self._home / kind / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == "sampler_weights":
            self.session.export(saved, target.with_name(f"{name}.files"))
        if target.exists():
            for file in target.iterdir():
                file.unlink()
            target.rmdir()
        saved.path.rename(target)

    @torch.no_grad()
    def _scored(self, wanted: Wanted) -> dict[str, Any]:
        """What a pass returns: the mean over its own rows, and the log-probs before the step."""
        logprobs = self.session.forward(wanted.data).result()
        longest = max(map(len, logprobs))
        columns = {
            name: torch.stack([_padded(datum.columns[name], longest) for datum in wanted.data])
            for name in wanted.data[0].columns
        }
        values = torch.stack([_padded(each.numpy(), longest) for each in logprobs])
        loss, _ = wanted.loss_fn(values, **columns)
        metrics = {"skip_token_normalization": 1.0} if wanted.divisor == SUMS else {}
        return {
            "loss": float(loss) / (1.0 if wanted.divisor == SUMS else wanted.count),
            "loss_fn_output_type": "scalar",
            "loss_fn_outputs": [
                {"logprobs": _as_wire(each, datum)}
                for each, datum in zip(logprobs, wanted.data, strict=True)
            ],
            "metrics": metrics,
        }


def read_rows(body: Mapping[str, Any]) -> Wanted:
    """The rows and the loss of a request.

    Raises:
        Refused: it is not a request of this wire, or of a loss that this server lacks.
    """
    name, config = body["loss_fn"], body["loss_fn_config"] or {}
    rows = [_read_row(row) for row in body["data"]]
    if not rows:
        raise Refused("data is empty")
    if name == "cross_entropy":
        datums = [
            Datum(
                tokens,
                {
                    "token_weights": active,
                    "weights": np.asarray(inputs.get("weights", active), np.float32),
                },
            )
            for tokens, inputs, active in rows
        ]
        if config.get("skip_token_normalization", False):
            return Wanted(datums, _cross_entropy, SUMS, 1.0)
        count = sum(float(active.sum()) for _, _, active in rows)
        return Wanted(datums, _cross_entropy, TOKENS, max(1.0, count))
    if name == "dpo":
        if len(rows) % 2:
            raise Refused(f"dpo takes pairs, and {len(rows)} rows are none")
        loss_fn = partial(
            dpo_conservative,
            beta=config.get("beta", 0.1),
            label_smoothing=config.get("label_smoothing", 0.0),
        )
        datums = [
            Datum(
                tokens,
                {
                    "token_weights": active,
                    "pair_weights": 1.0,
                    "reference_logprobs": np.asarray(inputs["ref_logprobs"], np.float32),
                },
            )
            for tokens, inputs, active in rows
        ]
        return Wanted(datums, loss_fn, PAIRS, len(rows) / 2)
    raise Refused(f"this server has no loss {name}")


def _cross_entropy(logprobs, *, token_weights, weights):
    """The mask says what is computed, the weights what it is worth; 0 is a worth too."""
    return cross_entropy(
        torch.where(token_weights != 0, logprobs, 0.0), token_weights=weights * token_weights
    )


def _read_row(row: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, list[float]], np.ndarray]:
    inputs = [token for chunk in row["model_input"]["chunks"] for token in chunk["tokens"]]
    tensors = row["loss_fn_inputs"]
    for name, tensor in tensors.items():
        if tensor["shape"] != [len(inputs)] or len(tensor["data"]) != len(inputs):
            raise Refused(f"{name} has the shape {tensor['shape']}, the input {len(inputs)} tokens")
        if any(value is None for value in tensor["data"]):
            raise Refused(f"{name} holds null")
    targets = tensors["target_tokens"]
    if targets["dtype"] != "int64":
        raise Refused(f"target_tokens is {targets['dtype']}")
    active = np.array([target != MASKED for target in targets["data"]], np.float32)
    last = targets["data"][-1]
    tokens = [*inputs, last if last != MASKED else inputs[-1]]
    for place, target in enumerate(targets["data"]):
        if target not in (MASKED, tokens[place + 1]):
            raise Refused(f"target {place} is not the next token, which this server needs")
    columns = {name: tensor["data"] for name, tensor in tensors.items() if name != "target_tokens"}
    return np.array(tokens, np.int32), columns, active


def _scaled(column: Any, total: float) -> Any:
    return column / total if isinstance(column, float) else (column / total).astype(np.float32)


def _padded(column: Any, length: int) -> torch.Tensor:
    if isinstance(column, float):
        return torch.tensor(column)
    padded = np.zeros(length, np.float32)
    padded[: len(column)] = column
    return torch.from_numpy(padded)


def _as_wire(logprobs: torch.Tensor, datum: Datum) -> dict[str, Any]:
    marks: Sequence[bool] = (np.asarray(datum.columns["token_weights"]) != 0).tolist()
    values = [
        value if marked else None for value, marked in zip(logprobs.tolist(), marks, strict=True)
    ]
    return {"data": values, "dtype": "float32", "shape": [len(values)]}
