"""What kernels.py and kernels_start.py train: GPTs, and small models of transformers.

Random weights, real text. All can be sent to another process, which makes the model there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import common
import torch
from backend import GPT_27M
from torch import nn

Batch = tuple[Any, ...] | dict[str, Any]

WIDTH, HEADS, LAYERS, SEQUENCE, VOCABULARY = 512, 8, 4, 256, 4096
PIXELS, PICTURES = 224, 2  # of 16 x 16 patches: 196 and one for the class

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "max_position_embeddings": SEQUENCE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every side trains; each makes it anew in its own process."""

    build: Callable[[], nn.Module]
    batches: Callable[[], Iterator[Batch]]
    autocast: bool = False


def gpt(config: common.Config, batch: int, autocast: bool = False) -> Work:
    return Work(
        build=partial(common.build, config),
        batches=partial(common.text_batches, batch, config.seq, 0),
        autocast=autocast,
    )


def gpts(layers: int | None) -> dict[str, Work]:
    """By size and precision. `layers` in the place of each one's own."""
    works = {}
    for size, config, batch in (("27M", GPT_27M, 2), ("92M", common.GPT_92M, 1)):
        config = replace(config, layers=layers or config.layers)
        for dtype in ("fp32", "bf16"):
            works[f"{size} {dtype}"] = gpt(config, batch, autocast=dtype == "bf16")
    return works


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(**DECODER, num_hidden_layers=layers, intermediate_size=1408)
    ).train()


def mixtral(layers: int) -> nn.Module:
    """Four experts, two for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": WIDTH}
    return MixtralForCausalLM(MixtralConfig(**DECODER, **experts, num_hidden_layers=layers)).train()


def vit(layers: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            image_size=PIXELS,
            patch_size=16,
            num_labels=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).train()


def labelled_text() -> Iterator[Batch]:
    for tokens, _ in common.text_batches(1, SEQUENCE, 0):
        yield {"input_ids": tokens, "labels": tokens.clone()}


def pictures() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {
            "pixel_values": torch.randn(PICTURES, 3, PIXELS, PIXELS, generator=generator),
            "labels": torch.randint(0, 10, (PICTURES,), generator=generator),
        }


def models(layers: int | None) -> dict[str, Work]:
    depth = layers or LAYERS
    return {
        "Llama": Work(build=partial(llama, depth), batches=labelled_text),
        "Mixtral": Work(build=partial(mixtral, depth), batches=labelled_text),
        "ViT": Work(build=partial(vit, depth), batches=pictures),
    }
