"""A session or a resource that the service loses is replaced, and no step is lost or repeated."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from loss_fns.cross_entropy import cross_entropy
from tests.backends.remote.test_ending import make_session
from tests.backends.tiny import make_adam, make_data, make_lora, make_sampling
from tests.loss_fns.batches import PREFERENCE
from tests.serve.server import ServerProcess
from tunebook.backends.remote.failures import RemoteError
from tunebook.backends.together.service import make_client
from tunebook.errors import BackendError


@pytest.fixture
def lose(server: ServerProcess) -> Callable[[object], None]:
    """A function that stops a session behind its back, as an operator would."""

    def stop(session) -> None:
        with make_client(server.url) as client:
            client.post_training.sessions.stop(session._queue.link.session_id)

    return stop


def server_step(server: ServerProcess, session) -> int:
    """Optimizer steps that the weights of a session have seen, by the service."""
    with make_client(server.url) as client:
        return int(client.post_training.sessions.retrieve(session._queue.link.session_id).step)


def train(session, steps, *, loss_fn=cross_entropy):
    """Losses of steps on data of their own, all submitted before the first is waited for."""
    pending = []
    for step in steps:
        pending.append(session.forward_backward(make_data(seed=step), loss_fn))
        pending.append(session.optim_step(make_adam()))
    return [each.result().get("loss") for each in pending[::2]]


def final(session):
    return [row.numpy() for row in session.forward(make_data()).result()]


def test_no_step_is_lost_or_repeated(server, attach, lose, tmp_path):
    """Lost after a checkpoint and one more step, and again at once: bit for bit the same."""
    unbroken = attach().open_session("unbroken", make_lora(), directory=tmp_path)
    expected = train(unbroken, range(6))
    session = attach(recover=2).open_session("lost", make_lora(), directory=tmp_path)
    found = train(session, [0, 1])
    session.save("two").result()
    found += train(session, [2])
    lose(session)
    found += train(session, [3])
    lose(session)
    found += train(session, [4, 5])
    assert found == expected
    assert server_step(server, session) == 6
    for ours, theirs in zip(final(session), final(unbroken), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_before_the_first_checkpoint_it_begins_anew(attach, lose, tmp_path, caplog):
    """In two passes, and lost with a gradient that was not applied yet."""
    unbroken = attach(losses="two_passes").open_session("u", make_lora(), directory=tmp_path)
    expected = train(unbroken, range(3))
    backend = attach(losses="two_passes", recover=1)
    session = backend.open_session("lost", make_lora(), directory=tmp_path)
    found = train(session, [0])
    half = session.forward_backward(make_data(seed=1), cross_entropy)
    found.append(half.result()["loss"])
    lose(session)
    session.optim_step(make_adam()).result()
    found += train(session, [2])
    assert found == expected
    assert "a new one begins from the start and repeats 3 operations" in caplog.text


def test_a_gradient_that_no_step_has_applied_outlives_a_save():
    """A checkpoint does not hold it, so a new session begins before it and makes it again."""
    begins = []

    def settle(operation):
        value = "x://" if operation.name == "save" else {}
        return SimpleNamespace(result=lambda: operation.settled(value))

    def move_base(place, again):
        begins.append(place)

    queue = SimpleNamespace(call=settle, move_base=move_base, close=lambda: None)
    session = make_session(queue, lambda: None)
    session.save("fresh").result()
    assert len(begins) == 1
    for _ in range(2):
        session.forward_backward(make_data(), cross_entropy).result()
        session.save("between").result()
    assert len(begins) == 1
    session.optim_step(make_adam()).result()
    session.save("after the step").result()
    assert len(begins) == 2


def test_samples_of_a_lost_session_go_on(attach, lose, tmp_path):
    """Of weights that are no checkpoint's: a step lies between the publish and the save."""
    session = attach(recover=2).open_session("lost", make_lora(), directory=tmp_path)
    train(session, [0])
    generator = session.publish_weights().result()
    prompts = [[5, 6, 7], [8, 9]]

    def tokens():
        sampled = generator.sample(prompts, make_sampling(), 2).result()
        assert {each.version for group in sampled for each in group} == {generator.version}
        return [each.tokens.tolist() for group in sampled for each in group]

    expected = tokens()
    train(session, [1])
    session.save("two").result()
    lose(session)
    assert tokens() == expected
    # Published at the checkpoint: the new session publishes before it samples.
    generator = session.publish_weights().result()
    expected = tokens()
    session.save("three").result()
    lose(session)
    assert tokens() == expected


def test_without_recover_it_says_what_to_do(attach, lose, tmp_path):
    session = attach().open_session("lost", make_lora(), directory=tmp_path)
    train(session, [0])
    lose(session)
    failed = session.forward_backward(make_data(), cross_entropy)
    later = session.optim_step(make_adam())
    with pytest.raises(RemoteError, match=r"backend\.recover=1") as caught:
        failed.result()
    assert (caught.value.code, caught.value.category) == ("session_not_active", "service")
    with pytest.raises(BackendError, match="refuses optim_step"):
        later.result()


def test_recoveries_are_counted(attach, lose, tmp_path):
    session = attach(recover=1).open_session("lost", make_lora(), directory=tmp_path)
    lose(session)
    train(session, [0])
    lose(session)
    with pytest.raises(RemoteError, match="not running"):
        train(session, [1])


def test_a_lost_resource_is_replaced(server, open_remote, tmp_path, caplog):
    """An owned one; pairs in two passes, with two sessions on it."""
    backend = open_remote(recover=1)
    sessions = [backend.open_session(name, make_lora(), directory=tmp_path) for name in "ab"]
    losses = [train(session, [0]) for session in sessions]
    lost_id = sessions[0]._queue.link.resource_id
    with make_client(server.url) as client:
        client.post_training.model_resources.stop(lost_id, force=True)
    again = [train(session, [1]) for session in sessions]
    assert losses[0] == losses[1] and again[0] == again[1]
    assert {session._queue.link.resource_id for session in sessions}.isdisjoint({lost_id})
    assert sessions[0]._queue.link.resource_id == sessions[1]._queue.link.resource_id
    assert caplog.text.count("created") == 2


def test_a_borrowed_resource_is_not_replaced(server, open_remote, tmp_path):
    owner = open_remote()
    owner.open_session("first", make_lora(), directory=tmp_path)
    resource_id = owner._connection.resource.id
    session = open_remote(model_resources_id=resource_id, recover=3).open_session(
        "second", make_lora(), directory=tmp_path
    )
    with make_client(server.url) as client:
        client.post_training.model_resources.stop(resource_id, force=True)
    with pytest.raises(RemoteError, match="Attach to another one"):
        train(session, [0])


def test_a_preference_loss_keeps_its_units(attach, lose, tmp_path):
    """Pairs stay together through splitting into requests and a lost session."""
    rows = [
        type(row)(
            row.tokens,
            {
                **row.columns,
                "pair_weights": 0.5,
                "reference_logprobs": -np.ones(row.num_scored, np.float32),
            },
        )
        for row in make_data()
    ]
    loss = PREFERENCE["dpo_sigmoid"]
    session = attach(recover=1).open_session("pairs", make_lora(), directory=tmp_path)
    first = session.forward_backward(rows, loss, rows_per_unit=2).result()
    lose(session)
    assert session.forward_backward(rows, loss, rows_per_unit=2).result() == first
    with pytest.raises(BackendError, match="whole number of units"):
        session.forward_backward(rows[:3], loss, rows_per_unit=2)
