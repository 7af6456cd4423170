"""Makes the C library keep freed memory, so that large temporaries do not fault in anew each time.

glibc returns large blocks to the kernel as soon as they are freed. A step of training frees and
allocates the same few megabytes thousands of times, and on a CPU the page faults cost up to a fifth
of it.
"""

import ctypes
import functools
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
TOP_PAD = 64 * 2**20
LARGEST_INT = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed for the whole process; returns whether it does.

    Elsewhere than on glibc nothing is changed.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # From the heap alone, which grows in large pieces and does not shrink.
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, LARGEST_INT), (M_TOP_PAD, TOP_PAD))
    return all(mallopt(name, value) == 1 for name, value in settings)
