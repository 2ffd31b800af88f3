"""Parameters over a mapped file: contents stay whatever pages go, room is kept to."""

import errno
import gc
import mmap
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elixir_fx.errors import TierError
from elixir_fx.machine import Tier
from elixir_fx.plan import ALIGNMENT_BYTES, Chunk, Homes, Slice
from elixir_fx.runtime.disk import Files
from elixir_fx.runtime.mapped import MappedCache, MappedFile

THREADS = 1
PAGE = ALIGNMENT_BYTES


def chunk(identity: int, numel: int, dtype: str = "float32") -> Chunk:
    piece = Slice(path=f"p{identity}", offset=0, span=numel, shape=(numel,), strides=(1,))
    size = getattr(torch, dtype).itemsize
    homes = Homes(parameters=Tier.DISK)
    return Chunk(
        id=identity,
        dtype=dtype,
        itemsize=size,
        numel=numel,
        trainable=True,
        slices=(piece,),
        homes=homes,
    )


class Recorded(MappedFile):
    """A mapped file that tells which parts were read ahead and dropped."""

    def __init__(self, folder: Path, nbytes: int, files: Files | None = None) -> None:
        super().__init__(folder, nbytes, files or Files())
        self.ahead: list[tuple[int, int]] = []
        self.dropped: list[tuple[int, int]] = []

    def read_ahead(self, offset: int, nbytes: int) -> None:
        self.ahead.append((offset, nbytes))
        super().read_ahead(offset, nbytes)

    def drop(self, offset: int, nbytes: int) -> None:
        self.dropped.append((offset, nbytes))
        super().drop(offset, nbytes)


def cached(folder: Path, count: int, room: int) -> tuple[Recorded, MappedCache]:
    """`count` chunks of one page, `room` pages of cache; chunk i holds i everywhere."""
    file = Recorded(folder, count * PAGE)
    chunks = {i: chunk(i, PAGE // 4) for i in range(count)}
    cache = MappedCache(file, chunks, {i: i * PAGE for i in range(count)}, room * PAGE)
    for i in range(count):
        cache.flat(i).fill_(i)
    return file, cache


def resident(file: MappedFile) -> list[bool]:
    """Whether each page of the file is mapped into this process."""
    start = file.memory.data_ptr()
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(start // mmap.PAGESIZE * 8)
        entries = pages.read(file.nbytes // mmap.PAGESIZE * 8)
    return [bool(entries[i + 7] >> 7) for i in range(0, len(entries), 8)]


# -- the file --------------------------------------------------------------------------------


def test_contents_survive_a_drop(tmp_path: Path) -> None:
    file = MappedFile(tmp_path, 3 * PAGE + 5, Files())
    assert file.nbytes == 4 * PAGE and file.memory.numel() == 4 * PAGE
    values = torch.arange(4 * PAGE, dtype=torch.int64).to(torch.uint8)
    file.memory.copy_(values)
    assert all(resident(file))
    file.drop(PAGE, 2 * PAGE)
    assert resident(file) == [True, False, False, True]
    assert torch.equal(file.memory, values)
    file.drop(0, file.nbytes)
    assert not any(resident(file))
    file.read_ahead(0, file.nbytes)
    assert torch.equal(file.memory, values)


def test_it_leaves_nothing(tmp_path: Path) -> None:
    """No name, no descriptor; the mapping goes with the last view."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    file = MappedFile(tmp_path, PAGE, Files())
    view = file.memory[8:16].view(torch.float32)
    view.fill_(3)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # mmap keeps one of its own
    del file
    gc.collect()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert view.tolist() == [3, 3]
    del view
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == before


class Failing(Files):
    """One system call fails."""

    def __init__(self, call: str, error: int) -> None:
        self.call, self.error = call, error
        self.opened = 0

    def _fail(self, call: str) -> None:
        if call == self.call:
            raise OSError(self.error, os.strerror(self.error))

    def open_unlinked(self, folder: Path) -> int:
        self._fail("open")
        self.opened += 1
        return super().open_unlinked(folder)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._fail("allocate")
        super().allocate(fd, nbytes)

    def close(self, fd: int) -> None:
        self.opened -= 1
        super().close(fd)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [("allocate", errno.ENOSPC, "ENOSPC"), ("open", errno.EACCES, "EACCES")],
)
def test_faults(call: str, error: int, words: str, tmp_path: Path) -> None:
    files = Failing(call, error)
    with pytest.raises(TierError, match=rf"cannot map a file of 12345 bytes: .*{words}") as caught:
        MappedFile(tmp_path, 12345, files)
    assert str(tmp_path) in str(caught.value)
    assert files.opened == 0
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="ENOENT"):
        MappedFile(tmp_path / "gone", PAGE, Files())


# -- the cache -------------------------------------------------------------------------------


def test_the_longest_unused_leaves(tmp_path: Path) -> None:
    file, cache = cached(tmp_path, 4, room=2)
    cache.clear()
    assert not any(resident(file))
    file.dropped.clear()
    for i in (0, 1, 0, 2):
        assert cache.acquire(i, 0).tolist() == [i] * (PAGE // 4)
        cache.release(i)
    assert file.dropped == [(PAGE, PAGE)]  # 1 is older than 0
    assert (cache.hits, cache.misses, cache.gathered_bytes) == (1, 3, 3 * PAGE)


def test_references_are_never_dropped(tmp_path: Path) -> None:
    """More is referenced than there is room for: nothing of it goes, until it is released."""
    file, cache = cached(tmp_path, 4, room=1)
    cache.clear()
    file.dropped.clear()
    held = [cache.acquire(i, 0) for i in range(3)]
    assert file.dropped == [] and cache.gathered == [0, 1, 2]
    assert [flat[0].item() for flat in held] == [0, 1, 2]
    for i in range(3):
        cache.drop(i)
        cache.clear()
    assert resident(file)[:3] == [True, True, True]
    cache.release(0)
    cache.release(1)
    cache.acquire(3, 0)
    assert file.dropped[-2:] == [(0, PAGE), (PAGE, PAGE)]
    assert cache.gathered == [2, 3]


def test_a_chunk_gathered_twice(tmp_path: Path) -> None:
    """Two readers: it is dropped when both are done."""
    file, cache = cached(tmp_path, 2, room=1)
    cache.acquire(0, 0)
    cache.acquire(0, 0)
    cache.release(0)
    cache.drop(0)
    assert cache.gathered == [0]
    cache.release(0)
    cache.drop(0)
    assert not resident(file)[0] and cache.gathered == []


def test_read_ahead(tmp_path: Path) -> None:
    """Asked for once, and only for what is not there."""
    file, cache = cached(tmp_path, 3, room=2)
    cache.clear()
    cache.start(1, 0)
    assert file.ahead == [(PAGE, PAGE)]
    cache.start(1, 0)
    cache.acquire(1, 0)
    assert file.ahead == [(PAGE, PAGE)]
    assert (cache.hits, cache.misses) == (1, 0)
    cache.start(2, 0)
    cache.start(0, 0)  # room for two: the referenced one and this
    assert cache.gathered == [1]
    assert (2 * PAGE, PAGE) in file.dropped


def test_an_exception_lets_go(tmp_path: Path) -> None:
    _, cache = cached(tmp_path, 3, room=3)
    cache.acquire(0, 0)
    cache.acquire(2, 0)
    cache.release_all()
    assert cache.gathered == []
    cache.acquire(0, 0)
    cache.release(0)
    assert cache.gathered == []


def test_writes_reach_the_file(tmp_path: Path) -> None:
    """An update of a chunk that nobody gathered: its pages go, what it wrote stays."""
    file, cache = cached(tmp_path, 2, room=2)
    cache.flat(1).add_(10)
    cache.drop(1)
    assert not resident(file)[1]
    assert cache.flat(1).tolist() == [11] * (PAGE // 4)


def test_two_types(tmp_path: Path) -> None:
    file = MappedFile(tmp_path, 2 * PAGE, Files())
    chunks = {3: chunk(3, 100), 5: chunk(5, 300, "bfloat16")}
    cache = MappedCache(file, chunks, {3: 0, 5: PAGE}, 2 * PAGE)
    assert (cache.flat(3).dtype, cache.flat(3).shape) == (torch.float32, (100,))
    assert (cache.flat(5).dtype, cache.flat(5).shape) == (torch.bfloat16, (300,))
    cache.flat(5).fill_(2)
    cache.flat(3).fill_(-1)
    assert cache.flat(5).sum().item() == 600


def test_tensors_have_storages_of_their_own(tmp_path: Path) -> None:
    """As ordinary parameters do: else torch.save writes the whole file for one of them."""
    file = MappedFile(tmp_path, 4 * PAGE, Files())
    whole, part = file.memory, file.tensor(2 * PAGE, torch.float32, 7)
    assert part.untyped_storage().nbytes() == 28
    assert part.storage_offset() == 0
    part.fill_(3.0)
    assert whole[2 * PAGE : 2 * PAGE + 28].view(torch.float32).tolist() == [3.0] * 7


actions = st.lists(
    st.tuples(st.sampled_from(["acquire", "release", "start", "drop", "clear"]), st.integers(0, 5)),
    max_size=40,
)


@given(actions, st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_any_order(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[str, int]], room: int
) -> None:
    """Whatever is asked: contents are right, references stay, the room is kept to."""
    folder = tmp_path_factory.mktemp("any")
    file, cache = cached(folder, 6, room)
    cache.clear()
    references = [0] * 6
    for action, which in order:
        before = set(cache._present)
        if action == "acquire":
            flat: Tensor = cache.acquire(which, 0)
            assert flat.eq(which).all()
            references[which] += 1
        elif action == "release" and references[which]:
            cache.release(which)
            references[which] -= 1
        elif action == "start":
            cache.start(which, 0)
        elif action == "drop":
            cache.drop(which)
        elif action == "clear":
            cache.clear()
        there = set(cache._present)
        held = {i for i, count in enumerate(references) if count}
        assert held <= there and cache.gathered == sorted(held)
        assert cache._bytes == PAGE * len(there)
        if action == "acquire" or (action == "start" and which not in before):
            assert there - held - {which} == set() or PAGE * len(there) <= room * PAGE
        elif action == "start":
            assert there == before
        else:
            assert there <= before
    assert file.nbytes == 6 * PAGE
