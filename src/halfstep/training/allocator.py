"""Keep freed memory for the next step instead of giving it back to the kernel.

glibc serves every tensor over 32 MiB (and, until it has learned better, over 128 KiB) by ``mmap``
and returns it on free, so each operation of each step page-faults its whole output again. For a
process that does the same allocations thousands of times it pays to keep the memory:
``docs/decisions/0004-allocator.md`` holds the measurement.
"""

from __future__ import annotations

import ctypes
import platform

# Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed memory; for a process that only trains, never for a library.

    Returns:
        Whether it was done: False on systems without glibc's ``mallopt``.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20))
    return all([mallopt(key, value) == 1 for key, value in settings])
