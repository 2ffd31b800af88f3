"""Units of a streamed update, and the ring over the arena that they pass through.

Stands below `optimizer`. A `Unit` is updated by one call; its `Load`s say what of each parameter
is shown to the optimizer, and where that lies: in the ring, in device memory that is its home,
or, for a unit that is updated on the host, in the host memory that is its home.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from elixir_fx.errors import TierError
from elixir_fx.machine import Tier
from elixir_fx.runtime.away import Home, Ticket
from elixir_fx.runtime.parameters import AwayTensor
from elixir_fx.runtime.shards import ShardedHome
from elixir_fx.runtime.store import TensorHome


class Entry(Protocol):
    """One managed parameter. A part whose home is None is an ordinary tensor."""

    @property
    def path(self) -> str: ...
    @property
    def value(self) -> Home | None: ...
    @property
    def gradient(self) -> Home | None: ...
    @property
    def states_away(self) -> bool: ...
    @property
    def on_host(self) -> bool:
        """Whether its update runs on the host, where then all its parts are at home."""


@dataclass(eq=False)
class Piece:
    """One tensor of a unit, as the update sees it."""

    home: Home
    flat: Tensor
    view: Tensor
    writes: bool = False
    in_place: bool = False  # it is the home itself


@dataclass(eq=False)
class Load:
    """The away parts of one parameter, while it is updated.

    `shown` is the parameter that the optimizer sees: the user's own, or one in host memory that
    stands in for it.
    """

    parameter: nn.Parameter
    entry: Entry
    shown: nn.Parameter
    value: Piece | None = None
    gradient: Piece | None = None
    states: dict[str, tuple[AwayTensor, Piece]] = field(default_factory=dict)
    seen: Tensor | None = None  # p.grad as the user sees it
    ordinary: Tensor | None = None  # this rank's part of it, where it is not at home
    lent: Tensor | None = None  # p.grad during the update
    lent_version: int = 0
    moved: dict[str, torch.device] = field(default_factory=dict)  # states, and where they were

    def pieces(self) -> Iterator[Piece]:
        yield from (piece for piece in (self.value, self.gradient) if piece is not None)
        yield from (piece for _, piece in self.states.values())

    def hold(self, name: str, piece: Piece, state: AwayTensor | None) -> None:
        """Take a piece as what it is: "value", "gradient" or a state's."""
        if state is not None:
            self.states[name] = (state, piece)
        elif name == "value":
            self.value = piece
        else:
            self.gradient = piece


@dataclass(eq=False)
class Unit:
    """Parameters that are updated by one call, and the region of the ring they have.

    One that is updated on the host (`on_host`) has none.
    """

    parameters: list[nn.Parameter]
    on_host: bool = False
    start: int = 0
    end: int = 0
    loads: list[Load] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    leaving: bool = False

    def wait(self) -> None:
        while self.tickets:
            self.tickets.pop(0).wait()


class Ring:
    """Regions of the arena, given out in a circle; a region is taken again once it is home."""

    def __init__(self, arena: Tensor) -> None:
        self.arena = arena
        self.head = 0
        self.units: deque[Unit] = deque()

    def reserve(self, unit: Unit, nbytes: int) -> bool:
        """Give `unit` a region; False while a unit that is still at work is in the way."""
        start = self.head if self.head + nbytes <= self.arena.numel() else 0
        end = start + nbytes
        in_the_way = [old for old in self.units if old.start < end and start < old.end]
        if any(not old.leaving for old in in_the_way):
            return False
        for old in in_the_way:
            old.wait()
            self.units.remove(old)
        unit.start, unit.end, self.head = start, end, end
        self.units.append(unit)
        return True

    def drain(self) -> None:
        """Wait for everything under way, all of it even if some of it fails."""
        error: BaseException | None = None
        while self.units:
            unit = self.units[0]
            try:
                unit.wait()
            except TierError as failed:
                error = error or failed
            if not unit.tickets:
                self.units.popleft()
        if error is not None:
            raise error


def own(home: Home) -> Home:
    """What this rank has of a home."""
    return home.own if isinstance(home, ShardedHome) else home


def in_place(home: Home) -> Tensor | None:
    """The value itself, flat, where a home is in device memory."""
    return home.memory if isinstance(home, TensorHome) else None


def host_memory(home: Home) -> Tensor | None:
    """The value itself, flat, where a home is in host memory; nothing moves there by then."""
    return home.host_memory() if isinstance(home, TensorHome) else None


def is_on_host(home: Home) -> bool:
    """Whether a home is in host memory."""
    return isinstance(home, TensorHome) and home.region.tier is Tier.HOST


def nbytes_of(home: Home) -> int:
    return home.span * home.dtype.itemsize
