"""What both sides of the training benchmark compute: a model in the shapes of Qwen3, sequences, and how many tokens a
micro-batch may have. Everything is drawn from fixed seeds, so that each side makes the same by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kind of step."""

    sizes: dict[str, int]
    """Of the model's config."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, prompt included."""
    prompt: int
    budget: int
    """Most tokens of a micro-batch: of ours packed, of the peer's padded."""
    steps: int
    """Timed ones of each side, in turn; one more warms up."""
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def tokens(self) -> list[np.ndarray]:
        rng = np.random.default_rng(1)
        return [rng.integers(0, self.sizes["vocab_size"], length) for length in self.lengths]

    def advantages(self) -> np.ndarray:
        return np.random.default_rng(2).normal(size=len(self.lengths)).astype(np.float32)

    def write_model(self, folder: Path) -> None:
        """Random weights, made on the device: a large model takes minutes on a CPU."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        config = Qwen3Config(**self.sizes, tie_word_embeddings=True, max_position_embeddings=8192)
        with torch.device(self.device):
            model = Qwen3ForCausalLM(config)
        model.save_pretrained(folder)


def long_tail(count: int, prompt: int, middle: float, longest: int) -> tuple[int, ...]:
    """Lengths as answers have them: most are short, few are long."""
    drawn = np.random.default_rng(0).lognormal(middle, 0.55, count)
    return tuple(int(prompt + np.clip(length, 16, longest - prompt)) for length in drawn)


def _sizes(vocabulary: int, width: int, inner: int, layers: int, heads: int = 4, head_dim: int = 0) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim or width // heads,
    }


LARGE_VOCABULARY = 151936
ON_CPU = {
    "mixed": Work(
        sizes=_sizes(8192, 256, 768, 4),
        lengths=long_tail(64, 24, 4.4, 300),
        prompt=24,
        budget=2048,
        steps=5,
    ),
    "long": Work(sizes=_sizes(LARGE_VOCABULARY, 128, 384, 2), lengths=(4096,), prompt=24, budget=4096, steps=1),
}
ON_GPU = {
    "mixed": Work(
        sizes=_sizes(LARGE_VOCABULARY, 1024, 3072, 28, 16, 128),
        lengths=long_tail(64, 128, 6.6, 4096),
        prompt=128,
        budget=8192,
        steps=4,
        device="cuda",
    ),
    "long": Work(
        sizes=_sizes(LARGE_VOCABULARY, 1024, 3072, 28, 16, 128),
        lengths=(4096,) * 8,
        prompt=128,
        budget=4096,
        steps=4,
        device="cuda",
    ),
}
"""Qwen3-0.6B."""
TINY = {
    "mixed": Work(sizes=_sizes(998, 64, 96, 2), lengths=long_tail(8, 24, 4.4, 300), prompt=24, budget=600, steps=2),
    "long": Work(sizes=_sizes(998, 64, 96, 2), lengths=(256,) * 2, prompt=24, budget=256, steps=1),
}
"""To see that the programs for GPUs run."""
WORKS = {"cpu": ON_CPU, "gpu": ON_GPU, "tiny": TINY}
