"""A process that has a run while it "trains", for tests that kill it.

python -m tests.backends.loops.owner <url> <folder>
"""

import sys
import time
from pathlib import Path

from tests.backends.loops.conftest import ALPHA
from tests.backends.tiny import make_lora
from tests.serve.server import TINY
from tunebook.backends.baseten import BasetenBackend
from tunebook.runs import terminable


def main(url: str, folder: str) -> None:
    settings = {"model": TINY, "service_model": TINY, "base_url": url, "lora_alpha": ALPHA}
    with terminable(), BasetenBackend(**settings) as backend:
        print("opening", flush=True)
        session = backend.open_session("first", make_lora(), directory=Path(folder))
        print("training", session.name, flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
