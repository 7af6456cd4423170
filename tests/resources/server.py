"""The resource routes of the service, with everything a test wants to see or to go wrong."""

import itertools
import json
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

PREFIX = "MODEL_RESOURCES_STATUS_"
ROOT = "/v1/rl/model-resources"
ENDED = (PREFIX + "STOPPED", PREFIX + "ERROR")


class ResourceServer:
    """What is there, what was asked, and what is to go wrong."""

    def __init__(self):
        self.resources = {}
        self.calls = []
        """(method, path with its query) of every request."""
        self.in_use = set()
        """Ids with an active session."""
        self.failing_stops = 0
        self.refusal = None
        """(status, message) for the next create calls."""
        self.rate_limits = []
        """Headers of the next refusals of create calls for their rate."""
        self.lose_replies = 0
        """Create calls whose connection is dropped after the work is done."""
        self.lose_requests = 0
        """Create calls whose connection is dropped before the work is done."""
        self.on_create = lambda body: None
        """Called in the request, before the resource is there."""
        self.reply = threading.Event()
        """Create and stop calls answer when this is set."""
        self.reply.set()
        self.page = 100
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, body=None, *, created_by="me", state="READY"):
        number = next(self._ids)
        body = body or {"base_model": "tiny", "lora_enabled": True}
        now = datetime.now(UTC).isoformat()
        resource = {
            "id": f"mr-{number}",
            "base_model": body["base_model"],
            "lora_enabled": body.get("lora_enabled", True),
            "inactive_timeout": body.get("inactive_timeout", 3600),
            "compute_config": {"num_generator_replicas": 1, **body.get("compute_config", {})},
            "optimizer_config": {},
            "created_at": now,
            "updated_at": now,
            "created_by": created_by,
            "status": PREFIX + state,
            "status_details": {"queue_position": 3} if state == "PENDING" else {},
        }
        self.resources[resource["id"]] = resource
        return resource["id"]

    def state(self, resource_id):
        return self.resources[resource_id]["status"].removeprefix(PREFIX)

    def live(self):
        return [id for id, one in self.resources.items() if one["status"] not in ENDED]

    def stops(self):
        """Id and query of every stop call."""
        stops = [urlsplit(path) for method, path in self.calls if "/stop" in path]
        return [(url.path.split("/")[-2], url.query) for url in stops]

    def creates(self):
        return sum(call == ("POST", ROOT) for call in self.calls)

    def answer(self, method, path, body):
        """(status, JSON) and headers if any, or None to drop the connection."""
        url = urlsplit(path)
        query = parse_qs(url.query)
        with self._lock:
            self.calls.append((method, path))
        if url.path == ROOT and method == "POST":
            return self._create(body)
        if url.path == ROOT:
            return 200, self._list(query)
        resource_id, _, action = url.path.removeprefix(ROOT + "/").partition("/")
        resource = self.resources.get(resource_id)
        if resource is None:
            return 404, {"error": {"message": f"no resource {resource_id}"}}
        if action == "stop":
            return self._stop(resource, force="force" in query)
        return 200, resource

    def _create(self, body):
        if self.rate_limits:
            return 429, {"error": {"message": "too many"}}, self.rate_limits.pop(0)
        if self.refusal:
            return self.refusal[0], {"error": {"message": self.refusal[1]}}
        self.on_create(body)
        if self.lose_requests:
            self.lose_requests -= 1
            return None
        resource_id = self.add(body)
        self.reply.wait(30)
        if self.lose_replies:
            self.lose_replies -= 1
            return None
        return 200, self.resources[resource_id]

    def _list(self, query):
        (status,) = query["status"]
        (creator,) = query["created_by"]
        after = query.get("after", [""])[0]
        fitting = [
            one
            for one in self.resources.values()
            if one["status"] == status and one["created_by"] == creator and one["id"] > after
        ]
        page = fitting[: self.page]
        more = len(fitting) > len(page)
        meta = {"has_more": more, "next_cursor": page[-1]["id"] if more else ""}
        return {"data": page, "meta": meta}

    def _stop(self, resource, *, force):
        self.reply.wait(30)
        if self.failing_stops:
            self.failing_stops -= 1
            return 503, {"error": {"message": "down for maintenance"}}
        if resource["status"] in ENDED:
            return 400, {"error": {"message": "it is stopped"}}
        if resource["id"] in self.in_use and not force:
            return 400, {"error": {"message": "sessions are active"}}
        resource["status"] = PREFIX + "STOPPED"
        return 200, resource


@contextmanager
def running(server):
    """The address of a server for the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length) or "null")
            answer = server.answer(self.command, self.path, body)
            if answer is None:
                self.close_connection = True
                self.connection.close()
                return
            status, value, *headers = answer
            data = json.dumps(value).encode()
            self.send_response(status)
            for name, text in dict(*headers).items():
                self.send_header(name, text)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.send_header("x-should-retry", "false")  # its own delays would take seconds
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        server.reply.set()
        http.shutdown()
        http.server_close()
        thread.join()


def until(condition, *, seconds=30):
    """Waits until a condition holds."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.05)
