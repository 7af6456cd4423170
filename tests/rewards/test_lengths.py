"""Rewards and penalties of lengths."""

import pytest

from tunebook.errors import ConfigError
from tunebook.rewards import TargetLength, overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "reward"),
    [(10, 1.0), (20, 1.0), (15, 1.0), (9, 0.75), (8, 0.5), (6, 0.0), (0, 0.0), (22, 0.5), (24, 0.0), (99, 0.0)],
)  # fmt: skip
def test_the_window_falls_linearly(num_tokens, reward):
    """Window 10 to 20, margin 4: two tokens outside are 1 - 2/4."""
    window = TargetLength(minimum=10, maximum=20, margin=4)
    assert window("text", num_tokens=num_tokens) == reward


def test_without_a_margin_it_is_a_step():
    window = TargetLength(minimum=2, maximum=2, margin=0)
    assert [window("text", num_tokens=count) for count in (1, 2, 3)] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "settings",
    [(-1, 5, 0), (5, 4, 0), (0, 5, -1)],
)
def test_bad_windows_are_refused(settings):
    minimum, maximum, margin = settings
    with pytest.raises(ConfigError, match="must be"):
        TargetLength(minimum=minimum, maximum=maximum, margin=margin)


@pytest.mark.parametrize(
    ("num_tokens", "truncated", "penalty"),
    [
        (0, False, 0.0),
        (80, False, 0.0),
        (85, False, -0.25),
        (90, False, -0.5),
        (100, False, -1.0),
        (100, True, -1.0),
        (3, True, -1.0),
    ],
)
def test_overlong_penalty(num_tokens, truncated, penalty):
    """Limit 100, buffer 20: 85 tokens are 5 into the buffer, -5/20."""
    found = overlong_penalty(num_tokens, truncated=truncated, max_tokens=100, buffer=20)
    assert found == penalty


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_the_buffer_fits_the_limit(buffer):
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(1, truncated=False, max_tokens=100, buffer=buffer)
