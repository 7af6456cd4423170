"""Short forms of `python -m tests.backends.remote.storm`, which says what is checked."""

import pytest

from tests.backends.remote.storm import (
    through_client_kills,
    through_faults,
    through_server_kills,
    undisturbed,
)

pytestmark = pytest.mark.xdist_group("storm")

STEPS = 24


@pytest.fixture(scope="module")
def expected(server, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEBOOK_HOME", str(tmp_path_factory.mktemp("home")))
        return undisturbed(tmp_path_factory.mktemp("calm"), server, steps=STEPS)


def test_faults(expected, tmp_path):
    """Case 108: replies are lost after the work was done, and every step is made once."""
    assert through_faults(tmp_path, seed=2, steps=STEPS).adapter == expected


def test_kills_of_the_server(expected, tmp_path):
    result = through_server_kills(tmp_path, seed=1, steps=STEPS, kills=2)
    assert result.adapter == expected
    assert result.disturbed["kills of the server"] == 2


def test_kills_of_the_client(expected, tmp_path):
    assert through_client_kills(tmp_path, seed=1, steps=STEPS, kills=2).adapter == expected
