"""The gauge of the played device: what is counted, once, and when it is let go."""

import pytest
import torch

from elixir_fx.errors import TierError
from elixir_fx.runtime.meter import DeviceMeter, uncounted


def test_a_storage_counts_once_until_its_last_view_dies():
    with DeviceMeter() as meter:
        first = torch.ones(1000)
        view = first.view(10, 100)
        del first
        assert meter.current_bytes == 4000
        second = view + 1
        assert meter.current_bytes == 8000
        del view
        assert (meter.current_bytes, meter.peak_bytes) == (4000, 8000)
    del second
    assert meter.current_bytes == 0


def test_what_existed_before_and_the_arena_are_free():
    before, arena = torch.ones(1000), torch.zeros(4096, dtype=torch.uint8)
    meter = DeviceMeter(base_bytes=4096)
    meter.ignore(arena.untyped_storage())
    with meter:
        before.mul_(2)
        view = before[1:]
        inside = arena[:400].view(torch.float32)
        assert meter.current_bytes == 4096
        result = view[:100] + inside
        assert meter.current_bytes == 4096 + 400
    assert (before == 2).all() and result.numel() == 100


def test_a_resized_storage_counts_its_new_size():
    with DeviceMeter() as meter:
        value = torch.empty(0)
        value.resize_(100)
        assert meter.current_bytes == 400
        value.resize_(300)
        assert meter.current_bytes == 1200


def test_backward_is_counted_and_meta_is_not():
    model = torch.nn.Linear(100, 50)
    with DeviceMeter() as meter:
        torch.ones(1000, device="meta")
        assert meter.current_bytes == 0
        model(torch.ones(2, 100)).sum().backward()
    gradients = sum(p.grad.nbytes for p in model.parameters())
    assert meter.current_bytes == gradients
    assert meter.peak_bytes > gradients


def test_the_limit_is_hard_and_says_who_passed_it():
    meter = DeviceMeter(limit_bytes=1000)
    with meter:
        kept = torch.ones(200)
        with pytest.raises(
            TierError,
            match=r"aten.ones.default needs 400 bytes more of device memory: 1200 bytes are then "
            "in use, 1000 bytes are allowed",
        ):
            torch.ones(100)
        assert meter.current_bytes == kept.nbytes
    assert meter.peak_bytes == 1200
    meter.reset_peak()
    assert meter.peak_bytes == 800


def test_what_the_host_makes_is_not_counted_then_or_later():
    with DeviceMeter(limit_bytes=5000) as outer, DeviceMeter() as inner:
        with uncounted():
            scratch = torch.ones(10_000)
            with uncounted():
                more = scratch + 1
            more = more + 1
        assert outer.current_bytes == inner.current_bytes == 0
        scratch.add_(more)
        kept = scratch[:1000] * 2
    assert outer.current_bytes == inner.current_bytes == kept.nbytes
