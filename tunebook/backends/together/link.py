"""The operations of one training session on the service: submitted in order, waited for later."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebook.backends.together.failures import DUTIES, RemoteError, failed_operation, translated
from tunebook.backends.together.losses import forward_samples
from tunebook.backends.together.samples import shortened
from tunebook.errors import BackendError
from tunebook.types import Datum, FloatArray

if TYPE_CHECKING:
    from together import AsyncTogether

UPLOAD_BYTES = 512 * 1024
"""A larger body is uploaded beside the request, as the service asks."""
MAX_ROWS = 4096
"""Rows that the service takes in one operation."""
FIRST_POLL_S = 0.05
LAST_POLL_S = 0.5
"""Seconds between two questions about an operation, at first and in the end."""
CROSS_ENTROPY = {"type": "LOSS_TYPE_CROSS_ENTROPY"}
DONE, FAILED = "TRAINING_OPERATION_STATUS_COMPLETED", "TRAINING_OPERATION_STATUS_FAILED"


@dataclass(frozen=True, slots=True)
class Sent:
    """An operation that the service has taken."""

    link: Link
    kind: str
    operation: Any

    async def output(self) -> Any:
        """What it returned; waits as long as it takes, and never submits it again."""
        return await self.link.output_of(self.kind, self.operation)


class Link:
    """One session on the service."""

    def __init__(
        self,
        client: AsyncTogether,
        session_id: str,
        resource_id: str,
        *,
        used: Callable[[], None],
    ) -> None:
        """
        Args:
            client: of the service.
            session_id: the session.
            resource_id: what it is on.
            used: called with every operation.
        """
        self._client = client
        self._used = used
        self.session_id = session_id
        self.resource_id = resource_id
        self.seen = "nothing"
        """What the service last said of an operation, for people."""

    async def forward(self, data: Sequence[Datum]) -> list[Sent]:
        """Submits rows whose log-probs are wanted."""
        return [
            await self.forward_backward(
                CROSS_ENTROPY, forward_samples(data[start : start + MAX_ROWS]), forward_only=True
            )
            for start in range(0, len(data), MAX_ROWS)
        ]

    async def forward_backward(
        self, loss: dict[str, Any], samples: list[dict[str, Any]], *, forward_only: bool = False
    ) -> Sent:
        """Submits rows for a loss of the service, which returns their log-probs too."""
        body = {"loss": loss, "samples": samples}
        flags = {"forward_only": forward_only, "return_loss_fn_outputs": True}
        return await self._submit("forward_backward", body, flags)

    async def custom_forward_backward(
        self, samples: list[dict[str, Any]], gradients: Sequence[FloatArray]
    ) -> Sent:
        """Submits the gradient with respect to the log-probs of rows."""
        sent = [{"data": each.tolist(), "dtype": "D_TYPE_FLOAT32"} for each in gradients]
        return await self._submit(
            "custom_forward_backward", {"samples": samples, "gradients": sent}, {}
        )

    async def sample(self, body: dict[str, Any]) -> Sent:
        """Submits prompts to be answered."""
        return await self._submit("sample", body, {})

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
            raise RemoteError(
                f"{kind} came back without a result ({where})",
                code="INTERNAL_ERROR",
                duty=DUTIES["INTERNAL_ERROR"],
            )
        return await self._resolved(operation.output)

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


def logprobs_in(outputs: Sequence[Any], data: Sequence[Datum]) -> list[FloatArray]:
    """The log-probs that operations returned for some rows, `[T]` each.

    Raises:
        RemoteError: they are not those of these rows.
    """
    found = [
        np.asarray(each.tensors["logprobs"].data, np.float32)
        for output in outputs
        for each in output.loss_fn_outputs or []
    ]
    if [len(each) for each in found] != [datum.num_scored for datum in data]:
        raise RemoteError(
            f"the service returned log-probs of {len(found)} rows for {len(data)}, or of other "
            "lengths",
            code="INTERNAL_ERROR",
            duty=DUTIES["INTERNAL_ERROR"],
        )
    return found


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
