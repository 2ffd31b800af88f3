"""The models that plans are compared on: known sizes, built on meta, captured once.

    facts = costed(captured("gpt2-10b", batch=8), machine)      # of the catalogue

Plain PyTorch modules with float32 parameters; the large ones compute under autocast to bfloat16,
with activation checkpointing of every layer (torch.utils.checkpoint, which a capture honours:
the layer's operations stand in the backward again). Nothing is downloaded, no weight exists. A
capture takes seconds, so the facts are kept in the temporary folder under a digest of everything
that made them.
"""

import hashlib
import pickle
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elixir_fx
from elixir_fx.config import read_options
from elixir_fx.facts import Cost, Facts
from elixir_fx.guarded import GuardedSession
from elixir_fx.machine import Machine
from elixir_fx.passes.compute_cost import LAUNCH_S
from elixir_fx.testing import emulated


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes. `keys` are key and value heads, `experts` feed-forwards of which each
    token's output weighs two. `gated`: SwiGLU, RMSNorm and no positions table, as Llama's.
    `large`: autocast and checkpointing."""

    width: int
    layers: int
    heads: int
    vocabulary: int = 50257
    sequence: int = 1024
    inner: int = 0
    keys: int = 0
    experts: int = 1
    gated: bool = False
    large: bool = True


SHAPES = {
    "gpt-27m": Shape(width=512, layers=6, heads=8, vocabulary=8192, sequence=128, large=False),
    "gpt-92m": Shape(width=768, layers=12, heads=12, vocabulary=8192, sequence=512, large=False),
    "gpt2-4b": Shape(width=3072, layers=32, heads=24),
    "gpt2-10b": Shape(width=4096, layers=48, heads=32),
    "gpt2-15b": Shape(width=8192, layers=18, heads=64),
    "gpt2-20b": Shape(width=8192, layers=24, heads=64),
    "opt-30b": Shape(width=7168, layers=48, heads=56, vocabulary=50272, sequence=2048),
    "opt-175b": Shape(width=12288, layers=96, heads=96, vocabulary=50272, sequence=2048),
    "llama3-8b": Shape(
        width=4096, layers=32, heads=32, keys=8, inner=14336, vocabulary=128256, sequence=2048,
        gated=True,
    ),
    "llama3-70b": Shape(
        width=8192, layers=80, heads=64, keys=8, inner=28672, vocabulary=128256, sequence=2048,
        gated=True,
    ),
    "mixtral-8x7b": Shape(
        width=4096, layers=32, heads=32, keys=8, inner=14336, vocabulary=32000, sequence=4096,
        experts=8, gated=True,
    ),
}  # fmt: skip


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner = shape.inner or 4 * shape.width
        self.up = nn.Linear(shape.width, inner, bias=not shape.gated)
        self.gate = nn.Linear(shape.width, inner, bias=False) if shape.gated else None
        self.down = nn.Linear(inner, shape.width, bias=not shape.gated)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(x)))
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Every expert sees every token, and two of them count: one graph whatever the routing."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(shape) for _ in range(shape.experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = y + weights[..., number : number + 1] * expert(x)
        return y


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        width, size = shape.width, shape.width // shape.heads
        keys = shape.keys or shape.heads
        self.heads, self.keys, self.size = shape.heads, keys, size
        self.attention_norm = norm(width)
        self.qkv = nn.Linear(width, (shape.heads + 2 * keys) * size, bias=not shape.gated)
        self.out = nn.Linear(width, width, bias=not shape.gated)
        self.mlp_norm = norm(width)
        self.mlp = Experts(shape) if shape.experts > 1 else FeedForward(shape)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        counts = [self.heads, self.keys, self.keys]
        parts = self.qkv(x).split([count * self.size for count in counts], dim=-1)
        q, k, v = (
            part.view(batch, length, count, self.size).transpose(1, 2)
            for part, count in zip(parts, counts, strict=True)
        )
        if self.keys < self.heads:
            k, v = (part.repeat_interleave(self.heads // self.keys, dim=1) for part in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Tokens and the next tokens [batch, sequence] in, the loss out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = None if shape.gated else nn.Embedding(shape.sequence, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.shape.large):
            x = self.tokens(tokens)
            if self.positions is not None:
                x = x + self.positions.weight[: tokens.shape[1]]
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.shape.large else layer(x)
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# The machine that captures are costed for at first; `costed` replaces its rates.
DRAFT = emulated(flops_per_s=1e12, stream_bytes_per_s=1e12)


def captured(name: str, batch: int) -> Facts:
    """The facts of a model's step with AdamW, from the temporary folder or captured now."""
    shape = SHAPES[name]
    sources = sorted(Path(elixir_fx.__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(Path(__file__).read_bytes() + repr((shape, batch)).encode())
    for source in sources:
        if "planner" not in source.parts and "runtime" not in source.parts:
            digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / "elixir_fx-corpus"
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}-{batch}-{digest.hexdigest()[:16]}.pickle"
    if not file.exists():
        file.write_bytes(pickle.dumps(capture(shape, batch)))
    facts = pickle.loads(file.read_bytes())
    assert isinstance(facts, Facts)
    return facts


def capture(shape: Shape, batch: int) -> Facts:
    """The facts of one training step of a decoder with fused AdamW, with rates of `DRAFT`."""
    with torch.device("meta"):
        model = Decoder(shape)
    tokens = torch.zeros(batch, shape.sequence, dtype=torch.long)
    session = GuardedSession(model, "adamw_fused", read_options({"machine": DRAFT}))
    return session.facts_only((tokens, tokens), {})


def costed(facts: Facts, machine: Machine, dtype: str = "bfloat16") -> Facts:
    """`facts` captured for `DRAFT`, with the times of another machine: the same rooflines at its
    rates. `dtype` is what the products of matrices are computed in."""
    peak, stream = machine.flops(dtype), machine.stream_bytes_per_s
    draft_stream = DRAFT.stream_bytes_per_s

    def cost(entry: Cost) -> Cost:
        if not entry.seconds:
            return entry
        if entry.flops:
            seconds = LAUNCH_S + max(entry.flops / peak, entry.bytes / stream)
        elif entry.seconds == LAUNCH_S + entry.bytes / draft_stream:
            seconds = LAUNCH_S + entry.bytes / stream
        else:  # fused with its neighbours: the bytes that reach memory are in its seconds alone
            seconds = entry.seconds * draft_stream / stream
        return replace(entry, seconds=seconds)

    return replace(facts, costs=tuple(map(cost, facts.costs)))
