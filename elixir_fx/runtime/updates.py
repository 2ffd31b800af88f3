"""How fast the user's own optimizer updates here, by timing it on made-up parameters.

An optimizer that makes one temporary after the other, as torch's do on a CPU unless they are
fused, takes three times what its memory traffic would say. So it is stepped on tensors of the
sizes that the model has, many enough that no cache holds them. `lowering` times it as it times
the graph's operators, and tells the planner the rate.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elixir_fx.facts import OptimizerFacts, Parameter
from elixir_fx.runtime.probe import own_step, trial_copy
from elixir_fx.units import MIB

MOST_NUMEL = 4 * MIB  # elements of one made-up parameter; a larger one is as fast by the element
COLD_NUMEL = 4 * MIB  # elements that an update in turn must come by before one is met again
MOST_COPIES = 32
_UNTIMED = frozenset({"params", "param_names", "lr", "initial_lr", "max_lr", "min_lr"})


@dataclass(frozen=True, kw_only=True)
class Updates:
    """An optimizer on `device`, to be timed."""

    optimizer: Optimizer
    device: torch.device

    def specs(self, parameters: Iterable[Parameter]) -> dict[str, Callable[[], object]]:
        """What to time for these parameters, by key: an update of one of each size."""
        return {
            self._key(dtype, numel): _Update(self, getattr(torch, dtype), min(numel, MOST_NUMEL))
            for dtype, numel in _sizes(parameters)
        }

    def bytes_per_s(
        self,
        parameters: Iterable[Parameter],
        facts: OptimizerFacts,
        seconds: Mapping[str, float],
    ) -> float | None:
        """The traffic of an update of all of them over its time; None where one is not known."""
        nbytes = total_s = 0.0
        for (dtype, numel), count in _sizes(parameters).items():
            known_s = seconds.get(self._key(dtype, numel))
            if known_s is None:
                return None
            nbytes += count * numel * facts.of(dtype).read_bytes
            total_s += count * known_s * max(1.0, numel / MOST_NUMEL)
        return nbytes / total_s if total_s else None

    @property
    def group(self) -> dict[str, Any]:
        """The options of the largest group."""
        groups = self.optimizer.param_groups
        return max(groups, key=lambda group: sum(p.numel() for p in group["params"]))

    def _key(self, dtype: str, numel: int) -> str:
        options = sorted((k, repr(v)) for k, v in self.group.items() if k not in _UNTIMED)
        name = type(self.optimizer).__qualname__
        return f"update {name}({options}) {dtype}[{min(numel, MOST_NUMEL)}]"


def _sizes(parameters: Iterable[Parameter]) -> Counter[tuple[str, int]]:
    """How many parameters that learn there are of each dtype and number of elements."""
    return Counter((p.dtype, p.span) for p in parameters if p.gradient is not None and p.span)


class _Update:
    """Updates one of several equal parameters, each in its turn. They are made at the first
    call, which updates all of them, so that their states are there."""

    def __init__(self, updates: Updates, dtype: torch.dtype, numel: int) -> None:
        self._updates, self._dtype, self._numel = updates, dtype, numel
        self._turns: list[Optimizer] = []

    def __call__(self) -> None:
        if not self._turns:
            copies = min(MOST_COPIES, max(1, COLD_NUMEL // self._numel))
            self._turns = [self._trial() for _ in range(copies)]
            for trial in self._turns:
                own_step(trial)(trial)
            return
        trial = self._turns.pop(0)
        own_step(trial)(trial)
        self._turns.append(trial)

    def _trial(self) -> Optimizer:
        values = torch.randn(self._numel, dtype=self._dtype, device=self._updates.device)
        parameter = nn.Parameter(values)
        parameter.grad = torch.randn_like(values)
        return trial_copy(self._updates.optimizer, self._updates.group, [parameter])
