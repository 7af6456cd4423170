"""The backend keeps the contract of all backends, on a server that speaks Tinker's wire."""

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
CASES = [(check, "auto") for check in CONTRACT] + [(check, "two_passes") for check in ABOUT_LOSSES]


@pytest.mark.parametrize(
    ("check", "losses"), CASES, ids=lambda each: getattr(each, "__name__", each)
)
def test_contract(check: Callable[[Case], None], open_tinker, tmp_path, losses: str) -> None:
    check(
        Case(
            backend=open_tinker(losses=losses),
            data=make_data(),
            loss_fn=cross_entropy,
            lora=make_lora(),
            adam=make_adam(),
            directory=tmp_path,
            tolerance=1e-5,
        )
    )
