"""A machine as the planner sees it: memories, links between them, and rates.

Plain data without torch. `elixir_fx.runtime.measure` fills one for this machine,
`Machine.named` one of the catalogue's from datasheets; `elixir_fx.testing.emulated` makes one
up. The forecast multiplies facts by these rates.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from elixir_fx.catalogue import Sheet, sheet
from elixir_fx.errors import PlanError


class Tier(StrEnum):
    """A kind of memory. On a CPU the device is RAM and there is no separate host. PEERS, the
    memory of the other ranks, is the end of a link and nobody's home."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    PEERS = "peers"


# Links between ranks that nobody measured: bytes/s, latency in s, share of compute. Over gloo,
# sends of 16 MiB between two processes of one host; over NCCL, part of what NVLink is sold as.
CPU_PEERS = (1.4e9, 3e-4, 0.7)
GPU_PEERS = (1e11, 3e-5, 0.0)
MOST_RANKS = 1024  # that a machine of the catalogue is known to work as

HOMES = (Tier.DEVICE, Tier.HOST, Tier.DISK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction between two tiers.

    `bytes_per_s` is its rate alone. `shared_bytes_per_s` is the rate that both directions
    reach together when they run at once: twice `bytes_per_s` for a full-duplex link, no more
    than `bytes_per_s` for a half-duplex one. `compute_share` is the part of the compute
    device's speed that is lost while this link streams (0 for a copy engine of its own).
    """

    source: Tier
    target: Tier
    bytes_per_s: float
    shared_bytes_per_s: float
    latency_s: float
    compute_share: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What one computer of a cluster joins its accelerators with, by a ring of all ranks.

    `peer_bytes_per_s` is the rate at which each of its `ranks` accelerators receives from the
    others of the node, `network_bytes_per_s` that at which the node receives, all its ports
    together. `start_latency_s` is before the first step of a ring, the other latencies are those
    of a step within the node and between two.
    """

    ranks: int
    peer_bytes_per_s: float
    network_bytes_per_s: float
    start_latency_s: float
    peer_latency_s: float
    network_latency_s: float

    def ring(self, ranks: int) -> tuple[float, float]:
        """Bytes/s at which each of `ranks` ranks receives the others' parts, and the latency.

        With N = ceil(ranks / self.ranks) nodes:

            rate    = peer_bytes_per_s                             on one node, else
                      min(peer_bytes_per_s, network_bytes_per_s)
            latency = start + (ranks - N) peer_latency_s + (N - 1) network_latency_s

        The rate is the bus bandwidth of nccl-tests. All that a rank receives enters its node
        once and goes round in it from rank to rank, so of several nodes the slower of the
        network of a whole node and the links within it counts: there are as many rings as
        ports. The latency is that of NCCL's ring (src/graph/tuning.cc).
        """
        nodes = -(-ranks // self.ranks)
        rate = self.peer_bytes_per_s
        if nodes > 1:
            rate = min(rate, self.network_bytes_per_s)
        steps_s = (ranks - nodes) * self.peer_latency_s + (nodes - 1) * self.network_latency_s
        return rate, self.start_latency_s + steps_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Memory sizes, links and rates of one machine, as one rank sees it.

    `device` is the torch device type that computes. `emulated` marks an accelerator that is
    played in RAM. `memory` is bytes by tier. `flops_per_s` is by dtype ("float32"),
    `stream_bytes_per_s` the rate at which the compute device reads and writes its own memory,
    `update_stream_bytes_per_s` that of an optimizer there, which is another one (a copy reads
    what it writes over, an update does not); 0 where nobody measured it.
    `host_stream_bytes_per_s` is that of an optimizer that runs on the host beside an
    accelerator; 0 where none can, as where both are one memory.
    `operators` maps an operator's key (name, shapes, dtypes, threads) to measured seconds.
    `fingerprint` says which computer was measured; it is empty where none was. `node` is how the
    machine joins others into a cluster, None where nobody said, and `ranks` how many share it:
    `with_ranks` has divided what they have in common.
    """

    name: str
    fingerprint: str
    device: str
    emulated: bool = False
    memory: Mapping[Tier, int]
    links: tuple[Link, ...]
    flops_per_s: Mapping[str, float]
    stream_bytes_per_s: float
    update_stream_bytes_per_s: float = 0.0
    host_stream_bytes_per_s: float = 0.0
    operators: Mapping[str, float] = field(default_factory=dict)
    node: Node | None = None
    ranks: int = 1

    @property
    def unified(self) -> bool:
        """Host and device are one memory: the tiers are RAM and disk."""
        return self.device == "cpu" and not self.emulated

    @property
    def updates_on_host(self) -> bool:
        """Whether an optimizer may run on the host, beside the device."""
        return self.host_stream_bytes_per_s > 0 and not self.unified

    def update_bytes_per_s(self, tier: Tier) -> float:
        """The rate at which an optimizer on `tier` (DEVICE or HOST) reads and writes memory; the
        device's where nobody measured the host's."""
        if tier is Tier.HOST and self.host_stream_bytes_per_s:
            return self.host_stream_bytes_per_s
        return self.update_stream_bytes_per_s or self.stream_bytes_per_s

    def link(self, source: Tier, target: Tier) -> Link:
        """The link from one tier to the other; PlanError if the machine has none."""
        link = self.find_link(source, target)
        if link is None:
            raise PlanError(f"machine {self.name!r} has no link from {source} to {target}")
        return link

    def find_link(self, source: Tier, target: Tier) -> Link | None:
        """The link from one tier to the other, None if the machine has none."""
        found = (x for x in self.links if x.source == source and x.target == target)
        return next(found, None)

    def flops(self, dtype: str) -> float:
        """Floating-point operations per second in `dtype`, float32's where unknown."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])

    def with_ranks(self, ranks: int) -> "Machine":
        """One rank's view of a cluster of such machines with `ranks` accelerators in all.

        Links to the peers are a ring over all of them (`Node.ring`). Each collective sends as
        much as it receives, so that a gather and a reduce at once share the rate of one. HOST and
        DISK, their rates and the host's optimizer are a rank's equal part of its node; the link
        between host and device is each accelerator's own. The name says the ranks.

        A machine that says nothing of its node, such as a measured one, is each rank's own:
        it gets links to the peers where nobody measured them (`with_peers`), no more.
        PlanError for ranks below 1 or above 1024, or if the machine is a part for other ranks.
        """
        if ranks < 1 or (self.node is not None and ranks > MOST_RANKS):
            raise PlanError(f"{ranks} ranks: machine {self.name!r} has 1 to {MOST_RANKS}")
        if self.node is None:
            return self.with_peers() if ranks > 1 else self
        if self.ranks == ranks:
            return self
        if self.ranks > 1:
            raise PlanError(
                f"machine {self.name!r} is one of {self.ranks} ranks already, and {ranks} are "
                "wanted: take the whole one"
            )
        here = min(ranks, self.node.ranks)
        nodes = -(-ranks // self.node.ranks)
        rate, latency_s = self.node.ring(ranks)
        own = (Tier.DEVICE, Tier.PEERS)
        links = [
            link
            if link.source in own or link.target in own
            else replace(
                link,
                bytes_per_s=link.bytes_per_s / here,
                shared_bytes_per_s=link.shared_bytes_per_s / here,
            )
            for link in self.links
        ]
        on = f" on {nodes} nodes" if nodes > 1 else ""
        return replace(
            self,
            name=f"{self.name}, {ranks} ranks{on}",
            memory={t: size if t in own else size // here for t, size in self.memory.items()},
            links=(*links, *_peer_links(rate, rate, latency_s, 0.0)),
            host_stream_bytes_per_s=self.host_stream_bytes_per_s / here,
            ranks=ranks,
        )

    def with_peers(self) -> "Machine":
        """This machine with links to other ranks, where nobody measured them: sends of 16 MiB
        between two processes of one CPU host over gloo, or a GPU node's own links over NCCL."""
        if any(link.source is Tier.PEERS for link in self.links):
            return self
        rate, latency_s, share = CPU_PEERS if self.device == "cpu" else GPU_PEERS
        both = rate if self.device == "cpu" else 2 * rate
        links = _peer_links(rate, both, latency_s, share)
        return replace(self, links=(*self.links, *links))

    def with_operators(self, operators: Mapping[str, float]) -> "Machine":
        return replace(self, operators={**self.operators, **operators})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @staticmethod
    def named(name: str) -> "Machine":
        """A machine of the catalogue, `elixir_fx/machines/*.json`: one accelerator with all of
        its node's host memory and disk. PlanError lists the names if it is none of them."""
        return _of_sheet(sheet(name))

    @staticmethod
    def from_json(text: str) -> "Machine":
        """The machine that `to_json` wrote. PlanError if `text` is anything else."""
        try:
            data = json.loads(text)
            data["memory"] = {Tier(tier): size for tier, size in data["memory"].items()}
            data["links"] = tuple(
                Link(**{**link, "source": Tier(link["source"]), "target": Tier(link["target"])})
                for link in data["links"]
            )
            if data.get("node") is not None:
                data["node"] = Node(**data["node"])
            return Machine(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"malformed machine: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write the machine as JSON; `load` reads it back equal."""
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> "Machine":
        """Read a machine from JSON. PlanError if the file is not one."""
        try:
            return Machine.from_json(Path(path).read_text())
        except (OSError, UnicodeDecodeError, PlanError) as error:
            raise PlanError(f"{path} is not a machine file: {error}") from error


def _peer_links(rate: float, both: float, latency_s: float, share: float) -> tuple[Link, ...]:
    ends = ((Tier.PEERS, Tier.DEVICE), (Tier.DEVICE, Tier.PEERS))
    return tuple(
        Link(
            source=source,
            target=target,
            bytes_per_s=rate,
            shared_bytes_per_s=both,
            latency_s=latency_s,
            compute_share=share,
        )
        for source, target in ends
    )


def _of_sheet(read: Sheet) -> Machine:
    """The machine of a sheet. The host link is full duplex; a disk that reads and writes at once
    is as fast as the faster of the two alone."""
    host_link = read["host_link_bytes_per_s"]
    disk = max(read["disk_read_bytes_per_s"], read["disk_write_bytes_per_s"])
    links = (
        (Tier.HOST, Tier.DEVICE, host_link, 2 * host_link, read["host_link_latency_s"]),
        (Tier.DEVICE, Tier.HOST, host_link, 2 * host_link, read["host_link_latency_s"]),
        (Tier.DISK, Tier.HOST, read["disk_read_bytes_per_s"], disk, read["disk_latency_s"]),
        (Tier.HOST, Tier.DISK, read["disk_write_bytes_per_s"], disk, read["disk_latency_s"]),
    )
    return Machine(
        name=read.name,
        fingerprint="",
        device=read.device,
        memory={
            Tier.DEVICE: int(read["device_memory_bytes"]),
            Tier.HOST: int(read["host_memory_bytes"]),
            Tier.DISK: int(read["disk_memory_bytes"]),
        },
        links=tuple(
            Link(source=near, target=far, bytes_per_s=rate, shared_bytes_per_s=both, latency_s=late)
            for near, far, rate, both, late in links
        ),
        flops_per_s=read.flops_per_s,
        stream_bytes_per_s=read["stream_bytes_per_s"],
        host_stream_bytes_per_s=read["host_stream_bytes_per_s"],
        node=Node(
            ranks=int(read["gpus_per_node"]),
            peer_bytes_per_s=read["peer_bytes_per_s"],
            network_bytes_per_s=read["network_bytes_per_s"],
            start_latency_s=read["collective_latency_s"],
            peer_latency_s=read["peer_latency_s"],
            network_latency_s=read["network_latency_s"],
        ),
    )
