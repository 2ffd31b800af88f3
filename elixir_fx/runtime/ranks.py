"""The ranks that train one model together: what they agree on, send each other and share.

`Ranks` has channels between the processes of a group, so that orders never meet: `control`
(small exchanges, from the user's thread), `gathers` and `reduces` (chunks, from one lane each).
Every rank must ask for the same things in the same order on each of them.

Errors are posted to all: a rank that fails writes its message on a page that the local ranks
share and closes its channels; whoever waits for it sees a closed connection, reads the message and
does the same. So nobody waits for a rank that has failed, and nobody takes a slow one for lost.

Which collective serves best was measured on gloo (2 ranks of one host, ms for 1, 4, 16, 64 MB):
all_gather 5.5, 3.9, 69, 142; reduce_scatter 7.6, 27, 63, 135; all_reduce 0.4, 11, 13, 92; sends
between all pairs 0.2, 5.3, 12, 32. Hence on a CPU chunks travel by sends, and sums are made here,
in the order of the ranks; on a GPU by NCCL's own collectives.
"""

import json
import mmap
import os
import socket
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elixir_fx.errors import ElixirError, RankError
from elixir_fx.plan import align
from elixir_fx.runtime import shared_memory
from elixir_fx.runtime.channels import Channel, open_channels

PAGE_BYTES = 4096  # for the message of a rank that failed


@dataclass(eq=False)
class _Channels:
    """The private connections; those of a group that is played are none."""

    control: Channel | None = None
    gathers: Channel | None = None
    reduces: Channel | None = None
    # Between the ranks that hold the same in each replica.
    replica_control: Channel | None = None
    replicas: Channel | None = None

    def close(self) -> None:
        """Close the connections, as far as nobody is at work on them: peers that wait see it."""
        for channel in (
            self.control,
            self.gathers,
            self.reduces,
            self.replica_control,
            self.replicas,
        ):
            if channel is not None:
                channel.close()


@dataclass(eq=False)
class Proposal:
    """A comparison under way: every rank has said, or will, what it is about to do."""

    ranks: "Ranks"
    what: str
    answers: Tensor
    work: Any = field(repr=False)

    def same(self) -> bool:
        """Wait for the others. Whether the digests are equal on all ranks; RankError on all of
        them if what they are about to do differs."""
        with self.ranks.guarded():
            if self.work is not None:
                self.work.wait()
                self.work = None
        mine = self.answers[self.ranks.rank]
        different = (self.answers != mine).any(dim=0).tolist()
        if different[0] or different[1]:
            self.ranks.disagree(self.what)
        return not different[2]

    def marked(self) -> bool:
        """Whether any rank set its mark; after `same`."""
        return bool(self.answers[:, 3].any())


class Ranks:
    """The processes of one group. `rank` counts within it, `size` is their number.

    `local`: all are on one host and may share memory. `replicas` is the number of equal groups
    that hold a copy of everything each (hybrid sharding). Made by all ranks at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        replicate: dist.ProcessGroup | None = None,
    ) -> None:
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.replicas = 1 if replicate is None else dist.get_world_size(replicate)
        self.replica = 0 if replicate is None else dist.get_rank(replicate)
        self.fake = dist.get_backend(group) == "fake"
        self._sequence = 0
        self._failure: RankError | None = None
        self._channels = _Channels()
        if not self.fake:
            backend = "gloo" if device.type == "cpu" else "nccl"
            channels = open_channels(group, ["gloo", backend, backend])
            if replicate is not None:
                channels += open_channels(replicate, ["gloo", backend])
            self._channels = _Channels(*channels)
        self._page: mmap.mmap | None = None
        self.local = self._same_host()
        if self.local:
            self._page = self._shared_mapping(self.size * PAGE_BYTES)
            self.local = self._page is not None
        self._finalizer = weakref.finalize(self, self._channels.close)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of the first replica."""
        return self.rank == 0 and self.replica == 0

    def wait_for_first(self) -> None:
        """Return when the first rank of the first replica is here."""
        self.broadcast(torch.zeros(1, device=self.device))

    # -- failures --------------------------------------------------------------------------

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around a communication: a closed connection becomes the message of who closed it."""
        if self._failure is not None:
            raise RankError(*self._failure.args)
        try:
            yield
        except RuntimeError as error:
            self._lost(error)

    def _lost(self, error: RuntimeError) -> None:
        message = self._posted()
        if message is None and ("Connection closed" in str(error) or "peer" in str(error)):
            message = (
                "another rank closed its connection: its process failed or ended before this "
                "one; see its own output, and give every rank equally many batches"
            )
        if message is None:
            message = f"communication between the ranks failed: {error}"
        self.fail(RankError(message))
        raise RankError(message) from error

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around what other ranks count on: an error in it becomes theirs too."""
        try:
            yield
        except BaseException as error:
            self.fail(error, what)
            raise

    def fail(self, error: BaseException, what: str = "") -> None:
        """Tell the others that this rank cannot go on. Idempotent."""
        if self._failure is not None:
            return
        if isinstance(error, RankError):
            self._failure = error
        else:
            where = f" {what}" if what else ""
            self._failure = RankError(
                f"rank {self.rank} failed{where}: {type(error).__name__}: {error}"
            )
        self._post(str(self._failure))
        self._channels.close()

    def _post(self, message: str) -> None:
        if self._page is not None:
            start = self.rank * PAGE_BYTES  # two may fail at once
            text = message.encode()[: PAGE_BYTES - 8]
            self._page[start + 4 : start + 8 + len(text)] = len(text).to_bytes(4, "little") + text
            self._page[start] = 1

    def _posted(self) -> str | None:
        if self._page is None:
            return None
        for start in range(0, self.size * PAGE_BYTES, PAGE_BYTES):
            if self._page[start]:
                length = int.from_bytes(self._page[start + 4 : start + 8], "little")
                return self._page[start + 8 : start + 8 + length].decode(errors="replace")
        return None

    # -- small exchanges -------------------------------------------------------------------

    def propose(self, what: str, digest: int = 0, mark: bool = False) -> Proposal:
        """Say what this rank is about to do, and a digest of how; `Proposal.same` compares. A
        `mark` of any rank is seen by all."""
        self._sequence += 1
        mine = torch.tensor([self._sequence, zlib.crc32(what.encode()), digest, int(mark)])
        answers = torch.empty(self.size, 4, dtype=torch.int64)
        answers[:] = mine
        work = None
        if not self.fake:
            with self.guarded():
                work = self._control.all_gather(answers, mine)
        return Proposal(self, what, answers, work)

    def agree(self, what: str, digest: int = 0) -> bool:
        """Every rank is here, about to do `what`; RankError on all if one is not. Whether the
        digests are equal too."""
        return self.propose(what, digest).same()

    def disagree(self, what: str) -> None:
        """Raise the same RankError on all ranks: each is about to do something else."""
        said = self.exchange(what)
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said))
        error = RankError(
            f"the ranks are no longer in step ({told}). Every rank must make the same calls in the "
            "same order: as many batches, backward passes and optimizer steps on each"
        )
        self.fail(error)
        raise error

    def exchange(self, value: Any) -> list[Any]:
        """What every rank gives, by rank. Values are JSON's."""
        if self.fake:
            return [value] * self.size
        return self._exchange(self._control, value)

    def from_first(self, value: Any) -> Any:
        """What the first rank of the first replica gives, on every rank of all replicas."""
        if self._channels.replica_control is not None:
            value = self._exchange(self._channels.replica_control, value)[0]
        return self.exchange(value)[0]

    def largest(self, value: int) -> int:
        """The largest that any rank of any replica gives."""
        most: int = max(self.exchange(value))
        if self._channels.replica_control is not None:
            most = max(self._exchange(self._channels.replica_control, most))
        return most

    def _exchange(self, channel: Channel, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        with self.guarded():
            sizes = torch.empty(channel.size, dtype=torch.int64)
            channel.all_gather(sizes.view(-1, 1), torch.tensor([len(text)])).wait()
            most = int(sizes.max())
            mine = torch.zeros(most, dtype=torch.uint8)
            mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            whole = torch.empty(channel.size, most, dtype=torch.uint8)
            channel.all_gather(whole, mine).wait()
        return [
            json.loads(row[:size].numpy().tobytes()) for row, size in zip(whole, sizes, strict=True)
        ]

    @property
    def _control(self) -> Channel:
        assert self._channels.control is not None
        return self._channels.control

    @property
    def _gathers(self) -> Channel:
        assert self._channels.gathers is not None
        return self._channels.gathers

    @property
    def _reduces(self) -> Channel:
        assert self._channels.reduces is not None
        return self._channels.reduces

    def broadcast(self, value: Tensor) -> Tensor:
        """`value` as the first rank has it, on every rank and in every replica."""
        if self.fake or not value.numel():
            return value
        first = value.detach().contiguous().clone()
        raw = first.view(-1).view(torch.uint8)  # a backend may not know its dtype
        on_cpu = self.device.type == "cpu"
        with self.guarded():
            if self._channels.replicas is not None:
                self._channels.replicas.broadcast(raw)
            (self._control if on_cpu else self._gathers).broadcast(raw)
        return first

    def total(self, values: Tensor, largest: bool = False) -> Tensor:
        """The sum, or the largest, of a small tensor over the ranks, in the order of the ranks:
        equal to the last bit on all of them."""
        if self.fake:
            return values
        self.agree(f"add up {values.numel()} numbers")
        mine = values.detach().to("cpu").contiguous()
        whole = torch.empty(self.size, *mine.shape, dtype=mine.dtype)
        with self.guarded():
            self._control.all_gather(whole.view(self.size, -1), mine.view(-1)).wait()
        result = whole.amax(0) if largest else whole.sum(0)
        return result.to(values.device)

    # -- chunks ----------------------------------------------------------------------------

    def gather(self, whole: Tensor) -> None:
        """Fill `whole`, flat, in which this rank's part (the rank-th of equal ones) is right."""
        if self.fake:
            return
        parts = whole.view(self.size, whole.numel() // self.size)
        with self.guarded():
            if whole.device.type == "cpu":
                self._gathers.swap([parts[self.rank]] * self.size, parts.unbind())
            else:
                self._gathers.gather_into(whole, parts[self.rank])

    def scatter_sum(self, whole: Tensor, parts: Tensor) -> Tensor:
        """The sum over the ranks of this rank's part of `whole`, flat.

        `parts` is memory like `whole` that the others' values arrive in; the answer lies in it.
        """
        mine = parts.view(self.size, whole.numel() // self.size)
        own = whole.view(self.size, whole.numel() // self.size)
        if self.fake:
            return mine[0].copy_(own[self.rank])
        with self.guarded():
            if whole.device.type == "cpu":
                mine[self.rank].copy_(own[self.rank])
                self._reduces.swap(own.unbind(), mine.unbind())
                return add_up(mine.unbind(), mine[0])
            self._reduces.scatter_into(mine[0], whole)
            return mine[0]

    def sum_whole(self, whole: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if not self.fake:
            with self.guarded():
                self._reduces.all_reduce(whole)
        self.sum_replicas(whole)
        return whole

    def sum_replicas(self, part: Tensor) -> None:
        """Add up a reduced part over the replicas, in place."""
        if self._channels.replicas is not None:
            with self.guarded():
                self._channels.replicas.all_reduce(part)

    def meet(self) -> None:
        """Return when every rank is here, on the lane of reduces."""
        if not self.fake:
            with self.guarded():
                self._reduces.all_reduce(torch.zeros(1, device=self.device))

    # -- memory that the ranks of one host share --------------------------------------------

    def share(self, nbytes: int) -> Tensor:
        """`nbytes` of zeroed CPU memory, uint8, that every rank sees. It has no name and goes
        with the last rank that holds it. RankError if it cannot be had."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        mapping = self._shared_mapping(align(nbytes))
        if mapping is None:
            raise RankError(
                f"the ranks of this host cannot share {nbytes} bytes of memory: the first of them "
                "could not allocate it, or its /proc/<pid>/fd cannot be read by the others"
            )
        return torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes]

    def _same_host(self) -> bool:
        """Whether all ranks are on this host. One with other memory has another boot id."""
        if self.fake or self.device.type != "cpu":
            return False
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
        except OSError:
            boot = ""
        hosts = self.exchange([socket.gethostname(), boot])
        return bool(boot) and all(host == hosts[0] for host in hosts)

    def _shared_mapping(self, nbytes: int) -> mmap.mmap | None:
        """A mapping of one nameless file in memory, on all ranks; None on all if one fails."""
        descriptor = shared_memory.make(nbytes) if self.rank == 0 else -1
        try:
            first = self.exchange([os.getpid(), descriptor])[0]
            mapping = None
            if first[1] >= 0:
                mapping = shared_memory.open_from(first[0], first[1], nbytes)
            have = all(self.exchange(mapping is not None))
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return mapping if have else None

    def close(self) -> None:
        """Close the connections. Peers that still wait for this rank see that it is gone."""
        self._finalizer()


def add_up(parts: Sequence[Tensor], into: Tensor) -> Tensor:
    """The sum of the rows of `parts`, first to last, in `into`, which may be the first row."""
    if into.data_ptr() != parts[0].data_ptr():
        into.copy_(parts[0])
    for part in parts[1:]:
        into.add_(part)
    return into


def check_equal(ranks: Ranks, what: str, told: Sequence[Sequence[str]]) -> None:
    """RankError on all ranks if the lists of (name, description) differ, with the first
    difference and who has it."""
    digest = zlib.crc32(json.dumps(told).encode())
    if ranks.agree(what, digest):
        return
    everyone = ranks.exchange([list(entry) for entry in told])
    for rank, theirs in enumerate(everyone):
        for index in range(max(len(theirs), len(everyone[0]))):
            one = everyone[0][index] if index < len(everyone[0]) else None
            other = theirs[index] if index < len(theirs) else None
            if one != other:
                error = RankError(
                    f"the ranks do not train the same model: {what} differs on rank {rank}: "
                    f"{_told(one)} on rank 0, {_told(other)} on rank {rank}"
                )
                ranks.fail(error)
                raise error
    raise ElixirError(f"digests of {what} differ and their contents do not")


def _told(entry: Sequence[str] | None) -> str:
    return "nothing" if entry is None else " ".join(entry)
