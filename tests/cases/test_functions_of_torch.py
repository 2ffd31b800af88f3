"""Functions that AOTAutograd takes apart, or that the compiler has to look into: each between
two layers, forward and backward equal to eager's bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from case_models import WHEN_SPARE, Way, in_turn, pair_of, randn
from torch import Tensor, nn
from torch.nn import functional

THREADS = 1


def image(h: Tensor) -> Tensor:
    return h.reshape(1, 4, 8, 8)


def positive(h: Tensor) -> Tensor:
    """A matrix that can be inverted."""
    return h @ h.mT + torch.eye(h.shape[0])


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": lambda h: functional.interpolate(image(h), scale_factor=2, mode="bilinear"),
    "bicubic": lambda h: functional.interpolate(image(h), size=(13, 13), mode="bicubic"),
    "nearest": lambda h: functional.interpolate(image(h), scale_factor=2.5),
    "smaller": lambda h: functional.interpolate(image(h), 5, mode="bilinear", antialias=True),
    "padded": lambda h: functional.pad(image(h), (1, 1, 1, 1), mode="reflect"),
    "grid": lambda h: functional.grid_sample(
        image(h), torch.linspace(-1, 1, 32).view(1, 4, 4, 2), align_corners=False
    ),
    "cumulative": lambda h: h.cumprod(-1) + h.logcumsumexp(-1),
    "margins": lambda h: functional.multi_margin_loss(h, torch.arange(8)),
    "likelihood": lambda h: functional.nll_loss(h.log_softmax(-1), torch.arange(8)),
    "smoothed": lambda h: functional.cross_entropy(h, torch.arange(8), label_smoothing=0.1),
    "huber": lambda h: functional.huber_loss(h, h.flip(0)),
    "attention to itself": lambda h: functional.scaled_dot_product_attention(
        *3 * (h.view(1, 2, 4, 32),), is_causal=True
    ),
    "attention, masked": lambda h: functional.scaled_dot_product_attention(
        h.view(1, 2, 4, 32),
        h.view(1, 2, 4, 32).sin(),
        h.view(1, 2, 4, 32).cos(),
        attn_mask=torch.ones(4, 4, dtype=torch.bool).tril(),
    ),
    "attention, dropped": lambda h: functional.scaled_dot_product_attention(
        *(part.view(1, 2, 4, 32) for part in (h, h.sin(), h.cos())), dropout_p=0.3
    ),
    "inverse": lambda h: torch.linalg.inv(positive(h)),
    "solved": lambda h: torch.linalg.solve(positive(h), h),
    "singular values": torch.linalg.svdvals,
    "determinant": lambda h: torch.linalg.slogdet(positive(h))[1],
    "complex": lambda h: (torch.complex(h, h.sin()) * 1j).abs(),
    "spectrum": lambda h: torch.fft.rfft(h).abs(),
    "scattered": lambda h: h.scatter_add(0, torch.zeros(4, 32, dtype=torch.long), h[:4]),
    "written by index": lambda h: h.clone().index_put(
        (torch.tensor([0, 0]),), h[2:4], accumulate=True
    ),
    "sorted": lambda h: h.sort().values + h.topk(32).values,
    "distances": lambda h: torch.cdist(h, h.flip(0)),
    "einsum": lambda h: torch.einsum("ij,kj->ik", h, h),
    "convolution": lambda h: functional.conv1d(h.view(2, 4, 32), h[:3].reshape(3, 4, 8)),
    "pooled": lambda h: (
        functional.adaptive_avg_pool2d(image(h), 3) + functional.adaptive_max_pool2d(image(h), 3)
    ),
    "quantile": lambda h: h.quantile(0.3) + h.median(),
}


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize(("way", "name"), in_turn(FUNCTIONS, "spare"))
def test_functions(way: Way, name: str, tmp_path: Path) -> None:
    pair = pair_of(way, lambda: Between(FUNCTIONS[name]), [(randn(8, 32),)], tmp_path)
    pair.train(1)
    pair.backward()
    pair.check()


# Where autograd takes another formula for a tensor that is traced, which rounds otherwise.
ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda h: h.prod(-1),
    "cholesky": lambda h: torch.linalg.cholesky(positive(h)),
}


@pytest.mark.parametrize("name", ROUNDED)
@WHEN_SPARE
def test_functions_whose_derivative_is_another_when_traced(
    way: Way, name: str, tmp_path: Path
) -> None:
    """The result is eager's; gradients are to the last bits."""
    pair = pair_of(way, lambda: Between(ROUNDED[name]), [(randn(8, 32),)], tmp_path)
    pair.backward()
    plain, ours = ([p.grad for p in side.model.parameters()] for side in pair.sides)
    for one, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)
