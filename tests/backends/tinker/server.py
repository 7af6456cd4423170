"""A server that speaks as much of Tinker's wire as the recipes need, learnt from the SDK.

    python -m tests.backends.tinker.server <home> <model>

It prints its port. `POST /test/fault` makes the next requests of a route fail, `POST /test/key` has
it ask for a key; `GET /test/state` says what it has done.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as wire

from tests.backends.tinker.engine import Engine, Refused

LONG_POLL_S = 5.0
DROPPED = {"content-length": "1000"}
"""A body of that length does not come, so the connection breaks."""


class Server:
    """Routes over an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.key: str | None = None
        """That requests have to carry; None = any."""
        self.faults: dict[str, list[str]] = {}
        self.sessions = 0
        self.samplers = 0
        self.adam: list[dict[str, float]] = []
        self.requests: list[str] = []

    def app(self) -> Starlette:
        api = "/api/v1"
        checkpoint = api + "/training_runs/{run}/checkpoints/{kind}/{name}"
        posts: dict[str, Callable[[dict[str, Any]], Any]] = {
            "client/config": lambda body: {},
            "client/dynamic_config": lambda body: {},
            "telemetry": lambda body: {"status": "accepted"},
            "session_heartbeat": lambda body: {},
            "create_session": self.create_session,
            "create_model": self.create_model,
            "load_weights": self.load_weights,
            "get_info": self.get_info,
            "optim_step": self.optim_step,
            "save_weights": lambda body: self.save(body, "weights"),
            "save_weights_external": lambda body: self.save(body, "external_weights"),
            "save_weights_for_sampler": self.publish,
            "asample": self.sample,
            "weights_info": self.weights_info,
        }
        return Starlette(
            routes=[
                *(
                    Route(f"{api}/{name}", self.json(name, handle), methods=["POST"])
                    for name, handle in posts.items()
                ),
                Route(f"{api}/healthz", lambda _: JSONResponse({"status": "ok"})),
                Route(f"{api}/get_server_capabilities", self.capabilities),
                Route(f"{api}/forward_backward", self.forward_backward, methods=["POST"]),
                Route(f"{api}/retrieve_future", self.retrieve, methods=["POST"]),
                Route(api + "/sessions/{session}/finish", self.finish, methods=["POST"]),
                Route(checkpoint, self.delete, methods=["DELETE"]),
                Route(f"{checkpoint}/ttl", self.set_ttl, methods=["PUT"]),
                Route(f"{checkpoint}/external_weights_urls", self.urls),
                Route("/files/{run}/{name}/{file}", self.file),
                Route("/test/fault", self.fault, methods=["POST"]),
                Route("/test/key", self.set_key, methods=["POST"]),
                Route("/test/state", self.state),
            ]
        )

    def json(self, name: str, handle: Callable[[dict[str, Any]], Any]) -> Any:
        async def answer(request: Request) -> Response:
            body = await request.json()
            return self.guarded(request, name, lambda: JSONResponse(handle(body)))

        return answer

    def guarded(self, request: Request, name: str, work: Callable[[], Response]) -> Response:
        """The answer, or the fault that is next for the route."""
        self.requests.append(name)
        if self.key is not None and request.headers.get("x-api-key") != self.key:
            return JSONResponse({"detail": "the key is not valid"}, status_code=401)
        faults = self.faults.get(name, [])
        fault = faults.pop(0) if faults else ""
        if fault.isdigit():
            return JSONResponse({"detail": f"injected {fault}"}, status_code=int(fault))
        if fault == "drop":
            return Response(headers=DROPPED)
        if fault.startswith("fail:"):
            category = fault.removeprefix("fail:")
            failure = json.dumps({"error": "injected failure", "category": category}).encode()
            self.failing = failure
        try:
            answer = work()
        except Refused as error:
            return JSONResponse({"detail": str(error)}, status_code=404)
        finally:
            self.failing = None
        return Response(headers=DROPPED) if fault == "drop_reply" else answer

    failing: bytes | None = None
    """What the operation that is being submitted comes to, instead of its result."""

    def queued(self, request_id: str, work: Callable[[], tuple[bytes, str]], **more: Any) -> Any:
        self.engine.submit(request_id, self.or_failure(work))
        return {"request_id": request_id, **more}

    def in_turn(self, body: dict[str, Any], work: Callable[[Any], tuple[bytes, str]]) -> Any:
        """An operation of a model; one that is sent again is the same operation."""
        model = self.engine.models.get(body["model_id"])
        if model is None:
            raise Refused(f"there is no model {body['model_id']}")
        seq = body["seq_id"]
        request_id = f"{model.id}/{seq}"
        if seq >= model.next_seq and seq not in model.waiting:
            self.engine.submit_in_turn(model, seq, request_id, self.or_failure(lambda: work(model)))
        return {"request_id": request_id}

    def or_failure(self, work: Callable[[], tuple[bytes, str]]) -> Callable[[], tuple[bytes, str]]:
        failing = self.failing
        return work if failing is None else lambda: (failing, "json")

    def create_session(self, body: dict[str, Any]) -> Any:
        self.sessions += 1
        return {"session_id": f"session-{self.sessions}"}

    async def finish(self, request: Request) -> Response:
        self.engine.close(request.path_params["session"] + ":")
        return JSONResponse({})

    def create_model(self, body: dict[str, Any]) -> Any:
        if body["base_model"] != self.engine.base_model:
            raise Refused(f"there is no model {body['base_model']}")
        return self.made(body, body["lora_config"], None, False)

    def load_weights(self, body: dict[str, Any]) -> Any:
        return self.made(body, {}, body["path"], body["optimizer"])

    def made(self, body: Any, lora: Any, path: str | None, optimizer: bool) -> Any:
        model_id = f"{body['session_id']}:train:{body['model_seq_id']}"

        def work() -> tuple[bytes, str]:
            self.engine.create(model_id, lora, path, optimizer)
            return as_json({"model_id": model_id})

        return self.queued(f"{model_id}/create", work)

    def get_info(self, body: dict[str, Any]) -> Any:
        model = self.engine.models[body["model_id"]]
        name = self.engine.base_model
        return {
            "model_id": model.id,
            "model_data": {"model_name": name},
            "model_name": name,
            "is_lora": True,
            "lora_rank": model.lora["rank"],
        }

    async def forward_backward(self, request: Request) -> Response:
        message = wire.ForwardBackwardRequest.FromString(await request.body())
        body = {"model_id": message.model_id, "seq_id": message.seq_id}
        name = "forward" if message.forward_only else "forward_backward"

        def work(model: Any) -> tuple[bytes, str]:
            return self.engine.forward_backward(model, message), "proto"

        return self.guarded(request, name, lambda: JSONResponse(self.in_turn(body, work)))

    def optim_step(self, body: dict[str, Any]) -> Any:
        self.adam.append(body["adam_params"])
        return self.in_turn(
            body, lambda model: as_json(self.engine.optim_step(model, body["adam_params"]))
        )

    def save(self, body: dict[str, Any], kind: str) -> Any:
        def work(model: Any) -> tuple[bytes, str]:
            path = self.engine.save(model, body["path"], kind, body.get("ttl_seconds"))
            return as_json({"path": path})

        return self.in_turn(body, work)

    def publish(self, body: dict[str, Any]) -> Any:
        if body.get("path") is not None:
            return self.save(body, "sampler_weights")
        self.samplers += 1
        sampler_id = f"{body['model_id']}/sampler-{self.samplers}"

        def work(model: Any) -> tuple[bytes, str]:
            self.engine.publish(model, sampler_id, body.get("kind", "snapshot"))
            return as_json({"sampling_session_id": sampler_id})

        return self.in_turn(body, work)

    def sample(self, body: dict[str, Any]) -> Any:
        sampler_id = body["sampling_session_id"]
        if sampler_id not in self.engine.generators:
            raise Refused(f"there is no sampler {sampler_id}")
        request_id = f"{sampler_id}/{body['seq_id']}"
        ids = [f"{request_id}/{number}" for number in range(body["num_samples"])]
        return self.queued(
            request_id,
            lambda: (self.engine.sample(sampler_id, body), "proto"),
            sample_sequence_ids=ids,
        )

    async def retrieve(self, request: Request) -> Response:
        request_id = (await request.json())["request_id"]
        fault = self.faults.get("retrieve_future", [])
        if fault:
            return JSONResponse({"detail": "injected"}, status_code=int(fault.pop(0)))
        found = await asyncio.to_thread(self._wait, request_id)
        if found is None:
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(waiting, status_code=408)
        content, kind = found
        kind = {"json": "application/json", "proto": "application/x-protobuf"}[kind]
        return Response(content, media_type=kind)

    def _wait(self, request_id: str) -> tuple[bytes, str] | None:
        engine = self.engine
        with engine.finished:
            engine.finished.wait_for(lambda: request_id in engine.results, LONG_POLL_S)
            return engine.results.get(request_id)

    async def capabilities(self, request: Request) -> Response:
        model = {
            "model_name": self.engine.base_model,
            "max_context_length": self.engine.max_seq_len,
            "trainable": True,
            "sampleable": True,
        }
        return self.guarded(
            request, "capabilities", lambda: JSONResponse({"supported_models": [model]})
        )

    def weights_info(self, body: dict[str, Any]) -> Any:
        found = self.engine.checkpoints.get(body["tinker_path"])
        if found is None:
            raise Refused("there is no such checkpoint")
        return {
            "base_model": self.engine.base_model,
            "is_lora": True,
            "lora_rank": found["lora"]["rank"],
        }

    async def delete(self, request: Request) -> Response:
        found = self.engine.checkpoints.pop(_path(request), None)
        return JSONResponse({}, status_code=200 if found else 404)

    async def set_ttl(self, request: Request) -> Response:
        found = self.engine.checkpoints.get(_path(request))
        if found is not None:
            found["ttl"] = (await request.json())["ttl_seconds"]
            found["renewed"] = found.get("renewed", 0) + 1
        return JSONResponse({}, status_code=200 if found else 404)

    async def urls(self, request: Request) -> Response:
        folder = self.engine.checkpoints[_path(request)]["folder"]
        run, name = request.path_params["run"], request.path_params["name"]
        files = [each.name for each in folder.iterdir() if each.name.startswith("adapter_")]
        base = f"{request.base_url}files/{run}/{name}"
        return JSONResponse(
            {
                "urls": {file: f"{base}/{file}" for file in files},
                "expires": "2100-01-01T00:00:00Z",
            }
        )

    async def file(self, request: Request) -> Response:
        run, name, file = (request.path_params[key] for key in ("run", "name", "file"))
        found = self.engine.checkpoints[f"tinker://{run}/external_weights/{name}"]
        return FileResponse(found["folder"] / file)

    async def fault(self, request: Request) -> Response:
        body = await request.json()
        self.faults[body["route"]] = body["kinds"]
        return JSONResponse({})

    async def set_key(self, request: Request) -> Response:
        self.key = (await request.json())["key"]
        return JSONResponse({})

    async def state(self, request: Request) -> Response:
        engine = self.engine
        return JSONResponse(
            {
                "steps": {model.id: model.steps for model in engine.models.values()},
                "checkpoints": {
                    path: {"ttl": each["ttl"], "renewed": each.get("renewed", 0)}
                    for path, each in engine.checkpoints.items()
                },
                "adam": self.adam,
                "requests": self.requests,
            }
        )


def as_json(value: Any) -> tuple[bytes, str]:
    return json.dumps(value).encode(), "json"


def _path(request: Request) -> str:
    given = request.path_params
    return f"tinker://{given['run']}/{given['kind']}/{given['name']}"


def main(home: str, model: str) -> None:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = Server(Engine(model, Path(home)))
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(server.app(), log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
