"""Giving freed memory back to the system while much passes through.

glibc keeps freed blocks, and aligned blocks of one size do not fit each other's places, so a
loop that makes and frees one 16 MiB tensor after the other grows by 16 MiB each time. Loops
that stream a model's values call a `HeapTrim` with what they let go.
"""

import ctypes

from elixir_fx.units import MIB

TRIM_BYTES = 32 * MIB  # freed before the heap is trimmed again: a trim takes some ms


class HeapTrim:
    """Trims the C heap after every TRIM_BYTES that were freed, where the C library can."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._trim = library.malloc_trim if hasattr(library, "malloc_trim") else None
        self._freed_bytes = 0

    def freed(self, nbytes: int) -> None:
        """Call after `nbytes` were let go."""
        self._freed_bytes += nbytes
        if self._freed_bytes >= TRIM_BYTES:
            self._freed_bytes = 0
            if self._trim is not None:
                self._trim(0)
