"""A tiny model, batches for it and objectives by name: what the trainer's tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from roles.objective import LossInputs, LossOutput, ObjectiveSpec
from roles.types import TrainSample

VOCAB = 37
"""Odd, so that rows of the embedding do not divide over two ranks."""


ADAM: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
"""None of them a default of anybody: what is not handed on is seen."""


def save_tiny_model(path: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    config = Qwen3Config(**{**sizes, **changes})
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(path)
    return str(path)


def random_samples(count: int, seed: int = 0) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        prompt, completion = int(rng.integers(1, 9)), int(rng.integers(1, 12))
        samples.append(
            TrainSample(
                token_ids=rng.integers(0, VOCAB, prompt + completion).astype(np.int32),
                prompt_length=prompt,
                rollout_logprobs=(rng.normal(size=completion) * 0.3 - 3.5).astype(np.float32),
                advantages=np.full(completion, rng.normal(), np.float32),
            )
        )
    return samples


def clipped(inputs: LossInputs, *, entropy_weight: float = 0.0) -> LossOutput:
    """PPO's clip over the proximal policy: uses every input of the border."""
    zero = torch.zeros(())
    ratio = torch.where(inputs.mask, inputs.logprobs - inputs.old_logprobs, zero).exp()
    terms = -torch.minimum(ratio * inputs.advantages, ratio.clamp(0.8, 1.2) * inputs.advantages)
    terms = terms - entropy_weight * inputs.entropy
    total = torch.where(inputs.mask, terms, zero).sum()
    moved = torch.where(inputs.mask, inputs.logprobs - inputs.old_logprobs, zero).detach()
    return LossOutput(
        loss=total / inputs.num_tokens,
        sums={
            "tokens": inputs.mask.sum(),
            "loss": total.detach(),
            "moved": moved.abs().sum(),
            "entropy": torch.where(inputs.mask, inputs.entropy, zero).sum().detach(),
        },
        maxima={"logprob": torch.where(inputs.mask, inputs.logprobs, -torch.inf).max().detach()},
    )


def value_error(inputs: LossInputs) -> LossOutput:
    """A critic's squared error; the advantages stand for the returns."""
    assert inputs.values is not None
    total = torch.where(inputs.mask, (inputs.values - inputs.advantages) ** 2, 0.0).sum()
    return LossOutput(loss=total / inputs.num_tokens, sums={"error": total.detach()})


def undefined(inputs: LossInputs) -> LossOutput:
    """NaN in one token of the batch: the one with the largest advantage."""
    worst = torch.where(inputs.mask, inputs.advantages, -torch.inf)
    hit = worst == worst.max()
    return LossOutput(loss=torch.where(hit, inputs.logprobs * torch.nan, inputs.logprobs).sum())


def undefined_later(inputs: LossInputs) -> LossOutput:
    """NaN once an update of the step has moved the weights."""
    output = clipped(inputs)
    return LossOutput(loss=torch.where(output.sums["moved"] > 0, torch.nan, output.loss))


def infinite_gradient(inputs: LossInputs) -> LossOutput:
    """A finite loss with a gradient that is not: the square root at zero."""
    scores = inputs.logprobs if inputs.values is None else inputs.values
    return LossOutput(loss=(scores * 0).abs().sqrt().sum())


def fails(inputs: LossInputs, *, width: int) -> LossOutput:
    """An error of the objective in micro-batches of this width."""
    if inputs.mask.shape[1] == width:
        raise ZeroDivisionError
    return clipped(inputs)


def draws(inputs: LossInputs) -> LossOutput:
    """Half of the tokens, by chance."""
    kept = inputs.mask & (torch.rand(inputs.mask.shape) < 0.5)
    return LossOutput(loss=torch.where(kept, inputs.logprobs, 0.0).sum() / inputs.num_tokens)


def constant(inputs: LossInputs) -> LossOutput:
    """A loss that the weights have no part in, as when every token is masked out by a correction."""
    return LossOutput(loss=torch.tensor(1.5), sums={"seen": inputs.mask.sum()})


def spec(function: Any, **options: Any) -> ObjectiveSpec:
    return ObjectiveSpec(function=f"{__name__}:{function.__name__}", options=options)
