"""Search: the plan of a step, found by trying layouts on the forecast.

Last stage of the planner, and its main door: `search`, `schedule`, `smallest`.

    minimise    step_s(choice)                       forecast.Player.play
    over        chunk size, arena size, gradient     draft.Choice
                blocks, ring depth, unit size,
                homes of every part of every chunk
    subject to  device(i) <= limits.device, all i    draft.Drafter, footprint.Footprint
                host, disk bytes <= their limits     draft.Drafter._assign
                stays that share a byte share no     place.place
                position
    and         step_s >= lower_bound_s              bound.Bound

If everything fits on the device, that is the plan: nothing beats it. Otherwise

    `_thrifty`  tries the arena of the least memory
    `_guided`   tries what the relaxation's optimum would have at home and on the host, as nearly
                as whole chunks can, with every chunk size
    `_survey`   tries every chunk size with every arena size
    `_vary`     changes one property of the best choices at a time
    `_relieve`  brings home the chunks that the step waits for
    `_polish`   makes the best of the best homes, and tries others one by one: all where there
                are few, so that small steps get the best plan that there is (see polish)

A search ends as soon as a plan is as fast as the bound allows. A choice is not played if its
update alone cannot beat the best so far (`_hopeless`). All are bounded by counts; there is no
clock and no chance in it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from elixir_fx.errors import LayoutError, PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Layout, Limits, Plan, Schedule
from elixir_fx.planner.arranged import Arranger
from elixir_fx.planner.baselines import rivals
from elixir_fx.planner.bound import PROVED, Bound, pair_s, update_compute_s
from elixir_fx.planner.draft import OUTSIZED, SPILLS, Choice, Draft
from elixir_fx.planner.footprint import Footprint, Part, away
from elixir_fx.planner.forecast import Player, Timing
from elixir_fx.planner.order import ORDERS, Item
from elixir_fx.planner.pack import away_tiers
from elixir_fx.planner.place import (
    Stay,
    core_bytes,
    first_call,
    gathered_uses,
    in_order,
    place,
    resident,
)
from elixir_fx.planner.polish import FEW, SLACK, Completed, Option, Table
from elixir_fx.planner.relaxation import Relaxed
from elixir_fx.planner.space import Arranged, Space, make_schedule, nearest
from elixir_fx.units import round_up, sizes

FINALISTS = 2  # choices, the best so far, that are varied
ROUNDS = 3  # of changes, while they help
RELIEVED = 10  # chunks brought home because the step waits for them
MANY_CHUNKS = 160  # of a packing that is not tried if a coarser one is at hand
GUIDED_ARENAS = 2  # arena sizes near the relaxation's
NEIGHBOURHOODS = 12  # of homes that are tried, each around the best of the one before
NEARBY = 160  # homes of one neighbourhood that are made the best of,
EVERYWHERE = 240  # and of all homes
EFFORT = 16_000  # chunks of all drafts that are made and played
COMPLETING = 8  # drafts that completing one layout takes as long as
RINGS = (1, 2)  # places in the ring that the survey tries where there is little room


def search(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    pins: Mapping[str, Tier] | None = None,
    group: Group = ONE_RANK,
    micro_batches: int = 1,
) -> Plan:
    """The best plan found for a step under `limits` of each rank, by the forecast's step time.

    `pins` fix the home of parameters, by parameter or module path; a step has `micro_batches`
    forwards and backwards. PlanError if no plan meets the limits, with the least device memory
    that would do.
    """
    space = Space(
        facts=facts,
        machine=machine,
        limits=limits,
        pins=pins or {},
        group=group,
        micro_batches=micro_batches,
    )
    everything = space.keep_all()
    if everything is not None:
        return space.plan(everything)
    global_state = facts.optimizer is not None and facts.optimizer.global_state
    if global_state or space.least is None or space.least[0] > limits.device:
        raise PlanError(space.refusal())
    trying = _Search(space)
    return space.plan(trying.best())


def smallest(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    pins: Mapping[str, Tier] | None = None,
    group: Group = ONE_RANK,
) -> int:
    """The least `limits.device` that `search` accepts, in bytes, the other limits as given.

    The least over the layouts that the search knows. PlanError where no device memory
    would help: pinned homes that their tier cannot hold.
    """
    space = Space(facts=facts, machine=machine, limits=limits, pins=pins or {}, group=group)
    return space.smallest()


def schedule(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    layout: Layout,
    held_bytes: int = 0,
    micro_batches: int = 1,
) -> Schedule:
    """When chunks of an existing layout move in another captured graph.

    `held_bytes` are activations of other graphs that are there while it runs.
    PlanError if the graph reads parameters that the layout does not have, LayoutError if it
    does not fit.
    """
    known = {piece.path for chunk in layout.chunks for piece in chunk.slices}
    strangers = sorted(p.path for p in facts.parameters if p.path not in known)
    if strangers:
        raise PlanError(
            f"the plan has no parameter {strangers[0]!r}; it was made for another model"
        )
    footprint = Footprint(facts, layout.chunks, layout.group)
    player = Player.of(facts, machine, footprint, micro_batches)
    stays: tuple[Stay, ...] = ()
    if not layout.keeps_all:
        found = _placed(facts, layout)
        if found is None:
            needed, _ = gathered_uses(facts, layout)
            raise LayoutError(
                f"this graph needs {sizes(core_bytes(needed))} of gathered parameters at once; "
                f"the plan's gather area has {sizes(layout.gather_bytes)}. Plan again with it as "
                "the example"
            )
        stays = found
    bound = Bound(
        facts=facts,
        machine=machine,
        limits=limits,
        group=layout.group,
        micro_batches=micro_batches,
    )
    made = make_schedule(player, bound, layout, stays)
    peak = player.footprint.layout_peak(layout, held_bytes)
    if peak > limits.device:
        raise LayoutError(_too_large(made, machine, limits, peak))
    return made


def _placed(facts: Facts, layout: Layout) -> tuple[Stay, ...] | None:
    """Stays of all that a graph reads in a layout; None if its gather area is too small."""
    needed, there = gathered_uses(facts, layout)
    found = place(needed, layout.gather_bytes, first_call(facts))
    return None if found is None else in_order([*found, *resident(there)])


@dataclass(kw_only=True)
class _Played:
    draft: Draft
    timing: Timing


@dataclass
class _Search:
    """One search: the choices played so far, the best first."""

    space: Space
    played: list[_Played] = field(default_factory=list)
    known: set[Choice] = field(default_factory=set)
    effort: int = EFFORT

    def best(self) -> Arranged:
        """The fastest layout that was found, no slower than what a baseline would decide."""
        candidates = [self.space.arranged(self._found())]
        # Baselines know nothing of activations that leave.
        for rival in () if self.space.facts.departures else rivals(self._arranger):
            stays = _placed(self.space.facts, rival.layout)  # moved as early as the area allows
            if stays is not None:
                candidates.append(replace(rival, stays=stays))
            candidates.append(rival)
        return min(candidates, key=lambda one: one.step_s)

    @property
    def _arranger(self) -> Arranger:
        space = self.space
        return Arranger(
            facts=space.facts,
            machine=space.machine,
            limits=space.limits,
            pins=space.pins,
            group=space.group,
            micro_batches=space.micro_batches,
        )

    def _found(self) -> Draft:
        assert self.space.least is not None
        self._try(self.space.least[1])
        for stage in self._stages():
            if self._done:
                break
            stage()
        return self.played[0].draft

    def _stages(self) -> tuple[Callable[[], None], ...]:
        return (
            self._thrifty,
            self._guided,
            self._vary_best,
            self._relieve,
            self._survey,
            self._vary_best,
            self._relieve,
            self._polish,
        )

    @property
    def _done(self) -> bool:
        """Whether nothing is left that is worth its effort."""
        return self._proved or self.effort <= 0

    @cached_property
    def _update_s(self) -> float:
        return update_compute_s(self.space.facts, self.space.machine)

    @property
    def relaxed(self) -> Relaxed:
        """The relaxation's optimum."""
        return self.space.bound.relaxed

    @property
    def _proved(self) -> bool:
        """Whether nothing can be faster than the best so far."""
        return bool(self.played) and self.played[0].timing.step_s <= self.relaxed.step_s * (
            1 + PROVED
        )

    @property
    def _shares(self) -> tuple[float, ...]:
        """How much of the update to try on the host."""
        machine = self.space.machine
        if not machine.updates_on_host:
            return (0.0,)
        return tuple(sorted({0.0, round(self.relaxed.on_host, 3), 1.0}))

    def _thrifty(self) -> None:
        """The least memory's own arena, and what is left for the rest: where there is little
        room, all there is to choose is where what is away lives and is updated. It counts for
        no effort, so that this is always asked."""
        if not self.played:
            return
        effort = self.effort
        least = self.played[0].draft
        arena = max(least.layout.arena_bytes + least.layout.shared_bytes, 1)
        for share, spill, ring in product(self._shares, self._spills, RINGS):
            self._try(
                replace(
                    least.choice,
                    arena_bytes=arena,
                    on_host=share,
                    spill=spill,
                    ring=ring,
                    fill=True,
                )
            )
        self.effort = effort

    def _guided(self) -> None:
        """What the relaxation keeps at home, and how much of it is updated on the host."""
        relaxed = self.relaxed
        quotas = (
            (Part.PARAMETERS, relaxed.parameters_bytes),
            (Part.GRADIENTS, relaxed.gradients_bytes),
            (Part.STATES, relaxed.states_bytes),
        )
        for size in reversed(self._sizes):  # the coarsest first: it takes the least effort
            near = nearest(self.space.arenas(size), relaxed.arena_bytes, GUIDED_ARENAS)
            chunks = self.space.players[size].footprint.chunks
            largest = max((chunk.nbytes for chunk in chunks), default=0)
            block = max(map(self.space.group.gradient_block_bytes, chunks), default=0)
            block = largest if self.space.group.ranks == 1 else block
            ways = [(arena, 2) for arena in (relaxed.arena_bytes, *near)]
            # Room to gather the largest chunk and to pass its gradient on.
            ways += [(block + largest + 2 * size, 1), (block + largest + 6 * size, 1)]
            ways += [(2 * block + largest + 2 * size, 2)]
            firsts = self._outsized(size)
            for (arena, blocks), first, spill in product(ways, firsts, self._spills):
                self._try(
                    Choice(
                        chunk_bytes=size,
                        arena_bytes=arena,
                        gradient_blocks=blocks,
                        quotas=quotas,
                        first=first,
                        on_host=relaxed.on_host,
                        spill=spill,
                    )
                )

    @cached_property
    def _spills(self) -> tuple[str, ...]:
        """What to spill: one way is enough where the nearest tier holds all that is away."""
        space = self.space
        tiers = away_tiers(space.machine, space.limits)
        footprint = space.players[space.chunk_sizes[-1]].footprint
        total = sum(sum(size.packed.values()) for size in footprint.sizes)
        several = len(tiers) > 1 and total > space.limits.of(tiers[0])
        return SPILLS if several else SPILLS[:1]

    def _outsized(self, chunk_bytes: int) -> list[tuple[Item, ...]]:
        """Parts to bring home first, in several ways: of chunks that are larger than they should
        be, as a single parameter may be, which else would set the size of every block."""
        chunks = self.space.players[chunk_bytes].footprint.chunks
        large = [chunk.id for chunk in chunks if chunk.nbytes > OUTSIZED * chunk_bytes]
        if not large or self.space.group.ranks > 1:
            return [()]
        gradients = tuple((chunk, Part.GRADIENTS) for chunk in large)
        return [(), gradients, (*gradients, *((chunk, Part.PARAMETERS) for chunk in large))]

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Chunk sizes: all, but those that make very many chunks only where no larger one is."""
        sizes, players = self.space.chunk_sizes, self.space.players
        few = tuple(s for s in sizes if len(players[s].footprint.chunks) <= MANY_CHUNKS)
        return few or sizes[-1:]

    def _survey(self) -> None:
        """Every chunk size with every arena size; every other one first."""
        for start in (1, 0):
            for share in self._shares:
                for size in self._sizes:
                    for arena in self.space.arenas(size)[start::2]:
                        self._try(Choice(chunk_bytes=size, arena_bytes=arena, on_host=share))
            if self.effort < EFFORT // 2:
                break
        if len(self.played) <= FINALISTS:  # little room: the thriftiest ways as well
            for size in self.space.chunk_sizes:
                for arena in self.space.arenas(size):
                    for ring in RINGS:
                        self._try(
                            Choice(
                                chunk_bytes=size, arena_bytes=arena, gradient_blocks=1, ring=ring
                            )
                        )

    def _vary_best(self) -> None:
        for finalist in self.played[:FINALISTS]:
            self._vary(finalist)

    def _vary(self, start: _Played) -> None:
        """Change one property at a time, from the best that came of the last change."""
        current = start
        for _ in range(ROUNDS):
            before = current.timing.step_s
            for choice in self._changes(current.draft.choice):
                other = self._try(choice)
                if other is not None and other.timing.step_s < current.timing.step_s:
                    current = other
            if current.timing.step_s >= before * 0.999:
                return

    def _changes(self, choice: Choice) -> Iterator[Choice]:
        """Choices that differ in one property."""
        for pieces in (2, 3, 4, 6, 8, 16):
            yield replace(choice, pieces=pieces, fill=True)
        for ring in (1, 2, 3):
            yield replace(choice, ring=ring, fill=True)
        for blocks in (1, 2, 3, 4, 6):
            yield replace(choice, gradient_blocks=blocks, fill=True)
        for order in ORDERS:
            yield replace(choice, order=order, fill=True)
        for factor in (0.8, 0.9, 1.12, 1.25):
            yield replace(choice, arena_bytes=int(choice.arena_bytes * factor), fill=True)
        for index, (part, nbytes) in enumerate(choice.quotas):
            for factor in (0.0, 0.8, 1.25):
                changed = (part, int(nbytes * factor))
                quotas = (*choice.quotas[:index], changed, *choice.quotas[index + 1 :])
                yield replace(choice, quotas=quotas, fill=True)
        if choice.quotas:
            yield replace(choice, quotas=(), fill=True)
        for spill in SPILLS:
            yield replace(choice, spill=spill, fill=True)
        for first in self._outsized(choice.chunk_bytes):
            yield replace(choice, first=first, fill=True)
        if len(self._shares) > 1:
            for step in (-0.25, -0.1, -0.04, 0.04, 0.1, 0.25):
                share = round(min(1.0, max(0.0, choice.on_host + step)), 3)
                yield replace(choice, on_host=share, fill=True)

    def _polish(self) -> None:
        """Make the best of the best homes of each packing, and of those around them; all of
        them where they are few."""
        if self.space.group.ranks > 1:
            return
        best = self.played[0].draft.choice.chunk_bytes
        starts = {one.draft.choice.chunk_bytes: one for one in reversed(self.played)}
        for size in self._sizes:
            table = self.space.tables[size]
            few = table.count <= FEW
            if size in starts and (few or size == best):
                self._descend(size, table, starts[size])
            if few:
                self._try_homes(size, table.all(), EVERYWHERE)

    def _descend(self, size: int, table: Table, start: _Played) -> None:
        """Go from homes to better ones that differ in one chunk, or where none is, in two."""
        options = [Option(chunk.homes, chunk.update) for chunk in start.draft.layout.chunks]
        self._keep(size, self.space.completers[size].complete(options, self._worth_s))
        changed = 1
        for _ in range(NEIGHBOURHOODS):
            if self._proved or table.neighbour_count(changed) > FEW:
                return
            found = self._try_homes(size, table.neighbours(options, changed), NEARBY)
            if found is None and changed == 2:
                return
            changed = 2 if found is None else 1
            options = found or options

    def _try_homes(self, size: int, rows: NDArray[np.int64], most: int) -> list[Option] | None:
        """Make the best of homes in the order of promise, of `most` at most; those of the best
        plan found here, None if none is better than what was known."""
        table, completer = self.space.tables[size], self.space.completers[size]
        bounds = table.bounds_s(rows)
        best: list[Option] | None = None
        for row in np.argsort(bounds, kind="stable")[:most]:
            if bounds[row] >= self.played[0].timing.step_s or self._done:
                break
            options = table.chosen(rows[row])
            self.effort -= COMPLETING * len(options)
            if self._keep(size, completer.complete(options, self._worth_s)):
                best = options
        return best

    def _keep(self, size: int, completed: Completed | None) -> bool:
        """Keep a layout if it is better than all played so far; whether it is."""
        if completed is None or completed.step_s >= self._worth_s:
            return False
        layout, player = completed.layout, self.space.players[size]
        draft = Draft(
            choice=Choice(chunk_bytes=size, arena_bytes=layout.arena_bytes),
            layout=layout,
            stays=completed.stays,
            need_bytes=player.footprint.layout_peak(layout),
        )
        self._add(_Played(draft=draft, timing=player.play(layout, completed.stays)))
        return True

    @property
    def _worth_s(self) -> float:
        """A step of fewer seconds is better than all played so far."""
        return self.played[0].timing.step_s * (1 - SLACK)

    def _add(self, played: _Played) -> None:
        self.played.append(played)
        self.played.sort(key=lambda one: one.timing.step_s)

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
            self._try(replace(choice, first=(*choice.first, (chunk, Part.PARAMETERS)), fill=True))
            if self.played[0] is best:
                refused.add(chunk)

    def _try(self, choice: Choice) -> _Played | None:
        """Draft and play a choice; None if it does not fit, or cannot be the best."""
        if choice in self.known or self._done:
            return None
        self.known.add(choice)
        self.effort -= len(self.space.players[choice.chunk_bytes].footprint.chunks)
        draft = self.space.drafters[choice.chunk_bytes].draft(
            choice, lambda layout: not self._hopeless(choice, layout)
        )
        if draft is None:
            return None
        player = self.space.players[choice.chunk_bytes]
        played = _Played(draft=draft, timing=player.play(draft.layout, draft.stays))
        self._add(played)
        return played

    def _hopeless(self, choice: Choice, layout: Layout) -> bool:
        """Whether compute and the bytes of the update alone take longer than the best step."""
        if not self.played or not self.space.facts.trains:
            return False
        machine = self.space.machine
        far = Tier.DISK if machine.unified else Tier.HOST
        loads = stores = gradients = 0
        player = self.space.players[choice.chunk_bytes]
        footprint = player.footprint
        for chunk, size in zip(layout.chunks, footprint.sizes, strict=True):
            if chunk.id in footprint.reduces and chunk.update is Tier.DEVICE:
                moving = away(chunk.homes, size.packed)
                gradient = size.packed[Part.GRADIENTS]
                gradient = gradient if chunk.homes.gradients != Tier.DEVICE else 0
                loads += moving
                stores += moving - gradient
                gradients += gradient
        update_s = pair_s(machine, Tier.DEVICE, far, loads, stores)
        update_s = max(update_s, self._update_s)
        copy_s = 2 * gradients / machine.stream_bytes_per_s
        compute_s = self.space.micro_batches * player.starts[-1]
        return compute_s + copy_s + update_s > self.played[0].timing.step_s


def _too_large(made: Schedule, machine: Machine, limits: Limits, peak: int) -> str:
    largest = ", ".join(f"{what} {sizes(size)}" for what, size in made.forecast.largest[:3])
    return (
        f"This graph needs {sizes(peak)} on {machine.device} with the plan's layout; "
        f"{sizes(limits.device)} are allowed. Largest: {largest}. "
        f"Plan again with it as the example: memory={round_up(peak)!r} would do with this layout."
    )
