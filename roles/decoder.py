"""What the small engine needs of a forward pass, and the proof that one computes what transformers does.

DE-1: transformers builds the model, names its tensors and says what is right: at start the logits of prefill and decode
      are compared with transformers' own forward, and a model that is not reproduced is refused.
DE-2: the module tree stays the owner of the weights: writing `q_proj.weight` in place changes what is computed.
DE-3: a row reads only the cache positions that it wrote itself or that were copied from its prompt: what an earlier
      owner of the slot left is masked.

Letters in shapes: N rows of activations, B decoding rows, P prompts, S padded prompt length, H query heads, K key/value
heads, G = H / K, D head size, L allocated cache length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

CACHE_STEP = 16
"""Cache lengths are multiples of this: attention reads up to the longest row, rounded up, not the whole allocation."""


class UnsupportedModel(ValueError):
    """The engine can't run this model faithfully. The text says what differs."""


class Decoder(Protocol):
    """A causal language model whose rows live in slots 0..B-1 of one cache."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens; what rows hold stays. Lengths only grow."""
        ...

    def move(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of slots `source` to slots `target`."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], owners: Sequence[int], first_slot: int) -> Tensor:
        """Run prompts once each and copy their keys and values to the slots of their samples.

        Args:
            prompts: token ids, at least one each.
            owners: index of the prompt of each new row, ascending, each prompt there; row r goes to slot
                `first_slot + r`.
            first_slot: first of so many consecutive free slots.

        Returns:
            [P, V] logits after the last token of each prompt.
        """
        ...

    def decode(self, token_ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        """One step of slots 0..B-1.

        Args:
            token_ids: [B] int64, the newest token of each row, not yet in the cache.
            positions: [B] int64, how many tokens of the row are in the cache.
            longest: the largest of `positions`.

        Returns:
            [B, V] logits of the next token.
        """
        ...

    def score(self, token_ids: Tensor) -> Tensor:
        """Logits after every token; no slot is touched.

        Args:
            token_ids: [P, S] int64, padded on the right with anything.

        Returns:
            [P, S, V] logits.
        """
        ...


def check(decoder: Decoder, model: Any, num_slots: int) -> None:
    """Two prompts of unlike length, then two decode steps, against transformers' forward of the whole (DE-1)."""
    weight = next(model.parameters())
    lengths = [3, 6][: min(2, num_slots)]
    longest = max(lengths)
    generator = torch.Generator().manual_seed(0)
    full = torch.randint(decoder.vocab_size, (2, longest + 2), generator=generator)[: len(lengths)].to(weight.device)
    length = torch.tensor(lengths, device=weight.device)
    rows = torch.arange(len(lengths), device=weight.device)
    prompts = [ids[:size].tolist() for ids, size in zip(full, lengths, strict=True)]
    with torch.inference_mode():
        found = [
            decoder.prefill(prompts, range(len(prompts)), 0).float(),
            *(decoder.decode(full[rows, length + i], length + i, longest + i).float() for i in range(2)),
        ]
        logits: Tensor = model(input_ids=full, use_cache=False).logits
        expected = torch.stack([logits[rows, length - 1 + i] for i in range(3)]).float()
        error = float((torch.stack(found) - expected).abs().max())
    allowed = (1e-3 if weight.dtype == torch.float32 else 0.1) * max(1.0, float(expected.abs().max()))
    if not error <= allowed:
        raise UnsupportedModel(
            f"{type(model).__name__}: logits of the torch engine differ from transformers' by {error:.3g}, "
            f"expected at most {allowed:.3g}: its layers compute something else than Llama's or Qwen3's; use a "
            f"model of that family, or another rollout engine"
        )


def refuse_what_a_short_check_would_miss(model: Any) -> None:
    """Raise UnsupportedModel for windows, ropes and scales that show in longer sequences only."""
    config, base = model.config, model.base_model
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    if kinds != {"full_attention"} or window < config.max_position_embeddings:
        raise UnsupportedModel(
            f"{type(base).__name__}: expected full attention in all layers, got {sorted(kinds)} with a window of "
            f"{window} tokens; set sliding_window to null in config.json if sequences stay shorter"
        )
    rope = getattr(base.rotary_emb, "rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise UnsupportedModel(
            f"{type(base).__name__}: rope type {rope!r} depends on the length of the whole batch, expected one that "
            f"doesn't (default, linear, yarn, llama3); change rope_type in config.json"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("llama_4_scaling_beta"):
        raise UnsupportedModel(
            f"{type(base).__name__}: llama_4_scaling_beta scales queries beyond "
            f"{parameters.get('original_max_position_embeddings')} tokens, expected none; set it to 0 in config.json "
            f"if sequences stay shorter"
        )


def select(model: nn.Module, num_slots: int, *, native: bool) -> Decoder:
    """The fastest one that reproduces the model.

    Args:
        model: a transformers causal LM in evaluation mode, with its weights loaded. It stays usable by itself.
        num_slots: rows that the cache can hold.
        native: our C++ may be used, where it can.

    Raises:
        UnsupportedModel: the model is not Llama-shaped, or its logits are not reproduced (DE-1).
    """
    from roles.decoder_cpu import CpuDecoder
    from roles.decoder_torch import TorchDecoder

    if native and (fast := CpuDecoder.of(model, num_slots)) is not None:
        try:
            check(fast, model, num_slots)
        except UnsupportedModel:
            pass  # torch's decoder says what is wrong, or can do it
        else:
            return fast
    decoder = TorchDecoder(model, num_slots)
    check(decoder, model, num_slots)
    return decoder
