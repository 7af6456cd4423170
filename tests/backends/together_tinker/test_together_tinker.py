"""`backend=tinker` over `together.post_training.tinker`, on `tunebook serve`.

Run by `make test-together-tinker`: an environment holds one release of `tinker` only.
"""

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("together.post_training.tinker", exc_type=ImportError)

from loss_fns.cross_entropy import cross_entropy
from tests.backends.contract import CONTRACT, Case
from tests.backends.services import (
    check_same,
    configured,
    events,
    gradient_of,
    make_rows,
    sample_prompts_apart,
)
from tests.backends.tiny import make_adam, make_data, make_lora
from tests.backends.together_tinker.service import TogetherTinkerService
from tests.loss_fns.batches import EVERY
from tests.running import train_all
from tests.serve.server import TINY, ServerProcess
from tunebook.backends.local import LocalBackend
from tunebook.backends.tinker import TinkerBackend
from tunebook.backends.together.service import TogetherService
from tunebook.compose import compose
from tunebook.runs import RunDir

pytestmark = pytest.mark.filterwarnings("ignore:not on the main thread")

ALPHA = 64.0
"""Of the service's adapters where a client does not ask for one."""


@pytest.fixture(scope="session")
def served(tmp_path_factory) -> Iterator[ServerProcess]:
    """`tunebook serve` over the built-in model."""
    with ServerProcess(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def resource_id(served) -> str:
    """A resource on the server that all training clients share."""
    what = {
        "base_model": TINY,
        "lora_enabled": True,
        "compute_config": {"num_generator_replicas": 1},
    }
    return TogetherService(served.url).create(what).id


@pytest.fixture(autouse=True)
def _in_place_of_tinker(resource_id, tmp_path, monkeypatch) -> None:
    """Has `backend=tinker` talk to the server through Together's client."""
    monkeypatch.setenv("TUNEBOOK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(TogetherTinkerService, "resource_id", resource_id, raising=False)
    monkeypatch.setattr("tunebook.backends.tinker.backend.TinkerService", TogetherTinkerService)


@pytest.fixture
def opened(served) -> Iterator[Callable[..., TinkerBackend]]:
    """A function that makes a backend of the server, closed after the test."""
    backends: list[TinkerBackend] = []

    def open_one(**settings) -> TinkerBackend:
        values = {"model": TINY, "service_model": TINY, "base_url": served.url}
        backends.append(TinkerBackend(**{**values, "lora_alpha": ALPHA, **settings}))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()


def through_client(recipe, folder, served, /, **overrides):
    settings = {"backend__base_url": served.url, "backend__lora_alpha": ALPHA, "lora__alpha": ALPHA}
    return configured(recipe, folder, backend="tinker", **{**settings, **overrides})


def without_norm(run) -> RunDir:
    """The client does not hand on what the server tells of a step."""
    metrics = [
        {key: value for key, value in row.items() if not key.endswith("grad_norm")}
        for row in run.metrics()
    ]
    run.metrics = lambda: metrics
    return run


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Case], None], opened, tmp_path) -> None:
    check(
        Case(
            backend=opened(),
            data=make_data(),
            loss_fn=cross_entropy,
            lora=make_lora(),
            adam=make_adam(),
            directory=tmp_path,
            tolerance=1e-5,
        )
    )


@pytest.mark.parametrize("recipe", ["sft", "dpo", "grpo"])
def test_recipes_train_as_on_local_torch(recipe, served, tmp_path, monkeypatch):
    sample_prompts_apart(monkeypatch)
    _, run = train_all(through_client(recipe, tmp_path / "remote", served))
    _, expected = train_all(configured(recipe, tmp_path / "local", lora__alpha=ALPHA))
    check_same(without_norm(run), without_norm(expected))
    assert run.samples() == expected.samples()
    [computed] = events(run, "loss_computed")
    assert computed["way"] == ("cross_entropy" if recipe == "sft" else "two_passes")


def test_a_stopped_run_goes_on_exactly(served, tmp_path):
    _, run = train_all(through_client("sft", tmp_path / "remote", served), stop_after=2)
    train_all(compose("sft", {"resume": str(run.path)}))
    _, expected = train_all(configured("sft", tmp_path / "local", lora__alpha=ALPHA))
    check_same(without_norm(RunDir.open(run.path)), without_norm(expected))


@pytest.mark.parametrize(
    "name", ["importance_sampling", "ppo", "grpo", "cispo", "dro", "gspo", "dpo_sigmoid"]
)
def test_gradients_are_those_of_the_local_backend(name, opened, tmp_path) -> None:
    rows = make_rows(same_weights=name == "dro")
    _, gradient = gradient_of(opened(), EVERY[name], rows, tmp_path / "remote", alpha=ALPHA)
    with LocalBackend(model=TINY, device="cpu") as local:
        _, expected = gradient_of(local, EVERY[name], rows, tmp_path / "local", alpha=ALPHA)
    assert (gradient - expected).norm() < 1e-4 * expected.norm()
