"""Train models far larger than their device memory: a compiler over torch.fx graphs.

    model = elixir_fx.compile(model, optimizer=optimizer, memory="8GiB", disk="/nvme")

See `compile` for the interface, `elixir_fx.pipeline.PIPELINE` for the passes in order.
"""

from elixir_fx.api import compile as compile
from elixir_fx.api import full_parameters as full_parameters
from elixir_fx.api import load as load
from elixir_fx.api import plan as plan
from elixir_fx.api import save as save
from elixir_fx.api import smallest_memory as smallest_memory
from elixir_fx.errors import CaptureError as CaptureError
from elixir_fx.errors import ElixirError as ElixirError
from elixir_fx.errors import PlanError as PlanError
from elixir_fx.errors import RankError as RankError
from elixir_fx.errors import TierError as TierError
from elixir_fx.errors import VerifyError as VerifyError
from elixir_fx.module import ElixirModule as ElixirModule
from elixir_fx.pipeline import PIPELINE as PIPELINE
from elixir_fx.plan import Plan as Plan
from elixir_fx.report.sweep import Sweep as Sweep
from elixir_fx.runtime.parameters import AwayParameter as AwayParameter
from elixir_fx.runtime.parameters import ChunkGradient as ChunkGradient
from elixir_fx.sweep import sweep as sweep
