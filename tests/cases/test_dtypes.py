"""Parameters of every dtype and size: mixed, whole numbers, complex, empty, without dimensions,
larger than a chunk; and how low precision is updated."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from case_models import EVERY_WAY, WHEN_TIGHT, Way, pair_of, randn, token_ids
from harness import Batch
from pairs import Pair, Side, tight
from torch import Tensor, nn
from torch.nn import functional

THREADS = 1
X = randn(3, 64)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(self.norm(x).bfloat16()).double() * self.gain).float()


class Quantised(nn.Module):
    """Bytes, dequantised in forward, beside an adapter."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 255, (64, 64), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.a, self.b = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, (self.codes.float() - 128) / 128) + self.b(self.a(x))


class Whole(nn.Module):
    """Frozen parameters of whole numbers and truth values, used as indices and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.randperm(64), requires_grad=False)
        self.keep = nn.Parameter(torch.rand(64) < 0.5, requires_grad=False)
        self.small = nn.Parameter(torch.arange(64, dtype=torch.int8), requires_grad=False)
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, self.order] * self.keep) + self.small


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(33, dtype=torch.complex64))
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.linear(x)) * self.filter, n=64)


class Sizes(nn.Module):
    """Nothing, one number, one element, and dimensions of one."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 64))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1))
        self.thin = nn.Parameter(torch.randn(1, 64, 1))
        self.linear = nn.Linear(64, 64)
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.number + self.one * self.frozen
        return torch.cat([y + self.thin[0, :, 0], self.nothing * 2])


class Halves(nn.Module):
    """All in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.half()).float()


class Eight(nn.Module):
    """Frozen weights in 8-bit floating point with scales that learn."""

    def __init__(self) -> None:
        super().__init__()
        weight = (torch.randn(64, 64) / 8).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.float() * self.scale)


KINDS = [Mixed, Quantised, Whole, Complex, Sizes, Halves, Eight]


@pytest.mark.parametrize("kind", KINDS)
@EVERY_WAY
def test_dtypes_stay(way: Way, kind: type[nn.Module], tmp_path: Path) -> None:
    pair = pair_of(way, kind, [(X,)], tmp_path, adam)
    dtypes = [p.dtype for p in pair.ours.model.parameters()]
    pair.train(2)
    pair.backward()
    bits(pair)
    for p, dtype in zip(pair.ours.model.parameters(), dtypes, strict=True):
        assert p.dtype == dtype and (p.grad is None or p.grad.dtype == dtype)
    if way.entry == "compile":
        for chunk in pair.ours.net.plan.layout.chunks:
            for piece in chunk.slices:
                assert str(pair.ours.net.get_parameter(piece.path).dtype) == f"torch.{chunk.dtype}"


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def real(value: Tensor) -> Tensor:
    """A tensor that can be compared: complex numbers as pairs, 8-bit floats as bytes."""
    if value.is_complex():
        return torch.view_as_real(value)
    return value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value


def bits(pair: Pair) -> None:
    pair.do(lambda side: [real(p.detach().clone()) for p in side.model.parameters()])
    pair.do(
        lambda side: [
            None if p.grad is None else real(p.grad.clone()) for p in side.model.parameters()
        ]
    )


@EVERY_WAY
def test_bfloat16_without_master_weights_stands_still(way: Way, tmp_path: Path) -> None:
    """The choice is explicit: parameters in bfloat16 are updated in bfloat16."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self) -> Tensor:
            return self.weight.sum()

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4)

    home = "disk" if way.budget == "tight" else "device"
    options = {"memory": "1GiB", "disk": tmp_path, "keep": {"weight": home}}
    pair = pair_of(way, One, [()], tmp_path, sgd, options=options)
    pair.train(20)
    pair.check()
    assert torch.equal(pair.ours.model.weight.detach(), torch.ones(4, dtype=torch.bfloat16))


class Cast(nn.Module):
    """An inner region without autocast, and weights cast by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        with torch.autocast("cpu", enabled=False):
            h = self.layers[1](h.float())
        weight = self.layers[2].weight.to(torch.bfloat16)
        return functional.linear(h.bfloat16(), weight).float()


@EVERY_WAY
def test_autocast(way: Way, tmp_path: Path) -> None:
    def loss(side: Side, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return 16384 * side.net(*batch).square().mean()

    pair = pair_of(way, Cast, [(X,)], tmp_path, room=0.2)
    pair.train(3, loss)
    pair.train(1)
    pair.train(1, loss)
    pair.check()


@WHEN_TIGHT
def test_no_weight_is_saved_for_the_backward(way: Way, tmp_path: Path) -> None:
    """Weights that are cast in forward are cast again in the backward."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = functional.linear(x, weight.to(torch.bfloat16)).tanh()
            return x.float()

    pair = pair_of(way, Casts, [(X.bfloat16(),)], tmp_path)
    pair.train(2)
    pair.check()
    if way.entry != "compile":
        return
    saved = list(pair.ours.net.graph.output_node().args[0])[1:]
    sizes = [node.meta["val"].numel() for node in saved if node.op != "placeholder"]
    assert sizes and max(sizes) < 64 * 64


# -- sizes ---------------------------------------------------------------------------------------


@WHEN_TIGHT
def test_a_parameter_larger_than_a_chunk(way: Way, tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.table = nn.Embedding(5000, 64)

        def forward(self, ids: Tensor) -> Tensor:
            h = self.table(ids)
            for layer in self.small:
                h = h + layer(h).tanh()
            return h

    batch = (token_ids(2, 8, below=5000),)
    pair = pair_of(way, Large, [batch], tmp_path, options=tight(Large, batch, tmp_path))
    pair.train(2)
    pair.check()
    if way.entry != "compile":
        return
    of_table = next(
        chunk
        for chunk in pair.ours.net.plan.layout.chunks
        if any(piece.path == "table.weight" for piece in chunk.slices)
    )
    assert len(of_table.slices) == 1


@WHEN_TIGHT
def test_many_tiny_parameters_and_a_large_one(way: Way, tmp_path: Path) -> None:
    """Padding and the room of chunks stay small beside the state itself."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Linear(512, 512, bias=False)
            self.tiny = nn.ParameterList(nn.Parameter(torch.ones(7)) for _ in range(100))

        def forward(self, x: Tensor) -> Tensor:
            return self.large(x) + sum(p.sum() for p in self.tiny)

    batch = (randn(2, 512),)
    pair = pair_of(way, Tiny, [batch], tmp_path, options=tight(Tiny, batch, tmp_path))
    pair.train(2)
    pair.check()
    if way.entry != "compile":
        return
    layout = pair.ours.net.plan.layout
    state = 4 * sum(p.nbytes for p in pair.ours.net.parameters())
    largest = max(chunk.nbytes for chunk in layout.chunks)
    assert layout.disk_bytes <= 1.1 * state + largest


@pytest.mark.parametrize("shape", [(7, 5), (11, 3), (1, 1)])
@WHEN_TIGHT
def test_odd_sizes(way: Way, shape: tuple[int, int], tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(11, shape[0]), nn.Linear(*shape), nn.Linear(shape[1], 1))

    batches: list[Batch] = [(torch.tensor([[0, 3, 10]]),)]
    pair = pair_of(way, build, batches, tmp_path)
    pair.train(2)
    pair.backward()
    pair.do(lambda side: nn.utils.clip_grad_norm_(side.net.parameters(), 0.01))
    pair.check()


LOW: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: functional.dropout(h, 0.3),
    "norms": lambda h: functional.rms_norm(functional.layer_norm(h, (64,)), (64,)),
    "activations": lambda h: functional.silu(functional.gelu(h)).softmax(-1),
    "attention": lambda h: functional.scaled_dot_product_attention(
        *3 * (h.view(1, 4, 3, 16),), is_causal=True
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOW)
@WHEN_TIGHT
def test_low_precision(way: Way, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What AOTAutograd decomposes otherwise than eager rounds otherwise."""

    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            h = LOW[name](self.first(x))
            return self.last(h.reshape(x.shape))

    pair = pair_of(way, lambda: Low().to(dtype), [(X.to(dtype),)], tmp_path)
    pair.train(3)
    pair.check()
