"""Checkpoints: complete or ignored, exact to continue from, and only on what they were made for."""

import dataclasses
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loss_fns.cross_entropy import cross_entropy
from tests.backends.test_local_training import parameters_of
from tests.backends.tiny import make_adam, make_data, make_lora, make_muon
from tunebook.backends.local import LocalBackend, checkpoint
from tunebook.errors import BackendError, CheckpointError, NonFiniteError
from tunebook.types import CheckpointRef

STEP_DATA = [make_data((1, 2, 3, 10), seed=seed) for seed in range(6)]


def train(session, steps, params=None) -> list[float]:
    losses = []
    for number in steps:
        loss = session.forward_backward(STEP_DATA[number], cross_entropy)
        session.optim_step(params or make_adam(learning_rate=1e-2 / (number + 1)))
        losses.append(loss.result()["loss"])
    session.forward(STEP_DATA[0]).result()
    return losses


@pytest.mark.parametrize(
    ("lora", "params"),
    [
        (make_lora(), None),
        (make_lora(dropout=0.3), None),
        (make_lora(target_modules=("lm_head", "q_proj"), rslora=True, dropout=0.3), None),
        (None, None),
        (None, make_muon()),
    ],
    ids=["adapter", "dropout", "head", "full", "muon"],
)
def test_three_and_three_steps_are_six(open_backend, tmp_path, lora, params) -> None:
    """Case 85: a stopped and restored run equals an unbroken one bit for bit."""
    unbroken = open_backend().open_session("a", lora, directory=tmp_path / "a")
    expected = train(unbroken, range(6), params)
    first = open_backend().open_session("b", lora, directory=tmp_path / "b")
    losses = train(first, range(3), params)
    ref = first.save("step_3").result()
    assert ref.has_optimizer and ref.path == tmp_path / "b" / "step_3"
    torch.manual_seed(123)
    second = open_backend().open_session("c", lora, directory=tmp_path / "c", restore=ref)
    assert second.step == 3
    losses += train(second, range(3, 6), params)
    assert losses == expected
    for name, value in parameters_of(unbroken).items():
        assert torch.equal(parameters_of(second)[name], value), name
    assert second.step == unbroken.step == 6


def test_a_checkpoint_holds_float32_weights_and_named_optimizer_state(
    open_backend, tmp_path
) -> None:
    session = open_backend(dtype="bfloat16").open_session("a", make_lora(), directory=tmp_path)
    train(session, range(2))
    folder = session.save("here").result().path
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    # Whoever may read the folder may read all of it.
    readers = folder.stat().st_mode & 0o444
    assert {path.stat().st_mode & 0o444 for path in folder.iterdir()} == {readers}
    weights = load_file(folder / "adapter.safetensors")
    assert weights.keys() == session._weights.parameters.keys()
    assert all(value.dtype == torch.float32 for value in weights.values())
    optimizer = load_file(folder / "optimizer.safetensors")
    for name in weights:
        assert optimizer[f"{name}.step"] == 2
        assert (optimizer[f"{name}.exp_avg_sq"] >= 0).all()
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 2 and state["optimizer"] == "adamw" and state["lora"]["rank"] == 4


def test_saving_before_the_first_step_and_again_under_the_same_name(open_backend, tmp_path) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    first = session.save("latest").result()
    assert checkpoint.read_state(first.path).step == 0
    train(session, range(2))
    assert session.save("latest").result() == first
    assert checkpoint.read_state(first.path).step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    restored = open_backend().open_session("b", make_lora(), directory=tmp_path, restore=first)
    assert restored.step == 2


def test_an_incomplete_checkpoint_is_refused(open_backend, tmp_path) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    train(session, range(1))
    ref = session.save("whole").result()

    def broken(name: str, change) -> CheckpointRef:
        shutil.copytree(ref.path, tmp_path / name)
        change(tmp_path / name)
        return CheckpointRef(name, str(tmp_path / name), True)

    cases = {
        "not a complete checkpoint": lambda folder: (folder / "state.json").unlink(),
        "adapter.safetensors: cannot be read": lambda folder: (
            folder / "adapter.safetensors"
        ).unlink(),
        "optimizer.safetensors: damaged or changed": lambda folder: (
            folder / "optimizer.safetensors"
        ).write_bytes(b"short"),
        "not readable as JSON": lambda folder: (folder / "state.json").write_text("{"),
        "written by another version": lambda folder: (folder / "state.json").write_text("[]"),
        r"not what a checkpoint holds: KeyError\('lora'\)": lambda folder: (
            folder / "state.json"
        ).write_text('{"format": 2}'),
        "no such checkpoint folder": shutil.rmtree,
    }
    for number, (message, change) in enumerate(cases.items()):
        backend = open_backend()
        with pytest.raises(CheckpointError, match=message):
            backend.open_session(
                "b", make_lora(), directory=tmp_path, restore=broken(f"broken_{number}", change)
            )
        # The failed open left no session behind.
        backend.open_session("b", make_lora(), directory=tmp_path)


@pytest.mark.parametrize(
    ("model", "lora", "message"),
    [
        (
            "other",
            make_lora(),
            r"base model: .*untied \(\w{32}\) in the checkpoint, .*other \(\w{32}\) now",
        ),
        ("untied", make_lora(rank=2), "lora.rank: 4 in the checkpoint, 2 now"),
        ("untied", make_lora(alpha=4.0), "lora.alpha: 8.0 in the checkpoint, 4.0 now"),
        ("untied", make_lora(rslora=True), "lora.rslora: False in the checkpoint, True now"),
        (
            "untied",
            make_lora(target_modules=("q_proj",)),
            r"lora.target_modules .*: all-linear in the checkpoint, \('q_proj',\) now",
        ),
        ("untied", None, "holds an adapter, this session trains full weights"),
    ],
)
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_checkpoint_of_something_else_is_refused(
    open_backend, tiny, tmp_path, model, lora, message, with_optimizer
) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    ref = session.save("here").result()
    with pytest.raises(CheckpointError, match=message):
        open_backend(model=getattr(tiny, model)).open_session(
            "b", lora, directory=tmp_path, restore=ref, with_optimizer=with_optimizer
        )


def test_targets_named_otherwise_are_the_same_targets(open_backend, tmp_path) -> None:
    """`all-linear` and the list of all its names select the same layers."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    train(session, range(1))
    ref = session.save("here").result()
    again = open_backend().open_session(
        "b", make_lora(target_modules=names), directory=tmp_path, restore=ref
    )
    assert again.step == 1


def test_weights_only_is_a_new_start(open_backend, tmp_path) -> None:
    """Case 85: step 0, no moments, the weights as they were."""
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    train(session, range(2))
    ref = session.save("here").result()
    warm = open_backend().open_session(
        "b", make_lora(dropout=0.5), directory=tmp_path, restore=ref, with_optimizer=False
    )
    assert warm.step == 0 and warm._optimizer is None
    for name, value in parameters_of(session).items():
        assert torch.equal(parameters_of(warm)[name], value)
    with pytest.raises(CheckpointError, match=r"without lora\.dropout"):
        open_backend().open_session("c", make_lora(dropout=0.5), directory=tmp_path, restore=ref)


def test_saving_between_gradient_and_step_is_refused(open_backend, tmp_path) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    session.forward_backward(STEP_DATA[0], cross_entropy)
    with pytest.raises(BackendError, match="between forward_backward and optim_step"):
        session.save("here").result()


@pytest.mark.parametrize("name", ["", "..", "a/b", ".a.0123abcd.tmp"])
def test_a_name_is_one_folder(open_backend, tmp_path, name: str) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path / "deep")
    with pytest.raises(BackendError, match="one folder name"):
        session.save(name).result()


def test_a_nan_is_never_saved_or_exported(open_backend, tmp_path) -> None:
    """Case 8."""
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    ref = session.save("good").result()
    session._weights.parameters["model.layers.0.mlp.up_proj.lora_B"].data[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"save 'bad': the weight .*up_proj.lora_B"):
        session.save("bad").result()
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    tensors = load_file(ref.path / "adapter.safetensors")
    tensors["model.layers.0.mlp.up_proj.lora_B"][0, 0] = torch.inf
    state = checkpoint.read_state(ref.path)
    checkpoint.save_checkpoint(ref.path, weights=tensors, optimizer={}, state=state)
    with pytest.raises(NonFiniteError, match="refusing to export"):
        session.export(ref, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_write_that_fails_leaves_the_previous_checkpoint(open_backend, tmp_path) -> None:
    """Case 115: a file size limit makes a real write fail half-way, as a full disk does."""
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    train(session, range(1))
    ref = session.save("latest").result()
    before = {path.name: path.read_bytes() for path in ref.path.iterdir()}
    train(session, range(1, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"latest: cannot be written \(\d{5} bytes"):
            session.save("latest").result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path.name: path.read_bytes() for path in ref.path.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_space_is_checked_before_writing(tmp_path) -> None:
    """Case 115: more bytes than any disk has."""
    with (
        pytest.raises(CheckpointError, match=r"x: cannot be written, 1\d{18} bytes are needed and"),
        checkpoint.replaced_folder(tmp_path / "x", num_bytes=10**18),
    ):
        raise AssertionError("not reached")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_save_leaves_nothing_that_looks_whole(tiny, tmp_path) -> None:
    """A process that dies in a save leaves a temporary folder without a state file."""
    code = f"""
import os
from pathlib import Path
from tests.backends.tiny import make_lora
from tunebook.backends.local import LocalBackend, checkpoint
session = LocalBackend(model={tiny.untied!r}, device="cpu").open_session(
    "a", make_lora(), directory=Path({str(tmp_path)!r}))
checkpoint.flush_folder = lambda folder: os._exit(9)
session.save("here").result()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)
    assert done.returncode == 9, done.stderr
    (left,) = list(tmp_path.iterdir())
    assert left.name.startswith(".here.") and not (left / "state.json").exists()
    LocalBackend(model=tiny.untied, device="cpu").open_session(
        "a", make_lora(), directory=tmp_path
    ).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_save_killed_while_it_replaces_loses_no_checkpoint(tiny, tmp_path, moment) -> None:
    """Before the old folder moves, before the new one takes its place, before the old one goes."""
    code = f"""
import os, shutil
from pathlib import Path
from tests.backends.tiny import make_lora
from tunebook.backends.local import LocalBackend
session = LocalBackend(model={tiny.untied!r}, device="cpu").open_session(
    "a", make_lora(), directory=Path({str(tmp_path)!r}))
session.save("here").result()
session.step = 7
rename, calls = Path.rename, []
def stopping(path, target):
    calls.append(path)
    if len(calls) == {{"before": 1, "between": 2}}.get({moment!r}):
        os._exit(9)
    return rename(path, target)
Path.rename = stopping
shutil.rmtree = lambda *args, **settings: os._exit(9)
session.save("here").result()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)
    assert done.returncode == 9, done.stderr
    assert len(list(tmp_path.iterdir())) == 2
    ref = CheckpointRef("here", str(tmp_path / "here"), True)
    backend = LocalBackend(model=tiny.untied, device="cpu")
    session = backend.open_session("a", make_lora(), directory=tmp_path, restore=ref)
    assert session.step == (7 if moment == "after" else 0)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_cleaning_up_takes_only_what_saves_leave(tmp_path) -> None:
    def folder(name: str, text: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text(text)

    for name in ("step_1", ".git", ".a.tmp", ".a.0123abc.tmp", "a.0123abcd.tmp", ".a.0123abcd"):
        folder(name, name)
    (tmp_path / ".file.0123abcd.tmp").write_text("a file")
    (tmp_path / ".link.0123abcd.tmp").symlink_to(tmp_path / "step_1")
    kept = {path.name for path in tmp_path.iterdir()}
    folder(".step_1.0123abcd.tmp", "half")
    folder(".step_1.0123abcd.tmp.old", "replaced")
    folder(".step_2.0123abcd.tmp", "half")
    folder(".step_2.0123abcd.tmp.old", "moved aside")
    folder(".step_2.4567abcd.tmp.old", "moved aside before")
    os.utime(tmp_path / ".step_2.4567abcd.tmp.old", (1, 1))
    checkpoint.clean_up(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "step_2"}
    assert (tmp_path / "step_1" / "text").read_text() == "step_1"
    assert (tmp_path / "step_2" / "text").read_text() == "moved aside"
    checkpoint.clean_up(tmp_path / "not there")


def zero_the_tail(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-64] + bytes(64))


@pytest.mark.parametrize("file", ["adapter.safetensors", "optimizer.safetensors"])
def test_a_damaged_file_is_neither_restored_nor_exported(open_backend, tmp_path, file) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    train(session, range(1))
    ref = session.save("here").result()
    state = json.loads((ref.path / "state.json").read_text())
    assert state["digests"] == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in ref.path.glob("*.safetensors")
    }
    zero_the_tail(ref.path / file)
    found = hashlib.sha256((ref.path / file).read_bytes()).hexdigest()
    with pytest.raises(CheckpointError) as caught:
        open_backend().open_session("b", make_lora(), directory=tmp_path, restore=ref)
    assert str(caught.value) == (
        f"{ref.path / file}: damaged or changed since it was saved (SHA-256 {found}, saved as "
        f"{state['digests'][file]}); use another checkpoint"
    )
    if file == "adapter.safetensors":
        with pytest.raises(CheckpointError, match="damaged or changed"):
            session.export(ref, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    else:
        # Weights alone are not affected.
        open_backend().open_session(
            "b", make_lora(), directory=tmp_path, restore=ref, with_optimizer=False
        )


NAME = "model.layers.1.mlp.up_proj.lora_B"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop(f"{NAME}.exp_avg"), f"{NAME}.exp_avg is missing"),
        (lambda state: state.pop(f"{NAME}.step"), f"{NAME}.step is missing"),
        (
            lambda state: state.update({f"{NAME}.momentum_buffer": torch.zeros(1)}),
            f"{NAME}.momentum_buffer belongs to nothing that is trained here",
        ),
        (
            lambda state: state.update({f"{NAME}.exp_avg_sq": torch.zeros(4)}),
            f"{NAME}.exp_avg_sq has shape (4,), this session needs (64, 4)",
        ),
    ],
)
def test_incomplete_optimizer_state_is_refused(open_backend, tmp_path, change, message) -> None:
    """Also where the file is what was saved."""
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    train(session, range(1))
    ref = session.save("here").result()
    state = checkpoint.read_state(ref.path)
    weights = checkpoint.read_weights(ref.path, state)
    optimizer = checkpoint.read_optimizer(ref.path, state)
    change(optimizer)
    checkpoint.save_checkpoint(ref.path, weights=weights, optimizer=optimizer, state=state)
    with pytest.raises(CheckpointError) as caught:
        open_backend().open_session("b", make_lora(), directory=tmp_path, restore=ref)
    file = ref.path / "optimizer.safetensors"
    assert str(caught.value) == f"{file}: the optimizer state {message}"


def test_a_parameter_that_no_step_has_reached_has_no_state(open_backend, tmp_path) -> None:
    """As an expert that no token was sent to: it is named, and found without state again."""
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    session.forward_backward(STEP_DATA[0], cross_entropy).result()
    session._weights.parameters[NAME].grad = None
    session.optim_step(make_adam()).result()
    ref = session.save("here").result()
    assert json.loads((ref.path / "state.json").read_text())["untouched"] == [NAME]
    again = open_backend().open_session("b", make_lora(), directory=tmp_path, restore=ref)
    assert train(again, range(2)) == train(session, range(2))
    for name, value in parameters_of(session).items():
        assert torch.equal(parameters_of(again)[name], value), name


def test_discard_deletes_own_checkpoints_only(open_backend, tmp_path) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path / "own")
    ref = session.save("here").result()
    session.discard(ref)
    session.discard(ref)
    assert not ref.path.exists()
    elsewhere = dataclasses.replace(ref, location=str(tmp_path / "elsewhere"))
    elsewhere.path.mkdir()
    with pytest.raises(CheckpointError, match="not a checkpoint of this session"):
        session.discard(elsewhere)
    assert elsewhere.path.exists()
