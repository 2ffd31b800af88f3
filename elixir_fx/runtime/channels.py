"""Connections of its own between the processes of a group, for one compiled model.

A `Channel` is a process group that torch.distributed's registry does not know: `new_group` names
groups by how many there are, so a model that one rank has freed and another has not yet would
make the next one wait for ever. Its processes meet at a store that the first of them opens, and
a channel that is dropped closes its connections, which its peers see.
"""

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(hours=12)  # a rank that compiles is slow, not lost
MEETING = timedelta(minutes=30)  # for all to reach the store, all of them being there already

# Their names from torch 2.13 on; the old ones warn there.
_new = hasattr(dist, "all_gather_single")
ALL_GATHER: Any = dist.all_gather_single if _new else dist.all_gather_into_tensor
REDUCE_SCATTER: Any = dist.reduce_scatter_single if _new else dist.reduce_scatter_tensor


# Public, and missing from torch's own type stubs.
_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]


class Channel:
    """One set of connections. Operations on it run in the order of calls; `close` ends it.

    RuntimeError "Connection closed" where a peer is gone.
    """

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._backend = backend
        self._lock = threading.Lock()

    def _open(self) -> Any:
        with self._lock:
            backend = self._backend
        if backend is None:
            raise RuntimeError("Connection closed by this rank")
        return backend

    def close(self) -> None:
        """Close the connections, once nobody is at work on them any more: peers that wait on gloo
        see it at once, on NCCL when its own watchdog does."""
        with self._lock:
            self._backend = None

    def all_gather(self, rows: Tensor, mine: Tensor) -> Any:
        """Fill the rows of `rows` with what every rank gives, small CPU tensors; what to wait
        for."""
        return self._open().allgather([list(rows.unbind())], [mine])

    def broadcast(self, value: Tensor) -> None:
        """`value` as the first rank has it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._open().broadcast([value], options).wait()

    def all_reduce(self, value: Tensor) -> None:
        """The sum over the ranks, in place."""
        self._open().allreduce([value]).wait()

    def swap(self, mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        """Send `mine[r]` to every other rank r, and receive its into `theirs[r]`."""
        backend = self._open()
        works = []
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            works.append(backend.send([_as_bytes(mine[to])], to, 0))
            works.append(backend.recv([_as_bytes(theirs[source])], source, 0))
        for work in works:
            work.wait()

    def gather_into(self, whole: Tensor, part: Tensor) -> None:
        """Fill `whole` with every rank's part, on an accelerator."""
        ALL_GATHER(whole, part, group=self._open())

    def scatter_into(self, part: Tensor, whole: Tensor) -> None:
        """The sum of this rank's part of every rank's `whole`, on an accelerator."""
        REDUCE_SCATTER(part, whole, group=self._open())


def _as_bytes(memory: Tensor) -> Tensor:
    """Contiguous memory as a backend takes it, whatever its dtype."""
    return memory.view(torch.uint8)


def open_channels(group: dist.ProcessGroup, backends: Sequence[str]) -> list[Channel]:
    """New channels between the processes of `group`, all of which call this at once."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hosts: list[Any] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    store = None
    if rank == 0:
        store = _TCPStore(host, 0, size, True, timeout=MEETING, wait_for_workers=False)
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port, group=group, group_src=0)
    if store is None:
        store = _TCPStore(host, port[0], size, False, timeout=MEETING)
    channels = []
    for index, name in enumerate(backends):
        own = _PrefixStore(f"elixir_fx/{index}", store)
        made: Any
        if name == "gloo":
            made = dist.ProcessGroupGloo(own, rank, size, PATIENCE)
        else:
            made = dist.ProcessGroupNCCL(own, rank, size, PATIENCE)  # type: ignore[arg-type]
        channels.append(Channel(made, rank, size))
    return channels
