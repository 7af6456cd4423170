"""tunebook: a cookbook of post-training recipes for language models."""

import os

__version__ = "0.1.0"

# GNU's OpenMP, which torch computes with on a CPU under Linux, has threads wait in a loop for each
# other. A long loop takes most of the time of a machine that others use too; too short a one has
# threads sleep, and waking them costs more (docs/concepts/local_torch.md). It is read when torch is
# loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
