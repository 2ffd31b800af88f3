"""The public functions: compile, plan, smallest_memory, full_parameters, save, load.

`compile()` checks what it is given and opens a session; everything after that is the five
verbs, in `capture`, `lowering` and `guarded`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir_fx import planner
from elixir_fx.config import Options, check_disk, check_machine, read_options
from elixir_fx.errors import ElixirError
from elixir_fx.guarded import GuardedSession
from elixir_fx.lowering import compute_device
from elixir_fx.module import ElixirModule
from elixir_fx.plan import Plan
from elixir_fx.regions import session_of
from elixir_fx.runtime import checkpoint
from elixir_fx.runtime.disk import Files
from elixir_fx.runtime.materialize import is_meta
from elixir_fx.runtime.parameters import AwayParameter
from elixir_fx.team import Team, team_of

Inputs = tuple[Any, ...] | Mapping[str, Any]


def compile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    example_inputs: Inputs | None = None,
    **options: Any,
) -> ElixirModule:
    """Compile a model so that its training state may be larger than the memory it is given.

    Args:
        model: an nn.Module, real or built on the meta device, or a GraphModule from
            symbolic_trace. Its parameter objects stay the same.
        optimizer: a torch.optim optimizer over its parameters; its step is then streamed.
            Made after compile, give it to `compiled.bind(optimizer)`.
        example_inputs: a tuple (positional) or dict (keyword). With them the model is
            captured, planned and moved at once, else at the first call.
        memory: budget of the compute device, in bytes or "3GiB"; None: what it has free.
        host_memory: budget of the host, on an accelerator. Refused on a CPU.
        disk: folder of the disk tier; None: no disk tier. `disk_memory`: its budget.
        init, weights: how a model on meta gets its values: a function of one module, or a
            safetensors file or folder.
        process_group: the ranks to train with, each of which makes the same calls; a process
            group, or a DeviceMesh: of one dimension (shards), or two (replicas, shards). None:
            all ranks of torch.distributed, where that is initialised. Start weights and
            buffers are the first rank's.
        reduction: "mean" or "sum" of the gradients over the ranks.
        keep: homes that you fix, by parameter or module path: {"wte": "device"}.
        ignore: paths of parameters that are left alone.
        plan: a Plan, or the path of one, instead of the planner's.
        machine: a Machine, the path of one, or, to plan for, a name of the catalogue
            ("h100-sxm"); elixir_fx.testing.emulated(...) plays one.
        dynamic_shapes: dimensions of the example inputs (or of the first call's) that stay open,
            with their names, by parameter of forward or in the order of a tuple:
            {"input_ids": {0: "batch", 1: "sequence"}}. One name is one size. `plan.largest`
            answers how large each may get.
        respect_checkpointing: with kernels="eager" begin with what the model's own
            torch.utils.checkpoint computes again, and keep of it what fits; compiled kernels
            compute it again. False plans as if there were none.
        passes: a pipeline, such as PIPELINE.after("prefetch", mine).
        dump: a folder that gets every stage of the graph as readable Python.
        kernels: "inductor" compiles the operations between our nodes, equal runs of them once;
            "eager" runs PyTorch's own kernels, equal to plain PyTorch bit for bit; a function of
            a GraphModule of pure operations and its fake inputs, which returns a function of
            these inputs that gives a tuple, compiles them your way.

    Raises CaptureError (the model is not one graph), PlanError (no plan fits: it says the
    smallest memory that would do), TierError (disk or memory cannot be had), ElixirError
    (an unknown option, a model that is compiled or wrapped already), RankError (the ranks do not
    train the same model, or one of them failed). Nothing has changed then.
    """
    return compile_over(Files(), model, optimizer, example_inputs, options)


def compile_over(
    files: Files,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    example_inputs: Inputs | None,
    options: Mapping[str, Any],
) -> ElixirModule:
    """`compile()` with a disk tier whose system calls are those of `files`."""
    check_model(model)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ElixirError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim optimizer")
    read = read_options(options)
    check_disk(read)
    _check_values_wanted(model, read)
    device = compute_device(model)
    check_machine(read, device.type)
    team = team_of(read, device)
    compiled = ElixirModule(GuardedSession(model, optimizer, read, files, team))
    if example_inputs is not None:
        args, kwargs = positional_and_keyword(example_inputs)
        compiled._session.prepare(args, kwargs)
    return compiled


def plan(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    optimizer: torch.optim.Optimizer | str | None = "adamw",
    ranks: int = 1,
    **options: Any,
) -> Plan:
    """Plan without running: what `compile()` with these options would decide.

    The model may be on meta and is left as it is. `optimizer` may be a name ("adamw", "sgd").
    `disk_memory` plans for a disk tier without naming a folder. With `dynamic_shapes` the plan
    answers `largest("batch")`. With `ranks` it is the plan of
    one of so many, each with a machine and budgets like these and links to the others, or on one
    host if the machine computes on its CPU; give a `machine` whose links to peers were measured
    for a forecast in seconds that means something.
    `plan(...).explain()` says why, and what more or less memory would change.
    Raises as `compile()` does.
    """
    check_model(model)
    args, kwargs = positional_and_keyword(example_inputs)
    check_ranks(ranks)
    session = GuardedSession(model, optimizer, read_options(options), planned_ranks=ranks)
    session.lowering.times_all = True
    found = session.plan_only(args, kwargs)
    if found is None:
        raise ElixirError(f"{type(model).__name__} does no tensor operation on these inputs")
    return session.lowering.explained(found)


def smallest_memory(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    optimizer: torch.optim.Optimizer | str | None = "adamw",
    ranks: int = 1,
    **options: Any,
) -> int:
    """The smallest `memory`, in bytes of each of the `ranks`, that `compile()` would accept with
    these options."""
    check_model(model)
    args, kwargs = positional_and_keyword(example_inputs)
    check_ranks(ranks)
    session = GuardedSession(model, optimizer, read_options(options), planned_ranks=ranks)
    facts = session.facts_only(args, kwargs)
    lowering = session.lowering
    return planner.smallest(facts, session.machine, lowering.limits, {}, lowering.group)


def check_ranks(ranks: int) -> None:
    """ElixirError for what is no number of ranks."""
    if not isinstance(ranks, int) or ranks < 1:
        raise ElixirError(f"ranks={ranks!r}: give the number of ranks, 1 or more")


@contextmanager
def full_parameters(compiled: ElixirModule, writeback: bool = True) -> Iterator[ElixirModule]:
    """A context in which every parameter is an ordinary full tensor.

    The whole model must fit in memory. With `writeback` what you changed goes home at the
    end. The compiled model cannot be called inside.
    """
    with compiled._session.full(writeback):
        yield compiled


def save(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Save weights, buffers, optimizer states and random states, streamed tensor by tensor.

    Weights are safetensors files with the original names and an index, loadable without
    elixir_fx. A folder that exists is replaced once the new one is complete. Of several ranks
    all call it, with one folder that the first one writes, and it returns when that is done.
    """
    plain, team = _plain(model), _team(model)
    if team is None:
        checkpoint.save(folder, plain, optimizer)
        return
    with team.ranks.together("while saving"):
        if team.ranks.leads:
            checkpoint.save(folder, plain, optimizer)
        else:
            checkpoint.read_along(plain, optimizer)
        team.ranks.wait_for_first()


def load(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load what `save` wrote, into the homes that this model's plan chose, of any number of
    ranks: all of them call it. Streams of random numbers are restored in one process only; of
    several ranks each keeps its own."""
    plain, team = _plain(model), _team(model)
    if team is None:
        checkpoint.load(folder, plain, optimizer)
        return
    with team.ranks.together("while loading"):
        checkpoint.load(folder, plain, optimizer, random=False)


def _team(model: nn.Module) -> Team | None:
    return model._session.team if isinstance(model, ElixirModule) else None


def _plain(model: nn.Module) -> nn.Module:
    return model._session.model if isinstance(model, ElixirModule) else model


def positional_and_keyword(
    example_inputs: Inputs,
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Example inputs as a call takes them. ElixirError for anything but a tuple or a dict."""
    if isinstance(example_inputs, Mapping):
        return (), example_inputs
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    raise ElixirError(
        f"example_inputs is a {type(example_inputs).__name__}: give a tuple of positional inputs "
        "or a dict of keyword inputs"
    )


def _check_values_wanted(model: nn.Module, options: Options) -> None:
    """`init` and `weights` are for a model on meta; on a real one they would do nothing."""
    given = [name for name in ("init", "weights") if getattr(options, name) is not None]
    if given and not is_meta(model):
        raise ElixirError(
            f"{' and '.join(given)} fill a model that was built on meta, and this one has values "
            "already: load it before (load_state_dict), or build it under torch.device('meta')"
        )


def check_model(model: nn.Module) -> None:
    """ElixirError for what is no plain module, or is compiled or wrapped already."""
    if not isinstance(model, nn.Module):
        raise ElixirError(f"model is a {type(model).__name__}, not an nn.Module")
    if any(isinstance(part, ElixirModule) for part in model.modules()) or any(
        isinstance(parameter, AwayParameter) for parameter in model.parameters()
    ):
        raise ElixirError("this model is compiled already; compile a model once")
    if session_of(list(model.parameters())) is not None:
        raise ElixirError(
            "regions of this model are compiled with backend='elixir_fx' already: use one of the "
            "two, or a copy.deepcopy(model), which is plain"
        )
    wrapper = type(model).__name__
    if wrapper in ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule"):
        raise ElixirError(
            f"the model is wrapped by {wrapper}: give elixir_fx.compile the plain model"
        )
    if wrapper.startswith("FSDP"):
        raise ElixirError("the model is sharded by fully_shard: give the plain model")
