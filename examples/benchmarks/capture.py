"""From a model of 175 billion parameters to facts and a plan, with no memory for any of it.

    python examples/benchmarks/capture.py                       # about six minutes
    python examples/benchmarks/capture.py --only gpt --kernels eager --layers 96

OPT-175B (96 layers, width 12288, 96 heads, vocabulary 50272, sequence 2048, batch 1) on the meta
device, as `transformers` writes it (opt, left out where transformers is not there) and as plain
PyTorch (gpt: the model of train_gpt.py in these sizes); with half of its layers too, so that what
grows faster than the graph shows. Every case is a process of its own; no kernel is compiled.

to facts  seconds from the model to the facts of its training step: captured and annotated
peak      the most memory that the process held until then, Python and PyTorch too
dynamo    of these seconds: Dynamo, from the call to its graph
autograd  AOTAutograd, from there to the joint graph
joint     Inductor's joint passes and its partitioner, and one graph again of the halves
ours      the step, its key, and the analyses
plan      a search with these facts, and none of the above, for one rank of --ranks with 80 GiB
          on the device and 2 TiB on the host
"""

import argparse
import importlib.util
import sys
import time
from dataclasses import replace
from typing import Any

import common
import torch
from common import GIB, Config, sizes
from torch import fx, nn

from elixir_fx import planner
from elixir_fx.config import read_options
from elixir_fx.errors import PlanError
from elixir_fx.guarded import GuardedSession
from elixir_fx.plan import Group, Plan
from elixir_fx.testing import emulated

MODELS = ("gpt", "opt")
KERNELS = ("eager", "inductor")
OPT_175B = Config(layers=96, width=12288, heads=96, seq=2048, vocab=50272)
PARTS = ("dynamo", "autograd", "joint", "ours")

# The bars: of the deepest model, and of how its seconds compare with half of its layers.
FACTS_S, PEAK_GIB, GROWTH = 60, 4, 2.3


class WatchedSession(GuardedSession):
    """A session that notes when the parts of a capture end."""

    def watch(self) -> None:
        self.ends_s: dict[str, float] = {}
        prepare, join, make_plan = self.tracing.prepare, self.tracing.join, self.lowering.make_plan

        def prepared(module: fx.GraphModule, dynamic: bool) -> fx.GraphModule:
            self._end("dynamo")
            return prepare(module, dynamic)

        def joined(*values: Any, **named: Any) -> fx.GraphModule:
            self._end("autograd")
            module = join(*values, **named)
            self._end("joint")
            return module

        def planned(*values: Any, **named: Any) -> Plan:
            self._end("ours")
            return make_plan(*values, **named)

        self.tracing = replace(self.tracing, prepare=prepared, join=joined)
        self.lowering.make_plan = planned

    def _end(self, part: str) -> None:
        self.ends_s.setdefault(part, time.perf_counter())


def build(kind: str, layers: int, dtype: torch.dtype) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model without memory, and the inputs of a training step."""
    config = replace(OPT_175B, layers=layers)
    tokens = torch.zeros(1, config.seq, dtype=torch.int64)
    with torch.device("meta"):
        if kind == "gpt":
            return common.GPT(config).to(dtype), {"tokens": tokens, "targets": tokens}
        from transformers import OPTConfig, OPTForCausalLM

        settings = OPTConfig(
            num_hidden_layers=layers,
            hidden_size=config.width,
            word_embed_proj_dim=config.width,
            ffn_dim=4 * config.width,
            num_attention_heads=config.heads,
            max_position_embeddings=config.seq,
            vocab_size=config.vocab,
            use_cache=False,
        )
        return OPTForCausalLM(settings).to(dtype), {"input_ids": tokens, "labels": tokens}


def measure(kind: str, layers: int, kernels: str, dtype: str, ranks: list[int]) -> dict[str, Any]:
    """One case, in this process."""
    model, inputs = build(kind, layers, getattr(torch, dtype))
    machine = emulated(
        device_memory=80 * GIB,
        host_memory=2048 * GIB,
        bytes_per_s=25e9,
        flops_per_s=150e12,
        stream_bytes_per_s=2e12,
    )
    options = read_options({"kernels": kernels, "machine": machine})
    session = WatchedSession(model, "adamw", options)
    session.watch()
    begin_s = time.perf_counter()
    facts = session.facts_only((), inputs)
    all_s = time.perf_counter() - begin_s
    ends_s = [begin_s, *(session.ends_s[part] for part in PARTS)]
    found: dict[str, Any] = {
        "model": kind,
        "layers": layers,
        "kernels": kernels,
        "parameters": sum(p.numel() for p in model.parameters()),
        "nodes": len(facts.nodes),
        "facts_s": ends_s[-1] - begin_s,
        "parts_s": {
            part: end_s - start_s
            for part, start_s, end_s in zip(PARTS, ends_s, ends_s[1:], strict=False)
        },
        "with_guards_s": all_s,
        "peak_resident_bytes": common.peak_resident_bytes(),
        "plans": {},
    }
    limits = session.lowering.limits
    for number in ranks:
        machine_of = machine if number == 1 else machine.with_peers()
        begin_s = time.perf_counter()
        try:
            plan = planner.search(facts, machine_of, limits, {}, Group(ranks=number))
            result = {"step_s": plan.forecast.step_s, "chunks": len(plan.layout.chunks)}
        except PlanError as error:
            result = {"refused": str(error)}
        found["plans"][number] = {"search_s": time.perf_counter() - begin_s, **result}
    found["peak_with_plans_bytes"] = common.peak_resident_bytes()
    return found


# Reporting


def rows_of(case: dict[str, Any]) -> list[tuple[str, str]]:
    name = f"{case['model']}, {case['layers']} layers, {case['kernels']}"
    parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in case["parts_s"].items())
    rows = [
        (
            f"{name}: to facts, peak, nodes",
            f"{case['facts_s']:.1f} s, {sizes(case['peak_resident_bytes'])}, {case['nodes']}",
        ),
        (f"{name}: of it", parts),
    ]
    for ranks, plan in case["plans"].items():
        told = "refused" if "refused" in plan else f"{plan['chunks']} chunks"
        rows.append((f"{name}: plan, ranks={ranks}", f"{plan['search_s']:.1f} s, {told}"))
    return rows


def bars(cases: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Whether the deepest cases keep to what is wanted."""
    deepest = max(case["layers"] for case in cases)
    rows = []
    for case in cases:
        if case["layers"] != deepest:
            continue
        name = f"{case['model']}, {case['kernels']}"
        rows.append(common.check(f"{name}: to facts, s", case["facts_s"], FACTS_S))
        peak_gib = case["peak_with_plans_bytes"] / GIB
        rows.append(common.check(f"{name}: peak, plans too, GiB", peak_gib, PEAK_GIB))
        for other in cases:
            same = all(other[key] == case[key] for key in ("model", "kernels"))
            if same and 2 * other["layers"] == deepest:
                growth = case["facts_s"] / other["facts_s"]
                what = f"{name}: {deepest} layers against {other['layers']}"
                rows.append(common.check(what, growth, GROWTH))
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=MODELS, help="may be repeated")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--layers", nargs="+", type=int, default=[48, 96])
    parser.add_argument("--dtype", default="bfloat16", help="of the parameters")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 64], help="to plan for")
    common.add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    models = args.only or list(MODELS)
    if "opt" in models and importlib.util.find_spec("transformers") is None:
        print("opt is left out: transformers is not installed", file=sys.stderr)
        models.remove("opt")
    cases: list[dict[str, Any]] = []
    for kind in models:
        for kernels in args.kernels:
            for layers in sorted(args.layers):
                case = common.in_child(measure, kind, layers, kernels, args.dtype, args.ranks)
                cases.append(case)
                print(
                    *(f"{what}: {value}" for what, value in rows_of(case)),
                    sep="\n",
                    flush=True,
                    file=sys.stderr,
                )
    if not cases:
        sys.exit("nothing to measure")
    rows = [row for case in cases for row in rows_of(case)] + bars(cases)
    common.report("capture", args, rows, {"dtype": args.dtype, "cases": cases})


if __name__ == "__main__":
    main()
