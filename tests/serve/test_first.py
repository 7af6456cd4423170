"""The real SDK against a server."""

import pytest
from together.post_training import ModelResourcesClient

LORA = {"rank": 4, "alpha": 8, "train_unembed": False}


def sample_of(tokens, weights=None):
    """A cross-entropy sample of a sequence."""
    count = len(tokens) - 1
    return {
        "model_input": {"chunks": [{"encoded_text": {"tokens": tokens[:-1]}}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64"},
            "weights": {"data": weights or [1.0] * count, "dtype": "float32"},
        },
    }


def test_trains(server):
    with (
        ModelResourcesClient.create(
            base_url=server.url, api_key="any", base_model=server.model
        ) as resource,
        resource.create_session(lora_config=LORA) as session,
    ):
        samples = [sample_of([5, 6, 7, 8, 9]), sample_of([11, 12, 13])]
        loss = {"type": "LOSS_TYPE_CROSS_ENTROPY"}
        losses = []
        for step in range(3):
            losses.append(session.trainer.forward_backward(samples=samples, loss=loss).loss)
            result = session.trainer.optim_step(adam_params={"learning_rate": 1e-2})
            assert int(result.step) == step + 1
        assert losses[-1] < losses[0]
        assert session.trainer.forward(samples=samples, loss=loss).loss == pytest.approx(
            losses[-1], rel=0.5
        )
