"""The addresses of the server, and what each does."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from tunebook.serve import resources, sessions
from tunebook.serve.answers import (
    Json,
    body_parts,
    check_token,
    error_answer,
    page_limit,
    page_wire,
    query_flag,
    read_body,
    read_json,
    statuses,
)
from tunebook.serve.downloads import Downloads
from tunebook.serve.errors import ApiError, invalid, log_failure, not_found
from tunebook.serve.meters import CONTENT_TYPE
from tunebook.serve.operations import READERS
from tunebook.serve.payloads import ADDRESS_S, Payloads
from tunebook.serve.records import (
    CREATED_BY,
    WAITING_RESOURCE,
    Checkpoint,
    Operation,
    OperationStatus,
    Resource,
    ResourceStatus,
    Session,
    SessionStatus,
)
from tunebook.serve.state import State

Endpoint = Callable[[Request], Awaitable[Response]]
THREAD_BYTES = 256 * 1024
"""Bodies above this are parsed in another thread, so that others are answered meanwhile."""
CHECKPOINT_TYPES = {"CHECKPOINT_TYPE_TRAINING": True, "CHECKPOINT_TYPE_INFERENCE": False}


class Routes:
    """Answers requests; see the protocol's own documentation for what each means."""

    def __init__(
        self,
        state: State,
        payloads: Payloads,
        downloads: Downloads,
        is_alive: Callable[[], bool],
    ) -> None:
        """Takes the server's parts.

        Args:
            state: of the server.
            payloads: large bodies and results.
            downloads: files of checkpoints.
            is_alive: whether operations are run.
        """
        self._state = state
        self._is_alive = is_alive
        self._settings = state.settings
        self._payloads = payloads
        self._downloads = downloads

    def all(self) -> list[BaseRoute]:
        """The routes of the API."""
        resource, session = "/v1/rl/model-resources", "/v1/rl/training-sessions"
        operation = session + "/{session_id}/operations/{kind}"
        payload = session + "/{session_id}/payloads"
        table: list[tuple[str, str, Endpoint]] = [
            ("GET", "/v1/rl/supported-models", self.supported_models),
            ("POST", resource, self.create_resource),
            ("GET", resource, self.list_resources),
            ("POST", resource + "/estimate-cost", self.estimate_cost),
            ("GET", resource + "/{id}", self.get_resource),
            ("POST", resource + "/{id}/extend-expiry", self.extend_expiry),
            ("POST", resource + "/{id}/stop", self.stop_resource),
            ("POST", session, self.create_session),
            ("GET", session, self.list_sessions),
            ("GET", session + "/{session_id}", self.get_session),
            ("PATCH", session + "/{session_id}", self.update_session),
            ("POST", session + "/{session_id}/stop", self.stop_session),
            ("POST", operation, self.submit),
            ("GET", operation + "/{id}", self.get_operation),
            ("POST", payload + "/upload-url", self.upload_url),
            ("POST", payload + "/{id}/download-url", self.download_url),
            ("GET", "/v1/rl/checkpoints", self.list_checkpoints),
            ("GET", "/v1/rl/checkpoints/{id}", self.get_checkpoint),
            ("GET", "/v1/rl/checkpoints/{id}/download", self.list_files),
        ]
        routes: list[BaseRoute] = [
            Route(path, self._counted(path, self._guarded(endpoint)), methods=[method])
            for method, path, endpoint in table
        ]
        signed: list[tuple[str, str, Endpoint]] = [
            ("PUT", "/v1/rl/files/{proof}/up/{id}", self.upload),
            ("GET", "/v1/rl/files/{proof}/down/{id}", self.download),
            ("GET", "/v1/rl/files/{proof}/file/{id}/{variant}/{file}", self.file),
        ]
        watched: list[tuple[str, str, Endpoint]] = [
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics),
        ]
        return routes + [
            Route(path, self._counted(path, endpoint), methods=[method])
            for method, path, endpoint in [*signed, *watched]
        ]

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            check_token(request, self._settings.token)
            return await endpoint(request)

        return guarded

    def _counted(self, path: str, endpoint: Endpoint) -> Endpoint:
        """The endpoint with its refusals as answers, and all answers counted."""
        requests = self._state.monitor.requests

        async def counted(request: Request) -> Response:
            response = await _answer(endpoint, request)
            requests.add(method=request.method, path=path, status=str(response.status_code))
            return response

        return counted

    async def health(self, request: Request) -> Response:
        del request
        alive = self._is_alive()
        body = {"status": "ok" if alive else "failed", "model": self._settings.model}
        return Json(body, status_code=200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        if self._settings.token is not None:
            check_token(request, self._settings.token)
        state = self._state
        with state.lock:
            text = state.monitor.text(
                resources=Tally(one.status for one in state.resources.values()),
                sessions=Tally(lane.session.status for lane in state.lanes.values()),
                num_queued=len(state.operations),
            )
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _json(self, request: Request) -> Any:
        return await read_json(request, max_bytes=self._settings.max_body_bytes)

    # Resources.

    async def supported_models(self, request: Request) -> Response:
        del request
        return Json({"data": [resources.supported_model(self._state)]})

    async def create_resource(self, request: Request) -> Response:
        resource = resources.create_resource(self._state, await self._json(request))
        return Json(resources.resource_wire(self._state, resource), status_code=201)

    async def estimate_cost(self, request: Request) -> Response:
        resources.read_resource(self._state, await self._json(request))
        return Json({"currency": "USD", "price_per_hour": self._settings.price_per_hour})

    async def list_resources(self, request: Request) -> Response:
        wanted = statuses(request, ResourceStatus, "MODEL_RESOURCES_STATUS_")
        created_by = request.query_params.get("created_by")

        def keep(resource: Resource) -> bool:
            return _is_mine(created_by) and (wanted is None or resource.status in wanted)

        found, limit, more = self._page(request, Resource, keep)
        wire = [resources.resource_wire(self._state, self._live(one)) for one in found]
        return Json(page_wire(wire, limit, more=more))

    def _live(self, resource: Resource) -> Resource:
        return self._state.resources.get(resource.id, resource)

    async def get_resource(self, request: Request) -> Response:
        identity = request.path_params["id"]
        state = self._state
        waiting = (*WAITING_RESOURCE, ResourceStatus.STOPPING)
        await state.waiters.until(
            identity,
            lambda: state.resource(identity).status not in waiting,
            timeout=self._settings.poll_s,
        )
        return Json(resources.resource_wire(state, state.resource(identity)))

    async def extend_expiry(self, request: Request) -> Response:
        body = await self._json(request)
        resource = resources.extend_expiry(self._state, request.path_params["id"], body)
        return Json(resources.resource_wire(self._state, resource))

    async def stop_resource(self, request: Request) -> Response:
        state, force = self._state, query_flag(request, "force")
        resource = resources.stop_resource(state, request.path_params["id"], force=force)
        await state.waiters.until(
            resource.id,
            lambda: resource.status is not ResourceStatus.STOPPING,
            timeout=self._settings.poll_s,
        )
        return Json(resources.resource_wire(state, resource))

    # Sessions.

    async def create_session(self, request: Request) -> Response:
        session = sessions.create_session(self._state, await self._json(request))
        return Json(sessions.session_wire(self._state, session), status_code=201)

    async def list_sessions(self, request: Request) -> Response:
        wanted = statuses(request, SessionStatus, "TRAINING_SESSION_STATUS_")
        created_by = request.query_params.get("created_by")
        resources_id = request.query_params.get("model_resources_id")

        def keep(session: Session) -> bool:
            return (
                _is_mine(created_by)
                and (wanted is None or session.status in wanted)
                and resources_id in (None, session.resources_id)
            )

        found, limit, more = self._page(request, Session, keep)
        wire = [sessions.session_wire(self._state, self._state.session(one.id)) for one in found]
        return Json(page_wire(wire, limit, more=more))

    async def get_session(self, request: Request) -> Response:
        identity = request.path_params["session_id"]
        state = self._state
        moving = (SessionStatus.CREATING, SessionStatus.STOPPING)
        await state.waiters.until(
            identity,
            lambda: state.session(identity).status not in moving,
            timeout=self._settings.poll_s,
        )
        return Json(sessions.session_wire(state, state.session(identity)))

    async def update_session(self, request: Request) -> Response:
        body = await self._json(request)
        session = sessions.update_session(self._state, request.path_params["session_id"], body)
        return Json(sessions.session_wire(self._state, session))

    async def stop_session(self, request: Request) -> Response:
        state = self._state
        session = sessions.stop_session(state, request.path_params["session_id"])
        await state.waiters.until(
            session.id,
            lambda: session.status is not SessionStatus.STOPPING,
            timeout=self._settings.poll_s,
        )
        return Json(sessions.session_wire(state, session))

    # Operations.

    async def submit(self, request: Request) -> Response:
        session_id, kind = request.path_params["session_id"], _kind_of(request)
        body = await read_body(request, max_bytes=self._settings.max_body_bytes)
        key = request.headers.get("idempotency-key")
        if len(body) < THREAD_BYTES and b'"payload_id"' not in body:
            operation = self._submit(session_id, kind, key, body)
        else:
            operation = await run_in_threadpool(self._submit, session_id, kind, key, body)
        return Json(self._operation_wire(session_id, operation.id, kind))

    def _submit(self, session_id: str, kind: str, key: str | None, body: bytes) -> Operation:
        payload_id = sessions.payload_of(body)
        payload = None
        if payload_id is not None:
            payload = self._payloads.read(session_id, payload_id)
        return sessions.submit(self._state, session_id, kind, key=key, body=body, payload=payload)

    async def get_operation(self, request: Request) -> Response:
        session_id, kind = request.path_params["session_id"], _kind_of(request)
        identity, state = request.path_params["id"], self._state

        await state.waiters.until(
            identity, lambda: identity not in state.operations, timeout=self._settings.poll_s
        )
        return Json(self._operation_wire(session_id, identity, kind))

    def _operation_wire(self, session_id: str, identity: str, kind: str) -> dict[str, Any] | bytes:
        """An operation as it is now, with its output if it has completed.

        A submission may find it completed as well, when it is sent again.
        """
        live = self._state.operations.get(identity)
        found = self._state.store.operation(session_id, identity)
        if found is None or found[0].kind != kind:
            raise not_found(f"{kind} operation", identity)
        operation, output = found
        # Whether it has ended is asked of the store alone: the live record moves on meanwhile.
        if not operation.ended and live is not None and live.status is OperationStatus.RUNNING:
            operation.status = OperationStatus.RUNNING
        if operation.status is OperationStatus.COMPLETED and output is None:
            message = f"the result of {identity} is no longer kept"
            raise ApiError(410, message, code="result_gone")
        return _stored_wire(operation, output)

    # Payloads.

    async def upload_url(self, request: Request) -> Response:
        await self._json(request)
        session = self._state.session(request.path_params["session_id"])
        if session.status is not SessionStatus.RUNNING:
            raise invalid("", f"training session is not running (current status: {session.status})")
        now = self._settings.now()
        identity = self._payloads.new(session.id, now)
        valid_s = min(ADDRESS_S, self._settings.keep_s)
        address = self._payloads.address(f"up/{identity}", now, valid_s=valid_s)
        return Json({"payload_id": identity, "upload_url": address})

    async def download_url(self, request: Request) -> Response:
        await self._json(request)
        identity, now = request.path_params["id"], self._settings.now()
        if not self._state.store.has_payload(identity, request.path_params["session_id"]):
            raise not_found("payload", identity)
        return Json({"download_url": self._payloads.address(f"down/{identity}", now)})

    async def upload(self, request: Request) -> Response:
        identity = self._checked_name(request, "up/{id}")
        self._payloads.check_kept(identity)
        partial = self._payloads.partial_path(identity)
        try:
            with partial.open("wb") as file:
                async for part in body_parts(request, max_bytes=self._settings.max_payload_bytes):
                    file.write(part)
            self._payloads.keep(identity, partial)
        finally:
            partial.unlink(missing_ok=True)
        return Response(status_code=200)

    async def download(self, request: Request) -> Response:
        path = self._payloads.path(self._checked_name(request, "down/{id}"))
        if not path.is_file():
            raise not_found("payload", path.name)
        return FileResponse(path, media_type="application/json")

    def _checked_name(self, request: Request, name: str) -> str:
        """The id of an address that the server has signed, so it is one of its own making."""
        params = request.path_params
        self._payloads.check_address(params["proof"], name.format(**params), self._settings.now())
        return params["id"]

    # Checkpoints.

    async def list_checkpoints(self, request: Request) -> Response:
        query = request.query_params
        kind = query.get("type")
        if kind is not None and kind not in CHECKPOINT_TYPES:
            raise invalid("type", f"is {kind[:60]!r}, must be one of {', '.join(CHECKPOINT_TYPES)}")

        def keep(checkpoint: Checkpoint) -> bool:
            return (
                query.get("session_id") in (None, checkpoint.session_id)
                and query.get("base_model") in (None, checkpoint.base_model)
                and (kind is None or CHECKPOINT_TYPES[kind] is checkpoint.for_training)
            )

        found, limit, more = self._page(request, Checkpoint, keep)
        return Json(page_wire([one.to_wire() for one in found], limit, more=more))

    async def get_checkpoint(self, request: Request) -> Response:
        return Json(self._checkpoint(request).to_wire())

    def _checkpoint(self, request: Request) -> Checkpoint:
        identity = request.path_params["id"]
        found = self._state.store.find(Checkpoint, identity)
        if found is None:
            raise not_found("checkpoint", identity)
        return found

    async def list_files(self, request: Request) -> Response:
        variant = request.query_params.get("variant")
        self._state.check_rate("download")
        files = await run_in_threadpool(self._downloads.files, self._checkpoint(request), variant)
        return Json({"data": files})

    async def file(self, request: Request) -> Response:
        identity = self._checked_name(request, "file/{id}/{variant}/{file}")
        params = request.path_params
        path = self._downloads.path(
            self._state.store.find(Checkpoint, identity), params["variant"], params["file"]
        )
        return FileResponse(path, media_type="application/octet-stream")

    def _page(
        self, request: Request, kind: Any, keep: Callable[[Any], bool]
    ) -> tuple[list[Any], int, bool]:
        limit = page_limit(request)
        after = request.query_params.get("after") or None
        try:
            found, more = self._state.store.page(kind, after=after, limit=limit, keep=keep)
        except LookupError as error:
            raise invalid("after", "is no cursor of this list") from error
        return found, limit, more


async def _answer(endpoint: Endpoint, request: Request) -> Response:
    try:
        return await endpoint(request)
    except ApiError as error:
        return error_answer(error)
    except Exception as error:
        log_failure(f"{request.method} {request.url.path[:200]!r} failed", error)
        message = "the server failed at this; its log has the cause"
        return error_answer(ApiError(500, message, code="internal_error"))


def _kind_of(request: Request) -> str:
    kind = request.path_params["kind"]
    if kind not in READERS:
        raise ApiError(404, f"there is no operation {kind[:60]!r}", code="not_found")
    return kind


def _stored_wire(operation: Operation, output: bytes | None) -> dict[str, Any] | bytes:
    status = f"TRAINING_OPERATION_STATUS_{operation.status}"
    if output is not None:
        head = f'{{"id":"{operation.id}","status":"{status}","output":'
        return head.encode() + output + b"}"
    wire: dict[str, Any] = {"id": operation.id, "status": status}
    if operation.error is not None:
        wire["error"] = operation.error
    return wire


def _is_mine(created_by: str | None) -> bool:
    """Whether records of this server are those of a creator; it knows one only."""
    return created_by in (None, "", "me", CREATED_BY)
