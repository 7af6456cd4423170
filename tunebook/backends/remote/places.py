"""Where checkpoints lie that are kept by a service."""

from tunebook.errors import CheckpointError
from tunebook.types import CheckpointRef


def check_on_service(ref: CheckpointRef, example: str) -> None:
    """Does nothing unless a checkpoint is a folder of this machine.

    Args:
        ref: what is to be started from.
        example: what a checkpoint on the service is called.

    Raises:
        CheckpointError: it is one.
    """
    if ref.path.is_absolute():
        raise CheckpointError(
            f"{ref.location}: the service cannot load a folder of this machine. Start from a run "
            f"that was trained there, or from {example}"
        )
