"""The session of the torch.compile backend: regions of a model that arrive one at a time.

Dynamo hands over a region when it first runs, between pieces of ordinary Python. Every
parameter therefore stays an ordinary tensor, on the device or over a mapped file; gradients,
optimizer states and activations leave. The first region settles the chunks of the whole
model (`planner.arrivals`); the plan is final at the first optimizer step, when every region
has come. The session hangs on the parameters themselves, in no table.
"""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, fx, nn

from elixir_fx.codegen import Halves
from elixir_fx.compilation import Captured, Lowered, compile_graph
from elixir_fx.config import Options
from elixir_fx.dynamo import guard_identity, sees_module_hooks
from elixir_fx.lowering import Admitted
from elixir_fx.machine import Tier
from elixir_fx.planner import arrivals
from elixir_fx.session import KnownStep, Session, weakly

_ATTRIBUTE = "elixir_fx_session"  # of a parameter


class _Tag:
    """How a parameter holds its session; a copy of the parameter has none."""

    def __init__(self, session: "RegionSession | None" = None) -> None:
        self.session = session

    def __deepcopy__(self, memo: Any) -> "_Tag":
        return _Tag()

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # what torch.load accepts beside tensors


class RegionSession(Session):
    """Everything that the regions of one model share."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Options
    ) -> None:
        super().__init__(model, optimizer, options)
        self.forwards: list[fx.GraphModule] = []
        self._settled = False
        self._held: dict[str, int] = {}  # most bytes that others held while a region ran
        self._hooks = _module_hooks(model)
        self._hook_count = sum(map(len, self._hooks))
        self._warned_of_hooks = False
        self.lowering.make_plan = arrivals.first
        self.lowering.held_bytes = self.held_bytes
        self.lowering.pinned = {
            path: Tier.DEVICE
            for path, parameter in model.named_parameters()
            if not self._may_be_mapped(parameter)
        }
        self.expect_optimizer()
        for parameter in model.parameters():
            parameter.__dict__[_ATTRIBUTE] = _Tag(self)

    def _may_be_mapped(self, parameter: nn.Parameter) -> bool:
        return (
            self.machine.unified
            and self.options.disk is not None
            and type(parameter) is nn.Parameter
        )

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Another torch.compile of this model names its optimizer: the first one that does counts;
        `bind` changes it."""
        if self._optimizer is None:
            self.bind(optimizer)

    def compile(self, region: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """One region, as Dynamo calls it, for these very parameters."""
        guard_identity(region)
        kept = any(True for _ in self.model.parameters())  # by them
        owner = weakref.ref(self) if kept else lambda: self
        return compile_graph(owner, region, inputs, otherwise=region)

    # -- the owner of captured graphs --------------------------------------------------------

    def lowered(self, known: KnownStep, halves: Halves, stored: KnownStep | None) -> Lowered:
        self.forwards.append(halves.forward)
        self._settled = False  # a region more, such as another shape, counts from now on
        return super().lowered(known, halves, stored)

    def enter(self, captured: Captured, inputs: Sequence[Any]) -> None:
        with self._lock:
            if self.engine is None and self.plan is not None:
                self._make_engine()
        self._check_hooks()
        super().enter(captured, inputs)
        if self.engine is not None:
            self.engine.map_again(captured.paths)
        self._held[captured.key] = max(self._held.get(captured.key, 0), self.held_bytes())

    def end_step(self) -> None:
        if self.plan is not None and self.plan.layout.keeps_all:
            self._settle()  # no update is streamed that would do it
        super().end_step()

    def _check_hooks(self) -> None:
        """Dynamo does not look at hooks of modules once it has traced them."""
        if self._warned_of_hooks or sees_module_hooks():
            return
        if sum(map(len, self._hooks)) != self._hook_count:
            self._warned_of_hooks = True
            warnings.warn(
                f"elixir_fx: the hooks of {self.title}'s modules have changed since it was "
                "compiled, and torch.compile does not see that. Set "
                "torch._dynamo.config.skip_nnmodule_hook_guards = False before the first call, "
                "or use hooks of parameters and tensors",
                stacklevel=2,
            )

    # -- start-up and the end of the first step ----------------------------------------------

    def _make_engine(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            engine = self.make_engine()
            self.fit_heap(engine)
            if engine.layout.mapped_bytes:
                engine.map_parameters()
        engine.updating = weakly(self._settle)
        self.start(engine)
        if self._optimizer is not None:
            self.bind(self._optimizer)
        elif not engine.layout.keeps_all and any(p.requires_grad for p in self.model.parameters()):
            warnings.warn(
                "elixir_fx: no optimizer was given in the backend's options, so that the states "
                "of any stay in memory: options={'optimizer': optimizer}, or "
                "elixir_fx.backend.state(model).bind(optimizer)",
                stacklevel=2,
            )

    def _settle(self) -> None:
        """The first streamed update begins: all regions have come, the plan becomes final."""
        if self._settled or self.engine is None or self.plan is None:
            return
        regions = [
            arrivals.Region(facts=graph.facts, held_bytes=self._held.get(key, 0))
            for key, graph in self._largest().items()
        ]
        plan = arrivals.settle(self.plan, regions, self.machine)
        self.engine.rehome(plan.layout)
        self.lowering.plan = plan
        self.lowering.admitted.clear()  # sizes that fitted the layout before
        self.refresh(self.engine)
        self._settled = True

    def _largest(self) -> dict[str, Admitted]:
        """Every region, at the largest sizes that it was called with."""
        largest = dict(self.lowering.captured)
        for (key, _), admitted in self.lowering.admitted.items():
            if key in largest and admitted.saved_bytes > largest[key].saved_bytes:
                largest[key] = admitted
        return largest


def session_of(parameters: Sequence[Tensor]) -> RegionSession | None:
    """The session that hangs on any of these parameters."""
    for parameter in parameters:
        tag = parameter.__dict__.get(_ATTRIBUTE)
        if isinstance(tag, _Tag) and tag.session is not None:
            return tag.session
    return None


def _module_hooks(model: nn.Module) -> list[Sized]:
    """Where the hooks of the model's modules are kept. It is looked at in every call, so no
    module is visited again."""
    return [
        hooks
        for module in model.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    ]
