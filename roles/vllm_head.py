"""Logits of a vLLM model in float32, whatever its weights are (`[rollout] head_dtype`).

A bfloat16 head rounds each logit to 8 bits: at 16 and above to eighths, more than any other error in the logprob of a
likely token. Its products are exact in float32, so that only the output has to be wider. vLLM 0.32 has the same behind
`head_dtype` of the model's config; 0.25 ignores that key for generation. This works in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def widen_heads(model: nn.Module) -> int:
    """Make the heads of a model give float32; returns how many there are.

    Raises:
        ValueError: it has none, or one whose weights are quantised.
    """
    heads = {id(head): head for module in model.modules() if (head := _head_of(module)) is not None}
    if not heads:
        raise ValueError("rollout.head_dtype = 'float32': the model has no head of its own; leave it at 'model'")
    for head in heads.values():
        method = head.quant_method
        if not type(method).__name__.startswith("Unquantized"):
            raise ValueError(
                f"rollout.head_dtype = 'float32': the head is quantised ({type(method).__name__}); leave it at 'model'"
            )
        method.apply = wide_product
    return len(heads)


def wide_product(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T in float32."""
    if x.is_cuda and x.dtype != torch.float32:
        flat = x.reshape(-1, x.shape[-1])
        logits = torch.mm(flat, layer.weight.t(), out_dtype=torch.float32).reshape(*x.shape[:-1], -1)
        return logits if bias is None else logits + bias.float()
    return nn.functional.linear(x.float(), layer.weight.float(), None if bias is None else bias.float())


def _head_of(module: nn.Module) -> Any:
    head = getattr(module, "lm_head", None)
    return head if isinstance(head, VocabParallelEmbedding) else None
