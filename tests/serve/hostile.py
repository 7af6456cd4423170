"""Requests as no client of good will sends them, drawn from a seeded generator.

Most start as a right request and get one to three things wrong, since what is wrong everywhere is
refused at the first look.
"""

import copy
import gzip
import json
from collections import defaultdict, deque
from dataclasses import dataclass, field
from random import Random
from threading import Lock

SESSIONS = "/v1/rl/training-sessions"
RESOURCES = "/v1/rl/model-resources"
KINDS = (
    "forward-backward",
    "custom-forward-backward",
    "optim-step",
    "weights-sync",
    "sample",
    "training-checkpoint",
    "inference-checkpoint",
)
LOSSES = ("CROSS_ENTROPY", "IMPORTANCE_SAMPLING", "PPO", "CISPO", "DRO", "DPPO", "GRPO", "NONE")

RAW = (
    "NaN",
    "-Infinity",
    "1e999",
    "-1e999",
    "1" * 5000,
    "-0.0",
    "1e-400",
    '"\\ud800"',
    '{"a": 1, "a": 2}',
    "[" * 5000 + "]" * 5000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    "[" * 100_000,
    "nul",
    "'",
    "\ufeff1",
)
"""Values that Python's encoder does not write."""

VALUES = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e308, -1e308, 1e-320, 2**31, 2**53 + 1),
    *(2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, "", "0", "-1", "1e5", "NaN", "None", "\0"),
    *("x" * 10_000, "\u202e\U0001f600", "../../../etc/passwd", "/etc/passwd", "%s%n{0}${a}"),
    *("'; DROP TABLE sessions; --", "LOSS_TYPE_PPO", [], {}, [[]], [None], [1, "a"], {"": None}),
    *([0] * 5000, {"a": {"b": {"c": []}}}),
)
PATHS = (
    *("..", ".", "%2e%2e", "..%2f..%2f..%2fetc%2fpasswd", "....//....//etc/passwd", "%00", "a%00b"),
    *("%", "%zz", "%ff%fe", "\\..\\..", "a" * 5000, "0", "-1", "None", "*", "'", '"', "<script>"),
    *("%0d%0aSet-Cookie:%20a=b", "é", "a b", "a/b", "", "?", "#", ";", "~", "file:///etc/passwd"),
)
QUERIES = (
    *("limit=0", "limit=-1", "limit=101", "limit=1e3", "limit=NaN", "limit=", "limit=1&limit=2"),
    *("limit=99999999999999999999999", "after=", "after=nothing", "after=%00", "after=%ff", "&&&="),
    *("status=A", "status=MODEL_RESOURCES_STATUS_READY%2CMODEL_RESOURCES_STATUS_STOPPED", "=", "a"),
    *("status=TRAINING_SESSION_STATUS_RUNNING", "created_by='--", "force=maybe", "force=true"),
    *("type=CHECKPOINT_TYPE_TRAINING", "type=9", "variant=CHECKPOINT_VARIANT_MERGED"),
    *("variant=CHECKPOINT_VARIANT_ADAPTER", "variant=../..", "session_id=..", "x=" + "y" * 20_000),
)
HEADERS = (
    ("Content-Type", "text/plain"),
    ("Content-Type", "application/xml"),
    ("Content-Type", "application/json; charset=utf-16"),
    ("Content-Type", "multipart/form-data; boundary=x"),
    ("Content-Type", "\xff"),
    ("Content-Encoding", "gzip"),
    ("Content-Encoding", "br, br, br"),
    ("Authorization", ""),
    ("Authorization", "Basic YTpi"),
    ("Authorization", "Bearer"),
    ("Authorization", "Bearer " + "x" * 5000),
    ("Authorization", "Bearer \xe9"),
    ("Idempotency-Key", ""),
    ("Idempotency-Key", "the same"),
    ("Idempotency-Key", "k" * 8000),
    ("Idempotency-Key", "\xff\xfe"),
    ("Host", ""),
    ("Host", "nowhere.example:99999"),
    ("Accept", "image/png"),
    ("Accept-Encoding", "gzip;q=0, *;q=0"),
    ("Range", "bytes=5-1"),
    ("X-Forwarded-Host", "evil.example"),
    ("X-HTTP-Method-Override", "DELETE"),
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Expect", "100-continue"),
)


@dataclass
class World:
    """Ids that the server has given out: to attack what is there and not only what is not."""

    ids: dict[str, deque[str]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=40))
    )
    lock: Lock = field(default_factory=Lock)

    def learn(self, what: str, value: object) -> None:
        if isinstance(value, str) and value:
            with self.lock:
                self.ids[what].append(value)

    def pick(self, rng: Random, what: str) -> str:
        """One of them; sometimes one of another kind, or something that was never an id."""
        with self.lock:
            known = list(self.ids[what])
            others = [value for values in self.ids.values() for value in values]
        if known and rng.random() < 0.9:
            return rng.choice(known[-3:] if rng.random() < 0.7 else known)
        if others and rng.random() < 0.4:
            return rng.choice(others).lstrip("/")
        return rng.choice(PATHS)


@dataclass(frozen=True)
class Attempt:
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    what: str
    """What an id in the answer is the id of; empty for nothing."""

    def head(self, *, length: int | None) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1"]
        names = {name.lower() for name, _ in self.headers}
        if "host" not in names:
            lines.append("Host: 127.0.0.1")
        lines += [f"{name}: {value}" for name, value in self.headers]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")

    def __str__(self) -> str:
        headers = "; ".join(f"{name}: {value[:60]}" for name, value in self.headers)
        return (
            f"{self.method} {self.target[:200]} [{headers}] {len(self.body)} B: {self.body[:600]!r}"
        )


def tensor(values: list, dtype: str = "float32") -> dict:
    return {"data": values, "dtype": dtype}


def sample(rng: Random, loss: str) -> dict:
    length = rng.randint(1, 12)
    tokens = [rng.randrange(128) for _ in range(length)]
    inputs = {"target_tokens": tensor([*tokens[1:], 2], "int64")}
    if loss == "CROSS_ENTROPY":
        inputs["weights"] = tensor([1.0] * length)
    else:
        inputs["logprobs"] = tensor([-1.0] * length)
        inputs["advantages"] = tensor([0.5] * length)
        inputs["reference_logprobs"] = tensor([-1.5] * length)
    return {
        "model_input": {"chunks": [{"encoded_text": {"tokens": tokens}}]},
        "loss_fn_inputs": inputs,
    }


def operation_body(rng: Random, kind: str) -> object:
    """A right body of an operation."""
    samples = [sample(rng, "CROSS_ENTROPY") for _ in range(rng.randint(1, 3))]
    if kind == "forward-backward":
        loss = rng.choice(LOSSES)
        body = {
            "loss": {"type": f"LOSS_TYPE_{loss}"},
            "samples": [sample(rng, loss) for _ in range(rng.randint(1, 3))],
        }
        if loss == "DRO":
            body["loss"]["dro_params"] = {"beta": 0.1}
        if loss == "GRPO":
            body["loss"]["grpo_params"] = {"beta": rng.choice([0, 0.1])}
        if rng.random() < 0.5:
            body["forward_only"] = rng.random() < 0.5
            body["return_loss_fn_outputs"] = rng.random() < 0.5
        return body
    if kind == "custom-forward-backward":
        for one in samples:
            del one["loss_fn_inputs"]["weights"]
        gradients = [
            {"data": [0.1] * len(one["loss_fn_inputs"]["target_tokens"]["data"])} for one in samples
        ]
        return {"samples": samples, "gradients": gradients}
    if kind == "optim-step":
        params = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        return {"adam_params": {**params, "weight_decay": 0.0, "grad_clip_norm": 1.0}}
    if kind == "weights-sync":
        names = ("SYNCHRONOUS", "BACKGROUND_PUBLISH", "PIPELINE")
        return {"weight_sync_type": f"WEIGHT_SYNC_TYPE_{rng.choice(names)}"}
    if kind == "sample":
        prompts = [one["model_input"] for one in samples]
        params = {"max_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": -1, "seed": 1}
        return {
            "model_inputs": prompts,
            "num_samples": rng.randint(1, 3),
            "sampling_params": {**params, "stop": ["ab"]},
            "prompt_logprobs": rng.random() < 0.5,
            "topk_prompt_logprobs": rng.choice([0, 3]),
        }
    return None


def right_request(rng: Random, world: World, model: str) -> tuple[str, str, object, str]:
    """Method, path, body and what it makes, of a request that a good client could send."""
    resource, session = world.pick(rng, "resource"), world.pick(rng, "session")
    kind = rng.choice(KINDS)
    operation = f"{SESSIONS}/{session}/operations/{kind}"
    lora = {"rank": 4, "alpha": 8, "dropout": 0.0, "seed": 1, "train_unembed": False}
    create = {"model_resources_id": resource, "display_name": "fuzz", "lora_config": lora}
    provision = {
        "base_model": model,
        "lora_enabled": True,
        "inactive_timeout": 3600,
        "compute_config": {"num_generator_replicas": 1},
    }
    checkpoint = world.pick(rng, "checkpoint")
    resumed = {**create, "resume_from_checkpoint_id": checkpoint, "load_optimizer": True}
    choices = [
        (30, ("POST", operation, operation_body(rng, kind), kind)),
        (6, ("GET", f"{operation}/{world.pick(rng, kind)}", None, "")),
        (1, ("GET", "/v1/rl/supported-models", None, "")),
        (1, ("GET", RESOURCES, None, "")),
        (0.3, ("POST", RESOURCES, provision, "resource")),
        (2, ("GET", f"{RESOURCES}/{resource}", None, "")),
        (1, ("POST", f"{RESOURCES}/estimate-cost", provision, "")),
        (1, ("POST", f"{RESOURCES}/{resource}/extend-expiry", {"seconds": 600}, "")),
        (0.03, ("POST", f"{RESOURCES}/{resource}/stop", None, "")),
        (0.3, ("POST", SESSIONS, create, "session")),
        (0.3, ("POST", SESSIONS, resumed, "session")),
        (1, ("GET", SESSIONS, None, "")),
        (1, ("GET", f"{SESSIONS}/{session}", None, "")),
        (1, ("PATCH", f"{SESSIONS}/{session}", {"display_name": "a", "metadata": {}}, "")),
        (0.1, ("POST", f"{SESSIONS}/{session}/stop", None, "")),
        (2, ("POST", f"{SESSIONS}/{session}/payloads/upload-url", None, "payload")),
        (
            1,
            (
                "POST",
                f"{SESSIONS}/{session}/payloads/{world.pick(rng, 'payload')}/download-url",
                None,
                "",
            ),
        ),
        (2, ("PUT", "/" + world.pick(rng, "url").lstrip("/"), operation_body(rng, kind), "")),
        (1, ("GET", "/" + world.pick(rng, "url").lstrip("/"), None, "")),
        (1, ("GET", "/v1/rl/checkpoints", None, "")),
        (1, ("GET", f"/v1/rl/checkpoints/{checkpoint}", None, "")),
        (1, ("GET", f"/v1/rl/checkpoints/{checkpoint}/download", None, "")),
        (0.5, ("GET", rng.choice(("/health", "/metrics", "/", "/v1", "/docs")), None, "")),
    ]
    weights = [weight for weight, _ in choices]
    method, path, body, what = rng.choices(choices, weights)[0][1]
    if isinstance(body, dict) and what in KINDS and rng.random() < 0.05:
        body = {**body, "payload_id": world.pick(rng, "payload")}
    return method, path, body, what


def _places(value: object) -> list[tuple[object, object]]:
    """Every (container, key) in a JSON value."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += _places(inner)
    return found


def mutated(rng: Random, body: object) -> bytes:
    """The body as JSON with up to three things wrong in it."""
    body = copy.deepcopy(body)
    if not isinstance(body, dict) or rng.random() < 0.05:
        body = {"x": rng.choice(VALUES)} if rng.random() < 0.5 else {}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        places = _places(body)
        if not places:
            break
        container, key = rng.choice(places)
        what = rng.random()
        if what < 0.45:
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif what < 0.6:
            container[key] = f"<<{rng.randrange(len(RAW))}>>"
        elif what < 0.75:
            del container[key]
        elif what < 0.85 and isinstance(container, dict):
            container[rng.choice(("extra", "", "__class__", "payload_id", "id", "é"))] = 1
        elif isinstance(container, list):
            container *= rng.choice((0, 2, 50))
        elif isinstance(container[key], int | float):
            container[key] = container[key] * rng.choice((-1, 1000, 1e9))
    text = json.dumps(body)
    for index, raw in enumerate(RAW):
        text = text.replace(f'"<<{index}>>"', raw)
    return text.encode("utf-8", "surrogatepass")


def draw_attempt(rng: Random, world: World, model: str) -> Attempt:
    method, path, body, what = right_request(rng, world, model)
    if rng.random() < 0.03:
        method = rng.choice(("DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW", "GET"))
    if rng.random() < 0.06:
        parts = path.split("/")
        parts[rng.randrange(1, len(parts))] = rng.choice(PATHS)
        path = "/".join(parts)
    if rng.random() < (0.5 if method == "GET" else 0.03):
        path += f"?{'&'.join(rng.choice(QUERIES) for _ in range(rng.randint(1, 2)))}"
    content = b""
    if method not in ("GET", "HEAD") and (body is not None or rng.random() < 0.1):
        content = mutated(rng, body)
    headers = {"Authorization": "Bearer any", "Content-Type": "application/json"}
    if what in KINDS and rng.random() < 0.95:
        headers["Idempotency-Key"] = f"{rng.random()}"
    for _ in range(rng.choice((0, 0, 0, 0, 1, 2))):
        name, value = rng.choice(HEADERS)
        headers[name] = value
    damage = rng.random()
    if damage < 0.02:
        content = content[: rng.randrange(len(content) + 1)]
    elif damage < 0.03:
        content = rng.randbytes(rng.randrange(2000))
    elif damage < 0.04:
        content = gzip.compress(content)
    target = path.replace(" ", "%20") or "/"
    return Attempt(method, target, tuple(headers.items()), content, what)
