"""Builders of Facts without torch: GPT-like steps, small odd ones, random ones; machines."""

from dataclasses import dataclass, field

from elixir_fx.facts import Cost, Facts, OptimizerFacts, Parameter, Role, Storage
from elixir_fx.machine import Link, Machine, Tier

ADAMW = OptimizerFacts(
    name="AdamW", states=(("exp_avg", 4), ("exp_avg_sq", 4)), scratch_bytes=8, read_bytes=28
)
SGD = OptimizerFacts(name="SGD", states=(), scratch_bytes=4, read_bytes=12)
LBFGS = OptimizerFacts(
    name="LBFGS", states=(("history", 40),), scratch_bytes=8, read_bytes=80, global_state=True
)


def cpu(read: float = 1.8e9, write: float = 2.2e9, shared: float = 2.0e9) -> Machine:
    """A CPU with a half-duplex disk."""
    return Machine(
        name="cpu",
        fingerprint="",
        device="cpu",
        memory={Tier.DEVICE: 16 << 30, Tier.DISK: 1 << 40},
        links=(
            Link(
                source=Tier.DISK,
                target=Tier.DEVICE,
                bytes_per_s=read,
                shared_bytes_per_s=shared,
                latency_s=1e-4,
                compute_share=0.01,
            ),
            Link(
                source=Tier.DEVICE,
                target=Tier.DISK,
                bytes_per_s=write,
                shared_bytes_per_s=shared,
                latency_s=1e-4,
                compute_share=0.03,
            ),
        ),
        flops_per_s={"float32": 1e11},
        stream_bytes_per_s=1e10,
    )


def accelerator() -> Machine:
    """An accelerator with a full-duplex link to the host and a disk behind it."""
    rates = {
        (Tier.HOST, Tier.DEVICE): (20e9, 40e9),
        (Tier.DEVICE, Tier.HOST): (20e9, 40e9),
        (Tier.DISK, Tier.HOST): (3e9, 3e9),
        (Tier.HOST, Tier.DISK): (2e9, 3e9),
    }
    return Machine(
        name="gpu",
        fingerprint="",
        device="cuda",
        memory={Tier.DEVICE: 80 << 30, Tier.HOST: 200 << 30, Tier.DISK: 1 << 40},
        links=tuple(
            Link(
                source=source,
                target=target,
                bytes_per_s=rate,
                shared_bytes_per_s=both,
                latency_s=2e-5,
            )
            for (source, target), (rate, both) in rates.items()
        ),
        flops_per_s={"float32": 5e13},
        stream_bytes_per_s=3e12,
    )


@dataclass
class Builder:
    """Writes a joint graph node by node. A parameter is made by `parameter`, read by naming
    it in `node`; `backward` starts the second half."""

    optimizer: OptimizerFacts | None = ADAMW
    nodes: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parameters: dict[str, dict] = field(default_factory=dict)
    values: dict[str, dict] = field(default_factory=dict)
    turn: int | None = None

    def parameter(
        self, path: str, *shape: int, dtype: str = "float32", trainable: bool = True
    ) -> str:
        numel = 1
        for size in shape:
            numel *= size
        itemsize = {"float32": 4, "bfloat16": 2, "float64": 8}[dtype]
        self.nodes.append("p_" + path.replace(".", "_"))
        self.seconds.append(0.0)
        self.parameters[path] = {
            "shape": shape,
            "strides": tuple(0 for _ in shape),
            "dtype": dtype,
            "itemsize": itemsize,
            "span": numel,
            "trainable": trainable,
            "reads": [],
            "gradient": None,
        }
        return path

    def node(
        self,
        name: str,
        *reads: str,
        nbytes: int = 0,
        seconds: float = 1e-3,
        role: Role | None = None,
        gradient_of: str | None = None,
    ) -> str:
        """One node; `reads` are parameters' paths or earlier nodes."""
        position = len(self.nodes)
        self.nodes.append(name)
        self.seconds.append(seconds)
        for read in reads:
            known = self.parameters.get(read) or self.values.get(read)
            if known is not None:
                known["reads"].append(position)
        path = ""
        if gradient_of is not None:
            role, path = Role.GRADIENT, gradient_of
            known = self.parameters[gradient_of]
            known["gradient"] = position
            known["gradient_storage"] = name
            nbytes = known["span"] * known["itemsize"]
        if nbytes:
            self.values[name] = {
                "born": position,
                "nbytes": nbytes,
                "reads": [],
                "role": role,
                "path": path,
            }
        return name

    def backward(self) -> None:
        self.turn = len(self.nodes)

    def facts(self, key: str = "graph") -> Facts:
        turn = len(self.nodes) if self.turn is None else self.turn
        returned = [n for n, v in self.values.items() if v["role"] in (Role.GRADIENT, Role.OUTPUT)]
        self.node("output", *returned, seconds=0.0)
        if self.turn is None:
            turn = len(self.nodes)
        storages = []
        for name, value in self.values.items():
            dies = max([value["born"], *value["reads"]])
            role = value["role"]
            if role is None:
                role = Role.ACTIVATION if value["born"] < turn <= dies else Role.TEMPORARY
            storages.append(
                Storage(
                    name=name,
                    role=role,
                    path=value["path"],
                    source="model.py:7",
                    nbytes=value["nbytes"],
                    born=value["born"],
                    dies=dies,
                    readers=tuple(value["reads"]),
                )
            )
        never = len(self.nodes)
        parameters = [
            Parameter(path=path, **{**known, "reads": tuple(sorted(set(known["reads"])))})
            for path, known in self.parameters.items()
        ]
        parameters.sort(key=lambda p: p.reads[0] if p.reads else never)
        return Facts(
            key=key,
            nodes=tuple(self.nodes),
            backward=turn,
            costs=tuple(
                Cost(node=node, seconds=s, flops=0, bytes=0, source="measured")
                for node, s in zip(self.nodes, self.seconds, strict=True)
            ),
            storages=tuple(storages),
            parameters=tuple(parameters),
            buffer_bytes=4096,
            optimizer=self.optimizer,
        )


def gpt(
    layers: int,
    width: int,
    vocabulary: int,
    sequence: int = 512,
    batch: int = 1,
    *,
    tied: bool = False,
    flops_per_s: float = 1.6e11,
    optimizer: OptimizerFacts | None = ADAMW,
    trains: bool = True,
    frozen: int = 0,
    dtype: str = "float32",
) -> Facts:
    """A GPT's training step (or its forward alone); the first `frozen` layers do not train."""
    b = Builder(optimizer=optimizer)
    tokens = batch * sequence
    hidden = tokens * width * 4

    def matmul(k: int, n: int) -> float:
        return 2 * tokens * k * n / flops_per_s

    def parameter(path: str, *shape: int, trainable: bool = True) -> str:
        return b.parameter(path, *shape, dtype=dtype, trainable=trainable and trains)

    shapes = {
        "ln1.weight": (width,),
        "ln1.bias": (width,),
        "qkv.weight": (3 * width, width),
        "qkv.bias": (3 * width,),
        "proj.weight": (width, width),
        "proj.bias": (width,),
        "ln2.weight": (width,),
        "ln2.bias": (width,),
        "fc.weight": (4 * width, width),
        "fc.bias": (4 * width,),
        "out.weight": (width, 4 * width),
        "out.bias": (width,),
    }
    parameter("wte", vocabulary, width)
    parameter("wpe", sequence, width)
    for layer in range(layers):
        for name, shape in shapes.items():
            parameter(f"h.{layer}.{name}", *shape, trainable=layer >= frozen)
    parameter("ln.weight", width)
    parameter("ln.bias", width)
    head = "wte" if tied else parameter("head", vocabulary, width)

    x = b.node("embed", "wte", "wpe", nbytes=hidden, seconds=1e-3)
    saved: list[dict[str, str]] = []
    for layer in range(layers):
        h = f"h.{layer}."
        s = {"x": x}
        s["ln1"] = b.node(f"ln1_{layer}", x, h + "ln1.weight", h + "ln1.bias", nbytes=hidden)
        for name, k, n, source in (
            ("qkv", width, 3 * width, "ln1"),
            ("attn", 0, 0, "qkv"),
            ("proj", width, width, "attn"),
            ("ln2", 0, 0, "proj"),
            ("fc", width, 4 * width, "ln2"),
            ("gelu", 0, 0, "fc"),
            ("out", 4 * width, width, "gelu"),
        ):
            reads = [s[source]]
            if name not in ("attn", "gelu"):
                b.node(f"t_{name}_{layer}", h + f"{name}.weight", seconds=0.0)
                reads += [h + f"{name}.weight", h + f"{name}.bias"]
            size = {"qkv": 3, "fc": 4, "gelu": 4}.get(name, 1) * hidden
            s[name] = b.node(f"{name}_{layer}", *reads, nbytes=size, seconds=matmul(k, n) + 2e-4)
        x = b.node(f"add_{layer}", x, s["out"], nbytes=hidden)
        saved.append(s)
    ln = b.node("ln", x, "ln.weight", "ln.bias", nbytes=hidden)
    logits = b.node(
        "logits", ln, head, nbytes=tokens * vocabulary * 4, seconds=matmul(width, vocabulary)
    )
    b.node("loss", logits, nbytes=4, role=Role.OUTPUT)
    if not trains:
        return b.facts(f"gpt{layers}-forward")
    b.backward()
    both = matmul(width, vocabulary)
    d = b.node("d_logits", logits, nbytes=tokens * vocabulary * 4)
    name = "head_grad" if tied else "g_head"
    part = {"nbytes": vocabulary * width * 4} if tied else {"gradient_of": head}
    head_grad = b.node(name, d, ln, seconds=both, **part)
    d = b.node("d_ln", d, head, nbytes=hidden, seconds=both)
    for piece in ("ln.weight", "ln.bias"):
        b.node("g_" + piece.replace(".", "_"), d, ln, gradient_of=piece)
    for layer in reversed(range(layers)):
        h, s = f"h.{layer}.", saved[layer]
        for name, k, n, source in (
            ("out", 4 * width, width, "gelu"),
            ("gelu", 0, 0, "fc"),
            ("fc", width, 4 * width, "ln2"),
            ("ln2", 0, 0, "proj"),
            ("proj", width, width, "attn"),
            ("attn", 0, 0, "qkv"),
            ("qkv", width, 3 * width, "ln1"),
            ("ln1", 0, 0, "x"),
        ):
            known = b.parameters.get(h + f"{name}.weight")
            if known and known["trainable"]:
                b.node(
                    f"g_{name}_w_{layer}",
                    d,
                    s[source],
                    gradient_of=h + f"{name}.weight",
                    seconds=matmul(k, n) + 1e-4,
                )
                b.node(f"g_{name}_b_{layer}", d, gradient_of=h + f"{name}.bias", seconds=1e-4)
            size = {"gelu": 4, "out": 4, "attn": 3}.get(name, 1) * hidden
            reads = [h + f"{name}.weight"] if known else []
            d = b.node(
                f"d_{name}_{layer}",
                d,
                s[source],
                *reads,
                nbytes=size,
                seconds=matmul(k, n) + 2e-4,
            )
    tail = (head_grad,) if tied else ()
    b.node("g_wte", d, *tail, gradient_of="wte")
    b.node("g_wpe", d, gradient_of="wpe")
    return b.facts(f"gpt{layers}-{sequence}x{batch}")
