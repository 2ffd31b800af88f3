"""What every test module may ask of pytest."""

import gc
import os
from collections.abc import Iterator

import pytest

# Read when torch is first imported: threads that wait leave the cores to the other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A capture collects what it has left behind; thousands of small ones leave that to Python.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import torch
import torch._dynamo


def pytest_collection_finish() -> None:
    """What was imported stays: the collector, which many tests call, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module that says `THREADS = 1` computes with one thread: small tensors are quicker so,
    and on busy cores much quicker."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request.module, "THREADS", before))
    yield
    torch.set_num_threads(before)
    # What torch keeps of a module's models even so, no later collection need look at.
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()
