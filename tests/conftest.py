"""What every test module may ask of pytest."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module that says `THREADS = 1` computes with one thread: small tensors are quicker so,
    and on busy cores much quicker."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request.module, "THREADS", before))
    yield
    torch.set_num_threads(before)
