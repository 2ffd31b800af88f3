"""A small model trained in half of the memory that it needs: losses, then the graph."""

import tempfile

import torch
from torch import nn

import elixir_fx

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state_bytes = 4 * sum(p.nbytes for p in model.parameters())  # weight, gradient, two moments
x, y = torch.randn(64, 512), torch.randn(64, 512)

with tempfile.TemporaryDirectory(dir=".") as folder:
    model = elixir_fx.compile(
        model,
        optimizer=optimizer,
        example_inputs=(x,),
        memory="12MiB",
        disk=folder,
    )
    print(f"training state: {state_bytes / 2**20:.1f} MiB, memory: 12 MiB")
    for step in range(5):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.6f}")

model.print_readable()
