"""The small engine's forward pass in torch, on any device and in any dtype (contract: roles/decoder.py).

Why not `model(...)` with a custom Cache: at the batch sizes of a small rank most of the time goes to what stands around
the products. So rows are flat [N, hidden] here, the key/value cache of the running rows is a view that is made once,
query and key are normed and rotated together and in place, keys and values are written in one go, a residual is added
by the product that follows it, and no mask is built twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roles.decoder import CACHE_STEP, UnsupportedModel, refuse_what_a_short_check_would_miss
from roles.fused_modules import block_of, embedding, linear, norm

MAX_VIEWS = 1024
"""Kept views of the cache, of 1 kB each: enough for every number of rows at a few lengths."""


@dataclass(frozen=True, kw_only=True)
class _Views:
    """The cache as so many rows read it up to some length; one of each per layer."""

    targets: Tensor
    """[B, 2K] int64: lines of a layer, as [.., D], where keys and values of position 0 stand."""
    lines: tuple[Tensor, ...]
    """The layer as [2 * slots * K * L, D]."""
    keys: tuple[Tensor, ...]
    """[B * K, D, length]."""
    values: tuple[Tensor, ...]
    """[B * K, length, D]."""
    positions: Tensor
    """[length] int64."""


class TorchDecoder:
    """A `roles.decoder.Decoder`.

    Args:
        model: a transformers causal LM in evaluation mode, with its weights loaded. It stays usable by itself.
        num_slots: rows that the cache can hold.

    Raises:
        UnsupportedModel: the model is not Llama-shaped.
    """

    def __init__(self, model: nn.Module, num_slots: int) -> None:
        try:
            self._read(model)
        except AttributeError as error:
            raise UnsupportedModel(
                f"{type(model).__name__}: expected the modules of a Llama or Qwen3 model, but {error}; use a model of "
                f"that family, or another rollout engine"
            ) from error
        weight = next(model.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._positions = torch.arange(0, device=self._device)
        self._views: dict[tuple[int, int], _Views] = {}
        self._cos = self._sin = torch.empty(0)
        shape = (len(self._blocks), 2, num_slots, self._num_kv_heads, 0, self._head_dim)
        self._cache = torch.empty(shape, dtype=self._dtype, device=self._device)
        with torch.inference_mode():
            self.reserve(CACHE_STEP)

    def _read(self, model: Any) -> None:
        """Take from the modules what the forward needs."""
        config, base = model.config, model.base_model
        self.vocab_size = int(config.vocab_size)
        self.max_positions = int(config.max_position_embeddings)
        self._embed = embedding(model.get_input_embeddings())
        self._head = linear(model.get_output_embeddings())
        self._norm = norm(base.norm)
        self._rotary: nn.Module = base.rotary_emb
        attention = base.layers[0].self_attn
        self._head_dim = int(attention.head_dim)
        self._num_heads = int(config.num_attention_heads)
        self._num_kv_heads = int(config.num_key_value_heads)
        self._scale = float(attention.scaling)
        refuse_what_a_short_check_would_miss(model)
        with torch.no_grad():
            self._blocks = [block_of(layer) for layer in base.layers]

    def reserve(self, length: int) -> None:
        """Make room for rows of `length` tokens; what rows hold stays. Lengths only grow."""
        old = self._cache.shape[4]
        if length <= old:
            return
        length = -(-max(length, 2 * old) // CACHE_STEP) * CACHE_STEP
        grown = self._cache.new_zeros((*self._cache.shape[:4], length, self._head_dim))
        grown[..., :old, :] = self._cache
        self._cache = grown
        self._views.clear()
        self._positions = torch.arange(length, device=self._device)
        cos, sin = self._rotary(grown.new_empty(1), self._positions[None])
        half = self._head_dim // 2
        # rotate_half(x) * sin = flip(x) * (sin with its first half negated), where flip swaps the halves.
        self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def move(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        old, new = self._tensor(source), self._tensor(target)
        self._cache[:, :, new, :, :length] = self._cache[:, :, old, :, :length]

    def prefill(self, prompts: Sequence[Sequence[int]], owners: Sequence[int], first_slot: int) -> Tensor:
        width = max(len(prompt) for prompt in prompts)
        padded = self._tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        last = self._tensor([len(prompt) - 1 for prompt in prompts])
        hidden = self._read_prompts(padded, self._tensor(owners), first_slot)
        return self._logits(hidden[torch.arange(len(prompts), device=self._device), last])

    def score(self, token_ids: Tensor) -> Tensor:
        hidden = self._read_prompts(token_ids, self._tensor([]), 0)
        return self._logits(hidden.flatten(0, 1)).view(*token_ids.shape, -1)

    def _read_prompts(self, token_ids: Tensor, owner: Tensor, first_slot: int) -> Tensor:
        """[P, S, hidden] of whole prompts; keys and values go to the slots of `owner`, one of its prompt each."""
        num_prompts, width = token_ids.shape
        self.reserve(width)
        heads, kv_heads, dim = self._num_heads, self._num_kv_heads, self._head_dim
        slots = slice(first_slot, first_slot + len(owner))

        def attend(layer: int, query: Tensor, written: Tensor) -> Tensor:
            query = query.view(num_prompts, width, heads, dim).transpose(1, 2)
            written = written.view(num_prompts, width, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
            self._cache[layer, :, slots, :, :width] = written[:, owner]
            key, value = written.unbind(0)
            # Padding stands to the right: a causal mask is all that real tokens need.
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self._scale, enable_gqa=heads != kv_heads
            )
            return mixed.transpose(1, 2).reshape(num_prompts * width, heads * dim)

        cos, sin = self._cos[:width].repeat(num_prompts, 1), self._sin[:width].repeat(num_prompts, 1)
        return self._forward(token_ids.reshape(-1), cos, sin, attend).view(num_prompts, width, -1)

    def decode(self, token_ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        self.reserve(longest + 1)
        num_rows, kv_heads, dim = len(token_ids), self._num_kv_heads, self._head_dim
        length = min(-(-(longest + 1) // CACHE_STEP) * CACHE_STEP, self._cache.shape[4])
        views = self._views.get((num_rows, length)) or self._view(num_rows, length)
        lanes, group = num_rows * kv_heads, self._num_heads // kv_heads
        targets = (views.targets + positions[:, None]).view(-1)
        bias = torch.where(views.positions <= positions[:, None], 0.0, -torch.inf).to(self._dtype)
        bias = bias.repeat_interleave(kv_heads, dim=0)[:, None]  # [B * K, 1, length], equal for the heads of a row

        def attend(layer: int, query: Tensor, written: Tensor) -> Tensor:
            views.lines[layer].index_copy_(0, targets, written.reshape(-1, dim))
            query = query.reshape(lanes, group, dim)
            scores = torch.baddbmm(bias, query, views.keys[layer], alpha=self._scale)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(self._dtype)
            return torch.bmm(weights, views.values[layer]).view(num_rows, -1)

        return self._logits(self._forward(token_ids, self._cos[positions], self._sin[positions], attend))

    def _view(self, num_rows: int, length: int) -> _Views:
        """Views change with the number of rows, and with the length once in CACHE_STEP steps."""
        if len(self._views) >= MAX_VIEWS:
            self._views.clear()
        num_slots, kv_heads, allocated = self._cache.shape[2:5]
        lanes = num_rows * kv_heads
        parts = torch.arange(2, device=self._device)[:, None] * num_slots * kv_heads
        lane = torch.arange(kv_heads, device=self._device)
        rows = torch.arange(num_rows, device=self._device)[:, None] * kv_heads
        layers = self._cache.unbind(0)
        self._views[num_rows, length] = views = _Views(
            targets=(rows + (parts + lane).view(-1)) * allocated,
            lines=tuple(layer.view(-1, self._head_dim) for layer in layers),
            keys=tuple(layer[0].flatten(0, 1)[:lanes, :length].transpose(1, 2) for layer in layers),
            values=tuple(layer[1].flatten(0, 1)[:lanes, :length] for layer in layers),
            positions=self._positions[:length],
        )
        return views

    def _forward(
        self, token_ids: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[int, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """[N] tokens to [N, hidden]. cos, sin: [N, D]; `attend` maps layer, queries [N, H, D] and keys and values
        [N, 2 * K, D] to [N, H * D]."""
        hidden = self._embed(token_ids)
        cos, sin = cos[:, None], sin[:, None]
        heads, kv_heads, dim = self._num_heads, self._num_kv_heads, self._head_dim
        rotating = heads + kv_heads
        for index, block in enumerate(self._blocks):
            qkv = block.qkv(block.input_norm(hidden)).view(-1, rotating + kv_heads, dim)
            rotated = qkv[:, :rotating]
            normed = rotated if block.head_norm is None else block.head_norm(rotated)
            flipped = normed.roll(dim // 2, -1)
            torch.mul(normed, cos, out=rotated).addcmul_(flipped, sin)
            hidden = block.out(hidden, attend(index, qkv[:, :heads], qkv[:, heads:]))
            hidden = block.mlp(hidden, block.post_norm(hidden))
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(self._norm(hidden))

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
