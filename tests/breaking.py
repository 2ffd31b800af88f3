"""Ways to break a rewritten step, each of which `verify` must refuse.

A way takes a copy of a rewritten step, its plan and a random source. It changes the copy (or
answers another plan) and tells what the refusal must say, or None where the step has nothing
that could be broken so.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from elixir_fx import ops
from elixir_fx.plan import Gather, Plan
from elixir_fx.step import (
    PHASE,
    STAY,
    StepGraph,
    is_backward,
    mark,
    readers,
    stay_of,
    tensor,
)


@dataclass(frozen=True)
class Broken:
    """What `verify` must say, as a regular expression, and the plan to verify with."""

    message: str
    plan: Plan


Way = Callable[[StepGraph, Plan, random.Random], Broken | None]


def _nodes(step: StepGraph, target: object) -> list[fx.Node]:
    return [node for node in step.nodes if node.target is target]


def _positions(step: StepGraph) -> dict[fx.Node, int]:
    return {node: index for index, node in enumerate(step.nodes)}


def _release_of(step: StepGraph, gathered: fx.Node) -> fx.Node:
    stay = stay_of(gathered)
    return next(node for node in _nodes(step, ops.RELEASE) if stay_of(node) == stay)


def _shaped(gathered: fx.Node) -> list[fx.Node]:
    """The parameters that are cut out of a gathered chunk."""
    return [shaped for part in gathered.users for shaped in part.users]


def _path(step: StepGraph, shaped: fx.Node) -> str:
    part = shaped.all_input_nodes[0]
    chunk = step.chunk(stay_of(part.all_input_nodes[0]).chunk)
    return next(piece.path for piece in chunk.slices if piece.offset == part.args[2])


def release_before_a_use(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    gathered = rng.choice(_nodes(step, ops.GATHER))
    reader = rng.choice([node for node in readers(gathered) if node.op != "output"])
    reader.prepend(_release_of(step, gathered))
    chunk = stay_of(gathered).chunk
    return Broken(rf"{reader.name} reads chunk {chunk} .* after its release", plan)


def release_dropped(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    released = rng.choice(_nodes(step, ops.RELEASE))
    chunk = stay_of(released).chunk
    step.module.graph.erase_node(released)
    return Broken(rf"chunk {chunk} .*(never released|already there)|while chunk {chunk} ", plan)


def release_doubled(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    released = rng.choice(_nodes(step, ops.RELEASE))
    with step.module.graph.inserting_after(released):
        again = step.module.graph.node_copy(released)
    return Broken(rf"{again.name}: chunk {stay_of(released).chunk} is not gathered here", plan)


def read_at_the_parameter(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    shaped = rng.choice([s for g in _nodes(step, ops.GATHER) for s in _shaped(g)])
    path = _path(step, shaped)
    shaped.replace_all_uses_with(step.parameter_nodes[path])
    return Broken(rf"reads parameter '{path}', whose home is .*, without a gather", plan)


def read_of_another_parameter(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    """Another parameter that is gathered at the same time, of the same shape or not."""
    position = _positions(step)
    pairs = [
        (one, other)
        for gathered in _nodes(step, ops.GATHER)
        for one in _shaped(gathered)
        for second in _nodes(step, ops.GATHER)
        for other in _shaped(second)
        if one is not other
        and one.users
        and is_backward(one) == is_backward(other)
        and position[other] < min(position[user] for user in one.users)
        and max(position[r] for r in readers(one)) < position[_release_of(step, second)]
    ]
    if not pairs:
        return None
    one, other = rng.choice(pairs)
    path, wrong = _path(step, one), _path(step, other)
    one.replace_all_uses_with(other)
    return Broken(rf"is (parameter '{wrong}'|something else), not parameter '{path}'", plan)


def gather_dropped(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    """Its readers look at the chunk's gather in the other phase, or at another chunk's."""
    gathered = rng.choice(_nodes(step, ops.GATHER))
    others = [node for node in _nodes(step, ops.GATHER) if node is not gathered]
    if not others:
        return None
    other = rng.choice(others)
    gathered.replace_all_uses_with(other)
    step.module.graph.erase_node(gathered)
    return Broken(r"chunk \d+|before it is computed", plan)


def gather_doubled(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    gathered = rng.choice(_nodes(step, ops.GATHER))
    with step.module.graph.inserting_after(gathered):
        again = step.module.graph.node_copy(gathered)
    return Broken(rf"{again.name}: chunk {stay_of(gathered).chunk} is already there", plan)


def gather_after_its_reader(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    gathered = rng.choice(_nodes(step, ops.GATHER))
    reader = next(iter(gathered.users))
    reader.append(gathered)
    return Broken(f"{reader.name} reads {gathered.name} before it is computed", plan)


def gather_of_another_chunk(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    node = rng.choice(_nodes(step, rng.choice([ops.GATHER, ops.RELEASE])))
    chunk = stay_of(node).chunk
    wrong = rng.choice([c.id for c in plan.layout.chunks if c.id != chunk] or [chunk + 1])
    node.args = (wrong, *node.args[1:])
    return Broken(f"{node.name} names chunk {wrong}, its stay chunk {chunk}", plan)


def slice_of_another_place(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    gathered = rng.choice(_nodes(step, ops.GATHER))
    part = rng.choice(list(gathered.users))
    first, last = int(str(part.args[2])), int(str(part.args[3]))
    part.args = (gathered, 0, first + 1, last + 1)
    return Broken(f"{part.name} reads no single parameter of chunk {stay_of(gathered).chunk}", plan)


def _move_block(step: StepGraph, stay: Gather, offset: int) -> None:
    for node in step.nodes:
        if node.meta.get(STAY) == stay:
            node.meta[STAY] = replace(stay, offset=offset)


def block_reused_too_early(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    """A block is laid over one that is in use."""
    position = _positions(step)
    stays = [(stay_of(node), node) for node in _nodes(step, ops.GATHER)]
    pairs = [
        (stay, held)
        for stay, node in stays
        for held, other in stays
        if stay.chunk != held.chunk
        and not stay.kept
        and position[other] < position[node] < position[_release_of(step, other)]
    ]
    if not pairs:
        return None
    stay, held = rng.choice(pairs)
    _move_block(step, stay, held.offset)
    return Broken(
        rf"block of chunk {stay.chunk} .*(while chunk \d+ is still in use|lies outside)"
        rf"|block of chunk {held.chunk} .*while chunk {stay.chunk} ",
        plan,
    )


def kept_block_written_over(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    kept = [stay_of(n) for n in _nodes(step, ops.GATHER) if stay_of(n).kept]
    if not kept:
        return None
    stay = rng.choice(kept)
    _move_block(step, stay, stay.offset + 4096)
    return Broken(f"chunk {stay.chunk} is planned to be kept from the forward", plan)


def block_outside_the_cache(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    stays = [stay_of(n) for n in _nodes(step, ops.GATHER) if not stay_of(n).kept]
    stay = rng.choice(stays)
    _move_block(step, stay, rng.choice([-4096, plan.layout.gather_bytes]))
    return Broken(rf"block of chunk {stay.chunk}, .* lies outside the gather cache", plan)


def prefetch_after_its_gather(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    prefetches = _nodes(step, ops.PREFETCH)
    if not prefetches:
        return None
    node = rng.choice(prefetches)
    gathered = next(g for g in _nodes(step, ops.GATHER) if stay_of(g) == stay_of(node))
    gathered.append(node)
    mark(node, backward=is_backward(gathered))
    return Broken(f"{node.name}: chunk {stay_of(node).chunk} is already there", plan)


def prefetch_into_a_block_in_use(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    position = _positions(step)
    cases = []
    for node in _nodes(step, ops.PREFETCH):
        stay = stay_of(node)
        end = stay.offset + step.chunk(stay.chunk).nbytes
        for other in _nodes(step, ops.GATHER):
            held = stay_of(other)
            meet = held.offset < end and stay.offset < held.offset + step.chunk(held.chunk).nbytes
            before = position[_release_of(step, other)] < position[node]
            if held.chunk != stay.chunk and meet and before:
                cases.append((node, other))
    if not cases:
        return None
    node, other = rng.choice(cases)
    other.append(node)
    mark(node, backward=is_backward(other))
    return Broken(r"block of chunk \d+ .* while chunk \d+ is still in use|already there", plan)


def prefetch_that_nobody_gathers(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    gathered = max(_nodes(step, ops.GATHER), key=_positions(step).__getitem__)
    released = _release_of(step, gathered)
    with step.module.graph.inserting_after(released):
        node = step.call("prefetch_again", ops.PREFETCH, gathered.args[:1], lambda: None)
    mark(node, backward=is_backward(released), stay=stay_of(gathered))
    return Broken(f"chunk {stay_of(gathered).chunk} is prefetched and never gathered", plan)


def reduce_dropped(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    reduces = _nodes(step, ops.REDUCE)
    if not reduces:
        return None
    node = rng.choice(reduces)
    answers = sorted(node.users, key=lambda item: int(str(item.args[1])))
    names = []
    for answer, gradient in zip(answers, node.args[2], strict=True):  # type: ignore[arg-type]
        answer.replace_all_uses_with(gradient)  # type: ignore[arg-type]
        step.module.graph.erase_node(answer)
        names.append(gradient.name)  # type: ignore[union-attr]
    step.module.graph.erase_node(node)
    return Broken(rf"the gradient of '.*', ({'|'.join(names)}), leaves the graph without", plan)


def reduce_doubled(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    reduces = _nodes(step, ops.REDUCE)
    if not reduces:
        return None
    node = rng.choice(reduces)
    with step.module.graph.inserting_after(node):
        step.module.graph.node_copy(node)
    return Broken(f"chunk {node.args[0]} is reduced 2 times", plan)


def reduce_of_another_gradient(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    reduces = [node for node in _nodes(step, ops.REDUCE) if len(node.users) > 1]
    if not reduces:
        return None
    node = rng.choice(reduces)
    chunk, slices, gradients = node.args
    node.args = (chunk, slices, [*gradients[1:], gradients[0]])  # type: ignore[index, misc]
    return Broken(rf"{node.name} takes .* for the gradient of '.*', which is", plan)


def answers_exchanged(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    reduces = [node for node in _nodes(step, ops.REDUCE) if len(node.users) > 1]
    if not reduces:
        return None
    node = rng.choice(reduces)
    one, other = list(node.users)[:2]
    one.args, other.args = other.args, one.args
    return Broken(rf"{node.name} gives the gradient of '.*' in chunk {node.args[0]} to '", plan)


def weight_saved_for_backward(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    """The backward reads the forward's view of a weight instead of its own."""
    forward = {
        _path(step, shaped): shaped
        for gathered in _nodes(step, ops.GATHER)
        if not is_backward(gathered)
        for shaped in _shaped(gathered)
    }
    pairs = [
        (shaped, forward[_path(step, shaped)])
        for gathered in _nodes(step, ops.GATHER)
        if is_backward(gathered)
        for shaped in _shaped(gathered)
        if _path(step, shaped) in forward
    ]
    if not pairs:
        return None
    own, saved = rng.choice(pairs)
    chunk = stay_of(saved.all_input_nodes[0].all_input_nodes[0]).chunk
    own.replace_all_uses_with(saved)
    return Broken(
        rf"in the backward reads {saved.name}, a gathered weight .*chunk {chunk}\): "
        "it would be saved",
        plan,
    )


def bytes_over_the_budget(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    body = [node for node in step.nodes if node.op == "call_function"]
    anchor = rng.choice(body)
    size = [plan.limits.device // 4 + 1]
    fake = tensor(next(n for n in step.nodes if n.op == "placeholder"))
    with step.module.graph.inserting_after(anchor):
        node = step.call(
            "huge", torch.ops.aten.zeros.default, (size,), lambda: fake.new_zeros(size).float()
        )
    mark(node, backward=is_backward(anchor))
    return Broken(r"at huge the step holds .* on the device .* are allowed", plan)


def budget_cut(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    device = rng.randrange(plan.layout.arena_bytes)
    cut = replace(plan, limits=replace(plan.limits, device=device))
    return Broken(r"at \w+ the step holds .* on the device .* are allowed", cut)


def host_cut(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    host = rng.randrange(plan.layout.host_bytes)
    cut = replace(plan, limits=replace(plan.limits, host=host))
    return Broken(r"the layout holds .* on host; .* are allowed", cut)


def arena_cut(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    arena = rng.randrange(plan.layout.gather_bytes)
    cut = replace(plan, layout=replace(plan.layout, arena_bytes=arena))
    return Broken("gather cache and gradient blocks take .* of an arena of", cut)


def slices_that_meet(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    chunks = [chunk for chunk in plan.layout.chunks if len(chunk.slices) > 1]
    if not chunks:
        return None
    chunk = rng.choice(chunks)
    slices = (chunk.slices[0], replace(chunk.slices[1], offset=0), *chunk.slices[2:])
    index = plan.layout.chunks.index(chunk)
    chunks_now = list(plan.layout.chunks)
    chunks_now[index] = replace(chunk, slices=slices)
    layout = replace(plan.layout, chunks=tuple(chunks_now))
    return Broken(f"meet in chunk {chunk.id}", replace(plan, layout=layout))


def forward_after_the_backward(step: StepGraph, plan: Plan, rng: random.Random) -> Broken | None:
    backward = [n for n in step.nodes if is_backward(n) and n.op == "call_function"]
    if len(backward) < 2:
        return None
    node = rng.choice(backward[1:])
    node.meta[PHASE] = "forward"
    return Broken(f"forward node {node.name} stands after the backward began", plan)


WAYS: tuple[Way, ...] = (
    release_before_a_use,
    release_dropped,
    release_doubled,
    read_at_the_parameter,
    read_of_another_parameter,
    gather_dropped,
    gather_doubled,
    gather_after_its_reader,
    gather_of_another_chunk,
    slice_of_another_place,
    block_reused_too_early,
    kept_block_written_over,
    block_outside_the_cache,
    prefetch_after_its_gather,
    prefetch_into_a_block_in_use,
    prefetch_that_nobody_gathers,
    reduce_dropped,
    reduce_doubled,
    reduce_of_another_gradient,
    answers_exchanged,
    weight_saved_for_backward,
    bytes_over_the_budget,
    budget_cut,
    host_cut,
    arena_cut,
    slices_that_meet,
    forward_after_the_backward,
)
