"""Real models of tests/zoo.py train under a tight budget with a disk, through both entry points,
and equal plain PyTorch bit for bit."""

from pathlib import Path

import exact
import pytest
import torch
from harness import Batch
from pairs import Entry, Pair, memory_needed
from zoo import ZOO

from elixir_fx import CaptureError
from elixir_fx.backend import state
from elixir_fx.units import MIB

THREADS = 1

# What compile() refuses, as its forward is not one graph, and words of the error.
REFUSED = {
    "mixtral_balanced": r"output_capturing.py:\d+: Unsupported context manager",
}
# A budget for the backend where no capture can say how much is needed.
ENOUGH = {"mixtral_balanced": 16 * MIB}

# Through one entry point in turn; through the other with `-m spare`.
CALLS = [
    pytest.param(name, entry, marks=pytest.mark.spare if index % 2 == turn else ())
    for turn, entry in enumerate(("compile", "backend"))
    for index, name in enumerate(ZOO)
    if entry == "backend" or name not in REFUSED
]


def import_packages(name: str) -> None:
    for package in ZOO[name].packages:
        pytest.importorskip(package)


def budget(name: str, entry: Entry, batch: Batch) -> int:
    """The smallest for compile(); the backend's graphs may be several, and get twice that."""
    if name in REFUSED:
        return ENOUGH[name]
    smallest = memory_needed(ZOO[name].build(), batch)
    return smallest if entry == "compile" else 2 * smallest


def disk_read_bytes(pair: Pair, entry: Entry) -> float:
    """What the last whole step of ours read from the disk, or from a mapped file there."""
    if entry == "compile":
        return pair.ours.net.stats()["disk_read_bytes"]
    stats = state(pair.ours.model).stats()
    return stats["disk_read_bytes"] + stats["gathered_bytes"]


@pytest.mark.parametrize(("name", "entry"), CALLS)
def test_three_steps(name: str, entry: Entry, tmp_path: Path) -> None:
    """Losses, and after each update, before its gradients go, all that training changes."""
    import_packages(name)
    model = ZOO[name]
    batches = model.batches(2)
    options = {"memory": budget(name, entry, batches[0]), "disk": str(tmp_path)}
    torch._dynamo.reset()  # code that models share is captured eight times at most
    pair = Pair(model.build, batches, options, entry=entry)
    for _ in range(3):
        pair.backward()
        pair.do(lambda side: side.optimizer.step())
        read_bytes = disk_read_bytes(pair, entry)  # before the comparison reads more
        pair.check()
        pair.do(lambda side: side.optimizer.zero_grad())
    assert read_bytes > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_one_graph_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    import_packages(name)
    model = ZOO[name]
    compiled = exact.compile(model.build(), memory="1GiB", disk=str(tmp_path))
    (batch,) = model.batches(1)
    with pytest.raises(CaptureError, match=REFUSED[name]):
        compiled(**batch)
