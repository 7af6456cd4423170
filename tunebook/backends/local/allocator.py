"""Makes the C library keep freed memory, so that large temporaries do not fault in anew each time.

glibc returns large blocks to the kernel as soon as they are freed. A step of training frees and
allocates the same few megabytes thousands of times, and on a CPU the page faults cost up to a fifth
of it. What is kept has a price of its own: streams of ever new sizes leave holes that nothing fits
into, so the heap grows for hundreds of steps. Giving all of it back now and then costs one round of
page faults and keeps it flat.
"""

import ctypes
import functools
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
TOP_PAD = 64 * 2**20
LARGEST_INT = 2**31 - 1
GIVE_BACK_EVERY = 10
"""Optimizer steps of a session."""


@functools.cache
def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed for the whole process; returns whether it does.

    Elsewhere than on glibc nothing is changed.
    """
    if not is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # From the heap alone, which grows in large pieces and does not shrink.
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, LARGEST_INT), (M_TOP_PAD, TOP_PAD))
    return all(mallopt(name, value) == 1 for name, value in settings)


def give_back_freed_memory() -> bool:
    """Returns the holes of the heap to the kernel; returns whether there were any.

    Elsewhere than on glibc nothing happens.
    """
    return is_glibc() and ctypes.CDLL(None).malloc_trim(0) == 1


@functools.cache
def is_glibc() -> bool:
    """Whether the C library of this process is glibc, whose settings these are."""
    return platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"
