"""Plans for known models on known machines: how far from the bound, and against the baselines.

    python examples/benchmarks/corpus.py [--only gpt2-10b] [--list]
    python examples/benchmarks/corpus.py --paper      # tokens/s against the paper's rule

Nothing is run: facts are captured on meta, machines are those of datasheets, and every time is a
forecast. Of each point: the plan's step, the time that no plan can beat, the gap between them,
the best baseline that fits, and how long planning took. At the end what must hold: a gap of at
most 10 % on at least 80 % of the points, no baseline that is faster, and none that fits where the
search has no plan.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

from common import GIB, add_output_options, report
from corpus_models import SHAPES, captured, costed

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import Link, Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Limits, Plan
from elixir_fx.planner import search
from elixir_fx.planner.baselines import POLICIES
from elixir_fx.planner.elixir_rule import RuleConstants, elixir_rule
from elixir_fx.planner.footprint import Footprint
from elixir_fx.planner.pack import pack
from elixir_fx.units import sizes, times

NEAR = 0.10  # a gap that counts as near
NEAR_SHARE = 0.80
ONE_CHUNK = 1 << 60
PAPER_MODELS = ("gpt2-4b", "gpt2-10b", "gpt2-15b", "gpt2-20b")


def card(name: str, ranks: int) -> Machine:
    """One rank's view of a cluster of servers with these cards, from the catalogue."""
    return Machine.named(name).with_ranks(ranks)


def workstation() -> Machine:
    """Two cores, 16 GiB and a half-duplex disk."""
    device, disk = Tier.DEVICE, Tier.DISK
    return Machine(
        name="2 cores",
        fingerprint="",
        device="cpu",
        memory={device: 16 * GIB, disk: 100 * GIB},
        links=tuple(
            Link(source=a, target=b, bytes_per_s=rate, shared_bytes_per_s=2e9, latency_s=1e-4)
            for a, b, rate in ((disk, device, 1.8e9), (device, disk, 2.2e9))
        ),
        flops_per_s={"float32": 1.6e11},
        stream_bytes_per_s=1e10,
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model with a batch for each rank on a machine, under a share of its device's memory (on
    the workstation: of what keeping everything takes)."""

    model: str
    batch: int
    machine: Machine
    ranks: int
    share: float

    @property
    def title(self) -> str:
        return f"{self.model} batch {self.batch}, {self.machine.name}, {self.share:.0%}"

    @property
    def group(self) -> Group:
        return Group(ranks=self.ranks) if self.ranks > 1 else ONE_RANK

    def facts(self) -> Facts:
        facts = captured(self.model, self.batch)
        return costed(facts, self.machine, "bfloat16" if SHAPES[self.model].large else "float32")

    def limits(self, facts: Facts) -> Limits:
        memory = self.machine.memory
        if self.machine.unified:
            whole = Footprint(facts, pack(facts, ONE_CHUNK, {})).kept_peak
            return Limits(device=int(self.share * whole), disk=memory[Tier.DISK])
        device = int(self.share * memory[Tier.DEVICE])
        return Limits(device=device, host=memory[Tier.HOST], disk=memory[Tier.DISK])


# (model, batch, card, ranks)
SETTINGS = (
    *((model, 8, "a100-40-sxm", ranks) for model in PAPER_MODELS for ranks in (1, 2, 4)),
    ("opt-30b", 2, "a100-40-sxm", 1),
    ("opt-30b", 2, "a100-40-sxm", 4),
    ("opt-30b", 2, "h100-sxm", 8),
    ("opt-175b", 1, "h100-sxm", 8),
    ("opt-175b", 1, "h100-sxm", 64),
    ("llama3-8b", 1, "rtx-4090", 1),
    ("llama3-8b", 1, "a100-40-sxm", 1),
    ("llama3-8b", 1, "a100-40-sxm", 2),
    ("llama3-8b", 1, "h100-sxm", 1),
    ("llama3-70b", 1, "a100-40-sxm", 8),
    ("llama3-70b", 1, "h100-sxm", 8),
    ("mixtral-8x7b", 1, "a100-40-sxm", 1),
    ("mixtral-8x7b", 1, "a100-40-sxm", 4),
    ("mixtral-8x7b", 1, "h100-sxm", 8),
)
SHARES = (0.9, 0.6)
SMALL_SHARES = (0.55, 0.6, 0.65, 0.8, 0.95)


def points() -> Iterator[Point]:
    for model in ("gpt-27m", "gpt-92m"):
        for share in SMALL_SHARES:
            yield Point(model=model, batch=4, machine=workstation(), ranks=1, share=share)
    for model, batch, name, ranks in SETTINGS:
        for share in SHARES:
            machine = card(name, ranks)
            yield Point(model=model, batch=batch, machine=machine, ranks=ranks, share=share)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one point, in seconds; infinite where there is no plan."""

    title: str
    device_bytes: int
    step_s: float
    bound_s: float
    baseline: str
    baseline_s: float
    planning_s: float

    @property
    def gap(self) -> float:
        return self.step_s / self.bound_s - 1

    @property
    def value(self) -> str:
        if self.step_s == float("inf"):
            ours = "no plan"
        else:
            ours = f"{times(self.step_s)}, bound {times(self.bound_s)}, gap {self.gap:.1%}"
        best = f"{self.baseline} {times(self.baseline_s)}" if self.baseline else "no baseline"
        return f"{sizes(self.device_bytes)}: {ours}; {best}; planned in {self.planning_s:.1f} s"


def solve(point: Point) -> Result:
    facts = point.facts()
    limits = point.limits(facts)
    begin = time.perf_counter()
    ours = planned(search, facts, point.machine, limits, None, point.group)
    planning_s = time.perf_counter() - begin
    best: tuple[float, str] = (float("inf"), "")
    bound_s = ours.forecast.lower_bound_s if ours else 1.0
    for name, policy in POLICIES.items():
        plan = planned(policy, facts, point.machine, limits, None, point.group)
        if plan is not None:
            best = min(best, (plan.forecast.step_s, name))
    return Result(
        title=point.title,
        device_bytes=limits.device,
        step_s=ours.forecast.step_s if ours else float("inf"),
        bound_s=bound_s,
        baseline=best[1],
        baseline_s=best[0],
        planning_s=planning_s,
    )


def planned(policy: Callable[..., Plan], *arguments: object) -> Plan | None:
    """A policy's plan; None if it has none."""
    try:
        return policy(*arguments)
    except PlanError:
        return None


def summary(results: list[Result]) -> list[tuple[str, str]]:
    found = [r for r in results if r.step_s < float("inf")]
    near = sum(r.gap <= NEAR for r in found)
    beaten = [r.title for r in found if r.baseline_s < r.step_s * (1 - 1e-9)]
    refused = [r.title for r in results if r not in found and r.baseline]
    return [
        ("points", f"{len(results)}, {len(found)} of them with a plan"),
        (f"gap at most {NEAR:.0%}", f"{near / max(1, len(found)):.0%} (wanted {NEAR_SHARE:.0%})"),
        ("largest gap", f"{max((r.gap for r in found), default=0):.1%}"),
        ("a baseline is faster (wanted 0)", f"{len(beaten)}: {', '.join(beaten)}"),
        ("refused where a baseline fits (wanted 0)", f"{len(refused)}: {', '.join(refused)}"),
        ("slowest planning", f"{max((r.planning_s for r in results), default=0):.1f} s"),
    ]


def paper_rows(only: str) -> Iterator[tuple[str, str]]:
    """Forecast tokens/s of all ranks over the paper's grid, ours and the rule's."""
    for model in PAPER_MODELS:
        for ranks in (1, 2, 4):
            for batch in (4, 8, 12, 16):
                point = Point(
                    model=model,
                    batch=batch,
                    machine=card("a100-40-sxm", ranks),
                    ranks=ranks,
                    share=1.0,
                )
                if only not in point.title:
                    continue
                facts = point.facts()
                limits = point.limits(facts)
                tokens = ranks * batch * SHAPES[model].sequence
                rule = partial(elixir_rule, constants=RuleConstants.paper(ranks))
                both = [
                    planned(policy, facts, point.machine, limits, None, point.group)
                    for policy in (search, rule)
                ]
                rates = [tokens / plan.forecast.step_s if plan else 0.0 for plan in both]
                ratio = f"{rates[0] / rates[1]:.2f}" if rates[1] else "-"
                yield (
                    point.title,
                    f"{rates[0]:.0f} tokens/s, the rule {rates[1]:.0f}: ratio {ratio}",
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="points whose title has this text")
    parser.add_argument("--list", action="store_true", help="print the points alone")
    parser.add_argument("--paper", action="store_true", help="the paper's grid against its rule")
    add_output_options(parser)
    args = parser.parse_args()
    if args.paper:
        rows = []
        for row in paper_rows(args.only):
            rows.append(row)
            print(*row, sep="  ", flush=True)
        report("corpus_paper", args, rows, {"rows": rows})
        return
    chosen = [point for point in points() if args.only in point.title]
    if args.list:
        print("\n".join(point.title for point in chosen))
        return
    results = []
    for point in chosen:
        results.append(solve(point))
        print(results[-1].title, results[-1].value, sep="  ", flush=True)
    rows = [(result.title, result.value) for result in results] + summary(results)
    numbers = {"points": [{**asdict(result), "gap": result.gap} for result in results]}
    report("corpus", args, rows, numbers)


if __name__ == "__main__":
    main()
