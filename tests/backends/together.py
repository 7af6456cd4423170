"""What several processes do in the tests, and the same in one.

    python -m torch.distributed.run --nproc-per-node 2 --standalone -m tests.backends.together \
        <folder> <model> <scenario>:<argument>:... <scenario>:...

A scenario is a function of this file; it gets a backend and a folder for what it finds.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from loss_fns.cross_entropy import cross_entropy
from tests.backends.contract import CONTRACT, Case, sessions_do_not_touch_each_other
from tests.backends.tiny import make_adam, make_data, make_lora, make_sampling
from tunebook.backends.base import Backend, Session
from tunebook.backends.local import LocalBackend
from tunebook.backends.local.distributed import ShardedBackend, run_together
from tunebook.display import report_error
from tunebook.errors import NonFiniteError
from tunebook.processes import num_processes
from tunebook.types import CheckpointRef, Workload

LENGTHS = (1, 2, 3, 10, 7, 5, 20)
MICRO_BATCH_TOKENS = 24
"""So few that the processes have several micro-batches, and not equally many."""


def lora_of(kind: str):
    """The adapter of a scenario's name, or None for full weights."""
    return {
        "lora": make_lora(),
        "rank_1": make_lora(rank=1, rslora=True),
        "head": make_lora(target_modules=("q_proj", "lm_head")),
        "dropout": make_lora(dropout=0.5),
        "full": None,
    }[kind]


def params_of(kind: str, **changes):
    return make_adam(**({"learning_rate": 1e-3} if kind == "full" else {}), **changes)


def step(session: Session, data, params) -> dict[str, float]:
    metrics = session.forward_backward(data, cross_entropy)
    norm = session.optim_step(params)
    return {**metrics.result(), **norm.result()}


def remember(folder: Path, name: str, **values) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{name}.npz", **values)


def train(backend: Backend, folder: Path, kind: str) -> None:
    """A gradient, then some clipped steps, and the log-probs after them."""
    data = make_data(LENGTHS)
    session = backend.open_session("gradient", lora_of(kind), directory=folder / "gradient")
    # With this beta the first moment in the checkpoint is the gradient.
    metrics = [step(session, data, params_of(kind, beta1=0.0))]
    session.save("one").result()
    session.close()
    session = backend.open_session("steps", lora_of(kind), directory=folder / "steps")
    params = params_of(kind, max_grad_norm=0.1, weight_decay=0.1)
    metrics += [step(session, data, params) for _ in range(4)]
    session.save("four").result()
    values = [logprobs.numpy() for logprobs in session.forward(data).result()]
    remember(
        folder,
        "train",
        loss=[one["loss"] for one in metrics],
        norm=[one["grad_norm"] for one in metrics],
        num_tokens=[one["num_tokens"] for one in metrics],
        logprobs=np.concatenate(values),
        parameters=session.trainable_parameters,
    )
    session.export(CheckpointRef("four", str(folder / "steps" / "four"), True), folder / "model")


def first_half(backend: Backend, folder: Path, kind: str) -> None:
    session = backend.open_session("first", lora_of(kind), directory=folder)
    for seed in (0, 1):
        step(session, make_data(LENGTHS, seed=seed), params_of(kind))
    session.save("half").result()


def second_half(backend: Backend, folder: Path, kind: str, begun: str) -> None:
    """Goes on from the first half that the launch with the folder `begun` has saved."""
    half = folder.parent.parent / begun / f"first_half-{kind}" / "half"
    ref = CheckpointRef("half", str(half), True)
    session = backend.open_session("second", lora_of(kind), directory=folder, restore=ref)
    metrics = [step(session, make_data(LENGTHS, seed=seed), params_of(kind)) for seed in (2, 3)]
    session.save("whole").result()
    remember(folder, "second", loss=[one["loss"] for one in metrics])


def both_halves(backend: Backend, folder: Path, kind: str) -> None:
    session = backend.open_session("both", lora_of(kind), directory=folder)
    for seed in range(4):
        step(session, make_data(LENGTHS, seed=seed), params_of(kind))
    session.save("whole").result()


def estimate(backend: Backend, folder: Path, kind: str) -> None:
    """Before anything is open, and the session that measured is closed after it."""
    data = make_data(LENGTHS)
    lengths = [len(datum.tokens) for datum in data]
    workload = Workload(
        lengths=lengths * 2,
        eval_lengths=lengths,
        supervised=LENGTHS * 2,
        batch_size=len(data),
        planned_steps=10,
        num_evaluations=1,
        lora=lora_of(kind),
        sample=data,
    )
    found = backend.estimate(workload)
    assert found.seconds is not None and found.seconds > 0
    session = backend.open_session("after", lora_of(kind), directory=folder / "after")
    loss = step(session, data, params_of(kind))["loss"]
    remember(folder, "estimate", basis=found.basis, tokens=found.train_tokens, loss=loss)


def new_backend(model: str, **settings) -> LocalBackend:
    kind = ShardedBackend if num_processes() > 1 else LocalBackend
    return kind(model=model, device="cpu", micro_batch_tokens=MICRO_BATCH_TOKENS, **settings)


def in_bfloat16(backend: LocalBackend, folder: Path, kind: str) -> None:
    """A bfloat16 base under a float32 adapter, or float32 weights computed in bfloat16."""
    backend.close()
    with new_backend(backend._model, dtype="bfloat16") as other:
        session = other.open_session("half", lora_of(kind), directory=folder)
        metrics = [step(session, make_data(LENGTHS), params_of(kind)) for _ in range(3)]
        remember(
            folder,
            "half",
            loss=[one["loss"] for one in metrics],
            norm=[one["grad_norm"] for one in metrics],
        )


def contract(backend: LocalBackend, folder: Path, kind: str) -> None:
    """The rules of every backend, but for those about several open sessions."""
    backend.close()
    checks = [check for check in CONTRACT if check is not sessions_do_not_touch_each_other]
    for check in checks:
        with new_backend(backend._model) as other:
            case = Case(
                backend=other,
                data=make_data(),
                loss_fn=cross_entropy,
                lora=lora_of(kind),  # pyright: ignore[reportArgumentType]
                adam=make_adam(learning_rate=1e-3) if kind == "full" else make_adam(),
                directory=folder / check.__name__,
                tolerance=1e-5,
            )
            check(case)


def few_rows(backend: Backend, folder: Path) -> None:
    """Fewer rows than processes, pairs, rows without weight, no rows that count at all."""
    session = backend.open_session("few", make_lora(), directory=folder / "few")
    losses, norms = [], []
    one_row, pairs = make_data((3,)), make_data((3, 1, 2, 5))
    silent = make_data((2, 2))
    for datum in silent:
        datum.columns["token_weights"][:] = 0
    for data, unit in ((one_row, 1), (pairs, 2), ([*silent, *one_row], 1), (silent, 1)):
        losses.append(
            session.forward_backward(data, cross_entropy, rows_per_unit=unit).result()["loss"]
        )
        norms.append(session.optim_step(make_adam()).result()["grad_norm"])
        assert len(session.forward(data).result()) == len(data)
    remember(folder, "few", loss=losses, norm=norms)


def sample(backend: Backend, folder: Path) -> None:
    """Prompts of several lengths, a stop string, and weights that changed after the publish."""
    session = backend.open_session("sample", make_lora(), directory=folder / "sample")
    step(session, make_data(LENGTHS), make_adam())
    generator = session.publish_weights().result()
    step(session, make_data(LENGTHS), make_adam())
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13], [4]]
    params = make_sampling(stop=("a", "bc"), max_tokens=12)
    found = [one for each in generator.sample(prompts, params, 3).result() for one in each]
    later = session.forward(make_data(LENGTHS)).result()
    remember(
        folder,
        "sample",
        tokens=np.concatenate([one.tokens for one in found]),
        logprobs=np.concatenate([one.logprobs for one in found]),
        lengths=[len(one.tokens) for one in found],
        stops=[str(one.stop_reason) for one in found],
        later=np.concatenate([one.numpy() for one in later]),
    )


def sample_to_the_end(backend: Backend, folder: Path) -> None:
    """As many tokens as the model has positions for, a full row beside one that is not."""
    session = backend.open_session("long", make_lora(), directory=folder / "long")
    generator = session.publish_weights().result()
    params = make_sampling(temperature=0.0, max_tokens=1000)
    numbers = range(20, 50)
    # Two of each length: both processes have both.
    found = generator.sample([[7, *numbers], [8], [9, *numbers], [10]], params, 1).result()
    remember(
        folder,
        "long",
        lengths=[len(one.tokens) for [one] in found],
        tokens=np.concatenate([one.tokens for [one] in found]),
    )


def sample_nan(backend: Backend, folder: Path) -> None:
    """A prompt that the model has no numbers for; the session goes on."""
    session = backend.open_session("nan", make_lora(), directory=folder / "nan")
    generator = session.publish_weights().result()
    message = ""
    try:
        generator.sample([[50], [100], [60]], make_sampling(), 1).result()
    except NonFiniteError as error:
        message = str(error)
    [[later]] = generator.sample([[50]], make_sampling(), 1).result()
    remember(folder, "nan", message=message, tokens=later.tokens)


def broken_loss(logprobs, *, token_weights):
    """Fails for the process that has the longest row only."""
    if logprobs.shape[1] > 20:
        raise ZeroDivisionError("a bug in a user's loss")
    return cross_entropy(logprobs, token_weights=token_weights)


def infinite_loss(logprobs, *, token_weights):
    loss, metrics = cross_entropy(logprobs, token_weights=token_weights)
    return (loss / 0 if logprobs.shape[1] > 20 else loss), metrics


class OutOfStep(BaseException):
    """No error of a loss, so nothing catches it."""


def dying_loss(logprobs, *, token_weights, rank, how):
    """Ends one process in the middle of a step."""
    if dist.get_rank() == rank:
        if how == "raise":
            raise OutOfStep("a process left in the middle")
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(logprobs, token_weights=token_weights)


class Unloadable:
    """Can be sent, but not received."""

    def __reduce__(self):
        return (_missing, ())

    def __call__(self, logprobs, *, token_weights):
        return cross_entropy(logprobs, token_weights=token_weights)


def _missing():
    if dist.get_rank() > 0:
        raise ImportError("no module named my_losses")
    return Unloadable()


def failures(backend: Backend, folder: Path) -> None:
    """Errors that leave all processes in step: each ends its session, the next one works."""
    messages = []
    for number, loss_fn in enumerate(
        (broken_loss, infinite_loss, lambda logprobs: (logprobs.sum(), {}), Unloadable())
    ):
        session = backend.open_session(f"s{number}", make_lora(), directory=folder / "s")
        failed = session.forward_backward(make_data(LENGTHS), loss_fn)
        later = session.optim_step(make_adam())
        for future in (failed, later):
            try:
                future.result()
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
        session.close()
    session = backend.open_session("good", make_lora(), directory=folder / "s")
    try:
        backend.open_session("second", make_lora(), directory=folder / "s")
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
    loss = step(session, make_data(LENGTHS), make_adam())["loss"]
    remember(folder, "failures", messages=messages, loss=loss)


def die(backend: Backend, folder: Path, rank: str, how: str) -> None:
    """A process that ends in the middle of a step; nothing after it is reached."""
    session = backend.open_session("dying", make_lora(), directory=folder / "dying")
    step(session, make_data(LENGTHS), make_adam())
    loss_fn = partial(dying_loss, rank=int(rank), how=how)
    session.forward_backward(make_data(LENGTHS), loss_fn).result()
    (folder / "reached").write_text("")


def leave_idle(backend: Backend, folder: Path) -> None:
    """Process 0 dies between two operations."""
    session = backend.open_session("idle", make_lora(), directory=folder / "idle")
    step(session, make_data(LENGTHS), make_adam())
    os.kill(os.getpid(), signal.SIGKILL)


def run_scenarios(folder: Path, model: str, scenarios: list[str]) -> None:
    """Runs scenarios one after the other, each with a backend of its own.

    Args:
        folder: each scenario gets one in it.
        model: of scenarios that name none.
        scenarios: `<name>:<argument>:...`, then perhaps `@<another model beside the first>`.
    """
    for scenario in scenarios:
        call, _, beside = scenario.partition("@")
        name, *others = call.split(":")
        with new_backend(str(Path(model).parent / beside) if beside else model) as backend:
            globals()[name](backend, folder / scenario.replace(":", "-"), *others)


def main(arguments: list[str]) -> int:
    folder, model, *scenarios = arguments

    def run() -> int:
        torch.set_num_threads(1)
        try:
            run_scenarios(Path(folder), model, scenarios)
        except Exception as error:
            return report_error(error)
        return 0

    return run_together(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
