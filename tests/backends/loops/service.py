"""A server that speaks as Baseten Loops and computes with the local engine.

    python -m tests.backends.loops.service --home FOLDER [--port 0] [--capacity dedicated]

Control plane, trainer and sampler are one process. `/test/...` is for tests: faults, and what the
server has been asked and still holds.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from tests.backends.loops.faults import Fault, Faults
from tests.backends.loops.sampler import Sampler
from tests.backends.loops.trainer import Refused, Trainer, read_rows
from tests.serve.server import TINY
from tunebook.backends.local import LocalBackend

OPERATIONS = (
    "init_trainer_server", "forward", "forward_backward", "optim_step", "save_state", "load_state",
    "load_state_with_optimizer", "save_weights_for_sampler",
)  # fmt: skip
SERVERLESS, DEDICATED = "serverless", "dedicated"
OF_SCOPE = {"serverless": SERVERLESS, "deployment": DEDICATED, "team": DEDICATED}
GATEWAY = {"X-Baseten-Error-Source": "06", "X-Baseten-Error-Code": "run_or_sampler_required"}
DEACTIVATED = {"X-Baseten-Error-Source": "01", "X-Baseten-Error-Code": "631"}


class Service:
    """Everything that the server holds."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.model: str = arguments.name or arguments.model
        self.max_seq_len: int = arguments.max_seq_len
        self.capacity: str = arguments.capacity
        self.key: str | None = arguments.key
        self.hold_s: float = arguments.hold
        self.alpha: float = arguments.alpha
        self.home = Path(arguments.home)
        self.backend = LocalBackend(model=arguments.model, device="cpu")
        self.sampler = Sampler(self.backend, self.home)
        self.sessions: list[str] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.trainers: dict[str, Trainer] = {}
        self.paired: dict[str, dict[str, Any]] = {}
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.done: list[dict[str, Any]] = []
        self.worker = ThreadPoolExecutor(1)
        """One thread, so that operations take effect in the order in which they came."""
        self.faults = Faults(Starlette(routes=self._routes()))

    def _routes(self) -> list[Route]:
        def post(path: str, answer: Callable[..., Any]) -> Route:
            return Route(path, answer, methods=["POST"])

        trainer = [
            post(f"{root}/{{operation}}", self.submit)
            for root in ("/trainer/{run_id}", "/shared/trainer")
        ]
        return [
            post("/test/faults", self.add_fault),
            post("/test/faults/clear", self.clear_faults),
            Route("/test/state", self.state),
            post("/v1/loops/sessions", self.create_session),
            post("/v1/loops/trainers", self.create_trainer),
            post("/v1/loops/debug/trainers", self.create_trainer),
            post("/v1/loops/samplers", self.create_sampler),
            Route("/v1/loops/capabilities", self.capabilities),
            Route("/v1/loops/runs", self.list_runs),
            post("/v1/loops/runs/{run_id}/deactivate", self.deactivate),
            Route("/v1/loops/deployments/{deployment_id}", self.deployment),
            Route("/v1/loops/checkpoints", self.list_checkpoints),
            post("/v1/loops/checkpoints/validate", self.validate),
            Route("/v1/loops/checkpoints/{checkpoint_id}/source", self.source),
            Route("/v1/loops/checkpoints/{checkpoint_id}/files", self.files),
            Route("/v1/models/{model_id}/deployments/{deployment_id}", self.sampler_status),
            Route("/files/{secret}/{checkpoint_id}/{name}", self.file),
            Route("/trainer/{run_id}/health", self.health),
            Route("/shared/trainer/health", self.health),
            Route("/trainer/{run_id}/policy_version", self.policy_version),
            Route("/trainer/{run_id}/operations/{operation_id}", self.poll),
            Route("/shared/trainer/operations/{operation_id}", self.poll),
            post("/sampler/{run_id}/sync/sample", self.sample_now),
            Route("/sampler/{run_id}/sync/trainers_policy_version", self.live_version),
            post("/shared/sampler/sample", self.sample_queued),
            Route("/shared/sampler/operations/{operation_id}", self.poll),
            *trainer,
        ]

    # What tests ask.

    async def add_fault(self, request: Request) -> Response:
        self.faults.waiting.append(Fault(**await request.json()))
        return JSONResponse({})

    async def clear_faults(self, request: Request) -> Response:
        self.faults.waiting.clear()
        return JSONResponse({})

    async def state(self, request: Request) -> Response:
        return JSONResponse(
            {
                "sessions": self.sessions,
                "runs": list(self.runs.values()),
                "operations": self.done,
                "requests": self.faults.requests,
                "checkpoints": list(self.checkpoints.values()),
            }
        )

    # Control plane.

    async def create_session(self, request: Request) -> Response:
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        self.sessions.append(f"se{secrets.token_hex(4)}")
        return JSONResponse({"session": {"id": self.sessions[-1]}})

    async def create_trainer(self, request: Request) -> Response:
        body = await request.json()
        if body["session_id"] not in self.sessions:
            return _error(404, "no such session")
        if body["base_model"] != self.model:
            return _error(400, f"base_model: {body['base_model']} is not supported")
        run_id = f"ru{secrets.token_hex(4)}"
        dedicated = OF_SCOPE.get(body.get("scope", ""), self.capacity) == DEDICATED
        place = f"trainer/{run_id}" if dedicated else "shared/trainer"
        self.runs[run_id] = {
            "id": run_id,
            "session_id": body["session_id"],
            "deployment_id": f"de{run_id}" if dedicated else None,
            "name": body.get("name", self.model),
            "base_model": self.model,
            "base_url": f"{request.base_url}{place}",
            "created_at": _now(),
            "status": {"name": "ACTIVE"},
            "user": {"email": "somebody@example.com"},
            "sampler": None,
        }
        self.trainers[run_id] = Trainer(
            run_id, self.backend, self.home, alpha=self.alpha, seed=body.get("seed", 0)
        )
        return JSONResponse({"run": self.runs[run_id]})

    async def create_sampler(self, request: Request) -> Response:
        run = self.runs.get((await request.json()).get("run_id"))
        if run is None:
            return _error(400, "only samplers of a run are served here")
        dedicated = run["deployment_id"] is not None
        place = f"sampler/{run['id']}/sync" if dedicated else "shared/sampler"
        sampler = {
            "id": f"sa{run['id']}",
            "base_url": f"{request.base_url}{place}",
            "base_model": self.model,
            "created_at": _now(),
            "model_id": f"mo{run['id']}" if dedicated else None,
            "deployment_id": f"ds{run['id']}" if dedicated else None,
            "status": {"name": "ACTIVE"},
        }
        self.paired[run["id"]] = sampler
        return JSONResponse({"sampler": sampler})

    async def capabilities(self, request: Request) -> Response:
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        model = {"model_name": self.model, "max_context_length": self.max_seq_len}
        return JSONResponse({"supported_models": [model]})

    async def list_runs(self, request: Request) -> Response:
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        return JSONResponse({"runs": list(self.runs.values())})

    async def deactivate(self, request: Request) -> Response:
        run = self.runs.get(request.path_params["run_id"])
        if run is None:
            return _error(404, "no such run")
        run["status"] = {"name": "INACTIVE"}
        await self._in_worker(self.trainers[run["id"]].close)
        return JSONResponse({key: run[key] for key in ("id", "base_model", "user")})

    async def deployment(self, request: Request) -> Response:
        deployment_id = request.path_params["deployment_id"]
        return JSONResponse({"deployment": {"id": deployment_id, "status": {"name": "RUNNING"}}})

    async def sampler_status(self, request: Request) -> Response:
        return JSONResponse({"status": "ACTIVE"})

    async def list_checkpoints(self, request: Request) -> Response:
        run_id = request.query_params.get("run_id")
        path = request.query_params.get("checkpoint_path")
        found = [
            each
            for each in self.checkpoints.values()
            if run_id == each["run_id"] or path == each["path"]
        ]
        if path is not None and not found:
            return _error(404, f"no checkpoint {path}")
        return JSONResponse({"checkpoints": found})

    async def validate(self, request: Request) -> Response:
        path = (await request.json())["checkpoint_path"]
        if any(each["path"] == path for each in self.checkpoints.values()):
            return JSONResponse({})
        return _error(400, f"no checkpoint {path}")

    async def source(self, request: Request) -> Response:
        return JSONResponse({"source": {"kind": "s3"}})

    async def files(self, request: Request) -> Response:
        checkpoint_id = request.path_params["checkpoint_id"]
        folder = self._files_of(checkpoint_id)
        found = sorted(folder.iterdir())
        first, size = (int(request.query_params[each]) for each in ("page_token", "page_size"))
        entries = [
            {
                "url": f"{request.base_url}files/{self._secret}/{checkpoint_id}/{file.name}",
                "relative_file_name": file.name,
                "node_rank": 0,
                "size_bytes": file.stat().st_size,
                "last_modified": _now(),
            }
            for file in found[first : first + size]
        ]
        last = first + size >= len(found)
        return JSONResponse(
            {
                "presigned_urls": entries,
                "next_page_token": None if last else first + size,
                "total_count": len(found),
            }
        )

    async def file(self, request: Request) -> Response:
        parts = request.path_params
        if parts["secret"] != self._secret or "authorization" in request.headers:
            return _error(403, "a presigned address carries its own permission")
        return FileResponse(self._files_of(parts["checkpoint_id"]) / parts["name"])

    # Trainer.

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def policy_version(self, request: Request) -> Response:
        trainer = self.trainers[request.path_params["run_id"]]
        return JSONResponse({"policy_version": trainer.session.step})

    async def submit(self, request: Request) -> Response:
        operation = request.path_params["operation"]
        run_id = request.headers.get("x-run-id")
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        if run_id not in self.runs:
            return _error(400, "name a run", headers=GATEWAY)
        if self.runs[run_id]["status"]["name"] != "ACTIVE":
            return _error(404, "this run is deactivated", headers=DEACTIVATED)
        if operation not in OPERATIONS:
            return _error(404, f"no operation {operation}")
        key = request.headers["idempotency-key"]
        if key not in self.operations:
            body = await request.json()
            try:
                if "loss_fn" in body:
                    read_rows(body)
            except Refused as error:
                return _error(400, str(error))
            fault = self.faults.take("POST", request.url.path, of_operation=True)
            told = {each: body.get(each) for each in ("seq_id", "loss_fn", "adam_params")}
            self.done.append({"run": run_id, "operation": operation, "key": key, **told})

            def work() -> dict[str, Any]:
                if fault is not None:
                    return _failed(fault.error_class, fault.error)
                return self._run(run_id, operation, body)

            self.operations[key] = self._in_worker(work)
        accepted = {"operation_id": key, "schema_version": 1}
        return JSONResponse(accepted, 202, headers={"Location": f"/operations/{key}"})

    async def poll(self, request: Request) -> Response:
        future = self.operations.get(request.path_params["operation_id"])
        if future is None:
            return _error(404, "no such operation")
        try:
            return JSONResponse(await asyncio.wait_for(asyncio.shield(future), self.hold_s))
        except TimeoutError:
            return _error(408, "pending")

    # Sampler.

    async def sample_now(self, request: Request) -> Response:
        run_id = request.path_params["run_id"]
        body, headers = await request.json(), request.headers
        version, live = self.sampler.live.get(run_id, (0, None))
        floor = int(headers.get("x-min-policy-version", 0))
        pinned = headers.get("x-checkpoint-path")
        if pinned is None and version < floor:
            return _error(408, f"version {version} is below {floor}")
        path = pinned if pinned is not None and version < floor else live
        if pinned is not None and not floor:
            path = pinned
        found = await self._in_worker(lambda: self._sample(path, run_id, body))
        if found["status"] == "error":
            return _error(400, found["error"], kind="BadRequestError")
        return JSONResponse(found["result"], headers={"x-trainers-policy-version": str(version)})

    async def sample_queued(self, request: Request) -> Response:
        run_id = request.headers.get("x-run-id")
        if run_id not in self.runs:
            return _error(400, "name a run", headers=GATEWAY)
        key, body = request.headers["idempotency-key"], await request.json()
        if body["model"] != self.model:
            return _error(400, f"no model {body['model']}")
        if key not in self.operations:
            path = request.headers.get("x-checkpoint-path")
            self.operations[key] = self._in_worker(lambda: self._sample(path, run_id, body))
        return JSONResponse({"operation_id": key, "schema_version": 1}, 202)

    async def live_version(self, request: Request) -> Response:
        version, _ = self.sampler.live.get(request.path_params["run_id"], (0, None))
        return JSONResponse({"policy_version": version})

    def _sample(self, path: str | None, run_id: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return {
                "status": "done",
                "result": self.sampler.sample(self.trainers[run_id], path, body),
            }
        except Exception as error:
            return _failed(type(error).__name__, str(error))

    def _run(self, run_id: str, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        trainer = self.trainers[run_id]
        try:
            result = trainer.run(operation, body)
        except Exception as error:
            return _failed(type(error).__name__, str(error))
        if operation in ("save_state", "save_weights_for_sampler"):
            self.sampler.forget(result["path"])
            self._keep(trainer, result["path"])
        if operation == "save_weights_for_sampler" and body["bump_version"]:
            self.sampler.live[run_id] = (result["version"], result["path"])
        return {"status": "done", "result": result}

    def _keep(self, trainer: Trainer, path: str) -> None:
        identity = next(
            (each["id"] for each in self.checkpoints.values() if each["path"] == path),
            f"ck{secrets.token_hex(4)}",
        )
        kind = "trainer" if "/weights/" in path else "sampler"
        self.checkpoints[identity] = {
            "id": identity,
            "path": path,
            "run_id": trainer.run_id,
            "checkpoint_id": path.rsplit("/", 1)[1],
            "checkpoint_type": "lora",
            "created_at": _now(),
            "base_model": self.model,
            "lora_adapter_config": {"r": trainer.lora().rank, "lora_alpha": self.alpha},
            "size_bytes": 1,
            "target": kind,
        }

    def _files_of(self, checkpoint_id: str) -> Path:
        checkpoint = self.checkpoints[checkpoint_id]
        folder = self.trainers[checkpoint["run_id"]].folder(checkpoint["path"])
        return (
            folder
            if checkpoint["target"] == "trainer"
            else folder.with_name(f"{folder.name}.files")
        )

    _secret = secrets.token_hex(8)

    def _in_worker(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self.worker, work)

    def _unauthorized(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Api-Key {self.key}":
            return None
        return _error(401, "this key is not known")


def _failed(kind: str | None, text: str | None) -> dict[str, Any]:
    return {"status": "error", "error": text, "error_class": kind}


def _error(
    status: int, text: str, *, headers: dict[str, str] | None = None, kind: str | None = None
) -> Response:
    body = {"error": text} if kind is None else {"error": {"message": text, "type": kind}}
    return JSONResponse(body, status, headers=headers)


def _now() -> str:
    return datetime.now(UTC).isoformat()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", required=True)
    parser.add_argument("--model", default=TINY)
    parser.add_argument("--name")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key")
    parser.add_argument("--capacity", choices=(SERVERLESS, DEDICATED), default=SERVERLESS)
    parser.add_argument("--hold", type=float, default=30.0)
    parser.add_argument("--alpha", type=float, default=32.0)
    parser.add_argument("--max-seq-len", type=int, default=2048)
    arguments = parser.parse_args()
    service = Service(arguments)
    with socket.create_server(("127.0.0.1", arguments.port)) as listening:
        print(f"listening on http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        config = uvicorn.Config(service.faults, log_level="warning", lifespan="off")
        uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
