"""elixir_fx with PyTorch's own kernels: what is equal to plain PyTorch bit for bit.

Tests call these in the place of elixir_fx's own.
"""

from functools import partial

import elixir_fx
from elixir_fx import testing

compile = partial(elixir_fx.compile, kernels="eager")
compile_over = partial(testing.compile_over, kernels="eager")
plan = partial(elixir_fx.plan, kernels="eager")
smallest_memory = partial(elixir_fx.smallest_memory, kernels="eager")
