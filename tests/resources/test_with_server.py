"""The ledger against `tunebook serve`, which both may be killed."""

import json

from together.post_training import SessionClient

from tests.resources.conftest import heard, kill, watchdogs
from tests.resources.server import until
from tests.resources.test_commands import call
from tests.serve.server import ServerProcess
from tunebook.resources import service_of


def test_client_and_server_killed_with_a_session_open(tmp_path, home, ledger, own_process):
    with ServerProcess(tmp_path / "server", extra=("--name", "tiny")) as server:
        process = own_process(server.url)
        resource_id = heard(process, "training")
        session = SessionClient.create(
            model_resources_id=resource_id, base_url=server.url, lora_config={"rank": 4}
        )
        (row,) = json.loads(call("list", "--json").stdout)
        assert (row["id"], row["state"], row["run"]) == (resource_id, "READY", "runs/a")
        server.kill()
        kill(process)
        session.detach()
        server.start()
        until(lambda: not watchdogs(home))
        assert service_of("together", server.url).list_live() == []
    assert ledger.entries()[0].closed == "stopped after its process had died"
