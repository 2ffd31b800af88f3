"""The bytes half of `verify`: law 4, counted from the graph alone.

At every position the device holds what always stays (parameters, gradients and states at home
there, buffers, the arena) and what is alive of the graph's own results; during the update, what
always stays and the largest unit; the host its homes, the staging memory and the largest unit
that is updated there. Not the planner's count: this one walks the nodes.
"""

from collections import Counter

from torch import Tensor, fx

from elixir_fx import ops
from elixir_fx.errors import VerifyError
from elixir_fx.facts import OptimizerFacts
from elixir_fx.machine import Tier
from elixir_fx.plan import Chunk, Layout, Plan, Slice, align
from elixir_fx.step import (
    StepGraph,
    is_item,
    memory_root,
    number,
    readers,
    storage_bytes,
    value,
    viewed_input,
)
from elixir_fx.units import sizes


def budget(step: StepGraph, plan: Plan) -> None:
    """VerifyError where the step holds more than a tier's budget, or the arena less than it
    must."""
    _arena(step, plan)
    _away_bytes(step, plan)
    constant = _constant_bytes(step, plan)
    born, died = _allocations(step)
    live = 0
    for node in step.nodes:
        live += born[node]
        _check(f"at {node.name}", constant, live, plan)
        live -= died[node]
    if step.trains:
        _check("in the update", constant, _update_bytes(step, plan, Tier.DEVICE), plan)


def _check(when: str, constant: int, live: int, plan: Plan) -> None:
    limit = plan.limits.device
    if constant + live > limit:
        raise VerifyError(
            f"{when} the step holds {sizes(constant + live)} on the device "
            f"({sizes(constant)} of it always); {sizes(limit)} are allowed"
        )


def _arena(step: StepGraph, plan: Plan) -> None:
    """The arena holds the gather cache beside the gradient blocks, and any unit that streams."""
    layout = plan.layout
    blocks = layout.block_bytes - layout.shared_bytes
    if layout.gather_bytes + blocks > layout.arena_bytes:
        raise VerifyError(
            f"gather cache and gradient blocks take {sizes(layout.gather_bytes + blocks)} of an "
            f"arena of {sizes(layout.arena_bytes)}"
        )
    for chunk in layout.chunks:
        if not chunk.trainable:
            continue
        room = layout.gradient_block_bytes if layout.gradient_blocks else 0
        passes = chunk.homes.gradients is not Tier.DEVICE or layout.group.ranks > 1
        needed = (
            layout.group.gradient_block_bytes(chunk) if layout.group.ranks > 1 else chunk.nbytes
        )
        if passes and needed > room:
            raise VerifyError(f"no gradient block holds the gradients of chunk {chunk.id}")
        for rank in range(chunk.shards) if chunk.update is Tier.DEVICE else ():
            for unit in chunk.units(layout.update_numel, rank):
                if _unit_bytes(step, chunk, unit, rank) > layout.arena_bytes:
                    raise VerifyError(
                        f"the arena does not hold {unit[0].path!r} of chunk {chunk.id} in the "
                        "update"
                    )


def _unit_bytes(step: StepGraph, chunk: Chunk, unit: tuple[Slice, ...], rank: int) -> int:
    numel = sum(chunk.own_width(piece, rank) for piece in unit)
    homes, total = chunk.homes, 0
    for home in (homes.parameters, homes.gradients):
        total += 0 if home is Tier.DEVICE else align(numel * chunk.itemsize)
    if homes.states is not Tier.DEVICE and step.optimizer is not None:
        total += sum(align(numel * size) for _, size in step.optimizer.of(chunk.dtype).states)
    return total


def _away_bytes(step: StepGraph, plan: Plan) -> None:
    layout, limits = plan.layout, plan.limits
    update = _update_bytes(step, plan, Tier.HOST) if step.trains else 0
    for tier, held in (
        (Tier.HOST, layout.host_bytes + layout.staging_bytes + update),
        (Tier.DISK, layout.disk_bytes),
    ):
        if held > limits.of(tier):
            raise VerifyError(
                f"the layout holds {sizes(held)} on {tier}; {sizes(limits.of(tier))} are allowed"
            )


def _update_bytes(step: StepGraph, plan: Plan, tier: Tier) -> int:
    """What updating the largest unit takes on a tier beside arena and homes: the optimizer's
    scratch, and in the first step its new states before they go home."""
    if step.optimizer is None:
        return 0
    if plan.layout.keeps_all:
        return _kept_update_bytes(step.optimizer, plan.layout) if tier is Tier.DEVICE else 0
    largest = 0
    for chunk in plan.layout.chunks:
        away = chunk.homes.states is not Tier.DEVICE or chunk.sharded
        optimizer = step.optimizer.of(chunk.dtype)
        per_element = optimizer.scratch_bytes + (optimizer.state_bytes if away else 0)
        for rank in range(chunk.shards) if chunk.trainable and chunk.update is tier else ():
            for unit in chunk.units(plan.layout.update_numel, rank):
                elements = sum(chunk.own_width(piece, rank) for piece in unit)
                largest = max(largest, per_element * elements)
    return largest


def _kept_update_bytes(optimizer: OptimizerFacts, layout: Layout) -> int:
    """The same where nothing streams: the optimizer's own way through all parameters."""
    each = [
        optimizer.of(chunk.dtype).scratch_bytes * piece.span
        for chunk in layout.chunks
        for piece in chunk.slices
        if chunk.trainable
    ]
    at_once = optimizer.foreach or optimizer.global_state
    return sum(each) if at_once else max(each, default=0)


def _constant_bytes(step: StepGraph, plan: Plan) -> int:
    total = plan.layout.arena_bytes + plan.layout.shared_bytes + step.buffer_bytes
    for chunk in plan.layout.chunks:
        elements = sum(piece.span for piece in chunk.slices)
        if chunk.sharded:
            elements = chunk.share_numel
        if chunk.homes.parameters is Tier.DEVICE:
            total += elements * chunk.itemsize
        if chunk.trainable and chunk.homes.gradients is Tier.DEVICE:
            total += elements * chunk.itemsize
        if chunk.trainable and chunk.homes.states is Tier.DEVICE and step.optimizer is not None:
            total += elements * step.optimizer.of(chunk.dtype).state_bytes
    return total


def _outputs(step: StepGraph) -> set[fx.Node]:
    """Storages that the caller gets: outputs of the forward, gradients of its inputs."""
    forward, backward = step.results()
    inputs = [item.node in step.parameter_names for item in step.inputs]
    given = [node for node, ours in zip(backward, inputs, strict=False) if not ours]
    return {memory_root(node) for node in (*forward, *given) if isinstance(node, fx.Node)}


def _allocations(step: StepGraph) -> tuple[Counter[fx.Node], Counter[fx.Node]]:
    """Bytes that every node allocates, and bytes that are free after it.

    Inputs, gathered chunks and what the caller gets are not among them. A result is free
    after the last reader of it or of a view of it; one of several results, not before the
    last of them was picked from the tuple that they come in.
    """
    given = _outputs(step)
    position = {node: index for index, node in enumerate(step.nodes)}
    born: Counter[fx.Node] = Counter()
    died: Counter[fx.Node] = Counter()
    for node in step.nodes:
        if node.op != "call_function" or node.target in ops.ALL or is_item(node):
            continue
        if viewed_input(node) is not None:
            continue
        results = value(node)
        items = {user.args[1]: user for user in node.users if is_item(user)}
        picked = [node, *items.values()]
        owners: list[tuple[fx.Node | None, object]] = [(node, results)]
        if isinstance(results, (list, tuple)):
            owners = [(items.get(index), result) for index, result in enumerate(results)]
        for owner, result in owners:
            if isinstance(result, Tensor) and owner not in given:
                uses = readers(owner) if owner is not None else ()
                last = max([*picked, *uses], key=position.__getitem__)
                nbytes = number(storage_bytes(result))
                born[node] += nbytes
                died[last] += nbytes
    return born, died
