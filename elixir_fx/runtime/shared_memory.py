"""Memory without a name that several processes of one host map.

A process makes it, the others open it through the first one's table of open files, and when all
have, only their mappings hold it: it goes with the last of them, however that one ends.
"""

import mmap
import os

from elixir_fx.runtime.measure import memory_left


def make(nbytes: int) -> int:
    """The descriptor of `nbytes` of zeroed memory, all of it allocated; -1 if it cannot be had."""
    # Where memory runs out the system ends a process, it does not refuse.
    if not hasattr(os, "memfd_create") or nbytes > memory_left():
        return -1
    descriptor = -1
    try:
        descriptor = os.memfd_create("elixir_fx")
        os.posix_fallocate(descriptor, 0, nbytes)  # so that no write later finds none left
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return -1
    return descriptor


def open_from(process: int, descriptor: int, nbytes: int) -> mmap.mmap | None:
    """A mapping of memory that another process made, not inherited by forks (law 12); None where
    this process may not look at the other's files."""
    try:
        mine = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        mapping = mmap.mmap(mine, nbytes)
        mapping.madvise(mmap.MADV_DONTFORK)
    except OSError:
        return None
    finally:
        os.close(mine)
    return mapping
