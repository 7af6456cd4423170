"""The server on a real model."""

import time

import numpy as np
import pytest

from loss_fns.cross_entropy import cross_entropy
from tests.serve.requests import ADAM, CROSS_ENTROPY, sample_of
from tests.serve.server import ServerProcess
from tunebook.backends.local import LocalBackend
from tunebook.types import AdamParams, Datum, LoraConfig

ROWS, TOKENS, STEPS = 8, 256, 4


@pytest.mark.real
def test_http_takes_a_small_share_of_a_step(smollm2, tmp_path):
    """At least 80 % of the local steps a second, through the service's SDK, and the same losses."""
    from together.post_training import ModelResourcesClient

    random = np.random.default_rng(0)
    rows = random.integers(100, 40_000, (ROWS, TOKENS + 1))
    weights = np.full(TOKENS, 1 / (ROWS * TOKENS), np.float32)
    data = [Datum(row.astype(np.int32), {"token_weights": weights}) for row in rows]
    samples = [sample_of(row.tolist(), weights=weights.tolist()) for row in rows]
    adam = AdamParams(1e-2, 0.9, 0.95, 1e-8, 0.0, 1.0)

    def timed(step):
        seconds = []
        for _ in range(STEPS):
            began = time.monotonic()
            losses.append(step())
            seconds.append(time.monotonic() - began)
        return min(seconds[1:])

    losses: list[float] = []
    with LocalBackend(model=str(smollm2), device="cpu") as backend:
        lora = LoraConfig(16, 32.0, 0.0, "all-linear", 0, False)
        session = backend.open_session("s", lora, directory=tmp_path / "local")

        def local_step():
            future = session.forward_backward(data, cross_entropy)
            session.optim_step(adam).result()
            return future.result()["loss"]

        local_s = timed(local_step)
    with (
        ServerProcess(tmp_path / "server", model=str(smollm2)) as server,
        ModelResourcesClient.create(
            base_url=server.url, api_key="any", base_model=server.model
        ) as resource,
        resource.create_session(
            lora_config={"rank": 16, "alpha": 32, "train_unembed": False}
        ) as remote,
    ):

        def remote_step():
            result = remote.trainer.forward_backward(samples=samples, loss=CROSS_ENTROPY)
            remote.trainer.optim_step(adam_params=ADAM)
            return result.loss

        remote_s = timed(remote_step)
    assert losses[STEPS:] == pytest.approx(losses[:STEPS], rel=1e-6)
    print(f"local {local_s:.2f} s, over HTTP {remote_s:.2f} s a step")
    assert local_s / remote_s >= 0.8, (local_s, remote_s)
