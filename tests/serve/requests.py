"""What tests send to a server."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

CROSS_ENTROPY = {"type": "LOSS_TYPE_CROSS_ENTROPY"}
LORA = {"rank": 4, "alpha": 8, "train_unembed": False}
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
SEQUENCES = ([5, 60, 7, 8, 9, 10], [11, 12, 13], [300, 40, 5, 6, 7, 8, 9, 10])


def model_input(tokens: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [{"encoded_text": {"tokens": list(tokens)}}]}


def floats(values: Sequence[float]) -> dict[str, Any]:
    return {"data": [float(value) for value in values], "dtype": "float32"}


def sample_of(tokens: Sequence[int], **inputs: Sequence[float]) -> dict[str, Any]:
    """A sample of a sequence; without inputs, one of cross-entropy with all weights 1."""
    inputs = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    return {
        "model_input": model_input(tokens[:-1]),
        "loss_fn_inputs": {
            "target_tokens": {"data": list(tokens[1:]), "dtype": "int64"},
            **{name: floats(values) for name, values in inputs.items()},
        },
    }


def policy_inputs(tokens: Sequence[int], seed: int = 0) -> dict[str, list[float]]:
    """Random log-probs and advantages for a sequence, its first token without weight."""
    random = np.random.default_rng([seed, *tokens])
    count = len(tokens) - 1
    return {
        "logprobs": (-6 + random.normal(size=count)).tolist(),
        "advantages": random.normal(size=count).tolist(),
        "reference_logprobs": (-6 + random.normal(size=count)).tolist(),
        "weights": [0.0] + [1.0] * (count - 1),
    }


class Wire:
    """A client without comfort: what is sent is what the test says."""

    def __init__(self, url: str, token: str = "any") -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # Connections that are not kept need not be closed, and outlive no server.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60, limits=limits)

    def get(self, path: str, **params: Any) -> httpx.Response:
        return self.http.get(f"/v1/rl/{path}", params=params or None)

    def post(self, path: str, body: Any = None, **params: Any) -> httpx.Response:
        content = {} if body is None else {"json": body}
        return self.http.post(f"/v1/rl/{path}", params=params or None, **content)

    def resource(self, model: str, **settings: Any) -> dict[str, Any]:
        made = self.post("model-resources", {"base_model": model, **settings})
        assert made.status_code == 201, made.text
        return made.json()

    def session(self, resource: str, **settings: Any) -> dict[str, Any]:
        """A session that runs, or could not."""
        body = {"model_resources_id": resource, "lora_config": LORA, **settings}
        made = self.post("training-sessions", body)
        assert made.status_code == 201, made.text
        return self.get(f"training-sessions/{made.json()['id']}").json()

    def submit(self, session: str, kind: str, body: Any = None, *, key: str | None = None):
        headers = {"idempotency-key": key or str(uuid.uuid4())}
        content = {} if body is None else {"json": body}
        return self.http.post(
            f"/v1/rl/training-sessions/{session}/operations/{kind}", headers=headers, **content
        )

    def wait(self, session: str, kind: str, operation: str) -> dict[str, Any]:
        while True:
            found = self.get(f"training-sessions/{session}/operations/{kind}/{operation}").json()
            if found["status"].endswith(("COMPLETED", "FAILED")):
                return found

    def run(self, session: str, kind: str, body: Any = None, *, key: str | None = None) -> Any:
        """The output of an operation."""
        made = self.submit(session, kind, body, key=key)
        assert made.status_code == 200, made.text
        ended = self.wait(session, kind, made.json()["id"])
        assert ended["status"].endswith("COMPLETED"), ended
        return ended["output"]

    def fail(self, session: str, kind: str, body: Any = None) -> dict[str, str]:
        """The error of an operation that is accepted and fails."""
        made = self.submit(session, kind, body)
        assert made.status_code == 200, made.text
        ended = self.wait(session, kind, made.json()["id"])
        assert ended["status"].endswith("FAILED"), ended
        return ended["error"]

    def forward_backward(self, session: str, samples: Any = None, **body: Any) -> Any:
        samples = samples or [sample_of(sequence) for sequence in SEQUENCES]
        body = {"loss": CROSS_ENTROPY, "samples": samples, **body}
        return self.run(session, "forward-backward", body)

    def step(self, session: str, **settings: Any) -> float:
        """Trains one step; the loss before it."""
        loss = self.forward_backward(session)["loss"]
        self.run(session, "optim-step", {"adam_params": {**ADAM, **settings}})
        return loss

    def logprobs(self, session: str) -> list[list[float]]:
        """Log-probs of the test's sequences by the weights of a session."""
        output = self.forward_backward(session, forward_only=True, return_loss_fn_outputs=True)
        return [one["tensors"]["logprobs"]["data"] for one in output["loss_fn_outputs"]]
