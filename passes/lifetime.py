"""Lifetime: which memory each value lies in, when it is born and when it dies.

Analysis; first of the pipeline. A storage is counted once however many views look at it:
views, elements of a list of views and silent views share their root's. Positions are those
of the joint graph. The generated code frees a value after its last reader, so `dies` is the
position of the last node that reads the storage through any view; several results of one
operator live at least until the last of them has been picked out.
"""

from dataclasses import replace

import sympy
from torch import Tensor, fx

from elixir_fx import ops
from elixir_fx.facts import Parameter, Role, Storage
from elixir_fx.machine import Machine
from elixir_fx.passes.derived import derived_from_parameters
from elixir_fx.step import (
    StepGraph,
    expression,
    is_backward,
    is_item,
    memory_root,
    number,
    readers,
    source_line,
    span,
    storage_bytes,
    tensor,
    value,
)


def lifetime(step: StepGraph, machine: Machine) -> None:
    """Fill `step.storages`, `step.storage_formulas` and `step.parameters`."""
    find_lives(step)


def find_lives(step: StepGraph) -> None:
    """The same for a step on its way through the transforms, before moves stand in its graph."""
    position = {node: index for index, node in enumerate(step.nodes)}
    roles = _roles(step)
    storages: list[Storage] = []
    formulas: dict[str, sympy.Expr] = {}
    for node in step.nodes:
        if node.op == "output" or memory_root(node) is not node or node.target in ops.ALL:
            continue
        if isinstance(value(node), Tensor):
            storages.append(_storage(node, position, roles))
            made = [tensor(node)]
        else:
            unpicked = _never_picked(node)
            storages += [
                _unpicked_storage(node, index, result, position)
                for index, result in unpicked.items()
            ]
            made = list(unpicked.values())
        for storage, result in zip(storages[len(storages) - len(made) :], made, strict=True):
            formula = expression(storage_bytes(result))
            if formula is not None:
                formulas[storage.name] = formula
    step.storages = tuple(storages)
    step.storage_formulas = formulas
    step.parameters = _parameters(step, position)


def _storage(
    node: fx.Node, position: dict[fx.Node, int], roles: dict[fx.Node, tuple[Role, str]]
) -> Storage:
    """The memory that a node allocates, or picks from several results of an operator."""
    reads = {position[user]: is_backward(user) for user in readers(node)}
    born = position[node]
    picked: list[int] = []
    if is_item(node):
        made = node.all_input_nodes[0]
        born, picked = position[made], _picks(made, position)
    role, path = roles.get(node, (None, ""))
    if role is None:
        crosses = not is_backward(node) and any(reads.values())
        role = Role.ACTIVATION if crosses else Role.TEMPORARY
    return Storage(
        name=node.name,
        role=role,
        path=path or module_path(node),
        source=source_line(node),
        nbytes=number(storage_bytes(tensor(node))),
        born=born,
        dies=max([position[node], *picked, *reads]),
        readers=tuple(sorted(reads)),
    )


def _never_picked(node: fx.Node) -> dict[int, Tensor]:
    """Results that an operator allocates with others and that nobody picks, by their place."""
    results = value(node)
    if not isinstance(results, (list, tuple)):
        return {}
    wanted = {user.args[1] for user in node.users if is_item(user)}
    return {
        index: result
        for index, result in enumerate(results)
        if isinstance(result, Tensor) and index not in wanted
    }


def _unpicked_storage(
    node: fx.Node, index: int, result: Tensor, position: dict[fx.Node, int]
) -> Storage:
    """The memory of such a result: it dies with the tuple that it came in."""
    return Storage(
        name=f"{node.name}_{index}",
        role=Role.TEMPORARY,
        path=module_path(node),
        source=source_line(node),
        nbytes=number(storage_bytes(result)),
        born=position[node],
        dies=max([position[node], *_picks(node, position)]),
        readers=(),
    )


def _picks(node: fx.Node, position: dict[fx.Node, int]) -> list[int]:
    """Where results of an operator are picked from the tuple that they come in."""
    return [position[user] for user in node.users if is_item(user)]


def _roles(step: StepGraph) -> dict[fx.Node, tuple[Role, str]]:
    """Roles that the ends of the graph settle, by storage root; later ones win."""
    roles: dict[fx.Node, tuple[Role, str]] = {}
    for path, node in step.gradients.items():
        roles[memory_root(node)] = (Role.GRADIENT, path)
    forward, backward = step.results()
    inputs = {item.node for item in step.inputs if item.role is Role.PARAMETER}
    for output in forward:
        if output is not None:
            roles[memory_root(output)] = (Role.OUTPUT, "")
    for item, output in zip(step.inputs, backward, strict=False):
        if item.node not in inputs and output is not None:
            roles[memory_root(output)] = (Role.OUTPUT, item.path)
    for node in step.nodes:
        if node.op == "placeholder":
            known = step.paths.get(node.name)
            roles[node] = (known.role, known.path) if known else (Role.INPUT, "")
    return roles


def _parameters(step: StepGraph, position: dict[fx.Node, int]) -> tuple[Parameter, ...]:
    """Facts about parameters, in order of first use; the ones that nobody reads last."""
    gradients = step.gradients
    found = []
    for path, node in step.parameter_nodes.items():
        fake = tensor(node)
        reads = _reads(node, position)
        sparse = path in step.sparse
        gradient = gradients.get(path) if not sparse else None
        found.append(
            Parameter(
                path=path,
                aliases=step.paths[node.name].aliases,
                shape=tuple(fake.shape),
                strides=tuple(fake.stride()),
                dtype=str(fake.dtype).removeprefix("torch."),
                itemsize=fake.element_size(),
                span=span(fake),
                trainable=step.paths[node.name].trainable and not sparse,
                reads=tuple(sorted(reads)),
                gradient=position[gradient] if gradient is not None else None,
                gradient_storage=memory_root(gradient).name if gradient is not None else "",
                pinned="device" if sparse else step.pinned.get(path),
            )
        )
    for idle in step.idle:
        if idle.path in step.sparse:
            found.append(replace(idle, pinned="device", trainable=False))
        else:
            found.append(replace(idle, pinned=step.pinned.get(idle.path)))
    never = len(position)
    return tuple(sorted(found, key=lambda item: item.reads[0] if item.reads else never))


def _reads(parameter: fx.Node, position: dict[fx.Node, int]) -> set[int]:
    """Where a parameter's own memory is read. What the forward derives from it is made again
    in the backward, before its first reader there (see split_views)."""
    found = {position[user] for user in readers(parameter) if user.op != "output"}
    for made in derived_from_parameters(parameter):
        users = (user for user in made.users if user.op != "output")
        backward = [position[user] for user in users if is_backward(user)]
        found.update(backward if memory_root(made) is parameter else sorted(backward)[:1])
    return found


def module_path(node: fx.Node) -> str:
    """The path of the module whose forward made the node, as far as the capture knows."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return str(path).removeprefix("L['module']").lstrip(".")
