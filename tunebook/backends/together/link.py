"""The operations of one training session on the service: submitted in order, waited for later."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebook.backends.remote.failures import broken_answer
from tunebook.backends.remote.link import Finish, Pass, Sampled
from tunebook.backends.remote.losses import BuiltIn
from tunebook.backends.remote.rows import marks_of
from tunebook.backends.together.failures import failed_operation, translated
from tunebook.backends.together.losses import CROSS_ENTROPY, loss_config
from tunebook.backends.together.samples import model_input, sample_of, shortened
from tunebook.errors import BackendError, ConfigError
from tunebook.types import (
    AdamParams,
    Datum,
    FloatArray,
    Metrics,
    MuonParams,
    OptimizerParams,
    SamplingParams,
    StopReason,
)

if TYPE_CHECKING:
    from together import AsyncTogether

UPLOAD_BYTES = 512 * 1024
"""A larger body is uploaded beside the request, as the service asks."""
MAX_ROWS = 4096
"""Rows that the service takes in one operation."""
FIRST_POLL_S = 0.05
LAST_POLL_S = 0.5
"""Seconds between two questions about an operation, at first and in the end."""
SYNCHRONOUS = "WEIGHT_SYNC_TYPE_SYNCHRONOUS"
STOP_REASONS = {"STOP_REASON_STOP": StopReason.STOP, "STOP_REASON_LENGTH": StopReason.LENGTH}
DONE, FAILED = "TRAINING_OPERATION_STATUS_COMPLETED", "TRAINING_OPERATION_STATUS_FAILED"


@dataclass(frozen=True, slots=True)
class Sent:
    """An operation that the service has taken."""

    link: TogetherLink
    kind: str
    operation: Any

    async def output(self) -> Any:
        """What it returned; waits as long as it takes, and never submits it again."""
        return await self.link.output_of(self.kind, self.operation)


class TogetherLink:
    """One session on the service; see `tunebook.backends.remote.link.Link`."""

    def __init__(
        self,
        client: AsyncTogether,
        session_id: str,
        resource_id: str,
        *,
        has_generator: bool,
        used: Callable[[], None],
    ) -> None:
        """
        Args:
            client: of the service.
            session_id: the session.
            resource_id: what it is on.
            has_generator: whether that samples.
            used: called with every operation.
        """
        self._has_generator = has_generator
        self._client = client
        self._used = used
        self.session_id = session_id
        self.resource_id = resource_id
        self.seen = "nothing"
        """What the service last said of an operation, for people."""

    @property
    def max_rows(self) -> int:
        return MAX_ROWS

    async def forward(self, data: Sequence[Datum]) -> Finish:
        sent = [
            await self._pass({"type": CROSS_ENTROPY}, _marked(data[start : start + MAX_ROWS]), True)
            for start in range(0, len(data), MAX_ROWS)
        ]

        async def finish() -> list[FloatArray]:
            outputs = [await each.output() for each in sent]
            return [logprobs for output in outputs for logprobs in _logprobs_in(output)]

        return finish

    async def forward_backward(self, own: BuiltIn, data: Sequence[Datum]) -> Finish:
        samples = [
            sample_of(datum, columns) for datum, columns in zip(data, own.columns, strict=True)
        ]
        sent = await self._pass(loss_config(own), samples, False)

        async def finish() -> Pass:
            output = await sent.output()
            return Pass(_logprobs_in(output), output.loss)

        return finish

    async def backward(self, data: Sequence[Datum], gradients: Sequence[FloatArray]) -> Finish:
        given = [{"data": each.tolist(), "dtype": "D_TYPE_FLOAT32"} for each in gradients]
        body = {"samples": _marked(data), "gradients": given}
        sent = await self._submit("custom_forward_backward", body, {})

        async def finish() -> None:
            await sent.output()

        return finish

    async def optim_step(self, params: OptimizerParams) -> Finish:
        sent = await self.small("optim_step", **optimizer_arguments(params))

        async def finish() -> Metrics:
            return metrics_of_step(await sent.output())

        return finish

    async def save(self, name: str) -> Finish:
        """Ids are the service's own, so the name goes nowhere."""
        return await self._checkpoint("training_checkpoint")

    async def save_for_download(self, name: str) -> Finish:
        return await self._checkpoint("inference_checkpoint")

    async def publish(self) -> Finish:
        if not self._has_generator:
            raise ConfigError(
                "this resource trains only; for samples set backend.generator_replicas=1, or "
                "samples.num_prompts=0 for none"
            )
        sent = await self.small("weights_sync", weight_sync_type=SYNCHRONOUS)

        async def finish() -> int:
            return int((await sent.output()).weights_version)

        return finish

    async def sample(
        self,
        published: Any,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        num_samples: int,
    ) -> Finish:
        body = {
            "model_inputs": [model_input(list(prompt)) for prompt in prompts],
            "num_samples": num_samples,
            "sampling_params": sampling_params(params),
        }
        sent = await self._submit("sample", body, {})

        async def finish() -> list[list[Sampled]]:
            results = (await sent.output()).results
            versions = {part.version for each in results for part in each.policy_segments}
            if versions - {published}:
                raise broken_answer(
                    f"sample: the service returned completions of weights {sorted(versions)} where "
                    f"{published} were published; somebody else publishes in this session"
                )
            return [[_sampled(sequence) for sequence in each.sequences] for each in results]

        return finish

    async def small(self, kind: str, **arguments: Any) -> Sent:
        """Submits an operation without rows."""
        self._used()
        method = getattr(self._client.post_training.operations, _SUBMIT[kind])
        with translated(f"{kind} of session {self.session_id}"):
            operation = await method(
                self.session_id, idempotency_key=str(uuid.uuid4()), **arguments
            )
        return Sent(self, kind, operation)

    async def output_of(self, kind: str, operation: Any) -> Any:
        """See `Sent.output`."""
        ask = getattr(self._client.post_training.operations, _RETRIEVE[kind])
        wait_s = FIRST_POLL_S
        while operation.status not in (DONE, FAILED):
            self.seen = f"{kind} {operation.id} is {operation.status.rpartition('_')[2]}"
            with translated(f"{kind} of session {self.session_id}"):
                operation = await ask(operation.id, session_id=self.session_id)
            if operation.status not in (DONE, FAILED):
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LAST_POLL_S)
        where = f"operation {operation.id}, session {self.session_id}, resource {self.resource_id}"
        if operation.status == FAILED:
            raise failed_operation(kind, operation.error, where=where)
        if operation.output is None:
            raise broken_answer(f"{kind} came back without a result ({where})")
        return await self._resolved(operation.output)

    async def _pass(
        self, loss: dict[str, Any], samples: list[dict[str, Any]], forward_only: bool
    ) -> Sent:
        """Submits rows for a loss of the service, which returns their log-probs too."""
        body = {"loss": loss, "samples": samples}
        flags = {"forward_only": forward_only, "return_loss_fn_outputs": True}
        return await self._submit("forward_backward", body, flags)

    async def _checkpoint(self, kind: str) -> Finish:
        sent = await self.small(kind)

        async def finish() -> str:
            return (await sent.output()).checkpoint.id

        return finish

    async def _submit(self, kind: str, body: dict[str, Any], flags: dict[str, Any]) -> Sent:
        try:
            encoded = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        except ValueError as error:
            raise BackendError(f"{kind}: a number to be sent is NaN or infinite") from error
        extra = None
        if len(encoded) > UPLOAD_BYTES:
            with translated(f"upload for {kind} of session {self.session_id}"):
                extra = {"payload_id": await self._upload(encoded)}
            body = shortened(body)
        return await self.small(kind, **body, **flags, extra_body=extra)

    async def _upload(self, encoded: bytes) -> str:
        """Id of a body that was put where the service says."""
        import httpx
        from together import omit

        place: Any = await self._client.post(
            f"/v1/rl/training-sessions/{self.session_id}/payloads/upload-url", cast_to=object
        )
        # The address itself is the permission, and it may be of another host.
        await self._client.put(
            place["upload_url"],
            content=encoded,
            cast_to=httpx.Response,
            options={"headers": {"Authorization": omit}},
        )
        return place["payload_id"]

    async def _resolved(self, output: Any) -> Any:
        """The result, with what it names as a download put into it."""
        payload_id = getattr(output, "payload_id", None)
        if not payload_id:
            return output
        import httpx
        from together import omit

        with translated(f"download of a result of session {self.session_id}"):
            place: Any = await self._client.post(
                f"/v1/rl/training-sessions/{self.session_id}/payloads/{payload_id}/download-url",
                cast_to=object,
            )
            answer = await self._client.get(
                place["download_url"],
                cast_to=httpx.Response,
                options={"headers": {"Authorization": omit}},
            )
        inline = output.to_dict(use_api_names=True, exclude_unset=True)
        del inline["payload_id"]
        return type(output).model_validate({**inline, **json.loads(answer.content)})


def _marked(data: Sequence[Datum]) -> list[dict[str, Any]]:
    """Rows whose log-probs are asked for; the service gives 0 where a weight is 0."""
    return [sample_of(datum, {"weights": marks_of(datum)}) for datum in data]


def _logprobs_in(output: Any) -> list[FloatArray]:
    """The log-probs that an operation returned, `[T]` a row."""
    return [
        np.asarray(each.tensors["logprobs"].data, np.float32)
        for each in output.loss_fn_outputs or []
    ]


def _sampled(sequence: Any) -> Sampled:
    return Sampled(
        tokens=np.asarray([int(token) for token in sequence.tokens], np.int32),
        logprobs=np.asarray(sequence.logprobs or [], np.float32),
        stop_reason=STOP_REASONS[sequence.stop_reason],
    )


def sampling_params(params: SamplingParams) -> dict[str, Any]:
    """Every setting as the service takes it; 0 is off for our `top_k`, -1 for its."""
    found: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop": [str(stop) for stop in params.stop],
    }
    if params.seed is not None:
        found["seed"] = params.seed
    return found


def metrics_of_step(output: Any) -> Metrics:
    """What our server tells of an optimizer step; the hosted service only numbers it."""
    metrics = (output.model_extra or {}).get("metrics") or {}
    return {name: float(value) for name, value in metrics.items()}


def optimizer_arguments(params: OptimizerParams) -> dict[str, Any]:
    """Every setting of a step as the service takes it; its defaults are none of ours."""
    if isinstance(params, MuonParams):
        return {
            "muon_params": {
                "learning_rate": params.learning_rate,
                "momentum": params.momentum,
                "newton_schulz_steps": params.newton_schulz_steps,
                "weight_decay": params.weight_decay,
                "grad_clip_norm": params.max_grad_norm,
                "adam": _adam(params.adam),
            }
        }
    return {"adam_params": _adam(params)}


def _adam(params: AdamParams) -> dict[str, float]:
    return {
        "learning_rate": params.learning_rate,
        "beta1": params.beta1,
        "beta2": params.beta2,
        "eps": params.eps,
        "weight_decay": params.weight_decay,
        "grad_clip_norm": params.max_grad_norm,
    }


_SUBMIT = {
    "forward_backward": "forward_backward",
    "custom_forward_backward": "custom_forward_backward",
    "optim_step": "optim_step",
    "weights_sync": "weights_sync",
    "sample": "sample",
    "training_checkpoint": "create_training_checkpoint",
    "inference_checkpoint": "create_inference_checkpoint",
}
_RETRIEVE = {kind: f"retrieve_{kind}" for kind in _SUBMIT}
