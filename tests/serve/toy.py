"""A toy service of one operation behind a FaultyApp, under a real uvicorn."""

import threading
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from tunebook.serve.faults import FaultyApp


class Toy:
    """Counts optimizer steps, and keeps the answer of an idempotency key."""

    def __init__(self):
        self.steps = 0
        self.requests = 0
        self.answers = {}
        self.log = []

    async def optim_step(self, request):
        self.requests += 1
        await request.body()
        key = request.headers.get("idempotency-key")
        if key is None or key not in self.answers:
            self.steps += 1
            self.answers[key] = {
                "id": f"op-{self.steps}",
                "status": "TRAINING_OPERATION_STATUS_COMPLETED",
                "output": {"step": str(self.steps)},
            }
        return JSONResponse(self.answers[key])

    async def health(self, request):
        return PlainTextResponse("ok")

    def app(self, plan):
        path = "/v1/rl/training-sessions/{session}/operations/optim-step"
        routes = [
            Route(path, self.optim_step, methods=["POST"]),
            Route("/health", self.health),
        ]
        return FaultyApp(Starlette(routes=routes), plan, self.log.append)


@contextmanager
def serving(app):
    """The URL at which an ASGI application answers."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the toy server did not start"
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
