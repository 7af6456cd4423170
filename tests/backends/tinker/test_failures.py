"""Errors of the service as ours, requests that are sent again, and what is left of them."""

import re
import subprocess
import sys

import numpy as np
import pytest

from loss_fns.cross_entropy import cross_entropy
from tests.backends.tiny import make_adam, make_data, make_lora, make_sampling
from tunebook.backends.remote.failures import RemoteError
from tunebook.errors import BackendError, CheckpointError, ConfigError
from tunebook.notices import LOG
from tunebook.resources import ServiceError
from tunebook.types import CheckpointRef, Datum


def train(session, steps):
    """Losses of steps on data of their own, all submitted before the first is waited for."""
    pending = []
    for step in steps:
        pending.append(session.forward_backward(make_data(seed=step), cross_entropy))
        pending.append(session.optim_step(make_adam()))
    return [each.result().get("loss") for each in pending[::2]]


@pytest.mark.parametrize("fault", ["429", "503", "drop", "drop_reply"])
def test_a_request_that_is_sent_again_counts_once(open_tinker, tinker_server, tmp_path, fault):
    """Case 108: where the reply is lost, the service has done it and must not do it again."""
    expected = train(open_tinker().open_session("a", make_lora(), directory=tmp_path), range(2))
    session = open_tinker().open_session("b", make_lora(), directory=tmp_path)
    for route in ("forward_backward", "optim_step"):
        tinker_server.fault(route, fault)
    tinker_server.fault("retrieve_future", "503", "408")
    assert train(session, range(2)) == pytest.approx(expected, rel=1e-6)
    assert tinker_server.state()["steps"][session._queue.link.session_id] == 2


@pytest.mark.parametrize(
    ("category", "code", "ours", "recoverable"),
    [
        ("user", "invalid_input", "input", False),
        ("server", "internal_error", "service", True),
        ("unknown", "internal_error", "service", True),
    ],
)
def test_a_failed_request_has_a_category(
    open_tinker, tinker_server, tmp_path, category, code, ours, recoverable
):
    session = open_tinker().open_session("a", make_lora(), directory=tmp_path)
    tinker_server.fault("forward_backward", f"fail:{category}")
    failed = session.forward_backward(make_data(), cross_entropy)
    later = session.optim_step(make_adam())
    with pytest.raises(RemoteError, match="injected failure") as caught:
        failed.result()
    error = caught.value
    assert (error.code, error.category, error.recoverable) == (code, ours, recoverable)
    with pytest.raises(BackendError, match="forward_backward failed before"):
        later.result()


@pytest.mark.parametrize(
    ("status", "code", "category", "match"),
    [
        ("400", "invalid_input", "input", "Correct"),
        ("401", "http_401", "input", "TINKER_API_KEY"),
        ("402", "http_402", "capacity", "credit"),
        ("403", "http_403", "capacity", "does not allow"),
    ],
)
def test_an_answer_has_a_duty(open_tinker, tinker_server, tmp_path, status, code, category, match):
    """402 among them: a training client that cannot be paid for is refused at once."""
    tinker_server.fault("create_model", status)
    with pytest.raises(RemoteError, match=match) as caught:
        open_tinker().open_session("a", make_lora(), directory=tmp_path)
    assert (caught.value.code, caught.value.category) == (code, category)


def test_a_pause_for_billing_ends_when_it_is_paid(open_tinker, tinker_server, tmp_path):
    """The SDK waits, up to an hour, and then goes on with the same request."""
    session = open_tinker().open_session("a", make_lora(), directory=tmp_path)
    tinker_server.fault("optim_step", "402")
    session.forward_backward(make_data(), cross_entropy)
    assert session.optim_step(make_adam()).result()["grad_norm"] > 0
    assert tinker_server.state()["steps"][session._queue.link.session_id] == 1


def test_a_lost_client_is_replaced_and_no_step_repeated(open_tinker, tinker_server, tmp_path):
    expected = train(open_tinker().open_session("a", make_lora(), directory=tmp_path), range(5))
    session = open_tinker(recover=1).open_session("b", make_lora(), directory=tmp_path)
    found = train(session, [0, 1])
    session.save("two").result()
    generator = session.publish_weights().result()
    found += train(session, [2])
    tinker_server.fault("forward_backward", "fail:server")
    found += train(session, [3, 4])
    assert found == pytest.approx(expected, rel=1e-6)
    assert tinker_server.state()["steps"][session._queue.link.session_id] == 3
    assert len(generator.sample([[5, 6]], make_sampling(), 2).result()[0]) == 2


def test_a_wrong_key_is_named_and_kept_out_of_messages(open_tinker, tinker_server, monkeypatch):
    tinker_server.ask_for_key("tml-right")
    try:
        monkeypatch.setenv("TINKER_API_KEY", "tml-secret-and-wrong")
        backend = open_tinker()
        with pytest.raises(ServiceError, match="Check the key in TINKER_API_KEY") as caught:
            _ = backend.capabilities
        assert "tml-secret" not in str(caught.value)
        monkeypatch.setenv("TINKER_API_KEY", "tml-right")
        assert backend.capabilities.max_seq_len
        monkeypatch.setenv("TINKER_API_KEY", "no-prefix")
        with pytest.raises(ServiceError, match="tml-"):
            backend.check(make_lora(), CheckpointRef("x", "tinker://a/weights/b", True))
    finally:
        tinker_server.ask_for_key(None)


def test_checkpoints_expire_unless_they_are_used(open_tinker, tinker_server, tmp_path, monkeypatch):
    """The one a run ends with is renewed, and those that are half through their time."""
    backend = open_tinker(checkpoint_ttl=7200)
    session = backend.open_session("a", make_lora(), directory=tmp_path)
    train(session, [0])
    first = session.save("first").result()
    assert tinker_server.state()["checkpoints"][first.location] == {"ttl": 7200, "renewed": 0}
    session._leases._renewed_at[first.location] -= 3601
    second = session.save("second").result()
    session.save("third").result()
    found = tinker_server.state()["checkpoints"]
    assert (found[first.location]["renewed"], found[second.location]["renewed"]) == (1, 0)
    session.export(second, tmp_path / "model")
    assert tinker_server.state()["checkpoints"][second.location]["renewed"] > 0
    session.discard(first)
    session.discard(first)
    assert first.location not in tinker_server.state()["checkpoints"]
    before = tinker_server.state()["checkpoints"][second.location]["renewed"]
    session.close()
    begun = backend.open_session("b", make_lora(), directory=tmp_path, restore=second)
    assert tinker_server.state()["checkpoints"][second.location]["renewed"] > before
    begun._leases.renew("tinker://gone/weights/x")
    messages = []
    monkeypatch.setattr(LOG, "warning", lambda *arguments: messages.append(arguments[-1]))
    begun.close()
    assert any("may expire" in message for message in messages)


def test_what_a_session_refuses(open_tinker, tmp_path):
    backend = open_tinker()
    session = backend.open_session("a", make_lora(), directory=tmp_path)
    first, second = make_data((2, 3))
    warm = Datum(second.tokens, {**second.columns, "temperature": 0.5})
    with pytest.raises(BackendError, match="row 1 has the temperature"):
        session.forward([first, warm]).result()
    session = backend.open_session("b", make_lora(), directory=tmp_path)
    generator = session.publish_weights().result()
    with pytest.raises(BackendError, match="not both at a time"):
        generator.sample([[5, 6]], make_sampling(stop=("x", 7)), 1).result()
    session = backend.open_session("c", make_lora(), directory=tmp_path)
    generator = session.publish_weights().result()
    every = tuple(range(3, 120))
    [[completion]] = generator.sample(
        [[5, 6]], make_sampling(stop=every, max_tokens=64), 1
    ).result()
    assert completion.tokens[-1] in every and not set(completion.tokens[:-1]) & set(every)
    with pytest.raises(CheckpointError, match="cannot load a folder"):
        backend.open_session(
            "d", make_lora(), directory=tmp_path, restore=CheckpointRef("x", str(tmp_path), True)
        )


def test_sampling_is_that_of_forward(open_tinker, tmp_path):
    session = open_tinker().open_session("a", make_lora(), directory=tmp_path)
    train(session, [0])
    generator = session.publish_weights().result()
    prompts = [[10, 11, 12], [20, 21]]
    found = generator.sample(prompts, make_sampling(), 2).result()
    rows = [
        Datum(np.concatenate([prompt, each.tokens]).astype(np.int32))
        for prompt, samples in zip(prompts, found, strict=True)
        for each in samples
    ]
    logprobs = [each.numpy() for each in session.forward(rows).result()]
    drawn = [each for samples in found for each in samples]
    for row, values, each in zip(rows, logprobs, drawn, strict=True):
        start = row.num_scored - len(each.tokens)
        np.testing.assert_allclose(values[start:], each.logprobs, atol=1e-3)
    again = generator.sample(prompts, make_sampling(), 2).result()
    assert [each.tokens.tolist() for samples in again for each in samples] == [
        each.tokens.tolist() for each in drawn
    ]


@pytest.mark.parametrize(
    ("package", "match"),
    [
        (
            "raise ImportError('no')",
            r"needs the package tinker; `pip install 'tunebook\[tinker\]'`",
        ),
        ("", r"needs tinker 0\.38 or newer, and this environment has 0\.23\.1"),
    ],
)
def test_the_package_is_missing_or_another_one(tmp_path, package, match):
    """`together[tinker]` pins an older release, and an environment holds one only."""
    (tmp_path / "tinker").mkdir()
    (tmp_path / "tinker" / "__init__.py").write_text(package)
    info = tmp_path / "tinker-0.23.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinker\nVersion: 0.23.1\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from tunebook.backends.tinker import TinkerBackend\n"
        "try: TinkerBackend(service_model='x', model='x', base_url='http://127.0.0.1:9')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(ConfigError.__name__)
    assert re.search(match, done.stdout)
