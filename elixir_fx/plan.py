"""The plan: what a person reads, saves, edits and compares. Frozen, JSON, no tensors.

A `Plan` is one `Layout` (chunks, their homes, the memory they share: made once, from the
training graph) and one `Schedule` for each captured graph (when chunks move, and the
forecast of doing so). The planner makes it, the rewrite passes carry it out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from elixir_fx.demand import Demand
from elixir_fx.errors import PlanError
from elixir_fx.explained import Account, Reasons, WhatIf, Why, Worth, explained_text
from elixir_fx.machine import Tier

T = TypeVar("T")

VERSION = 6
ALIGNMENT_BYTES = 4096  # of every slice, block and region: direct I/O works on any of them


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of slices, blocks and regions."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Budgets in bytes. A tier with 0 does not exist."""

    device: int
    host: int = 0
    disk: int = 0

    def of(self, tier: Tier) -> int:
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.disk}[tier]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks that train one model together; by default there is one.

    `shared`: all are on one host whose CPU computes, so that what is at home in memory lies in
    memory that every one of them sees, and gathering it moves nothing.
    """

    ranks: int = 1
    shared: bool = False

    def gradient_block_bytes(self, chunk: "Chunk") -> int:
        """The room that a chunk's gradients take while they are summed over the ranks: as many
        bytes for what the other ranks send, unless they can look at it; one share more for the
        old value where that is away."""
        received = 0 if self.shared or not chunk.sharded else align(chunk.nbytes)
        needed = align(chunk.nbytes) + received + align(chunk.share_bytes)
        return max(needed, ALIGNMENT_BYTES)  # a chunk of empty parameters passes through one too


ONE_RANK = Group()


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """One parameter's place in its chunk. `offset` is in elements, `span` from its first to
    its last element."""

    path: str
    offset: int
    span: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Homes:
    """Where a chunk's parts live between steps.

    A part at home on the device is an ordinary tensor. Frozen chunks have neither gradients
    nor states: theirs say device and hold nothing.
    """

    parameters: Tier = Tier.DEVICE
    gradients: Tier = Tier.DEVICE
    states: Tier = Tier.DEVICE

    @property
    def on_device(self) -> bool:
        return self.parameters == self.gradients == self.states == Tier.DEVICE


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Parameters of one dtype that move together. `numel` counts elements, padding included.

    `shards` equal parts of it, cut at multiples of 64 elements of every parameter, are at home
    with as many ranks, the rank-th with each; one shard is the whole chunk, on every rank.
    `update` is where its optimizer runs: on the device, through which the parts that are away
    stream, or on the host, where then all of them are at home (ZeRO-Offload, arXiv 2101.06840).
    """

    id: int
    dtype: str
    itemsize: int
    numel: int
    trainable: bool
    slices: tuple[Slice, ...]
    homes: Homes
    shards: int = 1
    update: Tier = Tier.DEVICE

    @property
    def sharded(self) -> bool:
        return self.shards > 1

    @property
    def gathered(self) -> bool:
        """Whether its parameters are read from a gather, not from ordinary tensors."""
        return self.sharded or self.homes.parameters is not Tier.DEVICE

    @property
    def share_numel(self) -> int:
        """Elements that one rank has."""
        return self.numel // self.shards

    @property
    def share_bytes(self) -> int:
        return self.share_numel * self.itemsize

    def own(self, piece: Slice, rank: int) -> tuple[int, int]:
        """First and end of the elements of a parameter that a rank has, counted from the
        parameter's first; equal where it has none."""
        share = self.share_numel
        first = min(max(rank * share - piece.offset, 0), piece.span)
        end = min(max((rank + 1) * share - piece.offset, 0), piece.span)
        return first, end

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def own_bytes(self) -> int:
        """Bytes of a part of it, as wide as its parameters, at home on the device of a rank."""
        if self.sharded:
            return self.share_bytes
        return sum(piece.span for piece in self.slices) * self.itemsize

    @property
    def title(self) -> str:
        """First and last parameter path, for people."""
        first, last = self.slices[0].path, self.slices[-1].path
        return first if first == last else f"{first} .. {last}"

    def width(self, piece: Slice) -> int:
        """Elements that a slice takes in the chunk, padding included."""
        return align(piece.span * self.itemsize) // self.itemsize

    def units(self, update_numel: int, rank: int = 0) -> tuple[tuple[Slice, ...], ...]:
        """The pieces the optimizer of a rank streams: consecutive slices of which it has at most
        `update_numel` elements together, or more of one slice. Those of which it has none
        come with their neighbours, or alone."""
        units: list[tuple[Slice, ...]] = []
        room = -1
        for piece in self.slices:
            first, end = self.own(piece, rank)
            if units and end - first <= room:
                units[-1] += (piece,)
                room -= end - first
            else:
                units.append((piece,))
                room = update_numel - (end - first)
        return tuple(units)

    def own_width(self, piece: Slice, rank: int) -> int:
        """Elements of a slice that a rank has, padded as they are where they stream."""
        first, end = self.own(piece, rank)
        return align((end - first) * self.itemsize) // self.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where everything lives. Made once; every schedule keeps it.

    The arena is one preallocated block of device memory. While a graph runs its first
    `gather_bytes` hold gathered chunks (the gather cache) and the rest `gradient_blocks`
    equal blocks that gradients pass through on their way home; while the optimizer runs the
    whole arena is a ring through which pieces of at most `update_numel` elements (or one
    parameter, if larger) stream.
    """

    chunks: tuple[Chunk, ...]
    gather_bytes: int
    gradient_blocks: int
    gradient_block_bytes: int
    update_numel: int
    arena_bytes: int
    host_bytes: int
    disk_bytes: int
    staging_bytes: int = 0  # host memory between disk and device, on an accelerator
    saved_bytes: int = 0  # of host or disk, for activations: part of their bytes above
    saved_tier: Tier = Tier.DEVICE  # which of the two; the device, if none leave
    mapped: bool = False  # parameters at home on the disk are tensors over a mapped file
    group: Group = ONE_RANK

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the mapped file."""
        if not self.mapped:
            return 0
        homes = [(chunk, chunk.homes.parameters) for chunk in self.chunks]
        return sum(align(chunk.nbytes) for chunk, home in homes if home is not Tier.DEVICE)

    @property
    def keeps_all(self) -> bool:
        """Everything stays on the device, of one rank: no node of ours is needed."""
        return self.group.ranks == 1 and self.all_home and not self.saved_bytes

    @property
    def all_home(self) -> bool:
        """Nothing is away on another tier; what ranks share may still be gathered."""
        return all(chunk.homes.on_device for chunk in self.chunks)

    def takes_block(self, chunk: Chunk) -> bool:
        """Whether a gathered chunk lies in the gather cache; otherwise it is where it is at
        home, in memory that the ranks share."""
        return chunk.gathered and not (self.group.shared and chunk.homes.parameters is Tier.DEVICE)

    @property
    def block_bytes(self) -> int:
        """Bytes of all gradient blocks."""
        return self.gradient_blocks * self.gradient_block_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the gradient blocks where they are memory of their own, which other ranks
        look at, and not a part of the arena."""
        return self.block_bytes if self.group.shared else 0


def merged(some: Sequence[T], others: Sequence[T]) -> list[T]:
    """Both sequences in one, each in its order, so mixed that of both about the same part has
    come at any point. The order in which units of the device's update and of the host's run."""
    found: list[T] = []
    rest = list(others)
    for index, one in enumerate(some):
        found.append(one)
        until = len(others) * (index + 1) // len(some)
        while len(rest) > len(others) - until:
            found.append(rest.pop(0))
    return [*found, *rest]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """One stay of a chunk in the gather cache, within one phase.

    `before` is the name of the first node that reads it and `after` of the last one;
    `prefetch` the node before which its transfer starts (None: at the gather itself).
    `offset` is its block's place in the arena, in bytes. `kept` says that the chunk is
    planned to be there still from the forward, so that nothing moves; `resident`, that it is at
    home in memory that the ranks share, and takes no block.
    """

    chunk: int
    backward: bool
    offset: int
    before: str
    after: str
    prefetch: str | None
    kept: bool = False
    resident: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduce:
    """A chunk's gradients are complete after node `after` and go home."""

    chunk: int
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Node `node` of the forward runs once more in the backward, before node `before`; what the
    backward reads of it from there on is what it gave then."""

    node: str
    before: str


SAVED = 1 << 24  # stays from this chunk on are those of activations: the schedule's offloads


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """What node `node` of the forward leaves for the backward is away in between.

    It leaves after node `after`, its last reader in the forward, and is there again from node
    `before` to node `last` of the backward, in the block at `offset` of the gather area, in bytes.
    Its transfer back starts before node `prefetch` (None: at `before` itself).
    """

    node: str
    nbytes: int
    after: str
    before: str
    last: str
    offset: int
    prefetch: str | None

    @property
    def title(self) -> str:
        """For people, as a chunk's."""
        return self.node


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What the planner expects of one steady step of `micro_batches` forwards and backwards and
    an update. Names as in `ElixirModule.stats()`.

    `exposed` splits the exposed seconds by cause (a link's "disk->device", "update").
    `lower_bound_s` is a time that no plan under the same budgets can beat, as far as it is
    proved; `gap` is how far above it this plan is. `largest` are the biggest storages at the
    position of the peak, as (what, bytes).
    """

    step_s: float
    compute_s: float
    optimizer_s: float
    exposed_s: float
    lower_bound_s: float
    peak_device_bytes: int
    peak_host_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    host_to_device_bytes: int
    device_to_host_bytes: int
    gathered_bytes: int
    reduced_bytes: int
    prefetch_hits: int
    prefetch_misses: int
    micro_batches: int = 1
    activation_bytes: int = 0
    peak_node: str = ""
    exposed: tuple[tuple[str, float], ...] = ()
    largest: tuple[tuple[str, int], ...] = ()

    @property
    def gap(self) -> float:
        return self.step_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """When chunks move in one captured graph, and what that is expected to cost.

    `recomputes` stand in their order: what a node reads is repeated ahead of it, or still there.
    Of a graph whose dynamic dimensions have names, `sizes` are these with the values that the
    forecast is for, and `demand` says the device memory at others.
    """

    key: str
    trains: bool
    gathers: tuple[Gather, ...]
    reduces: tuple[Reduce, ...]
    forecast: Forecast
    recomputes: tuple[Recompute, ...] = ()
    offloads: tuple[Offload, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    demand: Demand | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout and the schedules made for it so far.

    `worth` and `what_if` say why, of a plan that `elixir_fx.plan` made: they are worked out when
    somebody first asks, and saved if somebody had. They are no part of what is decided: plans
    that differ in them alone are equal.
    """

    machine: str
    limits: Limits
    layout: Layout
    schedules: tuple[Schedule, ...]
    notes: tuple[str, ...] = field(default=())
    why: Why | None = field(default=None, compare=False, repr=False)

    @property
    def worth(self) -> tuple[Worth, ...]:
        """What the device's memory buys; nothing where that is not known."""
        return self._account.worth

    @property
    def what_if(self) -> tuple[WhatIf, ...]:
        """What other budgets would change; nothing where that is not known."""
        return self._account.what_if

    @property
    def _account(self) -> Account:
        return Account() if self.why is None else self.why.account()

    @property
    def forecast(self) -> Forecast:
        """The forecast of the first schedule, the one that the layout was made for."""
        return self.schedules[0].forecast

    @property
    def sizes(self) -> Mapping[str, int]:
        """The named sizes of the inputs, at the values that the plan was made for."""
        return dict(self._sized.sizes) if self._sized is not None else {}

    @property
    def _sized(self) -> Schedule | None:
        """The first schedule of a graph with named sizes."""
        return next((entry for entry in self.schedules if entry.demand is not None), None)

    def largest(self, name: str, /, **others: int) -> int:
        """The largest value of a named size ("batch") for which a call keeps to the device's
        budget in this plan's layout; the other sizes as given, or as the plan was made for.

        The rule is that by which the compiled model takes or refuses a call, for a graph that
        keeps the dimension dynamic. PlanError if the plan has no such size, or for every value.
        """
        sized = self._sized
        for asked in (name, *others):
            if asked not in self.sizes:
                known = f"it has {sorted(self.sizes)}" if sized else "it has none: name some with "
                known += "" if sized else "dynamic_shapes={'input_ids': {0: 'batch'}}"
                raise PlanError(f"this plan has no size {asked!r}; {known}")
        for other, value in others.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"{other}={value!r} is no size: give a whole number, 1 or more")
        assert sized is not None and sized.demand is not None
        fixed = {**self.sizes, **others}
        del fixed[name]
        return sized.demand.largest(name, fixed, self.limits.device)

    def explain(self) -> str:
        """Why, for people: what the device's memory is for and what it buys, what more and less
        of it would change, what the step waits for, how near it is to the best possible.

        Of a plan that `elixir_fx.plan` made. Any other says what it knows, without the seconds.
        """
        forecast = self.forecast
        return explained_text(
            Reasons(
                step_s=forecast.step_s,
                compute_s=forecast.compute_s,
                lower_bound_s=forecast.lower_bound_s,
                gap=forecast.gap,
                peak_bytes=forecast.peak_device_bytes,
                limit_bytes=self.limits.device,
                exposed=forecast.exposed,
                held=self._held(),
                worth=self.worth,
                what_if=self.what_if,
            )
        )

    def _held(self) -> tuple[tuple[str, int], ...]:
        """Device bytes at the peak, by purpose. What states take is known to the planner alone."""
        layout, forecast = self.layout, self.forecast
        chunks = layout.chunks
        parameters = [c for c in chunks if c.homes.parameters is Tier.DEVICE]
        gradients = [c for c in chunks if c.homes.gradients is Tier.DEVICE and c.trainable]
        beside = layout.block_bytes - layout.shared_bytes
        known = (
            ("activations and gradients on their way", forecast.activation_bytes),
            ("parameters at home", sum(chunk.own_bytes for chunk in parameters)),
            ("gradients at home", sum(chunk.own_bytes for chunk in gradients)),
            ("gathered chunks", layout.gather_bytes),
            ("gradients on their way home", layout.block_bytes),
            ("ring of the update beyond these", layout.arena_bytes - layout.gather_bytes - beside),
        )
        rest = forecast.peak_device_bytes - sum(nbytes for _, nbytes in known)
        return (*known, ("states at home, buffers and the update's scratch", rest))

    def with_schedule(self, schedule: Schedule, keep: int = 8) -> "Plan":
        """This plan with one more schedule; the first stays, the oldest of the rest goes."""
        first, *rest = self.schedules
        others = [known for known in rest if known.key != schedule.key]
        return replace(self, schedules=(first, *others[2 - keep :], schedule))

    def with_known(self, schedule: Schedule) -> "Plan":
        """This plan with another schedule in the place of the one that has its key."""
        return replace(
            self,
            schedules=tuple(schedule if s.key == schedule.key else s for s in self.schedules),
        )

    def to_json(self) -> str:
        data = asdict(replace(self, why=None))
        del data["why"]
        told = self.why.known if self.why is not None else None
        return json.dumps(
            {"elixir_fx_plan": VERSION, **data, **asdict(told or Account())}, indent=1
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; `load` reads it back equal. What `explain` said stays with it, if
        somebody had asked."""
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan from a file. PlanError names the file if it holds none."""
        try:
            return Plan.from_json(Path(path).read_text())
        except (OSError, PlanError) as error:
            raise PlanError(f"{path} is not a plan: {error}") from error

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan that `to_json` wrote. PlanError if `text` is anything else."""
        try:
            data = json.loads(text)
            version = data.pop("elixir_fx_plan")
            if version != VERSION:
                raise PlanError(f"plan version {version}, this elixir_fx reads {VERSION}")
            return Plan(
                machine=data["machine"],
                limits=Limits(**data["limits"]),
                layout=_layout(data["layout"]),
                schedules=tuple(_schedule(entry) for entry in data["schedules"]),
                notes=tuple(data["notes"]),
                why=_why(data),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"malformed plan: {error!r}") from error


def _why(data: dict[str, Any]) -> Why | None:
    """What a plan's maker had said of it, if somebody had asked."""
    told = Account(
        worth=tuple(Worth(**entry) for entry in data["worth"]),
        what_if=tuple(WhatIf(**entry) for entry in data["what_if"]),
    )
    if told == Account():
        return None
    why = Why(lambda: told)
    why.account()
    return why


def _layout(data: dict[str, Any]) -> Layout:
    chunks = []
    for entry in data.pop("chunks"):
        homes = Homes(**{part: Tier(tier) for part, tier in entry.pop("homes").items()})
        slices = tuple(
            Slice(**{**piece, "shape": tuple(piece["shape"]), "strides": tuple(piece["strides"])})
            for piece in entry.pop("slices")
        )
        update = Tier(entry.pop("update"))
        chunks.append(Chunk(**entry, homes=homes, slices=slices, update=update))
    group = Group(**data.pop("group"))
    saved_tier = Tier(data.pop("saved_tier"))
    return Layout(chunks=tuple(chunks), group=group, saved_tier=saved_tier, **data)


def _schedule(data: dict[str, Any]) -> Schedule:
    forecast = dict(data["forecast"])
    for pairs in ("exposed", "largest"):
        forecast[pairs] = tuple(tuple(pair) for pair in forecast[pairs])
    sizes = tuple((name, int(value)) for name, value in data["sizes"])
    return Schedule(
        key=data["key"],
        trains=data["trains"],
        gathers=tuple(Gather(**entry) for entry in data["gathers"]),
        reduces=tuple(Reduce(**entry) for entry in data["reduces"]),
        forecast=Forecast(**forecast),
        recomputes=tuple(Recompute(**entry) for entry in data["recomputes"]),
        offloads=tuple(Offload(**entry) for entry in data["offloads"]),
        sizes=sizes,
        demand=_demand(data["demand"], dict(sizes)),
    )


def _demand(data: dict[str, Any] | None, sizes: Mapping[str, int]) -> Demand | None:
    if data is None:
        return None
    demand = Demand(**{**data, "live": tuple(data["live"])})
    demand.peak(sizes)  # PlanError for what is no formula of these sizes
    return demand
