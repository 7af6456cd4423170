"""What a session sends and gets: payloads, sampling, exports, limits, and where it may be called."""

import asyncio
from itertools import chain

import numpy as np
import pytest
from safetensors.torch import load_file

from loss_fns.cross_entropy import cross_entropy
from tests.backends.tiny import make_adam, make_data, make_lora, make_sampling
from tunebook.backends.remote.failures import RemoteError
from tunebook.backends.together import link
from tunebook.backends.together.service import make_client
from tunebook.errors import BackendError, CheckpointError, ConfigError
from tunebook.types import CheckpointRef, Datum, StopReason

PROMPTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33]]


def gradient_norm(session, rows):
    session.forward_backward(rows, cross_entropy).result()
    return session.optim_step(make_adam()).result()["grad_norm"]


@pytest.mark.parametrize("losses", ["auto", "two_passes"])
def test_large_bodies_are_uploaded_and_long_batches_split(
    attach, tmp_path, monkeypatch, losses
) -> None:
    """A body of which the service would read the inline stub would give another gradient."""
    rows = make_data((10, 20, 30, 15), prompt_length=12)
    backend = attach(losses=losses)
    expected = gradient_norm(backend.open_session("inline", make_lora(), directory=tmp_path), rows)
    monkeypatch.setattr(link, "UPLOAD_BYTES", 200)
    session = backend.open_session("uploaded", make_lora(), directory=tmp_path)
    assert gradient_norm(session, rows) == pytest.approx(expected, rel=1e-6)
    generator = session.publish_weights().result()
    long = [[token % 100 + 3 for token in range(60)]] * 2
    assert len(generator.sample(long, make_sampling(), 1).result()) == 2
    monkeypatch.setattr(link, "MAX_ROWS", 3)
    session = backend.open_session("split", make_lora(), directory=tmp_path)
    found = session.forward_backward(rows, cross_entropy, rows_per_unit=2).result()
    assert found["num_tokens"] == 75
    assert session.optim_step(make_adam()).result()["grad_norm"] == pytest.approx(
        expected, rel=1e-5
    )
    assert [len(each) for each in session.forward(rows).result()] == [r.num_scored for r in rows]


def test_sampling_is_that_of_the_local_backend(attach, open_local, tmp_path) -> None:
    """Tokens for a seed, stop strings, greedy, several samples; and the log-probs of forward."""
    session = attach().open_session("remote", make_lora(), directory=tmp_path)
    local = open_local().open_session("local", make_lora(), directory=tmp_path)
    generators = [each.publish_weights().result() for each in (session, local)]
    for changes in (
        {},
        {"seed": 3, "top_p": 0.9},
        {"temperature": 0.0, "seed": None},
        {"top_k": 5, "stop": ("a", "e")},
    ):
        ours, theirs = (
            each.sample(PROMPTS, make_sampling(**changes), 2).result() for each in generators
        )
        for mine, other in zip(chain(*ours), chain(*theirs), strict=True):
            assert mine.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)
            assert mine.stop_reason is other.stop_reason
        if changes.get("stop"):
            assert StopReason.STOP in {each.stop_reason for each in chain(*ours)}
    completion = generators[0].sample(PROMPTS, make_sampling(), 1).result()[0][0]
    tokens = np.concatenate([PROMPTS[0], completion.tokens]).astype(np.int32)
    forward = session.forward([Datum(tokens)]).result()[0].numpy()
    np.testing.assert_allclose(forward[len(PROMPTS[0]) - 1 :], completion.logprobs, atol=1e-3)


def test_token_ids_do_not_stop(attach, tmp_path) -> None:
    session = attach().open_session("first", make_lora(), directory=tmp_path)
    generator = session.publish_weights().result()
    with pytest.raises(BackendError, match=r"rollout\.stop=\[7\]"):
        generator.sample(PROMPTS, make_sampling(stop=("x", 7)), 1).result()
    assert generator.sample([], make_sampling(), 1).result() == []


def test_export_of_any_checkpoint(attach, open_local, tmp_path) -> None:
    """Of where the session is, of an older one, and rank-stabilised; PEFT's files and tokenizer."""
    lora = make_lora(rank=4, alpha=6.0, rslora=True)
    exported = {}
    for name, backend in (("remote", attach()), ("local", open_local())):
        session = backend.open_session(name, lora, directory=tmp_path / name)
        refs = []
        for step in range(2):
            session.forward_backward(make_data(seed=step), cross_entropy)
            session.optim_step(make_adam())
            refs.append(session.save(f"step_{step}").result())
        folders = [session.export(ref, tmp_path / name / ref.name / "model") for ref in refs]
        exported[name] = [load_file(each / "adapter_model.safetensors") for each in folders]
        assert (folders[0] / "tokenizer.json").is_file()
        assert (folders[0] / "adapter_config.json").is_file()
        session.discard(refs[0])
    for ours, theirs in zip(exported["remote"], exported["local"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            np.testing.assert_allclose(tensor, theirs[name], rtol=1e-4, atol=1e-6)


def test_checkpoints_are_checked(attach, tmp_path) -> None:
    backend = attach()
    with pytest.raises(CheckpointError, match="has no such checkpoint"):
        backend.check(make_lora(), CheckpointRef("x", "ckpt-none", True))
    with pytest.raises(CheckpointError, match="cannot load a folder"):
        backend.open_session(
            "x", make_lora(), directory=tmp_path, restore=CheckpointRef("x", str(tmp_path), True)
        )
    with pytest.raises(ConfigError, match="it trains adapters only"):
        backend.check(None, None)


def test_a_full_resource_says_so(attach, tmp_path) -> None:
    """Five adapters at once, then the sixth is refused; closing one makes room."""
    backend = attach()
    sessions = [
        backend.open_session(f"number {each}", make_lora(), directory=tmp_path) for each in range(5)
    ]
    with pytest.raises(RemoteError, match="takes no more sessions") as caught:
        backend.open_session("one more", make_lora(), directory=tmp_path)
    assert (caught.value.code, caught.value.category) == ("at_capacity", "capacity")
    sessions[0].close()
    backend.open_session("one more", make_lora(), directory=tmp_path)


def test_bad_rows_are_named(attach, tmp_path) -> None:
    backend = attach()
    first, second = make_data((2, 3))
    long = Datum(np.full(5000, 5, np.int32), {"token_weights": np.ones(4999, np.float32)})
    nan = Datum(second.tokens, {"token_weights": np.full(second.num_scored, np.nan, np.float32)})
    warm = Datum(second.tokens, {**second.columns, "temperature": 0.5})
    foreign = Datum(np.full(4, 10_000, np.int32), {"token_weights": np.ones(3, np.float32)})
    for number, (row, match) in enumerate(
        (
            (long, "row 1 has 4999 tokens"),
            (warm, "row 1 has the temperature"),
            (nan, "row 1: .*NaN"),
        )
    ):
        session = backend.open_session(f"bad {number}", make_lora(), directory=tmp_path)
        with pytest.raises(BackendError, match=match):
            session.forward_backward([first, row], cross_entropy).result()
        session.close()
    session = backend.open_session("foreign", make_lora(), directory=tmp_path)
    with pytest.raises(RemoteError) as caught:
        session.forward([first, foreign]).result()
    assert caught.value.code == "invalid_input" and caught.value.category == "input"


def test_inside_a_running_event_loop(attach, tmp_path) -> None:
    """A notebook, or code of somebody's server."""

    async def cell():
        session = attach().open_session("cell", make_lora(), directory=tmp_path)
        loss = session.forward_backward(make_data(), cross_entropy)
        session.optim_step(make_adam()).result()
        return loss.result()["loss"]

    assert asyncio.run(cell()) > 0


def test_calls_on_what_is_closed(attach, tmp_path) -> None:
    backend = attach()
    session = backend.open_session("first", make_lora(), directory=tmp_path)
    pending = session.forward_backward(make_data(), cross_entropy)
    with pytest.raises(BackendError, match="open already"):
        backend.open_session("first", make_lora(), directory=tmp_path)
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="was closed before"):
        pending.result()
    with pytest.raises(BackendError, match="closed"):
        session.optim_step(make_adam())
    with pytest.raises(BackendError, match="this backend is closed"):
        backend.open_session("second", make_lora(), directory=tmp_path)


def test_full_weights(open_remote, open_local, tmp_path) -> None:
    """One session; a checkpoint is loaded on a new resource, and comes here as a whole model."""
    found = {}
    for name, backend in (("remote", open_remote()), ("local", open_local())):
        session = backend.open_session(name, None, directory=tmp_path / name)
        session.forward_backward(make_data(), cross_entropy)
        session.optim_step(make_adam(learning_rate=1e-3))
        ref = session.save("one").result()
        session.forward_backward(make_data(), cross_entropy)
        session.optim_step(make_adam(learning_rate=1e-3)).result()
        if name == "remote":
            with pytest.raises(RemoteError, match="takes no more sessions"):
                backend.open_session("second", None, directory=tmp_path)
            with pytest.raises(BackendError, match="opened at it"):
                session.export(ref, tmp_path / "model")
        session.close()
        session = backend.open_session("again", None, directory=tmp_path, restore=ref)
        found[name] = session.forward(make_data()).result()
        folder = session.export(ref, tmp_path / name / "model")
        assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
        backend.close()
    for ours, theirs in zip(found["remote"], found["local"], strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-4)


def test_a_session_that_cannot_be_handed_out_is_stopped(attach, server, tmp_path, monkeypatch):
    """As where Ctrl-C comes between its start on the service and its entry here."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    backend = attach()
    monkeypatch.setattr("tunebook.backends.together.backend.RemoteSession", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.open_session("cut short", make_lora(), directory=tmp_path)
    with make_client(server.url) as client:
        sessions = client.post_training.sessions.list(limit=100).data or []
    [found] = [each for each in sessions if (each.display_name or "").startswith("cut short")]
    assert found.status == "TRAINING_SESSION_STATUS_STOPPED"
