"""What every test shares: a cache of its own, no hub, few threads."""

import os
import signal
from pathlib import Path

import pytest

# Before anything imports transformers or datasets, in this process and in those it starts.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts the suite in the background has it ignore Ctrl-C, and what it starts inherits
# that; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
USER_HOME = os.environ.get("TUNEBOOK_HOME", str(Path.home() / ".cache" / "tunebook"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Caches and split ledgers of the tests never meet those of the person who runs them."""
    os.environ["TUNEBOOK_HOME"] = str(tmp_path_factory.mktemp("tunebook_home"))
    yield
    os.environ["TUNEBOOK_HOME"] = USER_HOME


@pytest.fixture(scope="session")
def smollm2():
    """Folder of SmolLM2-135M-Instruct."""
    folder = Path(USER_HOME) / "models" / "HuggingFaceTB--SmolLM2-135M-Instruct"
    if not folder.is_dir():
        pytest.fail("SmolLM2-135M is not in the cache; `make smollm2` fetches it")
    return folder
