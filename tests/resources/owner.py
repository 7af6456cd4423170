"""A process that owns a resource while it "trains", for tests that kill it.

    python -m tests.resources.owner <url> [fork]

It says what happens, a line each, and trains until it is told to stop. `fork` leaves a child behind
that outlives it.
"""

import os
import signal
import sys
import time

from tunebook.backends.together.service import TogetherService
from tunebook.resources import Ledger, Patience, owned_resource
from tunebook.runs import terminable

PATIENCE = Patience(retry_s=0.05, max_retry_s=0.2, search_s=2.0, give_up_s=60.0)
WHAT = {"base_model": "tiny", "lora_enabled": True, "compute_config": {"num_generator_replicas": 0}}


def say(text):
    print(text, flush=True)


def main(url, *options):
    say(f"pid {os.getpid()}")
    with (
        terminable(),
        owned_resource(
            Ledger.of_user(), TogetherService(url), WHAT, run="runs/a", say=say, patience=PATIENCE
        ) as resource_id,
    ):
        if "fork" in options and not (child := os.fork()):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(60)
            os._exit(0)
        elif "fork" in options:
            say(f"child {child}")
        say(f"training {resource_id}")
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
