"""Real models, small: random weights, two layers, wide enough for a budget to bite.

    entry = ZOO["llama"]
    model, batches = entry.build(), entry.batches(2)

Those of transformers compute their own loss from labels. transformers and peft are imported by
the builders, so that a test which wants neither does not wait for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from graphs import seeded
from harness import Batch
from torch import Tensor, nn
from torch.nn import functional

Draw = Callable[[torch.Generator], Batch]

WIDTH, INNER, HEADS, LAYERS = 256, 512, 4, 2
VOCABULARY, SEQUENCE, BATCH = 512, 16, 2


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model in train mode, always with the same first weights, and batches for it.

    `draw` makes one batch with a generator; `packages` are what `make` imports.
    """

    make: Callable[[], nn.Module]
    draw: Draw
    packages: tuple[str, ...] = ("transformers",)

    def build(self) -> nn.Module:
        return seeded(0, self.make).train()

    def batches(self, count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(1)
        return [self.draw(generator) for _ in range(count)]


# Language models that predict the next token


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=SEQUENCE,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            word_embed_proj_dim=WIDTH,
            ffn_dim=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=SEQUENCE,
            dropout=0.0,
        )
    )


# What the configurations of Llama and its descendants call the same sizes.
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": SEQUENCE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DECODER))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**DECODER))


def gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**DECODER))


def mixtral(balanced: bool = False) -> nn.Module:
    """Four experts, two per token. `balanced` adds the loss that spreads tokens over them.

    The experts are small: a layer's are one parameter, and the largest one sets the smallest
    budget.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**DECODER, "intermediate_size": INNER // 4}
    return MixtralForCausalLM(
        MixtralConfig(
            **sizes, num_local_experts=4, num_experts_per_tok=2, output_router_logits=balanced
        )
    )


def mamba() -> nn.Module:
    """Without the associative scan: transformers takes it under torch.compile, never in eager,
    and it sums in another order."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            state_size=8,
            use_associative_scan=False,
        )
    )


def lora() -> nn.Module:
    """A frozen Llama whose attention learns through adapters."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    return get_peft_model(llama(), adapters)


def tokens(generator: torch.Generator, low: int = 3) -> Tensor:
    return torch.randint(low, VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def text(generator: torch.Generator) -> Batch:
    """Token ids that are their own labels."""
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids.clone()}


def padded_text(generator: torch.Generator) -> Batch:
    """As `text`; the last sequence is shorter, masked, and its end not predicted."""
    ids = tokens(generator)
    mask = torch.ones_like(ids)
    mask[-1, SEQUENCE // 2 :] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


# Encoders, and encoders with decoders


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=SEQUENCE,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=WIDTH // HEADS,
            d_ff=INNER,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=32,
            patch_size=8,
            num_labels=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=16,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=INNER,
            decoder_ffn_dim=INNER,
            max_source_positions=SEQUENCE,
            max_target_positions=SEQUENCE,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


def pictures(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(BATCH, 3, 32, 32, generator=generator),
        "labels": torch.randint(0, 10, (BATCH,), generator=generator),
    }


def sounds(generator: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(BATCH, 16, 2 * SEQUENCE, generator=generator),
        "labels": tokens(generator),
    }


class Translator(nn.Module):
    """torch.nn.Transformer between two embeddings and a head, in and out, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, WIDTH)
        self.target = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(
            WIDTH, HEADS, LAYERS, LAYERS, INNER, dropout=0.1, batch_first=True
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.body(
            self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True
        )
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def translations(generator: torch.Generator) -> Batch:
    target = tokens(generator)
    return (tokens(generator), target[:, :-1].contiguous(), target[:, 1:].contiguous())


# Convolutions


def _convolutions(inner: int, outer: int, norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1, bias=False),
        norm,
        nn.ReLU(inplace=True),
        nn.Conv2d(outer, outer, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Down twice, up twice, with what was seen on the way down beside it; a class per pixel."""

    def __init__(self, width: int = 64, classes: int = 5) -> None:
        super().__init__()
        sizes = (width, 2 * width, 4 * width)
        self.down = nn.ModuleList(
            _convolutions(inner, outer, nn.BatchNorm2d(outer))
            for inner, outer in zip((3, *sizes), sizes, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in reversed(sizes[:-1])
        )
        self.up = nn.ModuleList(
            _convolutions(2 * size, size, nn.GroupNorm(8, size)) for size in reversed(sizes[:-1])
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor, labels: Tensor) -> Tensor:
        *before, last = self.down
        skipped = []
        hidden = image
        for layer in before:
            hidden = layer(hidden)
            skipped.append(hidden)
            hidden = self.pool(hidden)
        hidden = last(hidden)
        for widen, layer, skip in zip(self.widen, self.up, reversed(skipped), strict=True):
            hidden = layer(torch.cat([skip, widen(hidden)], dim=1))
        return functional.cross_entropy(self.head(hidden), labels)


def images(generator: torch.Generator) -> Batch:
    return {
        "image": torch.randn(BATCH, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (BATCH, 16, 16), generator=generator),
    }


ZOO: dict[str, Entry] = {
    "bert": Entry(make=bert, draw=padded_text),
    "gemma": Entry(make=gemma, draw=text),
    "gpt2": Entry(make=gpt2, draw=text),
    "llama": Entry(make=llama, draw=padded_text),
    "lora": Entry(make=lora, draw=text, packages=("transformers", "peft")),
    "mamba": Entry(make=mamba, draw=text),
    "mixtral": Entry(make=mixtral, draw=text),
    "mixtral_balanced": Entry(make=partial(mixtral, balanced=True), draw=text),
    "opt": Entry(make=opt, draw=text),
    "qwen3": Entry(make=qwen3, draw=text),
    "t5": Entry(make=t5, draw=text),
    "translator": Entry(make=Translator, draw=translations, packages=()),
    "unet": Entry(make=UNet, draw=images, packages=()),
    "vit": Entry(make=vit, draw=pictures),
    "whisper": Entry(make=whisper, draw=sounds),
}
