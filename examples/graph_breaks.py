"""Train a model that is not one graph: its forward prints, and branches on a value.

python examples/graph_breaks.py
"""

import tempfile

import torch
from torch import Tensor, nn

from elixir_fx.backend import state


class Talkative(nn.Module):
    """Twelve layers; every fourth one is followed by a look at the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(12))

    def middle(self, x: Tensor, first: int) -> Tensor:
        for layer in self.layers[first : first + 4]:
            x = torch.relu(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        for first in (0, 4, 8):
            x = self.middle(x, first)
            if x.abs().max().item() > 1e3:  # a value decides: no single graph can
                x = x / 1e3
        return x.square().mean()


torch.manual_seed(0)
model = Talkative()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with tempfile.TemporaryDirectory() as disk:
    options = {"model": model, "optimizer": optimizer, "memory": "24MiB", "disk": disk}
    compiled = torch.compile(model, backend="elixir_fx", options=options)
    for number in range(4):
        loss = compiled(torch.randn(8, 512))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number}: loss {loss.item():.4f}")
    print(*state(model).plan.notes, sep="; ")
    print(f"{len(state(model).regions)} regions; in the last step:")
    for name, value in state(model).stats().items():
        if name.endswith("_bytes") and value:
            print(f"  {name} {value / 2**20:.1f} MiB")
