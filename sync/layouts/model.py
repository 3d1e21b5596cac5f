"""The tensors of a language model, from its Hugging Face `config.json`: names, shapes, and how each may be split. Pure.

MO-1: the list is what `save_pretrained` of that model type writes, in the order of the layers; a tied head is not
      in it.
MO-2: a model type that is not known is refused by name: nothing is guessed.
MO-3: tensor-parallel ranks split an axis in whole units (heads, or single rows). Where there are fewer units than ranks
      (KV heads), neighbouring ranks hold the same unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from sync.layout import LayoutError

__all__ = ["MLA", "Experts", "ModelShape", "Split", "Weight"]

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_SPARSE = ("qwen3_moe", "deepseek_v3", "kimi_k2")


class Split(msgspec.Struct, frozen=True):
    """How tensor-parallel ranks divide a tensor."""

    axis: int
    unit: int = 1
    """Rows (or columns) that stay together: the width of a head."""

    def part(self, shape: tuple[int, ...], rank: int, ranks: int, name: str) -> tuple[int, int]:
        """Half-open range of the axis that `rank` of `ranks` holds.

        Raises:
            LayoutError: the units don't divide by the ranks, nor the ranks by the units.
        """
        units = shape[self.axis] // self.unit
        if units % ranks == 0:
            step = units // ranks
            return rank * step * self.unit, (rank + 1) * step * self.unit
        if ranks % units == 0 and self.unit > 1:
            held = rank // (ranks // units)
            return held * self.unit, (held + 1) * self.unit
        raise LayoutError(
            f"{name}: axis {self.axis} has {units} parts of {self.unit}, which {ranks} tensor-parallel ranks can't "
            f"share evenly; choose a number of ranks that divides {units}"
        )


class Weight(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: Split | None = None
    """None: every tensor-parallel rank holds it whole."""
    layer: int = -1
    """Decoder layer; -1 for embedding, last norm and head."""
    expert: int = -1
    """Routed expert; -1 for what every rank of an expert-parallel group has."""
    role: Literal["matrix", "vocab", "other"] = "other"
    """`matrix`: a linear layer that may be quantised. `vocab`: rows are token ids, which engines pad."""


class MLA(msgspec.Struct, frozen=True):
    """Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int
    """0: the query is projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Experts(msgspec.Struct, frozen=True):
    """Routed experts of the sparse layers."""

    count: int
    width: int
    """Rows of an expert's gate and up projection."""
    shared_width: int
    """Rows of the shared experts together; 0 when there are none."""
    first_layer: int
    """Layers before it are dense."""
    router_bias: bool
    """A float32 bias that only decides who is chosen (DeepSeek-V3)."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer, as far as its tensors go."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    dtype: str
    mla: MLA | None = None
    experts: Experts | None = None
    critic: bool = False
    """Its head gives one number a position: `score`, in place of `lm_head`."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the content of `config.json`.

        Raises:
            LayoutError: the model type is not known here, or has a variant that is not (MO-2).
        """
        kind = config.get("model_type", "")
        if kind not in (*_DENSE, *_SPARSE):
            raise LayoutError(
                f"model_type = {kind!r}: its tensors are not described; known are {', '.join((*_DENSE, *_SPARSE))}. "
                f"Describe the ranks by their own modules instead (sync.layouts.modules, sync.layouts.dtensor)"
            )
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_bias"):
            raise LayoutError(
                f"model_type = {kind!r} with mlp_only_layers, decoder_sparse_step or mlp_bias: not described"
            )
        heads = int(config["num_attention_heads"])
        deepseek = kind in ("deepseek_v3", "kimi_k2")
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            ffn=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
            mla=_mla(config) if deepseek else None,
            experts=_experts(config, deepseek) if kind in _SPARSE else None,
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has routed experts."""
        return self.experts is not None and layer >= self.experts.first_layer

    def weights(self) -> Iterator[Weight]:
        """All tensors, embedding first, then layer by layer, then the last norm and an untied head (MO-1)."""
        embedding, *last = self.outer_weights()
        yield embedding
        for layer in range(self.layers):
            yield from self.layer_weights(layer)
        yield from last

    def outer_weights(self) -> Iterator[Weight]:
        """Tensors outside of the layers, the embedding first."""
        yield self._vocab("model.embed_tokens.weight")
        yield Weight("model.norm.weight", (self.hidden,), self.dtype)
        if self.critic:
            yield Weight("score.weight", (1, self.hidden), self.dtype)
            yield Weight("score.bias", (1,), self.dtype)
        elif not self.tied:
            yield self._vocab("lm_head.weight")

    def layer_weights(self, layer: int, *, experts: bool = True) -> Iterator[Weight]:
        """Tensors of one decoder layer, with or without its routed experts."""
        prefix = f"model.layers.{layer}"
        yield Weight(f"{prefix}.input_layernorm.weight", (self.hidden,), self.dtype, layer=layer)
        yield from self._latent(layer, self.mla) if self.mla else self._attention(layer)
        yield Weight(f"{prefix}.post_attention_layernorm.weight", (self.hidden,), self.dtype, layer=layer)
        if self.experts is None or not self.is_sparse(layer):
            yield from self._gated(f"{prefix}.mlp", self.ffn, layer)
            return
        router = f"{prefix}.mlp.gate"
        yield Weight(f"{router}.weight", (self.experts.count, self.hidden), self.dtype, layer=layer)
        if self.experts.router_bias:
            yield Weight(f"{router}.e_score_correction_bias", (self.experts.count,), "float32", layer=layer)
        for expert in range(self.experts.count if experts else 0):
            yield from self._gated(f"{prefix}.mlp.experts.{expert}", self.experts.width, layer, expert)
        if self.experts.shared_width:
            yield from self._gated(f"{prefix}.mlp.shared_experts", self.experts.shared_width, layer)

    def _vocab(self, name: str) -> Weight:
        return Weight(name, (self.vocab, self.hidden), self.dtype, Split(0), role="vocab")

    def _attention(self, layer: int) -> Iterator[Weight]:
        prefix, dim = f"model.layers.{layer}.self_attn", self.head_dim
        rows = Split(0, dim)
        for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            shape = (heads * dim, self.hidden)
            yield Weight(f"{prefix}.{part}_proj.weight", shape, self.dtype, rows, layer, role="matrix")
            if self.qkv_bias:
                yield Weight(f"{prefix}.{part}_proj.bias", shape[:1], self.dtype, rows, layer)
        shape = (self.hidden, self.heads * dim)
        yield Weight(f"{prefix}.o_proj.weight", shape, self.dtype, Split(1, dim), layer, role="matrix")
        if self.qk_norm:
            for part in ("q", "k"):
                yield Weight(f"{prefix}.{part}_norm.weight", (dim,), self.dtype, layer=layer)

    def _latent(self, layer: int, mla: MLA) -> Iterator[Weight]:
        prefix = f"model.layers.{layer}.self_attn"
        query = mla.qk_nope_head_dim + mla.qk_rope_head_dim

        def matrix(name: str, rows: int, columns: int, split: Split | None) -> Weight:
            return Weight(f"{prefix}.{name}.weight", (rows, columns), self.dtype, split, layer, role="matrix")

        if mla.q_lora_rank:
            yield matrix("q_a_proj", mla.q_lora_rank, self.hidden, None)
            yield Weight(f"{prefix}.q_a_layernorm.weight", (mla.q_lora_rank,), self.dtype, layer=layer)
            yield matrix("q_b_proj", self.heads * query, mla.q_lora_rank, Split(0, query))
        else:
            yield matrix("q_proj", self.heads * query, self.hidden, Split(0, query))
        yield matrix("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, self.hidden, None)
        yield Weight(f"{prefix}.kv_a_layernorm.weight", (mla.kv_lora_rank,), self.dtype, layer=layer)
        pair = mla.qk_nope_head_dim + mla.v_head_dim
        yield matrix("kv_b_proj", self.heads * pair, mla.kv_lora_rank, Split(0, pair))
        yield matrix("o_proj", self.hidden, self.heads * mla.v_head_dim, Split(1, mla.v_head_dim))

    def _gated(self, prefix: str, width: int, layer: int, expert: int = -1) -> Iterator[Weight]:
        for part in ("gate", "up"):
            name = f"{prefix}.{part}_proj.weight"
            yield Weight(name, (width, self.hidden), self.dtype, Split(0), layer, expert, "matrix")
        name = f"{prefix}.down_proj.weight"
        yield Weight(name, (self.hidden, width), self.dtype, Split(1), layer, expert, "matrix")


def _mla(config: Mapping[str, Any]) -> MLA:
    return MLA(
        q_lora_rank=int(config.get("q_lora_rank") or 0),
        kv_lora_rank=int(config["kv_lora_rank"]),
        qk_nope_head_dim=int(config["qk_nope_head_dim"]),
        qk_rope_head_dim=int(config["qk_rope_head_dim"]),
        v_head_dim=int(config["v_head_dim"]),
    )


def _experts(config: Mapping[str, Any], deepseek: bool) -> Experts:
    width = int(config["moe_intermediate_size"])
    count = config["n_routed_experts"] if deepseek else config.get("num_experts", config.get("num_local_experts"))
    if count is None:
        raise LayoutError("config.json has neither num_experts nor num_local_experts; it is of no mixture of experts")
    return Experts(
        count=int(count),
        width=width,
        shared_width=width * int(config.get("n_shared_experts") or 0) if deepseek else 0,
        first_layer=int(config.get("first_k_dense_replace", 0)) if deepseek else 0,
        router_bias=deepseek,
    )
