"""Small models for tests: named ones, and random ones that hypothesis draws.

An `Example` builds its model (always the same weights) and its batches. A `Drawn` is an
example described by a few plain values, so that its repr, printed by a failing test, is
Python that builds it again:

    Drawn(seed=3, width=5, layers=(Layer("linear", 7), Layer("skip", 1)), output="dict")
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import train_gpt


class Example(Protocol):
    """A model, always with the same first weights, and batches for it."""

    def build(self) -> nn.Module: ...

    def batches(self, count: int) -> list[Any]: ...


# Drawn models: a stream h of shape [batch, tokens, width] goes through layers of these kinds.


class Kind(nn.Module):
    """One kind of layer. `size` is an inner size, `index` names an earlier layer (modulo)."""

    def __init__(self, width: int, size: int, index: int) -> None:
        super().__init__()
        self.width, self.size, self.index = width, size, index
        self.setup()

    def setup(self) -> None: ...

    def forward(self, h: Tensor, stream: "Stream") -> Tensor:
        raise NotImplementedError


@dataclass
class Stream:
    """What a layer can see besides h: token ids, earlier values and layers, side outputs."""

    ids: Tensor
    layers: nn.ModuleList
    earlier: list[Tensor] = field(default_factory=list)
    aside: list[Tensor] = field(default_factory=list)


class Linear(Kind):
    def setup(self) -> None:
        self.up = nn.Linear(self.width, self.size)
        self.down = nn.Linear(self.size, self.width, bias=self.size % 2 == 0)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h + self.down(functional.gelu(self.up(h)))


class Norm(Kind):
    def setup(self) -> None:
        self.norm = nn.LayerNorm(self.width, elementwise_affine=self.size != 1)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return self.norm(h)


class BatchNorm(Kind):
    """Running statistics: buffers written in forward, one of them an integer."""

    def setup(self) -> None:
        self.norm = nn.BatchNorm1d(self.width)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return self.norm(h.flatten(0, 1)).view_as(h)


class Counter(Kind):
    """A buffer that is not saved and changes in place."""

    seen: Tensor

    def setup(self) -> None:
        self.register_buffer("seen", torch.ones(()), persistent=False)
        self.gain = nn.Parameter(torch.ones(self.width))

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        self.seen.add_(1)
        return h * self.gain * (1 / self.seen)


class Attention(Kind):
    def setup(self) -> None:
        self.qkv = nn.Linear(self.width, 3 * self.size)
        self.out = nn.Linear(self.size, self.width)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(h).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(y.squeeze(1))


class Convolution(Kind):
    def setup(self) -> None:
        self.conv = nn.Conv1d(self.width, self.width, 3, padding=1)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h + self.conv(h.transpose(1, 2)).transpose(1, 2)


class Lookup(Kind):
    def setup(self) -> None:
        self.table = nn.Embedding(IDS, self.width)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h + self.table(stream.ids)


class Tied(Kind):
    """One weight under two names, once as rows and once transposed."""

    def setup(self) -> None:
        self.table = nn.Embedding(IDS, self.width)
        self.head = nn.Linear(self.width, IDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h + self.head(h + self.table(stream.ids)).softmax(-1) @ self.table.weight


class Gain(Kind):
    """A parameter without dimensions."""

    def setup(self) -> None:
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h * self.gain


class InPlace(Kind):
    """Writes into an intermediate result, and into a view of it."""

    def setup(self) -> None:
        self.mix = nn.Linear(self.width, self.width)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        y = self.mix(h)
        y.add_(h)
        y[..., 0].mul_(0.5)
        return functional.leaky_relu_(y, 0.2)


class Branch(Kind):
    """Two ways apart and together again."""

    def setup(self) -> None:
        self.left = nn.Linear(self.width, self.size)
        self.right = nn.Linear(self.width, self.size + 1)
        self.join = nn.Linear(2 * self.size + 1, self.width)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return self.join(torch.cat([self.left(h).tanh(), self.right(h).sin()], dim=-1))


class Skip(Kind):
    """Adds an earlier value of the stream."""

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h + stream.earlier[self.index % len(stream.earlier)]


class Again(Kind):
    """Calls an earlier layer once more (itself excluded; nothing at the first place)."""

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        place = len(stream.earlier) - 1
        if place == 0:
            return h
        layer = stream.layers[self.index % place]
        return h if isinstance(layer, Again) else layer(h, stream)


class Dropout(Kind):
    def setup(self) -> None:
        self.dropout = nn.Dropout(0.3)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return self.dropout(h)


class Frozen(Kind):
    """Frozen layers around a bias that learns."""

    def setup(self) -> None:
        self.first = nn.Linear(self.width, self.size).requires_grad_(False)
        self.second = nn.Linear(self.size, self.width)
        self.second.weight.requires_grad_(False)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h + self.second(self.first(h).tanh())


class Unused(Kind):
    """Parameters that take no part."""

    def setup(self) -> None:
        self.spare = nn.Linear(self.width, self.size)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h.sin()


class Strided(Kind):
    """A parameter that is stored transposed, and one with an empty dimension."""

    def setup(self) -> None:
        self.weight = nn.Parameter(torch.randn(self.size, self.width).t() / self.width)
        self.empty = nn.Parameter(torch.empty(0, self.width))

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h + (h @ self.weight) @ self.weight.t() + self.empty.sum(0)


class Packed(Kind):
    """One flat parameter, used through overlapping and reshaped views."""

    def setup(self) -> None:
        self.flat = nn.Parameter(torch.randn(self.width * self.width + self.size) / self.width)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        square = self.flat[: self.width**2].view(self.width, self.width)
        return h + h @ square.mT + square.diagonal() + self.flat[-1]


class Mixed(Kind):
    """Parameters of float64 and bfloat16 in a float32 stream."""

    def setup(self) -> None:
        self.gain = nn.Parameter(torch.ones(self.width, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(self.width, self.width).bfloat16() / self.width)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return (h.double() * self.gain).float() + h @ self.weight.float()


class Bytes(Kind):
    """A frozen parameter of bytes, dequantised at use."""

    def setup(self) -> None:
        codes = torch.randint(0, 256, (self.width, self.width), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((self.width,), 1e-3))

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h + functional.linear(h, self.codes.float() - 128) * self.scale


class Gate(Kind):
    def setup(self) -> None:
        self.both = nn.Linear(self.width, 2 * self.size)
        self.out = nn.Linear(self.size, self.width)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        value, gate = self.both(h).chunk(2, dim=-1)
        return h + self.out(value * gate.sigmoid())


class Detached(Kind):
    """A gradient that stops half way."""

    def setup(self) -> None:
        self.layer = nn.Linear(self.width, self.width)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        return h + self.layer(h.detach()).tanh()


class Aside(Kind):
    """An output of its own, which the loss may not see."""

    def setup(self) -> None:
        self.probe = nn.Linear(self.width, self.size)

    def forward(self, h: Tensor, stream: Stream) -> Tensor:
        stream.aside.append(self.probe(h))
        return h


KINDS: dict[str, type[Kind]] = {
    "again": Again,
    "aside": Aside,
    "attention": Attention,
    "batch_norm": BatchNorm,
    "branch": Branch,
    "bytes": Bytes,
    "convolution": Convolution,
    "counter": Counter,
    "detached": Detached,
    "dropout": Dropout,
    "frozen": Frozen,
    "gain": Gain,
    "gate": Gate,
    "in_place": InPlace,
    "linear": Linear,
    "lookup": Lookup,
    "mixed": Mixed,
    "norm": Norm,
    "packed": Packed,
    "skip": Skip,
    "strided": Strided,
    "tied": Tied,
    "unused": Unused,
}
IDS = 11
OUTPUTS = ("loss", "tuple", "dict", "nest")


@dataclass(frozen=True)
class Layer:
    """A kind of layer, its inner size, and which earlier layer it refers to (modulo)."""

    kind: str
    size: int = 4
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A small model described by plain values. See KINDS and OUTPUTS."""

    layers: tuple[Layer, ...]
    seed: int = 0
    width: int = 8
    batch: int = 2
    tokens: int = 3
    output: str = "loss"

    def build(self) -> nn.Module:
        return seeded(self.seed, lambda: DrawnModel(self))

    def batches(self, count: int) -> list[Any]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch, self.tokens)
        return [
            (
                torch.randn(*shape, self.width, generator=generator),
                torch.randint(0, IDS, shape, generator=generator),
            )
            for _ in range(count)
        ]


class DrawnModel(nn.Module):
    """The module of a `Drawn`: (x [batch, tokens, width], ids [batch, tokens]) -> output."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.output = drawn.output
        self.layers = nn.ModuleList(
            KINDS[layer.kind](drawn.width, layer.size, layer.index) for layer in drawn.layers
        )
        self.readout = nn.Linear(drawn.width, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        stream = Stream(ids=ids, layers=self.layers)
        h = x
        for layer in self.layers:
            stream.earlier.append(h)
            h = layer(h, stream)
        y = self.readout(h).tanh()
        loss = y.square().mean()
        match self.output:
            case "tuple":
                return y, h, *stream.aside
            case "dict":
                return {"loss": loss, "h": h.detach(), "aside": stream.aside}
            case "nest":
                return [y, {"first": (h, None, 3), "aside": stream.aside}]
            case _:
                return loss


def models() -> st.SearchStrategy[Drawn]:
    """Random small models; equal draws build equal models and batches.

    Wide ones have something to move: places on a tier are multiples of 4 KiB.
    """
    layer = st.builds(
        Layer, st.sampled_from(sorted(KINDS)), size=st.integers(1, 64), index=st.integers(0, 9)
    )
    return st.builds(
        Drawn,
        layers=st.lists(layer, min_size=1, max_size=8).map(tuple),
        seed=st.integers(0, 999),
        width=st.integers(1, 33) | st.integers(64, 128),
        batch=st.integers(2, 4),
        tokens=st.integers(1, 5),
        output=st.sampled_from(OUTPUTS),
    )


# Named models


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """`build()` under its own random seed; the caller's random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


@dataclass(frozen=True, kw_only=True)
class Named:
    """A hand-written example: a function that builds the model, and one that makes a batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    seed: int = 0

    def build(self) -> nn.Module:
        return seeded(self.seed, self.make)

    def batches(self, count: int) -> list[Any]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return [self.batch(generator) for _ in range(count)]


def gpt(
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    seq: int = 32,
    vocab: int = 96,
    batch: int = 2,
    tied: bool = False,
    dropout: float = 0.0,
    prepare: Callable[[train_gpt.GPT], object] = lambda model: None,
) -> Named:
    """The GPT of examples/train_gpt.py, small. `prepare` may freeze parts of it."""
    config = train_gpt.Config(
        layers=layers, width=width, heads=heads, seq=seq, vocab=vocab, tied=tied, dropout=dropout
    )

    def make() -> nn.Module:
        model = train_gpt.build(config)
        prepare(model)
        return model

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        windows = torch.randint(0, vocab, (batch, seq + 1), generator=generator)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    return Named(make=make, batch=draw)


def mlp(*sizes: int, batch: int = 4, bias: bool = True) -> Named:
    """Linear layers of these sizes with GELU between them."""

    def make() -> nn.Module:
        pairs = itertools.pairwise(sizes)
        layers = [part for a, b in pairs for part in (nn.Linear(a, b, bias=bias), nn.GELU())]
        return nn.Sequential(*layers[:-1])

    return Named(make=make, batch=partial(_floats, (batch, sizes[0])))


def _floats(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor]:
    return (torch.randn(*shape, generator=generator),)


class Adapted(nn.Module):
    """A frozen layer, whose bias learns, beside a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.base.weight.requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Elsewhere(nn.Module):
    """Reads a parameter of a module whose own forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x) + self.inner.bias


class Thrice(nn.Module):
    """One layer used three times, and its weight under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.alias = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh()) + self.layer(2 * x) + x @ self.alias.t()


@dataclass
class Prediction:
    loss: Tensor
    hidden: Tensor
    extra: Tensor | None = None


class ByKeyword(nn.Module):
    """Keyword inputs with a default and a nest; a dataclass comes out, one output unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.unseen = nn.Linear(7, 2)

    def forward(self, *, x: Tensor, more: dict[str, Tensor], scale: float = 2.0) -> Prediction:
        hidden = torch.relu(self.first(x) * scale + more["shift"])
        return Prediction(self.second(hidden).square().mean(), self.unseen(hidden))


def _keyword_batch(generator: torch.Generator) -> dict[str, Any]:
    shift = torch.randn(7, generator=generator)
    return {"x": torch.randn(3, 5, generator=generator), "more": {"shift": shift}}


def _one(kind: str, output: str = "loss") -> Drawn:
    layers = (Layer("linear", 12), Layer(kind, 6), Layer("linear", 9))
    return Drawn(layers=layers, seed=7, width=12, output=output)


NAMED: dict[str, Example] = {
    **{f"kind_{kind}": _one(kind) for kind in sorted(KINDS)},
    **{f"output_{output}": _one("aside", output) for output in OUTPUTS},
    "gpt": gpt(),
    "gpt_tied": gpt(tied=True),
    "gpt_dropout": gpt(dropout=0.1),
    "gpt_frozen": gpt(prepare=lambda model: model.blocks[0].requires_grad_(False)),
    "mlp": mlp(64, 256, 256, 64),
    "mlp_odd": mlp(7, 13, 1, 31, 5),
    "mlp_one_large": mlp(16, 4096, 16),
    "adapted": Named(make=Adapted, batch=partial(_floats, (3, 8))),
    "elsewhere": Named(make=Elsewhere, batch=partial(_floats, (3, 6))),
    "thrice": Named(make=Thrice, batch=partial(_floats, (3, 6))),
    "by_keyword": Named(make=ByKeyword, batch=_keyword_batch),
}
