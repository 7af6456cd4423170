"""How many processes a launcher such as torchrun has started, read from its environment."""

import os


def num_processes() -> int:
    """Processes that train together; 1 where no launcher says otherwise."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
