"""The disk tier's file: preallocated, nameless, read and written past the page cache.

Stands below `store`: it moves bytes between one file and memory, in the calling thread, and
knows nothing of regions, order or threads. Every failure is a `TierError` that names the
folder, the offset, the bytes and the system's reason; a short read or write is continued, the
end of the file is an error and never a wait.

Direct I/O needs memory, offset and length aligned to a block. Where they are, bytes go straight
between the file and the caller's memory; the rest passes through a small aligned bounce buffer.
Blocks of which only a part is written are read first (neighbours keep their bytes), so callers
must not let two transfers touch one block at once unless both read.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import warnings
from pathlib import Path

from elixir_fx.errors import TierError
from elixir_fx.plan import ALIGNMENT_BYTES as BLOCK_BYTES
from elixir_fx.plan import align

# One system call moves at most this much: from 4 MiB on, the rate no longer grows (measured:
# reads 2.5 GB/s and writes 5.3 GB/s for 4, 16 and 512 MiB; 1 MiB writes reach half of it).
CALL_BYTES = 16 << 20
BOUNCE_BYTES = 1 << 20
SECTOR_BYTES = 512  # the finest grain at which a direct transfer may stop short
STALLS = 8  # calls in a row that moved nothing before a transfer is given up
RAM_FILESYSTEMS = ("tmpfs", "ramfs")

memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
memory_view.restype = ctypes.py_object
memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE


def view_memory(address: int, nbytes: int) -> memoryview:
    """A writable view of memory at an address. Whoever calls keeps that memory alive."""
    view: memoryview = memory_view(address, nbytes, _WRITABLE)
    return view


def address_of(buffer: memoryview | mmap.mmap) -> int:
    """Where a writable buffer that is not empty lies in memory."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))


def anonymous_mapping(nbytes: int) -> mmap.mmap:
    """Page-aligned memory that direct I/O may touch while the process forks.

    Shared, so that a fork never turns a page that the disk is writing into a copy, and left out
    of forked children (law 12). Huge pages are advised; a kernel without them does not mind.
    Pages come into being when they are first touched.
    """
    mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel built without transparent huge pages
        if error.errno != errno.EINVAL:
            raise
    return mapping


class Files:
    """The system calls that a `DiskFile` makes. A test puts faults in by overriding them."""

    def filesystem(self, folder: Path) -> str:
        """The type of the file system that holds `folder`, "" if it cannot be told."""
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        try:
            mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        except OSError:
            return ""
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
        return ""

    def open_unlinked(self, folder: Path) -> int:
        """A new empty file without a name in `folder`, gone when its last descriptor is."""
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:  # what file systems and kernels without O_TMPFILE say
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
        fd, name = tempfile.mkstemp(prefix=".elixir_fx-", dir=folder)
        os.unlink(name)
        return fd

    def set_direct(self, fd: int, direct: bool) -> None:
        """Bypass the page cache, or go through it. OSError where the file system refuses."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags)

    def allocate(self, fd: int, nbytes: int) -> None:
        os.posix_fallocate(fd, 0, nbytes)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.pwritev(fd, [buffer], offset)

    def drop_cache(self, fd: int, offset: int, nbytes: int, written: bool) -> None:
        """Let go of cached pages; written ones reach the disk first, else they would stay."""
        if written:
            os.fdatasync(fd)
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        os.close(fd)


class _Bounce:
    """An aligned buffer for one direction, and the lock of whoever uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.view = memoryview(anonymous_mapping(BOUNCE_BYTES))


class DiskFile:
    """One file of `nbytes` in `folder`. Threads may read and write different blocks at once.

    `direct` tells whether the page cache is bypassed. Where the file system refuses that, a
    warning says so once and cached pages are dropped after every transfer.
    Raises TierError if the folder is not one to write in, or has no room.
    """

    def __init__(self, folder: str | Path, nbytes: int, files: Files | None = None) -> None:
        self._fd = -1
        self.folder = Path(folder)
        self.nbytes = align(nbytes)
        self.files = Files() if files is None else files
        self._process = os.getpid()
        self._bounces = {"read": _Bounce(), "write": _Bounce()}
        self._lock = threading.Lock()
        self._check_folder()
        try:
            self._fd = self.files.open_unlinked(self.folder)
        except OSError as error:
            raise TierError(
                f"disk={str(self.folder)!r}: cannot create a file there: {errno_text(error)}"
            ) from error
        try:
            self._allocate()
            self.direct = self._try_direct()
        except BaseException:
            self.close()
            raise

    def _check_folder(self) -> None:
        if not self.folder.exists():
            raise TierError(f"disk={str(self.folder)!r}: no such folder; create it first")
        if not self.folder.is_dir():
            raise TierError(f"disk={str(self.folder)!r} is not a folder")
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise TierError(f"disk={str(self.folder)!r}: no permission to write there")

    def _allocate(self) -> None:
        if not self.nbytes:
            return
        try:
            self.files.allocate(self._fd, self.nbytes)
        except OSError as error:
            room = os.statvfs(self.folder)
            raise TierError(
                f"disk={str(self.folder)!r}: {self.nbytes} bytes asked, "
                f"{room.f_bavail * room.f_frsize} bytes free: {errno_text(error)}; "
                f"free some space, choose another folder or a smaller disk_memory"
            ) from error

    def _try_direct(self) -> bool:
        kind = self.files.filesystem(self.folder)
        if kind in RAM_FILESYSTEMS:
            self._warn(f"lies on {kind}, which is RAM: bytes put there still take memory")
            return False
        try:
            self.files.set_direct(self._fd, True)
        except OSError as error:
            self._warn(f"refuses direct I/O ({errno_text(error)}): it goes through the page cache")
            return False
        return True

    def _warn(self, what: str) -> None:
        warnings.warn(f"disk={str(self.folder)!r} {what}", RuntimeWarning, stacklevel=5)

    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes at `offset`. TierError if not every byte came."""
        self._check_range("read", offset, target.nbytes)
        head, body = self._cut(target, offset)
        self._read_bounced(target[:head], offset)
        self._transfer("read", target[head : head + body], offset + head)
        self._read_bounced(target[head + body :], offset + head + body)

    def write(self, source: memoryview, offset: int, spare: int = 0) -> None:
        """Write `source` at `offset`. TierError if not every byte went.

        `spare` bytes behind it belong to nobody and may be overwritten, which saves reading
        the last block before writing a part of it.
        """
        self._check_range("write", offset, source.nbytes)
        head, body = self._cut(source, offset)
        self._write_bounced(source[:head], offset, 0 if head < source.nbytes else spare)
        self._transfer("write", source[head : head + body], offset + head)
        self._write_bounced(source[head + body :], offset + head + body, spare)

    def _check_range(self, verb: str, offset: int, nbytes: int) -> None:
        if os.getpid() != self._process:
            raise TierError(
                f"disk={str(self.folder)!r}: {verb} in a forked process; "
                f"worker processes must not use a compiled model"
            )
        if self._fd < 0:
            raise TierError(f"disk={str(self.folder)!r}: {verb} after close")
        if offset < 0 or offset + nbytes > self.nbytes:
            raise TierError(
                f"disk={str(self.folder)!r}: {verb} of {nbytes} bytes at offset {offset} "
                f"in a file of {self.nbytes} bytes"
            )

    def _cut(self, buffer: memoryview, offset: int) -> tuple[int, int]:
        """How many bytes go by bounce before those that can go straight, and the latter."""
        nbytes = buffer.nbytes
        if not self.direct or not nbytes:
            return 0, nbytes
        head = -offset % BLOCK_BYTES
        if (address_of(buffer) + head) % BLOCK_BYTES or nbytes - head < BLOCK_BYTES:
            return nbytes, 0
        return head, (nbytes - head) // BLOCK_BYTES * BLOCK_BYTES

    def _read_bounced(self, target: memoryview, offset: int) -> None:
        if not target.nbytes:
            return
        bounce = self._bounces["read"]
        with bounce.lock:
            for first, last, inner in _blocks(offset, target.nbytes):
                self._transfer("read", bounce.view[: last - first], first)
                start = max(offset, first)
                target[inner : inner + min(last, offset + target.nbytes) - start] = bounce.view[
                    start - first : min(last, offset + target.nbytes) - first
                ]

    def _write_bounced(self, source: memoryview, offset: int, spare: int) -> None:
        if not source.nbytes:
            return
        bounce = self._bounces["write"]
        end = offset + source.nbytes
        with bounce.lock:
            for first, last, inner in _blocks(offset, source.nbytes):
                view = bounce.view[: last - first]
                start, stop = max(offset, first), min(end, last)
                if first < start:
                    self._transfer("read", view[:BLOCK_BYTES], first)
                if end + spare < last and (first == start or last - first > BLOCK_BYTES):
                    self._transfer("read", view[-BLOCK_BYTES:], last - BLOCK_BYTES)
                view[start - first : stop - first] = source[inner : inner + stop - start]
                self._transfer("write", view, first)

    def _transfer(self, verb: str, buffer: memoryview, offset: int) -> None:
        """Move every byte of `buffer`, in as many calls as the system needs."""
        call = self.files.pread if verb == "read" else self.files.pwrite
        total, moved, stalls = buffer.nbytes, 0, 0
        while moved < total:
            piece = buffer[moved : moved + CALL_BYTES]
            direct = self.direct
            try:
                count = call(self._fd, piece, offset + moved)
            except OSError as error:
                if error.errno == errno.EINVAL and direct:
                    self._give_up_direct(error)
                    continue
                raise self._failed(
                    verb, offset + moved, total - moved, errno_text(error)
                ) from error
            if not 0 <= count <= piece.nbytes:
                raise self._failed(verb, offset + moved, piece.nbytes, f"{count} bytes reported")
            if verb == "read" and count == 0:
                reason = "short read: the file ends here, was it truncated?"
                raise self._failed(verb, offset + moved, total - moved, reason)
            if direct and count < piece.nbytes:
                count -= count % SECTOR_BYTES  # go on where a direct transfer may start
            stalls = 0 if count else stalls + 1
            if stalls == STALLS:
                reason = f"short {verb}: {STALLS} calls moved nothing"
                raise self._failed(verb, offset + moved, total - moved, reason)
            if not direct and count:
                self._drop_cache(verb, offset + moved, count)
            moved += count

    def _drop_cache(self, verb: str, offset: int, nbytes: int) -> None:
        try:
            self.files.drop_cache(self._fd, offset, nbytes, verb == "write")
        except OSError as error:
            raise self._failed(verb, offset, nbytes, errno_text(error)) from error

    def _give_up_direct(self, error: OSError) -> None:
        """The file system took the flag but not the call: go on through the page cache."""
        with self._lock:
            if self.direct:
                self.files.set_direct(self._fd, False)
                self.direct = False
                self._warn(f"refuses direct I/O ({errno_text(error)}): it goes by the page cache")

    def _failed(self, verb: str, offset: int, nbytes: int, reason: str) -> TierError:
        return TierError(
            f"disk={str(self.folder)!r}: {verb} of {nbytes} bytes at offset {offset} "
            f"of the unlinked file failed: {reason}"
        )

    def close(self) -> None:
        """Give the space back. Nothing may be under way. More than once is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self.files.close(fd)

    def __del__(self) -> None:
        self.close()


def _blocks(offset: int, nbytes: int) -> list[tuple[int, int, int]]:
    """Runs of whole blocks that cover a range, none larger than the bounce buffer.

    Each is (first byte, end, how far into the range its first wanted byte is).
    """
    end = align(offset + nbytes)
    first = offset // BLOCK_BYTES * BLOCK_BYTES
    return [
        (start, min(start + BOUNCE_BYTES, end), max(start - offset, 0))
        for start in range(first, end, BOUNCE_BYTES)
    ]


def errno_text(error: OSError) -> str:
    """ "No space left on device (ENOSPC)": the system's words and the name to search for."""
    name = errno.errorcode.get(error.errno or 0, "?")
    return f"{error.strerror or error} ({name})"
