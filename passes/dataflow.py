"""Dataflow: which nodes every node computes from, and which could be computed again.

Analysis; anywhere. What is computed again must give the same bits: an operator that draws random
numbers, writes in place or is no plain operator runs once. Attention draws only where it is given
a dropout.
"""

from typing import Any

import torch
from torch import fx

from elixir_fx.facts import Flow
from elixir_fx.machine import Machine
from elixir_fx.passes.derived import is_derived
from elixir_fx.step import CHECKPOINTED, StepGraph, is_item, memory_root, operator_name


def dataflow(step: StepGraph, machine: Machine) -> None:
    """Fill `step.flow`."""
    nodes = step.nodes
    position = {node: index for index, node in enumerate(nodes)}
    paths = {node: path for path, node in step.parameter_nodes.items()}
    derives: dict[fx.Node, str] = {}
    flow = []
    for node in nodes:
        derives[node] = paths.get(node, "")
        if node.op == "call_function" and is_derived(node):
            derives[node] = next(filter(None, (derives[s] for s in node.all_input_nodes)), "")
        flow.append(
            Flow(
                sources=tuple(position[source] for source in node.all_input_nodes),
                root=position[memory_root(node)],
                repeats=repeats(node),
                derives=derives[node],
                checkpointed=bool(node.meta.get(CHECKPOINTED)),
            )
        )
    step.flow = tuple(flow)


def repeats(node: fx.Node) -> bool:
    """Whether a node, computed again from the same inputs, gives the same bits and nothing else."""
    if node.op != "call_function" or is_item(node):
        return is_item(node)
    target: Any = node.target
    if not operator_name(node) or target.namespace in ("elixir", "_c10d_functional"):
        return False
    if operator_name(node) == "aten::as_strided":  # of a place in memory, wherever that is then
        return False
    if target._schema.is_mutable or operator_name(node).endswith("_"):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return True
    module: Any = node.graph.owning_module
    given: Any = node.normalized_arguments(module, normalize_to_only_use_kwargs=True)
    return any(s.name == "dropout_p" for s in target._schema.arguments) and not (
        given and given.kwargs.get("dropout_p")
    )
