"""Search: the plan of a step, found by trying layouts on the forecast.

Last stage of the planner, and its only door: `search`, `schedule`, `smallest`.

    minimise    step_s(choice)                       forecast.Player.play
    over        chunk size, arena size, gradient     draft.Choice
                blocks, ring depth, unit size,
                homes of every part of every chunk
    subject to  device(i) <= limits.device, all i    draft.Drafter, footprint.Footprint
                host, disk bytes <= their limits     draft.Drafter._assign
                stays that share a byte share no     place.place
                position
    and         step_s >= lower_bound_s              bound.lower_bound_s

If everything fits on the device, that is the plan: nothing beats it. Otherwise `_survey`
tries every chunk size with every arena size, `_vary` changes one property of the best choices
at a time, and `_relieve` brings home the chunks that the step waits for. A choice is not
played if its update alone cannot beat the best so far (`_hopeless`). All are bounded by
counts; there is no clock and no chance in it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Gather, Layout, Limits, Plan, Reduce, Schedule
from elixir_fx.planner.bound import pair_s, update_compute_s
from elixir_fx.planner.draft import ORDERS, Choice, Draft, Drafter, spread_arenas
from elixir_fx.planner.footprint import Footprint, Part, away, home
from elixir_fx.planner.forecast import Player, Timing, forecast
from elixir_fx.planner.pack import away_tiers, chunk_sizes, pack, pinned_tiers
from elixir_fx.planner.place import Stay, core_bytes, first_call, place, uses
from elixir_fx.units import GIB, MIB, sizes

FINALISTS = 3  # choices of the survey that are varied
ROUNDS = 3  # of changes, while they help
RELIEVED = 10  # chunks brought home because the step waits for them
RINGS = (1, 2)  # places in the ring that the survey tries where there is little room


def search(
    facts: Facts, machine: Machine, limits: Limits, pins: Mapping[str, Tier] | None = None
) -> Plan:
    """The best plan found for a step under `limits`, by the forecast's step time.

    `pins` fix the home of parameters, by parameter or module path. PlanError if no plan
    meets the limits, with the least device memory that would do.
    """
    space = _Space(facts=facts, machine=machine, limits=limits, pins=pins or {})
    everything = space.keep_all()
    if everything is not None:
        return space.plan(everything)
    global_state = facts.optimizer is not None and facts.optimizer.global_state
    if global_state or space.least is None or space.least[0] > limits.device:
        raise PlanError(space.refusal())
    return space.plan(_Search(space).best())


def smallest(
    facts: Facts, machine: Machine, limits: Limits, pins: Mapping[str, Tier] | None = None
) -> int:
    """The least `limits.device` that `search` accepts, in bytes, the other limits as given.

    The least over the layouts that the search knows. PlanError where no device memory
    would help: pinned homes that their tier cannot hold.
    """
    space = _Space(facts=facts, machine=machine, limits=limits, pins=pins or {})
    return space.smallest()


def schedule(facts: Facts, machine: Machine, limits: Limits, layout: Layout) -> Schedule:
    """When chunks of an existing layout move in another captured graph.

    PlanError if the graph reads parameters that the layout does not have, or does not fit.
    """
    known = {piece.path for chunk in layout.chunks for piece in chunk.slices}
    strangers = sorted(p.path for p in facts.parameters if p.path not in known)
    if strangers:
        raise PlanError(
            f"the plan has no parameter {strangers[0]!r}; it was made for another model"
        )
    player = Player.of(facts, machine, Footprint(facts, layout.chunks))
    stays: tuple[Stay, ...] = ()
    if not layout.keeps_all:
        away = [c for c in layout.chunks if c.homes.parameters != Tier.DEVICE]
        needed = uses(facts, away)
        found = place(needed, layout.gather_bytes, first_call(facts))
        if found is None:
            raise PlanError(
                f"this graph needs {sizes(core_bytes(needed))} of gathered parameters at once; "
                f"the plan's gather area has {sizes(layout.gather_bytes)}. Plan again with it as "
                "the example"
            )
        stays = found
    made = _schedule(player, limits, layout, stays)
    if made.forecast.peak_device_bytes > limits.device:
        raise PlanError(_too_large(made, machine, limits))
    return made


def _schedule(player: Player, limits: Limits, layout: Layout, stays: tuple[Stay, ...]) -> Schedule:
    facts = player.facts
    gathers = tuple(
        Gather(
            chunk=stay.chunk,
            backward=stay.backward,
            offset=stay.offset,
            before=facts.nodes[stay.first],
            after=facts.nodes[stay.last],
            prefetch=facts.nodes[stay.start] if stay.start < stay.first else None,
            kept=stay.kept,
        )
        for stay in stays
    )
    reduces = sorted(player.footprint.reduces.items(), key=lambda item: (item[1], item[0]))
    return Schedule(
        key=facts.key,
        trains=facts.trains,
        gathers=gathers,
        reduces=()
        if layout.keeps_all
        else tuple(Reduce(chunk=chunk, after=facts.nodes[after]) for chunk, after in reduces),
        forecast=forecast(player, layout, stays, limits),
    )


@dataclass(frozen=True, kw_only=True)
class _Space:
    """All layouts of one step that the search knows."""

    facts: Facts
    machine: Machine
    limits: Limits
    pins: Mapping[str, Tier]

    @cached_property
    def tiers_by_path(self) -> dict[str, Tier]:
        return pinned_tiers(self.facts, self.machine, self.limits, self.pins)

    @cached_property
    def chunk_sizes(self) -> tuple[int, ...]:
        return chunk_sizes(self.facts)

    @cached_property
    def players(self) -> dict[int, Player]:
        """One packing of the parameters for each chunk size."""
        found = {}
        for size in self.chunk_sizes:
            chunks = pack(self.facts, size, self.tiers_by_path)
            found[size] = Player.of(self.facts, self.machine, Footprint(self.facts, chunks))
        return found

    @cached_property
    def drafters(self) -> dict[int, Drafter]:
        return {
            size: Drafter(
                machine=self.machine,
                limits=self.limits,
                pins=self.tiers_by_path,
                footprint=player.footprint,
            )
            for size, player in self.players.items()
        }

    @cached_property
    def kept_peak(self) -> int | None:
        """Device bytes of keeping everything; None if a pin forbids it."""
        if any(tier != Tier.DEVICE for tier in self.tiers_by_path.values()):
            return None
        return self._whole.footprint.kept_peak

    @property
    def _whole(self) -> Player:
        return self.players[self.chunk_sizes[-1]]

    def keep_all(self) -> Draft | None:
        """The layout that moves nothing, if it fits."""
        if self.kept_peak is None or self.kept_peak > self.limits.device:
            return None
        layout = Layout(
            chunks=self._whole.footprint.chunks,
            gather_bytes=0,
            gradient_blocks=0,
            gradient_block_bytes=0,
            update_numel=0,
            arena_bytes=0,
            host_bytes=0,
            disk_bytes=0,
        )
        choice = Choice(chunk_bytes=self.chunk_sizes[-1], arena_bytes=0)
        return Draft(choice=choice, layout=layout, stays=(), need_bytes=self.kept_peak)

    def arenas(self, chunk_bytes: int) -> tuple[int, ...]:
        """Arena sizes to try with a chunk size."""
        footprint = self.drafters[chunk_bytes].footprint
        largest = sorted(max(size.widest.values()) for size in footprint.sizes) or [0]
        whole = max((sum(size.widest.values()) for size in footprint.sizes), default=0)
        total = sum(sum(size.packed.values()) for size in footprint.sizes)
        base = max(chunk_bytes, self.chunk_sizes[0], largest[len(largest) // 2])
        big = (2 * largest[-1], 3 * largest[-1], whole, 2 * whole)
        return spread_arenas(base, big, total)

    @cached_property
    def least(self) -> tuple[int, Choice] | None:
        """The choice that needs the least device memory, and how much."""
        found: tuple[int, Choice] | None = None
        if not away_tiers(self.machine, self.limits):
            return None
        for size, drafter in self.drafters.items():
            for arena in self.arenas(size):
                choice = Choice(
                    chunk_bytes=size, arena_bytes=arena, gradient_blocks=1, ring=1, fill=False
                )
                need = drafter.need_bytes(choice)
                if need is not None and (found is None or need < found[0]):
                    found = (need, choice)
        return found

    def smallest(self) -> int:
        needs = [] if self.kept_peak is None else [self.kept_peak]
        moves = self.facts.optimizer is None or not self.facts.optimizer.global_state
        if moves and self.least is not None:
            needs.append(self.least[0])
        if not needs:
            raise PlanError("the pinned homes do not fit their tiers: give host or disk more room")
        return min(needs)

    def plan(self, draft: Draft) -> Plan:
        player = self.players[draft.choice.chunk_bytes]
        made = _schedule(player, self.limits, draft.layout, draft.stays)
        return Plan(
            machine=self.machine.name,
            limits=self.limits,
            layout=draft.layout,
            schedules=(made,),
            notes=self._notes(draft),
        )

    def _notes(self, draft: Draft) -> tuple[str, ...]:
        if draft.layout.keeps_all:
            return ("everything stays on the device",)
        notes = []
        for part in Part:
            whole = kept = 0
            footprint = self.players[draft.choice.chunk_bytes].footprint
            for chunk, size in zip(draft.layout.chunks, footprint.sizes, strict=True):
                total = size.ordinary[part]
                kept += total if home(chunk.homes, part) == Tier.DEVICE else 0
                whole += total
            notes.append(f"{part}: {sizes(kept)} of {sizes(whole)} at home on the device")
        return tuple(notes)

    def refusal(self) -> str:
        """Why no plan fits, with the numbers and what would do."""
        least = self.smallest()
        footprint = self._whole.footprint
        position = int(footprint.live.argmax()) if len(footprint.live) else 0
        largest = ", ".join(
            f"{what} {sizes(size)}" for what, size in footprint.largest_at(position, 3)
        )
        optimizer = self.facts.optimizer
        if optimizer is not None and optimizer.global_state:
            reason = f" {optimizer.name} needs all parameters at once, so nothing can be away."
        elif not away_tiers(self.machine, self.limits):
            reason = " Nothing can be away: there is no disk or host memory to use."
        else:
            reason = ""
        return (
            f"The step needs {sizes(least)} on {self.machine.device}; "
            f"{sizes(self.limits.device)} are allowed.{reason} "
            f"Largest: {largest or 'parameters ' + sizes(footprint.constant([]))}. "
            f"Smallest that fits: memory={_round_up(least)!r}."
        )


@dataclass(kw_only=True)
class _Played:
    draft: Draft
    timing: Timing


@dataclass
class _Search:
    """One search: the choices played so far, the best first."""

    space: _Space
    played: list[_Played] = field(default_factory=list)
    known: set[Choice] = field(default_factory=set)

    def best(self) -> Draft:
        assert self.space.least is not None
        self._try(self.space.least[1])
        self._survey()
        for finalist in self.played[:FINALISTS]:
            self._vary(finalist)
        self._relieve()
        return self.played[0].draft

    def _survey(self) -> None:
        for size in self.space.chunk_sizes:
            for arena in self.space.arenas(size):
                self._try(Choice(chunk_bytes=size, arena_bytes=arena))
        if len(self.played) <= FINALISTS:  # little room: the thriftiest ways as well
            for size in self.space.chunk_sizes:
                for arena in self.space.arenas(size):
                    for ring in RINGS:
                        self._try(
                            Choice(
                                chunk_bytes=size, arena_bytes=arena, gradient_blocks=1, ring=ring
                            )
                        )

    def _vary(self, start: _Played) -> None:
        """Change one property at a time, from the best that came of the last change."""
        current = start
        for _ in range(ROUNDS):
            before = current.timing.step_s
            for choice in _changes(current.draft.choice):
                other = self._try(choice)
                if other is not None and other.timing.step_s < current.timing.step_s:
                    current = other
            if current.timing.step_s >= before * 0.999:
                return

    def _relieve(self) -> None:
        """Bring home the chunk that the best plan waits for longest, while that helps."""
        refused: set[int] = set()
        for _ in range(RELIEVED):
            best = self.played[0]
            waits = {c: s for c, s in best.timing.waits.items() if s > 0 and c not in refused}
            if not waits:
                return
            chunk = max(waits, key=lambda chunk: (waits[chunk], -chunk))
            choice = best.draft.choice
            self._try(replace(choice, first=(*choice.first, chunk), fill=True))
            if self.played[0] is best:
                refused.add(chunk)

    def _try(self, choice: Choice) -> _Played | None:
        """Draft and play a choice; None if it does not fit, or cannot be the best."""
        if choice in self.known:
            return None
        self.known.add(choice)
        draft = self.space.drafters[choice.chunk_bytes].draft(
            choice, lambda layout: not self._hopeless(choice, layout)
        )
        if draft is None:
            return None
        player = self.space.players[choice.chunk_bytes]
        played = _Played(draft=draft, timing=player.play(draft.layout, draft.stays))
        self.played.append(played)
        self.played.sort(key=lambda one: one.timing.step_s)
        return played

    def _hopeless(self, choice: Choice, layout: Layout) -> bool:
        """Whether compute and the bytes of the update alone take longer than the best step."""
        if not self.played or not self.space.facts.trains:
            return False
        machine = self.space.machine
        far = Tier.DISK if machine.unified else Tier.HOST
        loads = stores = gradients = 0
        footprint = self.space.players[choice.chunk_bytes].footprint
        for chunk, size in zip(layout.chunks, footprint.sizes, strict=True):
            if chunk.id in footprint.reduces:
                moving = away(chunk.homes, size.packed)
                gradient = size.packed[Part.GRADIENTS]
                gradient = gradient if chunk.homes.gradients != Tier.DEVICE else 0
                loads += moving
                stores += moving - gradient
                gradients += gradient
        update_s = pair_s(machine, Tier.DEVICE, far, loads, stores)
        update_s = max(update_s, update_compute_s(self.space.facts, machine))
        copy_s = 2 * gradients / machine.stream_bytes_per_s
        return self.space.facts.compute_s + copy_s + update_s > self.played[0].timing.step_s


def _changes(choice: Choice) -> Iterator[Choice]:
    """Choices that differ in one property."""
    for pieces in (2, 3, 4, 6, 8, 16):
        yield replace(choice, pieces=pieces, fill=True)
    for ring in (1, 2, 3):
        yield replace(choice, ring=ring, fill=True)
    for blocks in (1, 2, 3):
        yield replace(choice, gradient_blocks=blocks, fill=True)
    for order in ORDERS:
        yield replace(choice, order=order, fill=True)
    for factor in (0.8, 0.9, 1.12, 1.25):
        yield replace(choice, arena_bytes=int(choice.arena_bytes * factor), fill=True)


def _round_up(nbytes: int) -> str:
    """Bytes as a user would write them, not less."""
    if nbytes > 4 * GIB:
        tenths = -(-nbytes * 10 // GIB)
        return f"{tenths / 10:g}GiB"
    return f"{-(-nbytes // MIB)}MiB"


def _too_large(made: Schedule, machine: Machine, limits: Limits) -> str:
    largest = ", ".join(f"{what} {sizes(size)}" for what, size in made.forecast.largest[:3])
    peak = made.forecast.peak_device_bytes
    return (
        f"This graph needs {sizes(peak)} on {machine.device} with the plan's layout; "
        f"{sizes(limits.device)} are allowed. Largest: {largest}. "
        f"Plan again with it as the example: memory={_round_up(peak)!r} would do with this layout."
    )
