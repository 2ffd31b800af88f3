"""One setting of accuracy.py or budgets.py, in this process: what was forecast, what was measured.

Started by these scripts, with the setting as JSON; the last line of its output is JSON. The
machine is measured anew just before, and its disk once more just after: a disk whose rates have
changed meanwhile makes no comparison. Of several ranks every one runs this, one thread each, and
the step lasts as long as its slowest rank.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import GPT_92M, Config, build, text_batches
from torch import Tensor

import elixir_fx
from elixir_fx.config import read_options
from elixir_fx.guarded import GuardedSession
from elixir_fx.machine import Machine, Tier
from elixir_fx.module import ElixirModule
from elixir_fx.plan import Plan
from elixir_fx.planner.elixir_rule import RuleConstants, elixir_rule
from elixir_fx.runtime.measure import MEASURE_BYTES, this_machine
from elixir_fx.runtime.rates import disk_rates
from elixir_fx.testing import emulated
from elixir_fx.units import GIB

GPT_27M = Config(layers=6, width=512, heads=8, seq=256, vocab=8192)
MODELS = {"27M": GPT_27M, "92M": GPT_92M}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}
WARM, STEPS = 2, 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`memory` is the device's budget, "" for all there is. With `link_bytes_per_s` the device
    is an accelerator that is played, on one thread, with its host as the other tier; otherwise it
    is the CPU, with a disk unless `memory` is ""."""

    name: str
    model: str = "27M"
    batch: int = 4
    memory: str = ""
    micro_batches: int = 1
    optimizer: str = "adamw"
    bf16: bool = False
    kernels: str = "eager"
    ranks: int = 1
    link_bytes_per_s: float = 0.0
    rule: bool = False  # the plan of the paper's rule instead of ours

    @property
    def threads(self) -> int:
        return 1 if self.ranks > 1 or self.link_bytes_per_s else torch.get_num_threads()

    @property
    def uses_disk(self) -> bool:
        return bool(self.memory) and not self.link_bytes_per_s

    def machine(self, disk: Path) -> Machine | None:
        """None: this one."""
        if not self.link_bytes_per_s:
            return None
        here = this_machine(torch.device("cpu"), None, threads=self.threads)
        return emulated(
            device_memory=8 * GIB,
            host_memory=4 * GIB,
            bytes_per_s=self.link_bytes_per_s,
            like=here,
        )

    def options(self, disk: Path) -> dict[str, Any]:
        """What compile() gets."""
        options: dict[str, Any] = {"kernels": self.kernels, "micro_batches": self.micro_batches}
        if self.memory:
            options["memory"] = self.memory
        if self.uses_disk:
            options["disk"] = disk
        machine = self.machine(disk)
        if machine is not None:
            options |= {"machine": machine, "host_memory": 2 * GIB}
        return options


class Training:
    """A compiled model, its optimizer and its data."""

    def __init__(self, setting: Setting, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.setting = setting
        config = MODELS[setting.model]
        model = build(config)
        self.optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.batches: Iterator[tuple[Tensor, Tensor]] = text_batches(
            setting.batch, config.seq, seed=rank
        )
        self.inputs = next(self.batches)
        if setting.rule:
            options = {**options, "plan": rule_plan(model, self, options)}
        with self.autocast():
            self.planned = keep_all_forecast(model, self, options)
            self.model: ElixirModule = elixir_fx.compile(
                model, optimizer=self.optimizer, example_inputs=self.inputs, **options
            )

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.setting.bf16 else nullcontext()

    def step(self) -> tuple[float, float]:
        """Seconds of all forwards and backwards, and of the update."""
        if dist.is_initialized():
            dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(self.setting.micro_batches):
            with self.autocast():
                loss = self.model(*next(self.batches))
            loss.backward()
        graphs_s = time.perf_counter() - begin_s
        self.optimizer.step()
        self.optimizer.zero_grad()
        return graphs_s, time.perf_counter() - begin_s - graphs_s


def rule_plan(model: Any, training: Training, options: dict[str, Any]) -> Plan:
    """What the paper's rule decides for this model here."""
    session = GuardedSession(model, training.optimizer, read_options(options))
    facts = session.facts_only(training.inputs, {})
    assert facts.optimizer is not None
    constants = RuleConstants.of(session.machine, facts.optimizer, 1)
    return elixir_rule(facts, session.machine, session.lowering.limits, constants=constants)


def keep_all_forecast(model: Any, training: Training, options: dict[str, Any]) -> Any:
    """compile() times no operator where nothing has to move; plan() does."""
    if dist.is_initialized() or training.setting.memory:
        return None
    plan = elixir_fx.plan(model, training.inputs, optimizer=training.optimizer, **options)
    return plan.forecast if plan.layout.keeps_all else None


def run(setting: Setting, disk: Path) -> dict[str, Any]:
    torch.set_num_threads(setting.threads)
    training = Training(setting, setting.options(disk))
    plan = training.model.plan
    assert plan is not None
    forecast = training.planned or plan.forecast
    gc.collect()
    steps = [training.step() for _ in range(WARM + STEPS)][WARM:]
    stats = training.model.stats()
    machine = training.model._session.machine
    after = None
    if setting.uses_disk:
        after = disk_rates(disk, setting.threads, MEASURE_BYTES)
    link = {(x.source, x.target): x for x in machine.links}
    read = link.get((Tier.DISK, Tier.DEVICE))
    write = link.get((Tier.DEVICE, Tier.DISK))
    before = []
    if setting.uses_disk and read is not None and write is not None:
        before = [
            rate * setting.ranks
            for rate in (read.bytes_per_s, write.bytes_per_s, read.shared_bytes_per_s)
        ]
    return {
        "forecast_s": forecast.step_s,
        "forecast_compute_s": forecast.compute_s,
        "forecast_update_s": forecast.optimizer_s,
        "forecast_exposed": dict(forecast.exposed),
        "forecast_peak_bytes": forecast.peak_device_bytes,
        "bound_s": plan.forecast.lower_bound_s,
        "graphs_s": [step[0] for step in steps],
        "update_s": [step[1] for step in steps],
        "peak_bytes": stats["peak_device_bytes"],
        "stats": dict(stats),
        "forecast_read_bytes": forecast.disk_read_bytes,
        "forecast_write_bytes": forecast.disk_write_bytes,
        "keeps_all": plan.layout.keeps_all,
        "disk_before": before,
        "disk_after": []
        if after is None
        else [after.read_bytes_per_s, after.write_bytes_per_s, after.both_bytes_per_s],
        "shares": [read.compute_share, write.compute_share] if read and write else [],
        "update_rate": machine.update_bytes_per_s(Tier.DEVICE),
    }


def serve(setting: Setting, disk: Path) -> None:
    """Print what is forecast; then take a step for every line of input and print its seconds."""
    torch.set_num_threads(setting.threads)
    training = Training(setting, setting.options(disk))
    plan = training.model.plan
    assert plan is not None
    forecast = training.planned or plan.forecast
    told = {"forecast_s": forecast.step_s, "forecast_peak_bytes": forecast.peak_device_bytes}
    print(json.dumps(told), flush=True)
    gc.collect()
    for _ in sys.stdin:
        print(sum(training.step()), flush=True)


def main() -> None:
    setting = Setting(**json.loads(sys.argv[1]))
    if "--serve" in sys.argv:
        serve(setting, Path(sys.argv[2]))
        return
    if setting.ranks > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    result = run(setting, Path(sys.argv[2]))
    print(json.dumps(result))
    sys.stdout.flush()
    if setting.ranks > 1:
        dist.barrier()
        os._exit(0)  # gloo's threads may abort the process while Python takes it down


if __name__ == "__main__":
    main()
