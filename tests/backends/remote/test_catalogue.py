"""What a resource costs by the service, asked for as it would be made or as it is."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tunebook.backends.together.catalogue import Catalogue
from tunebook.backends.together.service import TogetherService

BORROWED = SimpleNamespace(
    base_model="m", compute_config=SimpleNamespace(num_generator_replicas=3, gpu_type="B200-SXM")
)


@pytest.mark.parametrize(
    ("gpu_type", "borrowed_id", "compute"),
    [
        (None, None, {"num_generator_replicas": 1}),
        ("H200", None, {"num_generator_replicas": 1, "gpu_type": "H200"}),
        (None, "mr-1", {"num_generator_replicas": 3, "gpu_type": "B200-SXM"}),
    ],
)
def test_the_price_is_that_of_the_resource(monkeypatch, gpu_type, borrowed_id, compute) -> None:
    asked = []

    def estimate_cost(**wanted):
        asked.append(wanted)
        price = 2.0 if wanted["lora_enabled"] else 5.0
        return SimpleNamespace(price_per_hour=price, currency="USD")

    resources = SimpleNamespace(estimate_cost=estimate_cost, retrieve=lambda resource_id: BORROWED)

    @contextmanager
    def asking():
        yield SimpleNamespace(post_training=SimpleNamespace(model_resources=resources))

    catalogue = Catalogue(
        TogetherService("http://127.0.0.1:9"),
        "m",
        gpu_type=gpu_type,
        borrowed_id=borrowed_id,
        generator_replicas=1,
    )
    monkeypatch.setattr(catalogue, "asking", asking)
    prices = [catalogue.price_per_hour(lora) for lora in (True, False, True, False)]
    assert prices == [(2.0, "USD"), (5.0, "USD")] * 2
    assert asked == [
        {"base_model": "m", "compute_config": compute, "lora_enabled": lora}
        for lora in (True, False)
    ]
