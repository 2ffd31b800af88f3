"""One rank of one side of ranks.py: trains a GPT of 27M parameters, prints its figures as JSON.

ranks.py starts a process of this for every rank, with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set. It is a script of its own, with its own model, because a side must hold nothing
that it does not use: what `common` imports (elixir_fx, sympy, torch's compiler) is 50 MiB that
would count against every peer. So each side imports what it needs, in its own function.
"""

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, VOCAB, SEQ = 6, 512, 8, 8192, 256
DTYPES = ("fp32", "bf16")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens and targets [batch, seq] in; the loss out, in fp32 whatever computes the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS if residual else 1))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(SEQ, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# Sides


@dataclass(frozen=True)
class Training:
    """A model on its ranks, or what a side puts in its place; its optimizer; and whether
    autocast makes the forward bf16."""

    model: Any
    optimizer: torch.optim.Optimizer
    autocast: bool

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def alone(model: GPT, args: argparse.Namespace) -> Training:
    """The same step without communication, as many processes at once."""
    return Training(model, adamw(model), args.dtype == "bf16")


def ddp(model: GPT, args: argparse.Namespace) -> Training:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return Training(wrapped, adamw(wrapped), args.dtype == "bf16")


def shard(model: GPT, **policy: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, **policy)


def fsdp2(model: GPT, args: argparse.Namespace) -> Training:
    shard(model)
    return Training(model, adamw(model), args.dtype == "bf16")


def fsdp2_compile(model: GPT, args: argparse.Namespace) -> Training:
    """Every block compiled, then sharded: the hooks that gather stay outside of the graphs."""
    for block in model.blocks:
        block.compile()
    return fsdp2(model, args)


def fsdp2_mixed(model: GPT, args: argparse.Namespace) -> Training:
    """bf16 by FSDP2's own policy instead of autocast: it gathers half of the bytes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mp_policy=policy)
    return Training(model, adamw(model), autocast=False)


def ours(model: GPT, args: argparse.Namespace) -> Training:
    import elixir_fx

    limits = {"memory": args.memory, "disk": args.disk}
    optimizer = adamw(model)
    compiled = elixir_fx.compile(model, optimizer=optimizer, kernels="eager", **limits)
    return Training(compiled, optimizer, args.dtype == "bf16")


class ZeroTraining(Training):
    """DeepSpeed's engine in the place of model and optimizer both."""

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self.model(tokens, targets)
        self.model.backward(loss)
        self.model.step()
        return float(loss.item())


def zero3(model: GPT, args: argparse.Namespace) -> Training:
    """DeepSpeed's, with torch's optimizer and autocast as the others have them."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 0.0,  # it clips at 1.0 unless told otherwise
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,  # shard norms too, as FSDP2 does
            # Buckets for a model of this size; the defaults are for one of billions.
            "reduce_bucket_size": 17_000_000,
            "stage3_prefetch_bucket_size": 5_000_000,
            "sub_group_size": 17_000_000,
        },
        "zero_allow_untested_optimizer": True,
        # Its own switch: inside of torch.autocast the engine turns autocast off.
        "torch_autocast": {"enabled": args.dtype == "bf16", "dtype": "bfloat16"},
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=config
    )
    return ZeroTraining(engine, optimizer, autocast=False)


SIDES: dict[str, Callable[[GPT, argparse.Namespace], Training]] = {
    "alone": alone,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2_compile": fsdp2_compile,
    "fsdp2_mixed": fsdp2_mixed,
    "zero3": zero3,
    "ours": ours,
}


# Measuring


def batch_of(step: int, batch: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens and targets at a step, the same on every side."""
    generator = torch.Generator().manual_seed(dist.get_rank() * 100_003 + step)
    windows = torch.randint(VOCAB, (batch, SEQ + 1), generator=generator)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def kernel_bytes(file: str, field: str) -> int:
    """A figure of this process, from a file of /proc/self that gives it in kB."""
    lines = (Path("/proc/self") / file).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure(training: Training, args: argparse.Namespace) -> dict[str, Any]:
    seconds: list[float] = []
    losses: list[float] = []
    start_peak_bytes = 0
    for step in range(args.warm + args.steps):
        tokens, targets = batch_of(step, args.batch)
        if step == args.warm:
            gc.collect()
            start_peak_bytes = kernel_bytes("status", "VmHWM")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        dist.barrier()  # not timed: ranks begin together, also those of `alone`
        begin_s = time.perf_counter()
        losses.append(training.step(tokens, targets))
        seconds.append(time.perf_counter() - begin_s)
    peak_bytes = kernel_bytes("status", "VmHWM")
    return {
        "step_s": seconds[args.warm :],
        "losses": losses,
        "peak_bytes": peak_bytes,
        "peak_ever_bytes": max(peak_bytes, start_peak_bytes),
        "resident_bytes": kernel_bytes("status", "VmRSS"),
        "proportional_bytes": kernel_bytes("smaps_rollup", "Pss"),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--memory", help="budget of `ours`, a rank")
    parser.add_argument("--disk", help="folder of the disk tier of `ours`")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    training = SIDES[args.side](GPT(), args)
    figures = measure(training, args)
    if args.side == "ours":
        figures["stats"] = dict(training.model.stats())
    print(json.dumps(figures))
    dist.barrier()
    # gloo's threads may abort the process while Python takes it down.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
