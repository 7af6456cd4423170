"""A short form of `python -m tests.serve.fuzz`, which says what is checked."""

from tests.serve.fuzz import make_server, run_fuzz


def test_a_hostile_quarter_of_a_minute(tmp_path):
    with make_server(tmp_path) as server:
        fuzz = run_fuzz(server, seed=1, seconds=12, workers=3)
        assert fuzz.findings == []
        assert fuzz.statuses.total() > 300
        assert server.stop() == 0
