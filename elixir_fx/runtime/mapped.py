"""Parameters as mapped files: ordinary tensors whose pages come and go.

For the torch.compile backend on a CPU, where code between the captured regions reads
parameters as it pleases: a parameter that does not fit stays an ordinary tensor, over a
nameless file in the disk folder. Gathering a chunk brings its pages in, ahead of time where
the plan says so; the pages of the chunks that were used the longest ago go when the plan's
room for them is full. What was written to a page reaches the file by itself.

The file is only ever mapped, never read or written directly (law 12).
"""

import mmap
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from elixir_fx.errors import TierError
from elixir_fx.plan import Chunk, align
from elixir_fx.runtime.disk import Files, errno_text


class MappedFile:
    """`nbytes` of a nameless file in `folder`, as uint8 memory; it goes with its last view.

    TierError if the folder has no room.
    """

    def __init__(self, folder: Path, nbytes: int, files: Files) -> None:
        self.nbytes = align(nbytes)
        fd = -1
        try:
            fd = files.open_unlinked(folder)
            files.allocate(fd, self.nbytes)
            self._mapping = mmap.mmap(fd, self.nbytes)
        except OSError as error:
            raise TierError(
                f"disk={str(folder)!r}: cannot map a file of {nbytes} bytes: {errno_text(error)}"
            ) from error
        finally:
            if fd >= 0:
                files.close(fd)
        self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def tensor(self, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
        """A tensor over a part of the file, with a storage of its own, as a parameter has."""
        return torch.frombuffer(self._mapping, dtype=dtype, offset=offset, count=numel)

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Have pages read before they are needed."""
        self._mapping.madvise(mmap.MADV_WILLNEED, offset, nbytes)

    def drop(self, offset: int, nbytes: int) -> None:
        """Take pages out of this process's memory. Their contents stay, in the file."""
        if nbytes:
            self._mapping.madvise(mmap.MADV_DONTNEED, offset, nbytes)


class MappedCache:
    """The gather cache of mapped chunks: which of them have pages in memory.

    `offsets` say where each chunk lies in the file. At most `gather_bytes` stay in memory beside
    what somebody references. Not thread-safe: the engine's lock is held around it.
    """

    def __init__(
        self,
        file: MappedFile,
        chunks: Mapping[int, Chunk],
        offsets: Mapping[int, int],
        gather_bytes: int,
    ) -> None:
        self._file = file
        self._chunks = chunks
        self._offsets = offsets
        self._gather_bytes = gather_bytes
        self._references = dict.fromkeys(offsets, 0)
        self._present: dict[int, None] = {}  # the latest used last
        self._bytes = 0
        self.hits = 0
        self.misses = 0
        self.waited_s = 0.0
        self.gathered_bytes = 0

    def acquire(self, chunk: int, offset: int) -> Tensor:
        """The chunk's elements, 1-D. They stay readable; until `release` also in memory."""
        if chunk in self._present:
            self.hits += 1
        else:
            self.misses += 1
        self._enter(chunk)
        self._references[chunk] += 1
        return self.flat(chunk)

    def start(self, chunk: int, offset: int) -> None:
        """Begin to bring the chunk's pages in, if there is room beside what is in use."""
        used = sum(self._nbytes(other) for other in self.gathered)
        if chunk not in self._present and used + self._nbytes(chunk) <= self._gather_bytes:
            self._enter(chunk)
            self._file.read_ahead(self._offsets[chunk], self._nbytes(chunk))

    def release(self, chunk: int) -> None:
        """One reader of the chunk is done; its pages go when someone needs the room."""
        self._references[chunk] -= 1
        self._trim()

    def release_all(self) -> None:
        """Drop every reference: a call was cut short by an exception."""
        self._references = dict.fromkeys(self._references, 0)

    def clear(self) -> None:
        """Drop the pages of everything that nobody references, whoever brought them in."""
        for chunk in self._offsets:
            self.drop(chunk)

    def invalidate(self, chunk: int) -> None:
        """Nothing to do: what is mapped is the home itself."""

    @property
    def gathered(self) -> list[int]:
        """Chunks that somebody references."""
        return [chunk for chunk, count in self._references.items() if count]

    def flat(self, chunk: int) -> Tensor:
        """The chunk's elements, wherever their pages are."""
        known = self._chunks[chunk]
        first = self._offsets[chunk]
        return self._file.memory[first : first + known.nbytes].view(getattr(torch, known.dtype))

    def drop(self, chunk: int) -> None:
        """The chunk was used otherwise than by a gather: its pages may go."""
        if self._references[chunk]:
            return
        if chunk in self._present:
            self._leave(chunk)
        else:
            self._file.drop(self._offsets[chunk], self._nbytes(chunk))

    def _enter(self, chunk: int) -> None:
        if chunk in self._present:
            del self._present[chunk]
        else:
            self._bytes += self._nbytes(chunk)
            self.gathered_bytes += self._chunks[chunk].nbytes
        self._present[chunk] = None
        self._trim(chunk)

    def _trim(self, besides: int | None = None) -> None:
        """Drop what was used the longest ago until the rest keeps to its room."""
        for other in list(self._present):
            if self._bytes <= self._gather_bytes:
                return
            if other != besides and not self._references[other]:
                self._leave(other)

    def _leave(self, chunk: int) -> None:
        del self._present[chunk]
        self._bytes -= self._nbytes(chunk)
        self._file.drop(self._offsets[chunk], self._nbytes(chunk))

    def _nbytes(self, chunk: int) -> int:
        return align(self._chunks[chunk].nbytes)
