"""The ranks of a session: who they are, and how they come to one machine, one plan, one start.

Every rank captures by itself, in its own time. Then the ranks compare what they captured, the
first one plans, and the others take its plan. Nothing else is exchanged before the first step
but the weights, which all ranks start with as the first one has them.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from elixir_fx.capture import real_mode
from elixir_fx.config import Options
from elixir_fx.errors import ElixirError, PlanError
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Group, Plan
from elixir_fx.planner import live_peak_bytes
from elixir_fx.runtime.ranks import Ranks, check_equal
from elixir_fx.step import StepGraph


class Team:
    """The ranks that train one model together, seen from one of them."""

    def __init__(self, ranks: Ranks, mean: bool) -> None:
        self.ranks = ranks
        self.mean = mean
        self.group = Group(ranks=ranks.size)

    @property
    def on_this_host(self) -> int:
        """How many of the ranks are on this host, as far as can be told."""
        everyone = self.ranks.size * self.ranks.replicas
        told = os.environ.get("LOCAL_WORLD_SIZE", str(self.ranks.size if self.ranks.local else 1))
        return min(everyone, int(told))

    def machine(self, measure: Callable[[], Machine]) -> Machine:
        """One machine for all: the first rank's, measured while the others rest. Ranks of one
        host that compute on its CPU share its disk."""
        with self.ranks.together("while its machine was measured"):
            mine = measure().to_json() if self.ranks.leads or self.ranks.fake else None
            machine = Machine.from_json(self.ranks.from_first(mine))
            machine = machine.with_ranks(self.ranks.size * self.ranks.replicas)
        # Memory of an accelerator, also of one that is played, is not the others' to see.
        self.group = replace(self.group, shared=self.ranks.local and machine.unified)
        if not machine.unified:
            return machine
        links = tuple(
            replace(
                link,
                bytes_per_s=link.bytes_per_s / self.on_this_host,
                shared_bytes_per_s=link.shared_bytes_per_s / self.on_this_host,
            )
            if Tier.DISK in (link.source, link.target)
            else link
            for link in machine.links
        )
        return replace(machine, links=links)

    def share_plan(
        self, step: StepGraph, plan: Callable[[int], Plan], beside: Callable[[], object]
    ) -> Plan:
        """The first rank's plan, which leaves room for the rank with the largest activations.
        While it plans, the others do what they have `beside`.

        RankError on all ranks if they do not train the same model; PlanError on all if there
        is no plan.
        """
        ranks = self.ranks
        if step.sparse:
            raise PlanError(
                f"{sorted(step.sparse)[0]} has sparse gradients, which are not summed over ranks: "
                "make its layer with sparse=False"
            )
        with ranks.together("while it was planned"):
            with real_mode():
                check_equal(ranks, "the parameters", _parameters(step))
                if not self.group.shared:  # each rank has a part in every gather
                    check_equal(ranks, "the captured graph", _operators(step))
                peak_bytes = live_peak_bytes(step.facts())
                most_bytes = ranks.largest(peak_bytes)
            told: dict[str, str] = {}
            if ranks.leads or ranks.fake:
                try:
                    told["plan"] = plan(most_bytes - peak_bytes).to_json()
                except PlanError as error:
                    told["error"] = str(error)
            with real_mode():
                if not told:
                    beside()
                answer = ranks.from_first(told)
        if "error" in answer:
            raise PlanError(answer["error"])
        return Plan.from_json(answer["plan"])

    def start_equal(self, model: nn.Module, moved: set[nn.Parameter]) -> None:
        """Give every rank the first one's values of buffers, and of the parameters that are not
        among those that were `moved` home."""
        rest = [parameter for parameter in model.parameters() if parameter not in moved]
        with torch.no_grad():
            for tensor in (*rest, *model.buffers()):
                if not tensor.is_meta:
                    tensor.data.copy_(self.ranks.broadcast(tensor.data))


def team_of(options: Options, device: torch.device) -> Team | None:
    """The ranks of the process group asked for, of the default one otherwise; None where there is
    only this process. Every rank of the group calls it."""
    group: Any = options.process_group
    replicate = None
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ElixirError(
                f"process_group is a mesh of {group.ndim} dimensions: give one dimension (shards), "
                "or two (replicas, shards)"
            )
        replicate = group.get_group(0) if group.ndim == 2 else None
        group = group.get_group(group.ndim - 1)
    if not isinstance(group, dist.ProcessGroup):
        raise ElixirError(
            f"process_group is a {type(group).__name__}: give a torch.distributed process group "
            "or a DeviceMesh that this rank is in"
        )
    alone = dist.get_world_size(group) == 1
    if alone and (replicate is None or dist.get_world_size(replicate) == 1):
        return None
    if alone:
        raise ElixirError(
            "process_group has one rank to shard over: use DistributedDataParallel for replicas "
            "alone, or shard over more ranks"
        )
    return Team(Ranks(group, device, replicate), options.reduction == "mean")


def _parameters(step: StepGraph) -> list[tuple[str, str]]:
    return [
        (p.path, f"{p.dtype}{list(p.shape)}{'' if p.trainable else ', frozen'}")
        for p in sorted(step.facts().parameters, key=lambda parameter: parameter.path)
    ]


def _operators(step: StepGraph) -> list[tuple[str, str]]:
    return [(node.name, str(node.target)) for node in step.nodes if node.op == "call_function"]
