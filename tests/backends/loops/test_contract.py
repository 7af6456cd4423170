"""The backend keeps the contract of all backends, on shared trainers and on trainers of its own."""

from collections.abc import Callable

import pytest

from loss_fns.cross_entropy import cross_entropy
from tests.backends import contract
from tests.backends.contract import CONTRACT, Case
from tests.backends.tiny import make_adam, make_data, make_lora

ABOUT_LOSSES = [
    contract.loss_is_the_weighted_sum_of_logprobs,
    contract.requests_of_one_step_add_up,
    contract.a_restored_session_goes_on_exactly,
]
ABOUT_SAMPLERS = [contract.a_generator_is_stale_after_the_next_publish]
CASES = [
    *((check, "serverless", {}) for check in CONTRACT),
    *((check, "serverless", {"losses": "two_passes"}) for check in ABOUT_LOSSES),
    *((check, "dedicated", {}) for check in ABOUT_SAMPLERS + ABOUT_LOSSES),
    *((check, "dedicated", {"sampler": "live"}) for check in ABOUT_SAMPLERS),
]


@pytest.mark.parametrize(
    ("check", "capacity", "settings"),
    CASES,
    ids=lambda each: getattr(each, "__name__", None) or str(each),
)
def test_contract(
    check: Callable[[Case], None], capacity: str, settings, open_remote, request, tmp_path
) -> None:
    server = request.getfixturevalue(capacity)
    check(
        Case(
            backend=open_remote(server, **settings),
            data=make_data(),
            loss_fn=cross_entropy,
            lora=make_lora(),
            adam=make_adam(),
            directory=tmp_path,
            tolerance=1e-5,
        )
    )
