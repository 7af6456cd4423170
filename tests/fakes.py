"""A backend that computes nothing and remembers everything it was asked, for tests of recipes."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tunebook.backends.base import Capabilities
from tunebook.errors import CheckpointError, ConfigError
from tunebook.types import CheckpointRef, Estimate


@dataclass
class Done:
    """A future whose value is known, or that raises."""

    value: object = None
    error: Exception | None = None

    def result(self):
        if self.error is not None:
            raise self.error
        return self.value


@dataclass
class FakeBackend:
    """Weights are the list of batches trained so far; the loss of a token is `nll`."""

    nll: float | list[float] = 1.0
    """A list gives one value per evaluation, told apart by the number of steps made."""
    fail_at_step: int | None = None
    fail_export: bool = False
    calls: list[str] = field(default_factory=list)
    lineage: list[list[int]] = field(default_factory=list)
    """Batches, each as the sorted tokens of its rows, that are in the weights trained last."""
    with_optimizer: list[bool] = field(default_factory=list)
    checks: list[tuple] = field(default_factory=list)
    """The adapter and the start of every `check`."""
    closed: bool = False

    @property
    def capabilities(self):
        return Capabilities(
            max_sessions=1,
            has_generator=False,
            full_weight=True,
            optimizers=frozenset({"adamw"}),
            losses=None,
            max_seq_len=None,
            temperature=True,
        )

    def estimate(self, workload):
        return Estimate(
            seconds=None, train_tokens=0, peak_memory_bytes=None, price=None, basis="a fake"
        )

    def check(self, lora, start):
        """The only adapter that it refuses is one of rank 0, and it begins from what is there."""
        self.checks.append((lora, start))
        if lora is not None and lora.rank < 1:
            raise ConfigError(f"lora.rank={lora.rank}: must be at least 1")
        if start is not None and not (Path(start.location) / "batches.json").is_file():
            raise CheckpointError(f"{start.location}: there is no such checkpoint")

    def open_session(self, name, lora, *, directory, restore=None, with_optimizer=True):
        self.calls.append("open")
        self.with_optimizer.append(with_optimizer)
        batches = []
        if restore is not None:
            batches = json.loads((Path(restore.location) / "batches.json").read_text())
        return FakeSession(self, Path(directory), batches)

    def close(self):
        self.closed = True


class FakeSession:
    """One session of a `FakeBackend`."""

    def __init__(self, backend, directory, batches):
        self.backend = backend
        self.directory = directory
        self.batches = batches
        self.pending = None

    @property
    def trainable_parameters(self):
        return 1

    def forward(self, data):
        self.backend.calls.append("forward")
        nll = self.backend.nll
        if isinstance(nll, list):
            nll = nll[len(self.batches) - 1]
        return Done([torch.full((datum.num_scored,), -nll) for datum in data])

    def forward_backward(self, data, loss_fn, *, rows_per_unit=1):
        self.backend.calls.append("forward_backward")
        self.pending = sorted([int(token) for token in datum.tokens] for datum in data)
        return Done({"loss": 1.0, "num_tokens": float(sum(d.num_scored for d in data))})

    def optim_step(self, params):
        self.backend.calls.append("optim_step")
        if len(self.batches) + 1 == self.backend.fail_at_step:
            return Done(error=RuntimeError("the service went away"))
        self.batches.append(self.pending)
        self.backend.lineage = self.batches
        return Done({"grad_norm": 1.0})

    def save(self, name):
        self.backend.calls.append(f"save {name}")
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "batches.json").write_text(json.dumps(self.batches))
        return Done(CheckpointRef(name=name, location=str(folder), has_optimizer=True))

    def export(self, ref, directory):
        self.backend.calls.append("export")
        if self.backend.fail_export:
            raise OSError("disk full")
        directory.mkdir(exist_ok=True)
        (directory / "exported").write_text(ref.name)
        return directory

    def discard(self, ref):
        self.backend.calls.append(f"discard {ref.name}")
        (Path(ref.location) / "batches.json").unlink(missing_ok=True)
        if Path(ref.location).exists():
            Path(ref.location).rmdir()

    def close(self):
        self.backend.calls.append("close")
