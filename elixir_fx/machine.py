"""A machine as the planner sees it: memories, links between them, and rates.

Plain data without torch. `elixir_fx.runtime.measure` fills one for this machine;
`elixir_fx.testing.emulated` makes one up. The forecast multiplies facts by these rates.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

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
class Machine:
    """Memory sizes, links and rates of one machine.

    `device` is the torch device type that computes. `emulated` marks an accelerator that is
    played in RAM. `memory` is bytes by tier. `flops_per_s` is by dtype ("float32"),
    `stream_bytes_per_s` the rate at which the compute device reads and writes its own memory,
    `host_stream_bytes_per_s` that of an optimizer that runs on the host beside it; 0 where
    none can.
    `operators` maps an operator's key (name, shapes, dtypes, threads) to measured seconds.
    """

    name: str
    fingerprint: str
    device: str
    emulated: bool = False
    memory: Mapping[Tier, int]
    links: tuple[Link, ...]
    flops_per_s: Mapping[str, float]
    stream_bytes_per_s: float
    host_stream_bytes_per_s: float = 0.0
    operators: Mapping[str, float] = field(default_factory=dict)

    @property
    def unified(self) -> bool:
        """Host and device are one memory: the tiers are RAM and disk."""
        return self.device == "cpu" and not self.emulated

    def update_bytes_per_s(self, tier: Tier) -> float:
        """The rate at which an optimizer on `tier` (DEVICE or HOST) reads and writes memory."""
        return self.host_stream_bytes_per_s if tier is Tier.HOST else self.stream_bytes_per_s

    def link(self, source: Tier, target: Tier) -> Link:
        """The link from one tier to the other; PlanError if the machine has none."""
        for link in self.links:
            if link.source == source and link.target == target:
                return link
        raise PlanError(f"machine {self.name!r} has no link from {source} to {target}")

    def flops(self, dtype: str) -> float:
        """Floating-point operations per second in `dtype`, float32's where unknown."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])

    def with_peers(self) -> "Machine":
        """This machine with links to other ranks, where nobody measured them: sends of 16 MiB
        between two processes of one CPU host over gloo, or a GPU node's own links over NCCL."""
        if any(link.source is Tier.PEERS for link in self.links):
            return self
        rate, latency_s, share = CPU_PEERS if self.device == "cpu" else GPU_PEERS
        ends = ((Tier.PEERS, Tier.DEVICE), (Tier.DEVICE, Tier.PEERS))
        links = (
            Link(
                source=source,
                target=target,
                bytes_per_s=rate,
                shared_bytes_per_s=rate if self.device == "cpu" else 2 * rate,
                latency_s=latency_s,
                compute_share=share,
            )
            for source, target in ends
        )
        return replace(self, links=(*self.links, *links))

    def with_operators(self, operators: Mapping[str, float]) -> "Machine":
        return replace(self, operators={**self.operators, **operators})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

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
