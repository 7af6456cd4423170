"""The server of these tests normalises as the service does, by the SDK's own calls."""

import math

import pytest

from tests.backends.tiny import make_data

ROWS = make_data((2, 4), seed=3)


@pytest.fixture
def client(serverless):
    from baseten import loops

    from tests.backends.loops.conftest import KEY
    from tunebook.backends.baseten.service import BasetenService

    service = loops.ServiceClient(api_key=KEY, base_url=serverless.url)
    with service.create_lora_training_client(serverless.model, rank=4, seed=0) as training:
        yield training
    BasetenService(serverless.url).stop(training.run_id, force=True)


def datum(row, **columns):
    """A row whose prompt has no target."""
    from baseten.loops import Datum, ModelInput, TensorData

    length = row.num_scored
    marked = row.columns["token_weights"] != 0
    targets = [int(each) if on else -100 for each, on in zip(row.tokens[1:], marked, strict=True)]
    inputs = {"target_tokens": TensorData(data=targets, dtype="int64", shape=[length])}
    for name, values in columns.items():
        inputs[name] = TensorData(data=list(values), dtype="float32", shape=[length])
    return Datum(model_input=ModelInput.from_ints(row.tokens[:-1].tolist()), loss_fn_inputs=inputs)


def norm_of(client, *requests):
    """The gradient norm of one step over several requests."""
    from baseten.loops import AdamParams

    for rows, name, config in requests:
        client.forward_backward(rows, name, config).result()
    adam = AdamParams(learning_rate=0.0, grad_clip_norm=0.0)
    return client.optim_step(adam).result().metrics["grad_norm"]


def test_tokens_are_divided_by_at_the_step(client):
    first, second = (datum(row) for row in ROWS)
    whole = norm_of(client, ([first, second], "cross_entropy", None))
    apart = norm_of(client, ([first], "cross_entropy", None), ([second], "cross_entropy", None))
    skip = {"skip_token_normalization": True}
    assert apart == pytest.approx(whole, rel=1e-5)
    assert norm_of(client, ([first, second], "cross_entropy", skip)) == pytest.approx(
        6 * whole, rel=1e-4
    )
    found = client.forward([first], "cross_entropy", skip).result()
    values = found.loss_fn_outputs[0]["logprobs"].data
    assert values[:3] == [None] * 3
    assert found.loss == pytest.approx(-sum(values[3:]), rel=1e-5)
    mean = client.forward([first], "cross_entropy").result().loss
    assert mean == pytest.approx(found.loss / 2, rel=1e-5)


def test_sums_and_means_do_not_share_a_step(client):
    from baseten.loops import RemoteOpError

    row = datum(ROWS[0])
    client.forward_backward([row], "cross_entropy").result()
    with pytest.raises(RemoteOpError, match="one step has gradients"):
        norm_of(client, ([row], "cross_entropy", {"skip_token_normalization": True}))


def test_dpo_is_a_mean_over_pairs(client):
    """L16: at the reference every pair is worth log 2."""
    found = client.forward([datum(row) for row in ROWS], "cross_entropy").result().loss_fn_outputs
    rows = [
        datum(row, ref_logprobs=[each or 0.0 for each in one["logprobs"].data])
        for row, one in zip(ROWS, found, strict=True)
    ]
    assert client.forward(rows, "dpo", {"beta": 0.1}).result().loss == pytest.approx(math.log(2))
    twice = norm_of(client, (rows, "dpo", {"beta": 0.1}), (rows, "dpo", {"beta": 0.1}))
    assert twice == pytest.approx(norm_of(client, (rows, "dpo", {"beta": 0.1})), rel=1e-5)
    with pytest.raises(ValueError, match="multiple of 2"):
        client.forward(rows[:1], "dpo")
