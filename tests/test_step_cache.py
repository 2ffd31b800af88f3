"""The step cache: what is taken from an earlier start, and what never is."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import gpt, seeded
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import elixir_fx
from elixir_fx.step import NOTE
from elixir_fx.units import GIB

THREADS = 1
SPARE = {"memory": 1 * GIB}
GPT = gpt(layers=1, width=32, seq=8)


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    with fresh_cache():
        yield
    torch._dynamo.reset()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def start(
    model: nn.Module,
    inputs: tuple[Any, ...],
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **options: Any,
) -> tuple[Any, list[float], dict[str, int]]:
    """Two steps: the compiled model, its losses, and what AOTAutograd's cache said."""
    counters["aot_autograd"].clear()
    optimizer = make(model)
    compiled = elixir_fx.compile(model, optimizer=optimizer, **{**SPARE, **options})
    losses = []
    for _ in range(2):
        loss = compiled(*inputs)
        loss = loss if loss.ndim == 0 else loss.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    said = {name.removeprefix("autograd_cache_"): n for name, n in counters["aot_autograd"].items()}
    return compiled, losses, said


def again(build: Callable[[], nn.Module], inputs: tuple[Any, ...], **options: Any) -> Any:
    """Two starts of equal models."""
    first = start(seeded(0, build), inputs, **options)
    torch._dynamo.reset()
    return first, start(seeded(0, build), inputs, **options)


def batch() -> tuple[Tensor, ...]:
    found = GPT.batches(1)[0]
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize("tight", [False, True], ids=["spare", "tight"])
def test_a_second_start_takes_the_step(tight: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if tight:
        build = GPT.build()
        least = elixir_fx.smallest_memory(build, batch(), optimizer=sgd(build), disk=str(tmp_path))
        options = {"memory": int(1.1 * least), "disk": str(tmp_path)}
    (one, losses, said), (other, same, found) = again(GPT.build, batch(), **options)
    assert said["miss"] == said["saved"] == 1
    assert found.get("hit") == 1 and "miss" not in found
    assert losses == same
    assert one.plan.layout == other.plan.layout
    assert one.plan.layout.keeps_all is not tight
    assert one.plan.schedules[0].gathers == other.plan.schedules[0].gathers
    assert [record.name for record in one.history] == [record.name for record in other.history]
    shown = [net.print_readable(print_output=False, additional_meta=[NOTE]) for net in (one, other)]
    assert shown[0].count("\n") == shown[1].count("\n")
    assert len(one.backward_module.graph.nodes) == len(other.backward_module.graph.nodes)
    assert other.stats()["peak_device_bytes"] == one.stats()["peak_device_bytes"]


def test_weights_may_differ() -> None:
    start(seeded(0, GPT.build), batch())
    torch._dynamo.reset()
    model, plain = (seeded(1, GPT.build) for _ in range(2))
    _, losses, said = start(model, batch())
    assert said.get("hit") == 1
    assert plain(*batch()).item() == pytest.approx(losses[0], rel=1e-5)


class Named(nn.Module):
    """One layer under a name."""

    def __init__(self, name: str, learns: bool = True) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)
        self.name = name
        getattr(self, name).weight.requires_grad_(learns)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(getattr(self, self.name)(x)))


X = (torch.ones(4, 8),)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (lambda: Named("other"), {}),
        (lambda: Named("first", learns=False), {}),
        (lambda: Named("first"), {"memory": 2 * GIB}),
        (lambda: Named("first"), {"keep": {"last": "device"}}),
        (lambda: Named("first"), {"make": lambda m: torch.optim.AdamW(m.parameters())}),
    ],
    ids=["name", "frozen", "budget", "pinned", "optimizer"],
)
def test_what_makes_another_step(build: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    start(seeded(0, lambda: Named("first")), X)
    torch._dynamo.reset()
    _, _, said = start(seeded(0, build), X, **options)
    assert said.get("miss") == 1 and "hit" not in said


def test_other_shapes_are_another_step() -> None:
    start(seeded(0, lambda: Named("first")), X)
    torch._dynamo.reset()
    _, _, said = start(seeded(0, lambda: Named("first")), (torch.ones(3, 8),))
    assert said.get("miss") == 1


def test_a_step_that_writes_buffers_is_captured_anew() -> None:
    (_, losses, said), (_, same, found) = again(normed, X)
    assert "saved" not in said and "hit" not in found
    assert losses == same


def test_other_kernels_store_nothing() -> None:
    for kernels in ("eager", lambda module, inputs: module):
        _, _, said = start(seeded(0, GPT.build), batch(), kernels=kernels)
        assert not said.keys() & {"miss", "hit", "saved"}
        torch._dynamo.reset()


def test_a_stored_step_that_does_not_fit_is_captured_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no budget is given, that is checked against the memory that is free."""
    from elixir_fx import lowering
    from elixir_fx.errors import LayoutError

    def refuses(*_: Any) -> Any:
        raise LayoutError("too large")

    start(seeded(0, GPT.build), batch())
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        patch.setattr(lowering.Lowering, "adopt", refuses)
        _, losses, said = start(seeded(0, GPT.build), batch())
    assert "hit" not in said
    assert losses[1] < losses[0]
