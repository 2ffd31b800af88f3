"""Lifetime: which memory each value lies in, when it is born and when it dies.

Analysis; first of the pipeline. A storage is counted once however many views look at it:
views, elements of a list of views and silent views share their root's. Positions are those
of the joint graph. The generated code frees a value after its last reader, so `dies` is the
position of the last node that reads the storage through any view; several results of one
operator live at least until the last of them has been picked out.
"""

from elixir_fx.facts import Parameter, Role, Storage
from elixir_fx.machine import Machine
from elixir_fx.passes.derived import derived_from_parameters
from elixir_fx.step import (
    StepGraph,
    is_backward,
    is_item,
    memory_root,
    readers,
    source_line,
    tensor,
    value,
)
from torch import Tensor, fx


def lifetime(step: StepGraph, machine: Machine) -> None:
    """Fill `step.storages` and `step.parameters`."""
    nodes = step.nodes
    position = {node: index for index, node in enumerate(nodes)}
    roles = _roles(step)
    storages = []
    for node in nodes:
        fake = value(node)
        if not isinstance(fake, Tensor) or memory_root(node) is not node or node.op == "output":
            continue
        reads = sorted({position[user] for user in readers(node)})
        born = position[node.args[0]] if is_item(node) else position[node]  # type: ignore[index]
        dies = max([position[node], *reads])
        if is_item(node):
            dies = max(dies, *(position[item] for item in node.args[0].users))  # type: ignore[union-attr]
        role, path = roles.get(node, (None, ""))
        if role is None:
            crosses = not is_backward(node) and any(is_backward(nodes[i]) for i in reads)
            role = Role.ACTIVATION if crosses else Role.TEMPORARY
        storages.append(
            Storage(
                name=node.name,
                role=role,
                path=path or module_path(node),
                source=source_line(node),
                nbytes=fake.untyped_storage().nbytes(),
                born=born,
                dies=dies,
                readers=tuple(reads),
            )
        )
    step.storages = tuple(storages)
    step.parameters = _parameters(step, position)


def _roles(step: StepGraph) -> dict[fx.Node, tuple[Role, str]]:
    """Roles that the ends of the graph settle, by storage root; later ones win."""
    roles: dict[fx.Node, tuple[Role, str]] = {}
    for path, node in step.gradients.items():
        roles[memory_root(node)] = (Role.GRADIENT, path)
    forward, backward = step.results()
    inputs = {item.node for item in step.inputs if item.role is Role.PARAMETER}
    for node in forward:
        if isinstance(node, fx.Node):
            roles[memory_root(node)] = (Role.OUTPUT, "")
    for item, node in zip(step.inputs, backward, strict=False):
        if item.node not in inputs and isinstance(node, fx.Node):
            roles[memory_root(node)] = (Role.OUTPUT, item.path)
    for node in step.nodes:
        if node.op == "placeholder":
            item = step.paths.get(node.name)
            roles[node] = (item.role, item.path) if item else (Role.INPUT, "")
    return roles


def _parameters(step: StepGraph, position: dict[fx.Node, int]) -> tuple[Parameter, ...]:
    """Facts about parameters, in order of first use; the ones that nobody reads last."""
    gradients = step.gradients
    found = []
    for path, node in step.parameter_nodes.items():
        fake = tensor(node)
        reads = {
            position[user]
            for held in (node, *derived_from_parameters(node))
            for user in readers(held)
            if user.op != "output"
        }
        gradient = gradients.get(path)
        span = 1 + sum((n - 1) * s for n, s in zip(fake.shape, fake.stride(), strict=True))
        found.append(
            Parameter(
                path=path,
                aliases=step.paths[node.name].aliases,
                shape=tuple(fake.shape),
                strides=tuple(fake.stride()),
                dtype=str(fake.dtype).removeprefix("torch."),
                itemsize=fake.element_size(),
                span=span if fake.numel() else 0,
                trainable=gradient is not None,
                reads=tuple(sorted(reads)),
                gradient=position[gradient] if gradient is not None else None,
                pinned=step.pinned.get(path),
            )
        )
    never = len(position)
    return tuple(sorted(found, key=lambda item: item.reads[0] if item.reads else never))


def module_path(node: fx.Node) -> str:
    """The path of the module whose forward made the node, as far as the capture knows."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return str(path).removeprefix("L['module']").lstrip(".")
