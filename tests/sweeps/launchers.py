"""Launchers of others that start each run of a sweep as a job of its own."""

from collections.abc import Iterator

import pytest

MODULES = {
    "ray": "hydra_plugins.hydra_ray_launcher.ray_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher.submitit_launcher",
}
SETTINGS = {
    "ray": ["+hydra.launcher.ray.init.num_cpus=2"],
    "submitit_local": ["hydra.launcher.timeout_min=10"],
}


@pytest.fixture(params=list(MODULES))
def launcher(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Arguments that choose a launcher; skips the test where it is not installed."""
    pytest.importorskip(MODULES[request.param])
    yield [f"hydra/launcher={request.param}", *SETTINGS[request.param]]
    if request.param == "ray":
        import ray

        ray.shutdown()  # its workers would stay in the folder of this test
