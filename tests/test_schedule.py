"""Learning rates, step by step."""

import pytest

from tunebook.schedule import Schedule, learning_rate_at, warmup_steps


def rates(planned, **changes):
    settings = {"kind": "linear", "peak": 1.0, "warmup": 0, "final_fraction": 0.0, "decay": 0.2}
    schedule = Schedule(**{**settings, **changes})
    return [learning_rate_at(step, planned, schedule) for step in range(1, planned + 1)]


def test_linear_starts_at_the_peak_and_still_trains_at_the_last_step():
    assert rates(4) == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_warmup_reaches_the_peak_at_its_last_step():
    """Case 28: 16 steps, warm-up 0.25: 4 warm-up steps, peak first at step 4."""
    values = rates(16, warmup=0.25)
    assert values[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert max(values) == values[3] and values[4] < 1.0
    assert values[-1] == pytest.approx(1 / 13)  # one more step would be 0
    assert values == rates(16, warmup=4)


def test_floor():
    values = rates(10, final_fraction=0.1)
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(0.1 + 0.9 * 0.1)
    assert min(values) >= 0.1


def test_constant_and_cosine_and_wsd():
    assert rates(3, kind="constant") == [1.0, 1.0, 1.0]
    cosine = rates(4, kind="cosine")
    assert cosine == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert rates(10, kind="wsd", warmup=2, decay=0.3) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    )


@pytest.mark.parametrize(
    ("planned", "warmup", "expected"),
    [(16, 0.25, 4), (10, 0.0, 0), (10, 3.0, 3), (3, 0.1, 1), (100, 0.07, 7)],
)
def test_warmup_steps(planned, warmup, expected):
    assert warmup_steps(planned, warmup=warmup) == expected


def test_warmup_longer_than_the_run_never_reaches_the_peak():
    assert rates(2, warmup=4) == [0.25, 0.5]


def test_one_step():
    for kind in ("linear", "cosine", "constant", "wsd"):
        assert rates(1, kind=kind) == [1.0]
