"""Communication cost: the bytes that each parameter, gradient and state would move.

Analysis; after lifetime. How often they move is the plan's business, how fast the machine's.
"""

from elixir_fx.facts import Moves
from elixir_fx.machine import Machine
from elixir_fx.step import StepGraph


def communication_cost(step: StepGraph, machine: Machine) -> None:
    """Fill `step.moves`, one entry a parameter, in the order of `step.parameters`."""
    optimizer = step.optimizer
    step.moves = tuple(
        Moves(
            path=parameter.path,
            gather_bytes=parameter.nbytes,
            reduce_bytes=parameter.nbytes if parameter.trainable else 0,
            state_bytes=parameter.span * optimizer.of(parameter.dtype).state_bytes
            if parameter.trainable and optimizer is not None
            else 0,
        )
        for parameter in step.parameters
    )
