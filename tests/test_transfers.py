"""Lanes and tickets: order, errors that reach whoever waits, threads that end."""

import gc
import threading
import time
import weakref

import pytest
import torch

from elixir_fx.errors import TierError
from elixir_fx.machine import Link, Tier
from elixir_fx.runtime.transfers import Lane, Pace, Slots, Ticket


@pytest.fixture
def lane():
    lane = Lane("test lane")
    yield lane
    lane.close()


def lane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "lane" in thread.name]


def test_jobs_run_in_order(lane):
    seen = []
    tickets = [lane.submit(lambda index=index: seen.append(index)) for index in range(100)]
    tickets[-1].wait()
    assert seen == list(range(100))
    assert all(ticket.done and not ticket.failed for ticket in tickets)


def test_ready_is_done():
    ticket = Ticket.ready()
    ticket.wait()
    ticket.block()
    assert ticket.done and ticket.settled and not ticket.failed


def test_an_error_reaches_everyone_who_waits(lane):
    def fail():
        raise TierError("no bytes today")

    ticket = lane.submit(fail)
    for _ in range(2):
        with pytest.raises(TierError, match="no bytes today"):
            ticket.wait()
    assert ticket.failed and ticket.done
    lane.submit(lambda: None).wait()  # the lane goes on


def test_a_bug_in_a_job_reaches_the_waiter_too(lane):
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: 1 // 0).wait()
    lane.submit(lambda: None).wait()


def test_a_job_waits_for_others_without_holding_up_its_lane(lane):
    gate, seen = threading.Event(), []
    other = Lane("other lane")
    first = other.submit(lambda: (gate.wait(), seen.append("first"))[2:] or None)
    second = lane.submit(lambda: seen.append("second"), after=[first])
    lane.submit(lambda: seen.append("free")).wait()
    assert seen == ["free"] and not second.settled
    gate.set()
    second.wait()
    assert seen == ["free", "first", "second"]
    other.close()


def test_a_failed_dependency_fails_the_job_unless_only_order_was_asked(lane):
    def fail():
        raise TierError("broken")

    seen = []
    bad = lane.submit(fail)
    with pytest.raises(TierError, match="broken"):
        lane.submit(lambda: seen.append("after"), after=[bad]).wait()
    lane.submit(lambda: seen.append("behind"), behind=[bad]).wait()
    assert seen == ["behind"]


def test_a_job_may_hand_on_to_another_ticket(lane):
    other, gate = Lane("other lane"), threading.Event()
    ticket = lane.submit(lambda: other.submit(lambda: gate.wait() and None))
    lane.submit(lambda: None).wait()
    assert not ticket.settled
    gate.set()
    ticket.wait()
    other.close()


def test_callbacks_come_before_waiters(lane):
    gate, seen = threading.Event(), []
    ticket = lane.submit(lambda: gate.wait() and None)
    ticket.on_settled(lambda: (time.sleep(0.01), seen.append("called")))
    gate.set()
    ticket.wait()
    assert seen == ["called"]
    ticket.on_settled(lambda: seen.append("late"))
    assert seen == ["called", "late"]


def test_kept_memory_lives_until_the_copy_is_done_and_no_longer(lane):
    gate, memory = threading.Event(), torch.zeros(4)
    reference = weakref.ref(memory)
    ticket = lane.submit(lambda: gate.wait() and None, kept=memory)
    del memory
    assert reference() is not None
    gate.set()
    ticket.wait()
    assert reference() is None


def test_a_failed_job_keeps_no_tensor():
    lane = Lane("test lane")
    memory = torch.zeros(4)
    reference = weakref.ref(memory)

    def fail(memory=memory):
        raise TierError("broken")

    ticket = lane.submit(fail)
    del fail, memory
    with pytest.raises(TierError):
        ticket.wait()
    lane.close()
    assert reference() is None


def test_close_fails_what_waits_and_ends_the_thread():
    lane, began, gate = Lane("test lane"), threading.Event(), threading.Event()
    running = lane.submit(lambda: (began.set(), gate.wait())[2:] or None)
    waiting = lane.submit(lambda: None)
    began.wait()
    chain = [waiting]
    for _ in range(1000):
        chain.append(lane.submit(lambda: None, after=chain[-1:]))
    lane.stop()
    gate.set()
    lane.close()
    lane.close()
    running.wait()
    for ticket in (waiting, chain[-1]):
        with pytest.raises(TierError, match="test lane was closed before this transfer ran"):
            ticket.wait()
    with pytest.raises(TierError, match="closed"):
        lane.submit(lambda: None).wait()
    assert "test lane" not in lane_threads()


def test_a_dropped_lane_ends_its_thread():
    lane = Lane("dropped lane")
    lane.submit(lambda: None).wait()
    thread = lane.thread
    del lane
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_closing_from_a_job_does_not_wait_for_itself():
    lane = Lane("test lane")
    lane.submit(lane.close).wait()
    lane.thread.join(10)
    assert not lane.thread.is_alive()


def test_a_played_link_counts_both_directions_on_one_clock(monkeypatch):
    slept = []
    monkeypatch.setattr("elixir_fx.runtime.transfers.time.monotonic", lambda: 0.0)
    monkeypatch.setattr("elixir_fx.runtime.transfers.time.sleep", slept.append)
    link = Link(
        source=Tier.HOST,
        target=Tier.DEVICE,
        bytes_per_s=100.0,
        shared_bytes_per_s=100.0,
        latency_s=0.5,
    )
    clock = [0.0]
    there, back = Pace(link, clock), Pace(link, clock)
    there.hold(100, 0.0)
    there.hold(100, 0.0)
    back.hold(300, 0.0)
    assert slept == [1.5, 3.0, 5.0]


def test_slots_are_taken_again_only_when_their_copy_is_done(lane):
    slots, gate = Slots(torch.zeros(8192, dtype=torch.uint8), 4096), threading.Event()
    assert slots.count == 2
    first, second = slots.take(), slots.take_now()
    assert second is not None and slots.take_now() is None
    slots.give(first, lane.submit(lambda: gate.wait() and None))
    threading.Timer(0.02, gate.set).start()
    assert slots.take().data_ptr() == first.data_ptr()
    assert gate.is_set()
