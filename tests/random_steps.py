"""Small random planning problems: facts, a machine and limits, all from one number.

Sizes and rates are drawn so that neither computation nor moves are negligible: what one step
would take to move everything is between a third of its computation and ten times that. Parameters
are read once or twice, some are tied or frozen; a budget lies between about the least that can
do and what keeping everything takes, so there may be no plan at all.

`crowded` problems are what a bound may forget: layers of many parameters, some without a
dimension, whose gradients wait for each other; a numeric format of fewer bytes; optimizers that
need parameters whole; links that slow the computation down.
"""

from dataclasses import dataclass, replace
from random import Random

from graphs_facts import ADAMW, SGD, Builder

from elixir_fx.facts import Facts
from elixir_fx.machine import Link, Machine, Tier
from elixir_fx.plan import Limits, align
from elixir_fx.planner.footprint import Footprint
from elixir_fx.planner.pack import pack

MIB = 1 << 20
ROOMY = 1 << 50  # bytes of a tier that never fills


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One planning problem. `title` says what it is of."""

    title: str
    facts: Facts
    machine: Machine
    limits: Limits


def instance(seed: int) -> Instance:
    """The problem of a number: the same number, the same problem."""
    random = Random(seed)
    kind = random.choice(("cpu with disk", "host", "host, updates there too", "host and disk"))
    machine = _machine(random, kind)
    most = 3 if kind == "host and disk" else 5  # what an exhaustive search can do
    facts = _facts(random, machine, random.randint(2, most), f"random-{seed}")
    return Instance(
        title=f"{seed}: {len(facts.parameters)} parameters, {kind}",
        facts=facts,
        machine=machine,
        limits=_limits(random, facts, machine, kind),
    )


def crowded(seed: int) -> Instance:
    """The crowded problem of a number."""
    random = Random(1_000_003 * seed)
    kind = random.choice(("cpu with disk", "host", "host, updates there too", "host and disk"))
    machine = _machine(random, kind)
    slowed = random.choice((0.0, 0.3, 0.7))
    links = tuple(replace(link, compute_share=slowed) for link in machine.links)
    facts = _layers(random, random.randint(2, 4), f"crowded-{seed}")
    return Instance(
        title=f"crowded {seed}: {len(facts.parameters)} parameters, {kind}",
        facts=facts,
        machine=replace(machine, links=links),
        limits=_limits(random, facts, machine, kind),
    )


def _layers(random: Random, count: int, key: str) -> Facts:
    optimizer = random.choice((ADAMW, SGD, replace(ADAMW, elementwise=False)))
    b = Builder(optimizer=optimizer)
    dtype = random.choice(("float32", "float32", "bfloat16"))
    numel = int(random.uniform(0.05, 1) * MIB)
    layers: list[list[str]] = []
    for i in range(count):
        shapes = [(numel,), (random.randint(1, 5000),), (numel // 3,)] * random.randint(1, 2)
        shapes += [()] if random.random() < 0.3 else []
        layers.append(
            [b.parameter(f"layer.{i}.{j}", *shape, dtype=dtype) for j, shape in enumerate(shapes)]
        )
    spend_s = 10 ** random.uniform(-5, -2.5)

    def seconds() -> float:
        return spend_s * random.choice((0.0, 1.0, 1.0, 3.0))

    def nbytes() -> int:
        return int(10 ** random.uniform(-2, 0.5) * MIB)

    x = b.node("embed", nbytes=nbytes(), seconds=seconds())
    inputs = []
    for i, paths in enumerate(layers):
        inputs.append(x)
        for j, path in enumerate(paths):
            x = b.node(f"f{i}_{j}", x, path, nbytes=nbytes(), seconds=seconds())
    b.backward()
    d = b.node("d_loss", x, nbytes=nbytes(), seconds=seconds())
    for i, paths in reversed(list(enumerate(layers))):
        for j, path in reversed(list(enumerate(paths))):
            d = b.node(f"d{i}_{j}", d, inputs[i], path, nbytes=nbytes(), seconds=seconds())
            b.node(f"g{i}_{j}", d, gradient_of=path, seconds=seconds())
    return b.facts(key)


def _machine(random: Random, kind: str) -> Machine:
    device, host, disk = Tier.DEVICE, Tier.HOST, Tier.DISK
    on_cpu = kind == "cpu with disk"
    ends = [(disk, device)] if on_cpu else [(host, device)]
    if kind == "host and disk":
        ends.append((disk, host))
    links = []
    for far, near in ends:
        slow = far is disk
        rate = random.uniform(1e9, 4e9) if slow else random.uniform(4e9, 30e9)
        back = rate * random.uniform(0.5, 1.2)
        shared = random.uniform(0.9, 1.2) * max(rate, back) if slow else rate + back
        share = random.choice((0.0, 0.02)) if on_cpu else 0.0
        for source, target, bytes_per_s in ((far, near, rate), (near, far, back)):
            links.append(
                Link(
                    source=source,
                    target=target,
                    bytes_per_s=bytes_per_s,
                    shared_bytes_per_s=shared,
                    latency_s=1e-4 if slow else 2e-5,
                    compute_share=share,
                )
            )
    return Machine(
        name=kind,
        fingerprint="",
        device="cpu" if on_cpu else "cuda",
        memory={device: ROOMY, host: ROOMY, disk: ROOMY},
        links=tuple(links),
        flops_per_s={"float32": 1e12},
        stream_bytes_per_s=random.uniform(1e10, 3e10) if on_cpu else random.uniform(2e11, 2e12),
        host_stream_bytes_per_s=random.uniform(1e10, 1e11) if "updates" in kind else 0.0,
    )


def _facts(random: Random, machine: Machine, count: int, key: str) -> Facts:
    b = Builder(optimizer=random.choice((ADAMW, ADAMW, SGD)))
    alike = random.random() < 0.4  # layers of one size, as models have them
    numel = int(random.uniform(0.5, 16) * MIB / 4)
    paths = []
    for i in range(count):
        if not alike:
            numel = int(MIB / 4 * 2 ** random.uniform(-2, 4.5))
        paths.append(b.parameter(f"layer.{i}", numel, trainable=random.random() > 0.1))
    if not any(p["trainable"] for p in b.parameters.values()):
        b.parameters[paths[0]]["trainable"] = True
    slowest = min(link.bytes_per_s for link in machine.links)
    moved = 10 * sum(p["span"] * p["itemsize"] for p in b.parameters.values())
    whole_s = moved / slowest * 10 ** random.uniform(-1, 0.5)

    def seconds() -> float:
        return whole_s / (4 * count) * random.uniform(0.2, 1.8)

    def nbytes() -> int:
        return int(random.uniform(0.1, 4) * MIB)

    x = b.node("embed", nbytes=nbytes(), seconds=seconds())
    tied = random.random() < 0.2
    inputs = []
    for i, path in enumerate(paths):
        inputs.append(x)
        for j in range(random.randint(1, 2)):
            x = b.node(f"f{i}_{j}", x, path, nbytes=nbytes(), seconds=seconds())
    if tied:
        x = b.node("head", x, paths[0], nbytes=nbytes(), seconds=seconds())
    b.node("loss", x, nbytes=4096, seconds=seconds())
    b.backward()
    d = b.node("d_loss", x, nbytes=nbytes(), seconds=seconds())
    if tied:
        d = b.node("d_head", d, paths[0], nbytes=nbytes(), seconds=seconds())
    for i, path in reversed(list(enumerate(paths))):
        if b.parameters[path]["trainable"]:
            b.node(f"g{i}", d, inputs[i], gradient_of=path, seconds=seconds())
        reads = [path] if random.random() < 0.85 else []
        d = b.node(f"d{i}", d, inputs[i], *reads, nbytes=nbytes(), seconds=seconds())
    return b.facts(key)


def _limits(random: Random, facts: Facts, machine: Machine, kind: str) -> Limits:
    whole = Footprint(facts, pack(facts, ROOMY, {}))
    widest = max(align(p.nbytes) for p in facts.parameters)
    kept = whole.kept_peak
    # The largest parameter's parts in the ring, and its gradient, scratch or states beside it.
    least = facts.buffer_bytes + max(whole.live_peak, 4 * widest) + 4 * widest
    least = min(least, int(0.8 * kept))
    device = int(least + random.uniform(0.0, 0.97) * (kept - least))
    state = kept - whole.live_peak
    if machine.unified:
        return Limits(device=device, disk=ROOMY)
    if kind == "host and disk":
        host = int(random.uniform(0.3, 1.2) * state)
        return Limits(device=device, host=host, disk=ROOMY)
    return Limits(device=device, host=ROOMY)
