"""Inference under a budget: generate() of the transformers package through compiled steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import Pair, Side, memory_needed
from zoo import ZOO

NEW_TOKENS = 10  # prompts of 5 tokens: within the zoo's longest sequence


def _generate(side: Side, inputs: dict[str, Any]) -> torch.Tensor:
    side.model.eval()
    tokens = side.net.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    side.model.train()
    return tokens


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generate(name: str, tmp_path: Path) -> None:
    """Before and after a training step: a few graphs serve every length, and tokens are eager's."""
    pytest.importorskip("transformers")
    model = ZOO[name]
    batches = model.batches(2)
    memory = int(1.2 * memory_needed(model.build(), batches[0]))
    pair = Pair(model.build, batches, {"memory": memory, "disk": str(tmp_path)})
    prompt = batches[0]["input_ids"][:, :5]
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    pair.train(1)
    for _ in range(2):
        pair.do(lambda side: _generate(side, inputs))
        pair.train(1)
    pair.check()
    assert pair.ours.net.stats()["disk_read_bytes"] > 0
    assert pair.ours.net._session._capture.graphs <= 5


def test_the_captured_step_runs_in_generate(tmp_path: Path) -> None:
    """Calls of the model by itself go through the plan, not through its own forward."""
    pytest.importorskip("transformers")
    model = ZOO["llama"]
    (batch,) = model.batches(1)
    memory = int(1.2 * memory_needed(model.build(), batch))
    pair = Pair(model.build, [batch], {"memory": memory, "disk": str(tmp_path)})
    pair.train(1)
    engine = pair.ours.net._session.engine
    before = engine.cache.hits + engine.cache.misses
    pair.do(lambda side: _generate(side, {"input_ids": batch["input_ids"][:, :5]}))
    assert engine.cache.hits + engine.cache.misses > before
