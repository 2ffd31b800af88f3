"""The store: bytes equal a plain model's on every kind of machine, in any order, with faults."""

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_fx.errors import TierError
from elixir_fx.machine import Tier
from elixir_fx.runtime.store import Region, Store, TensorHome
from elixir_fx.runtime.transfers import Lane, Ticket
from elixir_fx.testing import FaultyFiles, emulated

CPU = torch.device("cpu")
BLOCK = 4096
HOME_BYTES = 6 * BLOCK + 100
PLAYED = emulated(bytes_per_s=1e12, latency_s=0.0, disk_memory=1 << 30)
UNIFIED = replace(PLAYED, emulated=False, name="cpu")
SETUPS = ["unified disk", "host", "staged disk", "staged disk, one slot"]


def make_store(setup: str, folder: Path, files: FaultyFiles | None = None) -> tuple[Store, Region]:
    """A store and a region of HOME_BYTES on the tier that the set-up is about."""
    common = {"device": CPU, "arena_bytes": 16 * BLOCK}
    disk = {"disk": folder, "disk_bytes": 8 * BLOCK, "files": files}
    if setup == "unified disk":
        store = Store(machine=UNIFIED, **common, **disk)
    elif setup == "host":
        store = Store(machine=PLAYED, host_bytes=8 * BLOCK, **common)
    else:
        slots = 1 if "one slot" in setup else 4
        store = Store(machine=PLAYED, staging_bytes=slots * BLOCK, **common, **disk)
    tier = Tier.HOST if setup == "host" else Tier.DISK
    return store, store.allocate(tier, HOME_BYTES)


def noise(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if "elixir" in thread.name)


@pytest.fixture(params=SETUPS)
def setup(request):
    return request.param


piece = st.tuples(st.integers(0, HOME_BYTES), st.integers(0, HOME_BYTES)).map(
    lambda cuts: (min(cuts), max(cuts) - min(cuts))
)
aligned = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(
    lambda cuts: (min(cuts) * BLOCK, abs(cuts[0] - cuts[1]) * BLOCK)
)
move = st.tuples(st.booleans(), st.one_of(piece, aligned), st.sampled_from([0, 1, 64, BLOCK]))


@pytest.mark.parametrize("setup", SETUPS)
@settings(max_examples=100, deadline=None)
@given(moves=st.lists(move, max_size=20), short=st.booleans())
def test_any_sequence_equals_plain_bytes(tmp_path_factory, setup, moves, short):
    files = FaultyFiles(short_reads=short, short_writes=short)
    store, region = make_store(setup, tmp_path_factory.getbasetemp(), files)
    model = bytearray(HOME_BYTES)
    store.put(region, torch.zeros(HOME_BYTES, dtype=torch.uint8))
    expected = []
    for seed, (writes, (offset, nbytes), skew) in enumerate(moves):
        part = region.part(offset, nbytes)
        if writes:
            source = noise(nbytes + skew, seed)[skew:]
            store.put(part, source)
            model[offset : offset + nbytes] = source.numpy().tobytes()
        else:
            into = torch.zeros(nbytes + skew, dtype=torch.uint8)[skew:]
            store.fetch(part, into)
            expected.append((into, bytes(model[offset : offset + nbytes])))
    store.drain()
    for into, value in expected:
        assert into.numpy().tobytes() == value
    everything = store.arena[:HOME_BYTES]
    store.fetch(region, everything).wait()
    assert everything.numpy().tobytes() == model
    store.close()


def test_memory_beside_the_destination_is_left_alone(setup, tmp_path):
    store, region = make_store(setup, tmp_path)
    store.put(region, noise(HOME_BYTES, 0)).wait()
    around = torch.full((HOME_BYTES + 2 * 64,), 77, dtype=torch.uint8)
    store.fetch(region, around[64:-64]).wait()
    assert torch.equal(around[64:-64], noise(HOME_BYTES, 0))
    assert (around[:64] == 77).all() and (around[-64:] == 77).all()
    store.close()


def test_neighbours_of_odd_sizes_do_not_touch_each_other(setup, tmp_path):
    store, region = make_store(setup, tmp_path)
    store.put(region, noise(HOME_BYTES, 0))
    other = store.allocate(region.tier, 7)
    assert other.offset == 7 * BLOCK
    store.put(other, noise(7, 1))
    store.put(region, noise(HOME_BYTES, 2))
    result, small = torch.empty(HOME_BYTES, dtype=torch.uint8), torch.empty(7, dtype=torch.uint8)
    store.fetch(other, small).wait()
    store.fetch(region, result).wait()
    assert torch.equal(small, noise(7, 1)) and torch.equal(result, noise(HOME_BYTES, 2))
    store.close()


def test_many_blocks_in_flight_both_ways_do_not_deadlock(tmp_path):
    store, region = make_store("staged disk, one slot", tmp_path)
    tickets = []
    for index in range(60):
        part = region.part(index % 6 * BLOCK, BLOCK)
        tickets.append(store.put(part, torch.full((BLOCK,), index, dtype=torch.uint8)))
        tickets.append(store.fetch(region.part(0, 6 * BLOCK), store.arena[: 6 * BLOCK]))
    tickets[-1].wait()
    store.drain()
    assert store.arena[::BLOCK][:6].tolist() == [54, 55, 56, 57, 58, 59]
    store.close()


def test_after_waits_for_the_ticket(setup, tmp_path):
    store, region = make_store(setup, tmp_path)
    store.put(region, noise(HOME_BYTES, 0)).wait()
    lane, gate = Lane("test lane"), threading.Event()
    into = torch.zeros(HOME_BYTES, dtype=torch.uint8)
    ticket = store.fetch(region, into, after=[lane.submit(lambda: gate.wait() and None)])
    store.fetch(region.part(0, 7), torch.empty(7, dtype=torch.uint8)).wait()
    assert not ticket.done and not into.any()
    gate.set()
    ticket.wait()
    assert torch.equal(into, noise(HOME_BYTES, 0))
    lane.close()
    store.close()


def test_a_source_may_be_dropped_right_after_the_put(setup, tmp_path):
    store, region = make_store(setup, tmp_path)
    lane, gate = Lane("test lane"), threading.Event()
    source = noise(HOME_BYTES, 3)
    reference = weakref.ref(source.untyped_storage())
    ticket = store.put(region, source, after=[lane.submit(lambda: gate.wait() and None)])
    del source
    gc.collect()
    assert reference() is not None
    gate.set()
    ticket.wait()
    into = torch.zeros(HOME_BYTES, dtype=torch.uint8)
    store.fetch(region, into).wait()
    assert torch.equal(into, noise(HOME_BYTES, 3))
    store.drain()
    lane.close()
    store.close()
    assert reference() is None


def test_counters_count_wanted_bytes_by_link(setup, tmp_path):
    store, region = make_store(setup, tmp_path)
    store.put(region, noise(HOME_BYTES, 0)).wait()
    before = store.counters.snapshot()
    store.fetch(region, torch.empty(HOME_BYTES, dtype=torch.uint8)).wait()
    disk = HOME_BYTES if region.tier == Tier.DISK else 0
    link = 0 if setup == "unified disk" else HOME_BYTES
    assert (before.disk_write_bytes, before.device_to_host_bytes) == (disk, link)
    assert (before.disk_read_bytes, before.host_to_device_bytes) == (0, 0)
    after = store.counters
    assert (after.disk_read_bytes, after.host_to_device_bytes) == (disk, link)
    store.close()


@pytest.mark.parametrize("setup", ["unified disk", "staged disk", "staged disk, one slot"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_a_failed_put_was_to_write_is_kept_until_it_is_written(tmp_path, setup, number):
    files = FaultyFiles(fail_write_at=1000, error=number)
    store, region = make_store(setup, tmp_path, files)
    expected = noise(HOME_BYTES, 0)
    store.put(region, expected).wait()
    files.fail_write_at, files.once = files.writes, True
    part = region.part(BLOCK, 2 * BLOCK)
    live = noise(2 * BLOCK, 1)
    ticket = store.put(part, live)
    early = torch.empty(HOME_BYTES, dtype=torch.uint8)
    store.fetch(region, early).wait()
    with pytest.raises(TierError, match=errno.errorcode[number]):
        ticket.wait()
    store.drain()  # told once
    expected[BLOCK : 3 * BLOCK] = live
    assert torch.equal(early, expected)
    expected[BLOCK : 2 * BLOCK] = 7
    store.put(part.part(0, BLOCK), expected[BLOCK : 2 * BLOCK].clone()).wait()
    live.zero_()  # the caller's again: what is kept is a copy
    for first, size in ((0, HOME_BYTES), (BLOCK, 2 * BLOCK), (2 * BLOCK + 5, 11)):
        again = torch.empty(size, dtype=torch.uint8)
        store.fetch(region.part(first, size), again).wait()
        assert torch.equal(again, expected[first : first + size])
    store.put(part, live).wait()
    store.fetch(region, early).wait()
    assert not early[BLOCK : 3 * BLOCK].any()
    store.close()


def test_an_error_that_nobody_waited_for_is_told_by_drain(tmp_path):
    store, region = make_store("unified disk", tmp_path, FaultyFiles(fail_write_at=0))
    store.put(region, noise(HOME_BYTES, 0))
    with pytest.raises(TierError, match="EIO"):
        store.drain()
    store.drain()
    store.close()


@pytest.mark.parametrize("setup", ["unified disk", "staged disk", "staged disk, one slot"])
def test_a_truncated_file_fails_the_fetch_and_nothing_else(tmp_path, setup):
    files = FaultyFiles()
    store, region = make_store(setup, tmp_path, files)
    store.put(region, noise(HOME_BYTES, 0)).wait()
    files.truncate_at = files.reads
    with pytest.raises(TierError, match="short read: the file ends here"):
        store.fetch(region, torch.empty(HOME_BYTES, dtype=torch.uint8)).wait()
    files.truncate_at = None
    into = torch.empty(HOME_BYTES, dtype=torch.uint8)
    store.fetch(region, into).wait()
    assert torch.equal(into, noise(HOME_BYTES, 0))
    store.close()


def test_a_full_tier_says_what_was_asked_and_what_is_left(tmp_path):
    store, _ = make_store("host", tmp_path)
    assert store.used(Tier.HOST) == 7 * BLOCK and store.capacity(Tier.HOST) == 8 * BLOCK
    with pytest.raises(
        TierError, match="the host tier is full: 4097 bytes asked, 4096 of 32768 bytes left"
    ):
        store.allocate(Tier.HOST, BLOCK + 1)
    with pytest.raises(TierError, match="the disk tier is full"):
        store.allocate(Tier.DISK, 1)
    assert store.allocate(Tier.HOST, BLOCK).offset == 7 * BLOCK
    store.close()


@pytest.mark.parametrize("setup", ["unified disk", "staged disk"])
def test_spare_bytes_of_a_piece_save_a_read(tmp_path, setup):
    files = FaultyFiles()
    store, region = make_store(setup, tmp_path, files)
    assert region.spare == BLOCK - 100 == region.part(7, HOME_BYTES - 7).spare
    store.put(region, noise(HOME_BYTES, 0)).wait()
    store.put(region.part(BLOCK, 7, spare=BLOCK - 7), noise(7, 1)).wait()
    assert files.reads == 0
    store.put(region.part(BLOCK, 7), noise(7, 1)).wait()
    assert files.reads == 1
    with pytest.raises(TierError, match="are not all inside"):
        region.part(0, HOME_BYTES, spare=1)
    store.close()


def test_wrong_tensors_and_pieces_are_refused(tmp_path):
    store, region = make_store("host", tmp_path)
    with pytest.raises(TierError, match="a tensor of 3 bytes for the region of 24676 bytes"):
        store.fetch(region, torch.empty(3, dtype=torch.uint8))
    with pytest.raises(TierError, match="not contiguous"):
        store.put(region.part(0, 8), torch.empty(16, dtype=torch.uint8)[::2])
    with pytest.raises(TierError, match="on meta"):
        store.put(region.part(0, 8), torch.empty(8, dtype=torch.uint8, device="meta"))
    with pytest.raises(TierError, match="are not all inside"):
        region.part(HOME_BYTES, 1)
    store.close()


def test_setups_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(TierError, match="host and device are one memory"):
        Store(device=CPU, arena_bytes=0, machine=UNIFIED, host_bytes=1)
    with pytest.raises(TierError, match="pass disk="):
        Store(device=CPU, arena_bytes=0, machine=UNIFIED, disk_bytes=1)
    before = (threads(), descriptors())
    with pytest.raises(TierError, match="staging_bytes=100"):
        Store(
            device=CPU,
            arena_bytes=0,
            machine=PLAYED,
            disk_bytes=1,
            disk=tmp_path,
            staging_bytes=100,
        )
    with pytest.raises(TierError, match="ENOSPC"):
        Store(
            device=CPU,
            arena_bytes=0,
            machine=UNIFIED,
            disk_bytes=BLOCK,
            disk=tmp_path,
            files=FaultyFiles(space=0),
        )
    assert (threads(), descriptors()) == before


def test_the_arena_is_aligned_and_the_device_tier_lies_in_it(tmp_path):
    store, _ = make_store("host", tmp_path)
    assert store.arena.data_ptr() % BLOCK == 0 and store.arena.nbytes == 16 * BLOCK
    region = store.allocate(Tier.DEVICE, 7)
    store.put(region, noise(7, 0)).wait()
    assert torch.equal(store.view(region), noise(7, 0))
    into = torch.empty(7, dtype=torch.uint8)
    store.fetch(region, into, after=[Ticket.ready()]).wait()
    assert torch.equal(into, noise(7, 0))
    store.close()


def test_close_ends_threads_and_files_and_refuses_more(setup, tmp_path):
    before = (threads(), descriptors())
    store, region = make_store(setup, tmp_path)
    store.put(region, noise(HOME_BYTES, 0)).wait()
    assert (threads(), descriptors()) != before
    store.close()
    store.close()
    assert (threads(), descriptors()) == before
    for use in (
        lambda: store.fetch(region, torch.empty(HOME_BYTES, dtype=torch.uint8)),
        lambda: store.allocate(region.tier, 1),
    ):
        with pytest.raises(TierError, match="was released"):
            use()
    store.arena.fill_(1)  # still memory


def test_a_dropped_store_leaves_nothing_even_with_transfers_under_way(setup, tmp_path):
    before = (threads(), descriptors())
    store, region = make_store(setup, tmp_path)
    tickets = [store.put(region, noise(HOME_BYTES, seed)) for seed in range(20)]
    reference = weakref.ref(store)
    del store
    gc.collect()
    assert reference() is None
    assert all(ticket.settled for ticket in tickets)
    assert (threads(), descriptors()) == before


def test_a_forked_child_is_refused(tmp_path):
    store, region = make_store("unified disk", tmp_path)
    end, start = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.fetch(region, torch.empty(HOME_BYTES, dtype=torch.uint8))
        except TierError as error:
            os.write(start, str(error).encode())
        store.close()
        os._exit(0)
    os.close(start)
    os.waitpid(child, 0)
    message = os.read(end, 1000).decode()
    os.close(end)
    assert "worker processes must not use a compiled model" in message
    into = torch.empty(HOME_BYTES, dtype=torch.uint8)
    store.put(region, noise(HOME_BYTES, 0))
    store.fetch(region, into).wait()
    assert torch.equal(into, noise(HOME_BYTES, 0))
    store.close()


def test_the_interpreter_ends_with_transfers_under_way(tmp_path):
    program = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from dataclasses import replace\n"
        "from elixir_fx.machine import Tier\n"
        "from elixir_fx.runtime.store import Store\n"
        "from elixir_fx.testing import emulated\n"
        "n = 8 << 20\n"
        "for machine in (emulated(), replace(emulated(), emulated=False)):\n"
        "    store = Store(device=torch.device('cpu'), arena_bytes=n, disk_bytes=n,\n"
        "                  staging_bytes=1 << 20, disk=Path(sys.argv[1]), machine=machine)\n"
        "    region = store.allocate(Tier.DISK, n)\n"
        "    globals()[f'kept{machine.emulated}'] = store\n"
        "    for _ in range(8): store.put(region, store.arena)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path) == []


def make_home(store: Store, tier: Tier, value: torch.Tensor) -> TensorHome:
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    span = span if value.numel() else 0
    region = store.allocate(tier, span * value.itemsize)
    return TensorHome(
        store, region, value.shape, value.stride(), value.dtype, CPU, "layers.0.weight"
    )


VALUES = {
    "plain": torch.arange(12.0).view(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "with gaps": torch.arange(24.0).view(4, 6)[:, :3],
    "seven halves": torch.arange(7).to(torch.bfloat16),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "empty": torch.empty(0, 5),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_home_gives_back_value_shape_and_strides(setup, tmp_path, name):
    value = VALUES[name]
    store, region = make_store(setup, tmp_path)
    home = make_home(store, region.tier, value)
    home.store(value)
    loaded = home.load()
    assert torch.equal(loaded, value) and loaded.dtype == value.dtype
    assert loaded.stride() == value.stride()
    home.store((loaded.to(torch.float64) * 2).to(value.dtype))
    assert torch.equal(home.load(), (value.to(torch.float64) * 2).to(value.dtype))
    assert torch.equal(loaded, value)  # a copy of its own
    flat = torch.empty(home.span, dtype=value.dtype)
    home.fetch(flat).wait()
    home.view(flat).zero_()
    home.put(flat).wait()
    assert not home.load().any()
    store.close()


def test_a_home_takes_parameters_and_any_layout(tmp_path):
    store, region = make_store("host", tmp_path)
    home = make_home(store, region.tier, torch.empty(3, 4))
    parameter = torch.nn.Parameter(torch.arange(12.0).view(4, 3).t())
    home.store(parameter)
    assert torch.equal(home.load(), parameter.detach())
    assert not home.load().requires_grad
    store.close()


def test_a_home_names_its_tensor_in_errors(tmp_path):
    store, region = make_store("host", tmp_path)
    home = make_home(store, region.tier, torch.empty(3, 4))
    with pytest.raises(TierError, match=r"layers.0.weight is torch.float32 \[3, 4\]; the new"):
        home.store(torch.empty(4, 3))
    with pytest.raises(TierError, match=r"layers.0.weight moves as torch.float32 \[12\], not as"):
        home.fetch(torch.empty(3, 4))
    with pytest.raises(TierError, match=r"layers.0.weight: 48 bytes do not fill"):
        TensorHome(store, region, (3, 4), (4, 1), torch.float32, CPU, "layers.0.weight")
    store.close()


def test_a_store_collected_on_its_own_lane_ends_all_the_same(setup, tmp_path):
    before, others = (threads(), descriptors()), set(threading.enumerate())
    store, region = make_store(setup, tmp_path)
    lane, gate = Lane("test lane"), threading.Event()
    first = lane.submit(lambda: gate.wait() and None)
    ticket = store.put(region, noise(HOME_BYTES, 0), after=[first])
    rest = [store.fetch(region, torch.empty(HOME_BYTES, dtype=torch.uint8)) for _ in range(5)]
    # a cycle that only the collector frees, which runs on the thread that settles the put
    cycle = [store]
    cycle.append(cycle)
    ticket.on_settled(gc.collect)
    reference = weakref.ref(store)
    gc.disable()
    try:
        del store, cycle
        gate.set()
        ticket.wait()
        assert reference() is None
    finally:
        gc.enable()
    for other in rest:
        other.finish()
    lane.close()
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("elixir_fx"):
            thread.join(10)
    assert (threads(), descriptors()) == before


# -- memory that stays on the device, beside the arena -----------------------------------------


def test_resident_memory_lies_behind_the_arena_and_apart():
    store, _ = make_store("host", Path())
    given = noise(3 * BLOCK, 5)
    regions = [store.reside(100), store.reside(3 * BLOCK, given), store.reside(0), store.reside(7)]
    assert {region.tier for region in regions} == {Tier.DEVICE}
    ends = [store.arena.numel(), *(region.end for region in regions)]
    assert all(a <= b.offset for a, b in zip(ends, regions, strict=False))
    assert store.used(Tier.DEVICE) == 0  # the arena is not given away by this
    assert not store.view(regions[0]).any() and store.view(regions[0]).numel() == 100
    assert store.view(regions[1]).data_ptr() == given.data_ptr()
    assert store.view(regions[2]).numel() == 0
    store.view(regions[0])[:] = 1
    store.view(regions[3])[:] = 2
    assert (store.view(regions[0]) == 1).all() and (store.view(regions[3]) == 2).all()
    assert torch.equal(given, noise(3 * BLOCK, 5)) and not store.arena.any()
    store.close()


def test_resident_memory_is_fetched_and_put_by_parts():
    store, _ = make_store("host", Path())
    model = bytearray(noise(HOME_BYTES, 1).numpy().tobytes())
    region = store.reside(HOME_BYTES)
    store.put(region, noise(HOME_BYTES, 1)).wait()
    for seed, (offset, nbytes) in enumerate([(0, 1), (BLOCK - 3, 7), (5, 3 * BLOCK), (100, 0)]):
        part = region.part(offset, nbytes)
        store.put(part, noise(nbytes, 10 + seed)).wait()
        model[offset : offset + nbytes] = noise(nbytes, 10 + seed).numpy().tobytes()
        into = torch.zeros(nbytes, dtype=torch.uint8)
        store.fetch(part, into).wait()
        assert torch.equal(into, store.view(part))
        assert store.view(part).numpy().tobytes() == model[offset : offset + nbytes]
    assert store.view(region).numpy().tobytes() == model
    before = store.counters.snapshot()
    assert before.host_to_device_bytes == before.device_to_host_bytes == 0  # over no link
    with pytest.raises(TierError, match="a tensor of 3 bytes for"):
        store.put(region, noise(3, 0))
    store.close()


def test_a_copy_on_the_device_waits_for_what_it_comes_after():
    store, _ = make_store("host", Path())
    region = store.reside(BLOCK)
    lane, gate = Lane("test lane"), threading.Event()
    source = torch.zeros(BLOCK, dtype=torch.uint8)

    def write():
        gate.wait()
        source.fill_(9)

    ticket = lane.submit(write)
    threading.Timer(0.05, gate.set).start()
    store.put(region, source, after=[ticket]).wait()
    assert (store.view(region) == 9).all()
    lane.close()
    store.close()


def test_a_tensor_at_home_on_the_device_can_be_looked_at(tmp_path):
    store, away = make_store("unified disk", tmp_path)
    dtype = torch.bfloat16
    home = TensorHome(store, store.reside(12), (2, 3), (1, 2), dtype, CPU, "here")
    value = torch.arange(6, dtype=dtype).view(2, 3)
    home.store(value)
    assert home.memory is not None and home.memory.dtype == dtype
    assert torch.equal(home.view(home.memory), value) and torch.equal(home.load(), value)
    assert home.load().stride() == (1, 2)
    home.memory.zero_()
    assert not home.load().any()
    there = TensorHome(store, away.part(0, 12), (6,), (1,), dtype, CPU, "there")
    assert there.memory is None
    store.close()


@pytest.mark.parametrize("writes", [True, False])
def test_host_memory_is_given_once_nothing_moves_there(writes):
    slow = emulated(bytes_per_s=1e6, latency_s=0.05)
    store = Store(device=CPU, arena_bytes=4 * BLOCK, machine=slow, host_bytes=4 * BLOCK)
    region, beside = store.allocate(Tier.HOST, BLOCK), store.allocate(Tier.HOST, BLOCK)
    first, second = noise(BLOCK, 1), noise(BLOCK, 2)
    store.put(region, first).block()
    home = TensorHome(store, region, (BLOCK,), (1,), torch.uint8, CPU, "p")
    into = torch.zeros(BLOCK, dtype=torch.uint8)
    ticket = store.put(region, second) if writes else store.fetch(region, into)
    memory = home.host_memory()
    assert ticket.done
    assert torch.equal(memory, second if writes else first)
    memory.fill_(7)  # what somebody reads now, or read just before
    assert writes or torch.equal(into, first)
    store.fetch(region, into).block()
    assert (into == 7).all()
    assert (store.host_memory(beside) == 0).all()
    store.close()
    with pytest.raises(TierError, match="released"):
        store.host_memory(region)


def test_what_is_not_on_the_host_has_no_host_memory(tmp_path):
    store, region = make_store("unified disk", tmp_path)
    home = TensorHome(store, region, (HOME_BYTES,), (1,), torch.uint8, CPU, "p")
    assert home.host_memory() is None
    store.close()
