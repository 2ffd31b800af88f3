from dataclasses import replace

import pytest
from graphs_facts import ADAMW, SGD, Builder, accelerator, cpu

from elixir_fx.machine import Link, Machine, Tier
from elixir_fx.plan import Homes, Layout, Limits, align
from elixir_fx.planner.bound import Bound
from elixir_fx.planner.footprint import Footprint
from elixir_fx.planner.forecast import Player, forecast
from elixir_fx.planner.pack import pack
from elixir_fx.planner.place import first_call, place, uses
from elixir_fx.planner.wires import Wires

MB = 1_000_000
IN, OUT = (Tier.DISK, Tier.DEVICE), (Tier.DEVICE, Tier.DISK)


def disk(read: float, write: float, shared: float, share: float = 0.0, latency_s: float = 0.0):
    """A machine whose only links are to its disk."""
    return Machine(
        name="test",
        fingerprint="",
        device="cpu",
        memory={},
        links=tuple(
            Link(
                source=source,
                target=target,
                bytes_per_s=rate,
                shared_bytes_per_s=shared,
                latency_s=latency_s,
                compute_share=share,
            )
            for (source, target), rate in ((IN, read), (OUT, write))
        ),
        flops_per_s={"float32": 1e9},
        stream_bytes_per_s=1e12,
    )


def test_a_transfer_beside_compute_costs_nothing_and_the_rest_is_waited_for():
    wires = Wires(disk(MB, MB, 2 * MB))
    done = wires.event()
    wires.send((IN,), 3 * MB, event=done)
    wires.compute(2.0)
    assert wires.now == pytest.approx(2.0)
    assert wires.wait(done) == pytest.approx(1.0)


def test_both_directions_share_a_half_duplex_link():
    wires = Wires(disk(2 * MB, 2 * MB, 2 * MB))
    read, write = wires.event(), wires.event()
    wires.send((IN,), 2 * MB, event=read)
    wires.send((OUT,), MB, event=write)
    wires.wait(write)
    assert wires.now == pytest.approx(1.0)  # each at half the rate
    wires.wait(read)
    assert wires.now == pytest.approx(1.5)


def test_a_full_duplex_link_shares_nothing():
    wires = Wires(disk(MB, MB, 2 * MB))
    read, write = wires.event(), wires.event()
    wires.send((IN,), MB, event=read)
    wires.send((OUT,), MB, event=write)
    wires.wait(read)
    wires.wait(write)
    assert wires.now == pytest.approx(1.0)


def test_streaming_slows_compute_and_latency_counts():
    wires = Wires(disk(MB, MB, 2 * MB, share=0.5, latency_s=0.25))
    done = wires.event()
    wires.send((IN,), MB // 2, parts=2, event=done)
    wires.compute(2.0)  # the first second at half speed
    assert wires.now == pytest.approx(2.5)
    assert wires.wait(done) == 0


def test_a_transfer_from_the_disk_passes_host_memory():
    wires = Wires(accelerator())
    done = wires.event()
    wires.send(((Tier.DISK, Tier.HOST), (Tier.HOST, Tier.DEVICE)), 3 * 10**9, event=done)
    assert wires.wait(done) == pytest.approx(1 + 3 / 20, rel=1e-3)
    assert wires.moved(Tier.DISK, Tier.HOST) == wires.moved(Tier.HOST, Tier.DEVICE) == 3 * 10**9


def test_a_transfer_may_take_other_bytes_over_each_link():
    """As a rank's share from its disk, and the rest from its peers."""
    wires = Wires(disk(MB, MB, 2 * MB).with_peers())
    done = wires.event()
    peers = (Tier.PEERS, Tier.DEVICE)
    wires.send((IN, peers), [MB, 3 * MB], event=done)
    rate, latency_s = 1.4e9, 3e-4
    assert wires.wait(done) == pytest.approx(1.0 + 3 * MB / rate + latency_s)
    assert (wires.moved(*IN), wires.moved(*peers)) == (MB, 3 * MB)
    nothing = wires.event()
    wires.send((peers,), [0], event=nothing)  # the ranks wait for each other all the same
    assert wires.wait(nothing) == pytest.approx(latency_s)


def test_a_transfer_over_no_link_is_through_at_once():
    wires = Wires(disk(MB, MB, 2 * MB))
    for sizes in (5 * MB, []):
        done = wires.event()
        wires.send((), sizes, event=done)
        assert wires.wait(done) == 0 and wires.now == 0
    assert wires.moved(*IN) == wires.moved(*OUT) == 0
    assert wires.moved(Tier.PEERS, Tier.DEVICE) == 0


def two_layers(optimizer=SGD):
    """Two weights of 4 MB, one second of compute for each in either phase."""
    b = Builder(optimizer=optimizer)
    b.parameter("a", 1 << 20)
    b.parameter("b", 1 << 20)
    b.node("fa", "a", seconds=1.0, nbytes=1000)
    b.node("fb", "b", "fa", seconds=1.0)
    b.backward()
    b.node("gb", "fa", "b", seconds=1.0, gradient_of="b")
    b.node("ga", "a", seconds=1.0, gradient_of="a")
    return b.facts()


def lay(facts, machine, homes, gather_bytes=1 << 23, update_numel=1 << 20):
    """A layout by hand: a chunk for each parameter, all with the same homes."""
    chunks = tuple(replace(c, homes=homes) for c in pack(facts, 1, {}))
    player = Player.of(facts, machine, Footprint(facts, chunks))
    away = [c for c in chunks if c.homes.parameters != Tier.DEVICE]
    stays = place(uses(facts, away), gather_bytes, first_call(facts))
    layout = Layout(
        chunks=chunks,
        gather_bytes=gather_bytes,
        gradient_blocks=1,
        gradient_block_bytes=1 << 22,
        update_numel=update_numel,
        arena_bytes=gather_bytes + (1 << 22),
        host_bytes=0,
        disk_bytes=0,
    )
    return player, layout, stays


def test_a_step_by_hand():
    facts = two_layers()
    machine = disk(1 << 22, 1 << 22, 1 << 23)  # a second for each weight
    away = Homes(parameters=Tier.DISK, gradients=Tier.DISK, states=Tier.DEVICE)
    player, layout, stays = lay(facts, machine, away)
    timing = player.play(layout, stays)
    # a: an exposed second; b arrives while fa computes; both are kept for the backward.
    # From 4 s gb is written, from 5 s ga. Update of a: loads p and g from 6 s to 8 s, writes p
    # until 9 s. The arena has no second place of that size, so only now b: until 12 s.
    assert (timing.hits, timing.misses) == (3, 1)
    assert timing.exposed["disk->device"] == pytest.approx(1.0)
    assert timing.optimizer_s == pytest.approx(7.0, abs=1e-3)
    assert timing.step_s == pytest.approx(12.0, abs=1e-3)
    assert timing.gathered_bytes == 2 << 22
    assert timing.moved == {IN: 6 << 22, OUT: 4 << 22}


def bound(player):
    limits = Limits(device=1 << 30, disk=1 << 30)
    return Bound(facts=player.facts, machine=player.machine, limits=limits)


def test_exposed_seconds_add_up():
    player, layout, stays = lay(two_layers(), cpu(), Homes(parameters=Tier.DISK))
    made = forecast(player, layout, stays, bound(player))
    assert sum(s for _, s in made.exposed) == pytest.approx(made.exposed_s)
    assert made.step_s == pytest.approx(made.compute_s + made.exposed_s)
    assert made.prefetch_hits + made.prefetch_misses == len(stays)


def test_gradients_live_until_their_reduce_and_without_one_to_the_end():
    facts = two_layers()
    footprint = Footprint(facts, pack(facts, 1, {}))
    grown = 1 << 22
    assert list(footprint.live) == [0, 0, 1000, 1000, 1000 + grown, grown, 0]
    assert list(footprint.live_kept) == [0, 0, 1000, 1000, 1000 + grown, 2 * grown, 2 * grown]
    together = Footprint(facts, pack(facts, 1 << 24, {}))
    assert list(together.live) == [0, 0, 1000, 1000, 1000 + grown, 2 * grown, 0]


def test_largest_storages_are_named_for_people():
    player, layout, stays = lay(two_layers(), cpu(), Homes(parameters=Tier.DISK))
    made = forecast(player, layout, stays, bound(player))
    assert made.peak_node == "gb"
    assert made.largest == (
        ("gradient of b (model.py:7)", align(1 << 22)),
        ("fa (model.py:7)", 1000),
    )


def test_foreach_updates_hold_scratch_for_all_resident_parameters():
    facts = two_layers()
    one = Footprint(facts, pack(facts, 1, {})).kept_update_bytes
    many = replace(facts, optimizer=replace(SGD, foreach=True))
    assert Footprint(many, pack(many, 1, {})).kept_update_bytes == 2 * one > 0


def test_the_peak_can_be_the_update():
    player, layout, stays = lay(two_layers(ADAMW), cpu(), Homes(states=Tier.DISK))
    made = forecast(player, layout, stays, bound(player))
    assert made.peak_node == "optimizer"  # new states and scratch of a unit
    assert made.largest == (("update of a unit", 16 << 20),)


def test_an_update_on_the_host_takes_memory_there_and_not_on_the_device():
    facts = two_layers(ADAMW)
    footprint = Footprint(facts, pack(facts, 1, {}))
    trained = {sizes.chunk.id for sizes in footprint.sizes if sizes.chunk.trainable}
    streamed = footprint.update_bytes(trained, 1)
    assert streamed > 0 == footprint.host_update_bytes((), 1)
    assert footprint.update_bytes(trained, 1, on_host=trained) == 0
    assert footprint.host_update_bytes(trained, 1) == streamed
