"""Training on several devices or in several processes, started by torchrun.

Process 0 runs the recipe. The others wait for the operations that it sends, and all compute each
operation together: every process has its own rows and its own part of all weights (FSDP2).
"""

from tunebook.backends.local.distributed.backend import ShardedBackend
from tunebook.backends.local.distributed.launching import run_together

__all__ = ["ShardedBackend", "run_together"]
