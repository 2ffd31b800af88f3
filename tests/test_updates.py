"""The user's optimizer as it is timed: by size of parameter, by its own options."""

import pytest
import torch
from torch import nn

from elixir_fx.facts import OptimizerFacts, Parameter
from elixir_fx.runtime.updates import MOST_NUMEL, Updates

ADAMW = OptimizerFacts(name="AdamW", states=(), scratch_bytes=0, read_bytes=28)


def of(path: str, numel: int, gradient: int | None = 1) -> Parameter:
    return Parameter(
        path=path,
        shape=(numel,),
        strides=(1,),
        dtype="float32",
        itemsize=4,
        span=numel,
        trainable=gradient is not None,
        reads=(0,),
        gradient=gradient,
    )


def updates(optimizer=torch.optim.AdamW, **options) -> Updates:
    parameter = nn.Parameter(torch.zeros(2))
    return Updates(optimizer=optimizer([parameter], **options), device=torch.device("cpu"))


def test_equal_sizes_are_timed_once_and_frozen_ones_never():
    parameters = [of("a", 64), of("b", 64), of("c", 128), of("frozen", 32, gradient=None)]
    assert len(updates().specs(parameters)) == 2


def test_options_that_change_the_update_are_timed_apart():
    keys = {
        key
        for one in (updates(), updates(fused=True), updates(torch.optim.SGD), updates(lr=0.5))
        for key in one.specs([of("a", 64)])
    }
    assert len(keys) == 3  # another learning rate takes as long


def test_timing_leaves_the_optimizer_as_it_is():
    known = updates()
    (update,) = known.specs([of("a", 64)]).values()
    for _ in range(3):
        update()
    (parameter,) = known.optimizer.param_groups[0]["params"]
    assert not known.optimizer.state and not parameter.any()


def test_the_rate_is_the_traffic_over_the_time_of_all_parameters():
    known = updates()
    parameters = [of("a", 64), of("b", 64), of("c", 2 * MOST_NUMEL)]
    small, large = known.specs(parameters)
    rate = known.bytes_per_s(parameters, ADAMW, {small: 1e-3, large: 1.0})
    # One larger than what is timed takes longer in proportion.
    assert rate == pytest.approx((128 + 2 * MOST_NUMEL) * 28 / (2e-3 + 2.0))


def test_without_all_times_there_is_no_rate():
    assert updates().bytes_per_s([of("a", 64)], ADAMW, {}) is None
