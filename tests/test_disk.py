"""The disk tier's file: exact bytes at any size and address, clear errors, nothing left behind."""

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_fx.errors import TierError
from elixir_fx.runtime.disk import BLOCK_BYTES, BOUNCE_BYTES, DiskFile, anonymous_mapping
from elixir_fx.testing import FaultyFiles

FILE_BYTES = 8 * BLOCK_BYTES


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return bytes((index * 7 + seed + index // 251) % 256 for index in range(nbytes))


def memory(nbytes: int, skew: int = 0) -> memoryview:
    """Memory that starts `skew` bytes behind a page boundary."""
    return memoryview(anonymous_mapping(skew + nbytes))[skew : skew + nbytes]


def memory_with(data: bytes, skew: int = 0) -> memoryview:
    view = memory(len(data), skew)
    view[:] = data
    return view


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


piece = st.tuples(st.integers(0, FILE_BYTES), st.integers(0, FILE_BYTES)).map(
    lambda cuts: (min(cuts), max(cuts) - min(cuts))
)
skews = st.sampled_from([0, 1, 64, 512, 4095])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), piece, skews), max_size=12),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_sequence_of_reads_and_writes_equals_plain_bytes(
    tmp_path_factory, steps, short_reads, short_writes, cached
):
    files = FaultyFiles(
        short_reads=short_reads,
        short_writes=short_writes,
        refuse_direct="flag" if cached else "",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = DiskFile(tmp_path_factory.getbasetemp(), FILE_BYTES, files)
    model = bytearray(FILE_BYTES)
    for number, (writes, (offset, nbytes), skew) in enumerate(steps):
        if writes:
            data = pattern(nbytes, number)
            file.write(memory_with(data, skew), offset)
            model[offset : offset + nbytes] = data
        else:
            target = memory(nbytes, skew)
            file.read(target, offset)
            assert bytes(target) == model[offset : offset + nbytes]
    everything = memory(FILE_BYTES)
    file.read(everything, 0)
    assert bytes(everything) == model
    file.close()


@pytest.mark.parametrize("nbytes", [14, BLOCK_BYTES + 1, BOUNCE_BYTES, 2 * BOUNCE_BYTES + 6002])
@pytest.mark.parametrize("skew", [0, 64])
def test_odd_sizes_survive(tmp_path, nbytes, skew):
    file = DiskFile(tmp_path, nbytes)
    data = pattern(nbytes)
    file.write(memory_with(data, skew), 0, spare=-nbytes % BLOCK_BYTES)
    target = memory(nbytes, skew)
    file.read(target, 0)
    assert bytes(target) == data


def test_spare_bytes_save_reading_the_last_block(tmp_path):
    files = FaultyFiles()
    file = DiskFile(tmp_path, BLOCK_BYTES, files)
    file.write(memory_with(b"1234567"), 0, spare=BLOCK_BYTES - 7)
    assert (files.reads, files.writes) == (0, 1)
    file.write(memory_with(b"abc"), 2)
    assert (files.reads, files.writes) == (1, 2)
    target = memory(7)
    file.read(target, 0)
    assert bytes(target) == b"12abc67"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_names_folder_offset_bytes_and_reason(tmp_path, number):
    file = DiskFile(tmp_path, FILE_BYTES, FaultyFiles(fail_write_at=0, error=number))
    with pytest.raises(TierError) as caught:
        file.write(memory(BLOCK_BYTES), 2 * BLOCK_BYTES)
    assert str(caught.value) == (
        f"disk={str(tmp_path)!r}: write of 4096 bytes at offset 8192 of the unlinked file failed: "
        f"{os.strerror(number)} ({errno.errorcode[number]})"
    )


def test_a_failed_read_names_where_it_stopped(tmp_path):
    file = DiskFile(tmp_path, FILE_BYTES, FaultyFiles(fail_read_at=1, short_reads=True))
    with pytest.raises(TierError, match=r"read of 8192 bytes at offset 12288 .*EIO"):
        file.read(memory(4 * BLOCK_BYTES), BLOCK_BYTES)


def test_the_end_of_the_file_is_an_error(tmp_path):
    file = DiskFile(tmp_path, FILE_BYTES, FaultyFiles(truncate_at=0))
    with pytest.raises(TierError, match=r"read of 4096 bytes at offset 0 .*the file ends here"):
        file.read(memory(100), 0)


def test_calls_that_move_nothing_are_given_up(tmp_path):
    class Stuck(FaultyFiles):
        def pwrite(self, fd, buffer, offset):
            return 0

    with pytest.raises(TierError, match="short write: 8 calls moved nothing"):
        DiskFile(tmp_path, FILE_BYTES, Stuck()).write(memory(BLOCK_BYTES), 0)


def test_a_full_disk_is_told_at_once(tmp_path):
    before = open_descriptors()
    with pytest.raises(TierError, match=r"32768 bytes asked, \d+ bytes free: .*ENOSPC"):
        DiskFile(tmp_path, FILE_BYTES, FaultyFiles(space=100))
    assert open_descriptors() == before


@pytest.mark.parametrize("refuse", ["flag", "call"])
def test_without_direct_io_it_warns_once_and_goes_on(tmp_path, refuse):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        file = DiskFile(tmp_path, FILE_BYTES, FaultyFiles(refuse_direct=refuse))
        file.write(memory_with(b"abcdefg"), 3)
        target = memory(7)
        file.read(target, 3)
    assert bytes(target) == b"abcdefg"
    assert not file.direct
    assert len(caught) == 1
    assert "refuses direct I/O" in str(caught[0].message)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_a_folder_in_ram_works_with_a_warning():
    with pytest.warns(RuntimeWarning, match="lies on tmpfs, which is RAM"):
        file = DiskFile("/dev/shm", FILE_BYTES)
    file.write(memory_with(b"abcdefg", 1), 3)
    target = memory(7)
    file.read(target, 3)
    assert bytes(target) == b"abcdefg"


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(TierError, match="no such folder; create it first"):
        DiskFile(tmp_path / "missing", FILE_BYTES)
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierError, match="is not a folder"):
        DiskFile(tmp_path / "file", FILE_BYTES)

    class ReadOnly(FaultyFiles):
        def open_unlinked(self, folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(TierError, match=r"cannot create a file there: .*EROFS"):
        DiskFile(tmp_path, FILE_BYTES, ReadOnly())


def test_ranges_outside_the_file_and_use_after_close(tmp_path):
    file = DiskFile(tmp_path, FILE_BYTES)
    with pytest.raises(TierError, match="read of 4096 bytes at offset 30000 in a file of 32768"):
        file.read(memory(BLOCK_BYTES), 30000)
    file.close()
    file.close()
    with pytest.raises(TierError, match="write after close"):
        file.write(memory(1), 0)


def test_no_name_and_no_descriptor_is_left(tmp_path):
    before = open_descriptors()
    file = DiskFile(tmp_path, FILE_BYTES)
    assert os.listdir(tmp_path) == []
    del file
    assert open_descriptors() == before


def test_without_nameless_files_the_name_goes_at_once(tmp_path, monkeypatch):
    system_open = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no")
        return system_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    fd = FaultyFiles().open_unlinked(tmp_path)
    os.close(fd)
    assert os.listdir(tmp_path) == []


def test_a_killed_process_leaves_nothing(tmp_path):
    program = (
        "import sys, time\n"
        "from elixir_fx.runtime.disk import DiskFile\n"
        "file = DiskFile(sys.argv[1], 1 << 20)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert os.listdir(tmp_path) == []


def test_a_forked_child_is_refused(tmp_path):
    file = DiskFile(tmp_path, FILE_BYTES)
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            file.read(memory(1), 0)
        except TierError as error:
            os.write(start, str(error).encode())
        os._exit(0)
    os.close(start)
    os.waitpid(child, 0)
    message = os.read(end, 1000).decode()
    os.close(end)
    assert re.search("read in a forked process; worker processes must not", message)


def test_an_odd_short_count_is_continued_at_a_sector(tmp_path):
    class Odd(FaultyFiles):
        def pread(self, fd, buffer, offset):
            return max(super().pread(fd, buffer, offset) - 1, 1)

        def pwrite(self, fd, buffer, offset):
            count = super().pwrite(fd, buffer, offset)
            return count - 1 if count > BLOCK_BYTES else count

    file = DiskFile(tmp_path, FILE_BYTES, Odd())
    data = pattern(2 * BLOCK_BYTES)
    file.write(memory_with(data), 0)
    with pytest.raises(TierError, match="short read: 8 calls moved nothing"):
        file.read(memory(2 * BLOCK_BYTES), 0)
    assert file.direct
    target = memory(2 * BLOCK_BYTES)
    file.files = FaultyFiles()
    file.read(target, 0)
    assert bytes(target) == data
