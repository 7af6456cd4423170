"""The local backend keeps the contract of all backends."""

from collections.abc import Callable

import pytest

from loss_fns.cross_entropy import cross_entropy
from tests.backends.contract import CONTRACT, Case
from tests.backends.tiny import make_adam, make_data, make_lora


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "general"])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Case], None], open_backend, tmp_path, fast: bool) -> None:
    check(
        Case(
            backend=open_backend(fast=fast),
            data=make_data(),
            loss_fn=cross_entropy,
            lora=make_lora(),
            adam=make_adam(),
            directory=tmp_path,
            tolerance=1e-5,
        )
    )


def test_contract_of_full_weights(open_backend, tmp_path) -> None:
    """The parts of it that are about training, with all weights trained."""
    checks = [check for check in CONTRACT if "sessions_do_not" not in check.__name__]
    for check in checks:
        case = Case(
            backend=open_backend(),
            data=make_data(),
            loss_fn=cross_entropy,
            lora=None,  # pyright: ignore[reportArgumentType]
            adam=make_adam(learning_rate=1e-3),
            directory=tmp_path / check.__name__,
            tolerance=1e-5,
        )
        check(case)
        case.backend.close()
