"""Train a GPT on English text, with less memory than its training state needs.

The text is the Python documentation that ships inside Python itself, read byte by byte, so
that nothing is downloaded. The model and the loop are plain PyTorch; one line is elixir_fx.

    python examples/train_gpt.py                          # the defaults: state > memory
    python examples/train_gpt.py --plain                  # the same without elixir_fx
    torchrun --nproc_per_node=2 examples/train_gpt.py     # two ranks, each with half of the state
    python examples/train_gpt.py --layers 36 --width 1280 --heads 20 --seq 512 --batch 1 \
        --tied --meta --memory 2GiB --disk /nvme --steps 3
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional

import elixir_fx
from elixir_fx.report.text import plan_text

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int = 6
    width: int = 512
    heads: int = 8
    seq: int = 128
    vocab: int = 256
    tied: bool = False
    dropout: float = 0.0


class Block(nn.Module):
    """Attention, then a two-layer perceptron; each behind a LayerNorm and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def attend(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.attention_norm(x)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """Tokens [batch, seq] in; logits [batch, seq, vocab] out, or the loss if targets are given."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def init_weights(module: nn.Module) -> None:
    """GPT-2's initialisation of one module's own parameters: normal(0, 0.02), biases 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def build(config: Config, *, meta: bool = False) -> GPT:
    """The model with its first weights, or without any (`meta`) for elixir_fx to fill."""
    with torch.device("meta" if meta else "cpu"):
        model = GPT(config)
    return model if meta else model.apply(init_weights)


def text_batches(batch: int, seq: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text, without end: (bytes, the next bytes), each [batch, seq]."""
    text = torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - seq - 1, (batch,), generator=generator)
        windows = torch.stack([text[start : start + seq + 1] for start in starts.tolist()]).long()
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def peak_resident_bytes() -> int:
    """The most memory this process ever held (VmHWM; Linux)."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s)
    return int(line.split()[1]) * 1024


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT under a memory budget.")
    for name, default in [("layers", 6), ("width", 512), ("heads", 8), ("seq", 128)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab", type=int, default=256, help="rows of the embedding, >= 256")
    parser.add_argument("--tied", action="store_true", help="head and embedding share a weight")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--lr", type=float, default=None, help="default: 5e-4 (adamw), 0.1 (sgd)")
    parser.add_argument("--memory", default="180MiB", help="budget of the training step")
    parser.add_argument("--disk", default=".", help="folder on a fast disk; nothing stays there")
    parser.add_argument("--meta", action="store_true", help="never hold the whole model in memory")
    parser.add_argument("--plain", action="store_true", help="plain PyTorch, to compare with")
    parser.add_argument(
        "--kernels",
        choices=["inductor", "eager"],
        default="inductor",
        help="compiled; or PyTorch's own: equal to --plain bit for bit",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = Config(
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        seq=args.seq,
        vocab=args.vocab,
        tied=args.tied,
    )
    torch.manual_seed(args.seed)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group()
    model: nn.Module = build(config, meta=args.meta)
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr or 5e-4)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr or 0.1, momentum=0.9)
    tell = print if rank == 0 else lambda _: None  # one rank tells
    batches = text_batches(args.batch, args.seq, args.seed + rank)  # other text on every rank
    example = next(batches)

    copies = 4 if args.optimizer == "adamw" else 3  # weight, gradient, optimizer states
    state_bytes = copies * sum(p.nbytes for p in model.parameters())
    tell(f"training state: {state_bytes / MIB:.0f} MiB; memory budget: {args.memory} a rank")
    if not args.plain:
        model = elixir_fx.compile(
            model,
            optimizer=optimizer,
            example_inputs=example,
            memory=args.memory,
            disk=args.disk,
            kernels=args.kernels,
            init=init_weights if args.meta else None,
        )
        tell(plan_text(model.plan))

    first = last = math.nan
    for step in range(args.steps):
        start = time.perf_counter()
        total = 0.0
        for _ in range(args.micro_batches):
            tokens, targets = next(batches)
            loss = model(tokens, targets) / args.micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        rate = ranks * args.micro_batches * args.batch * args.seq / seconds
        tell(f"step {step:4d}  loss {total:.4f}  {rate:8.0f} tokens/s  {seconds:.2f} s")
        first, last = (total if step == 0 else first), total

    tell(f"loss: {first:.4f} -> {last:.4f}")
    if not args.plain:
        measured, forecast = model.stats()["peak_device_bytes"], model.plan.forecast
        tell(
            f"peak of the step: {measured / MIB:.1f} MiB measured, "
            f"{forecast.peak_device_bytes / MIB:.1f} MiB forecast, {args.memory} allowed"
        )
    tell(
        f"peak of the whole process (Python and PyTorch too): {peak_resident_bytes() / MIB:.0f} MiB"
    )


if __name__ == "__main__":
    main()
