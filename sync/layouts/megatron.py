"""What megatron-core ranks hold (0.19, GPTModel), as boxes in Hugging Face names. Arithmetic only: megatron is not
imported, parallel sizes and ranks are given.

ME-1: ranks are numbered as megatron numbers them by default, "tp-cp-ep-dp-pp": tensor-parallel neighbours first,
      pipeline stages outermost. Context-parallel ranks hold what data-parallel ones do and count as such here.
ME-2: fused q, k, v lie in memory per KV group, [queries of the group, k, v]; with fewer groups than ranks, rows of that
      order are cut evenly all the same. Gate and up lie as [gate; up] of each rank.
ME-3: rows that only pad the vocabulary are nobody's boxes. A tied head is the embedding; with several stages the last
      stage has a copy, which counts as a second holder.
ME-4: experts are split whole over expert-parallel ranks, each expert over expert-tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from sync.layout import Box, LayoutError
from sync.layouts.held import Held, Part
from sync.layouts.model import Experts, ModelShape, Split, Weight

__all__ = ["MegatronParallel", "MegatronRank", "held"]


class MegatronParallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is spread over megatron ranks."""

    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks of each stage (virtual pipeline stages, interleaved)."""
    ep: int = 1
    """Expert-parallel ranks."""
    etp: int | None = None
    """Ranks that share one expert; megatron's default is `tp`."""
    layers: tuple[int, ...] = ()
    """Layers of each model chunk, in the order of the layers; empty: even. 43 layers on 4 stages: 11, 11, 11, 10."""
    vocab_divisor: int = 128
    """The padded vocabulary is a multiple of this times `tp`."""
    spec: Literal["local", "transformer_engine"] = "local"
    """Which modules the layers are made of: it names norms and grouped experts."""

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.vpp, self.ep, self.expert_tp, self.vocab_divisor) < 1:
            raise LayoutError(f"megatron: every parallel size is at least 1, got {self}")
        if self.layers and len(self.layers) != self.pp * self.vpp:
            raise LayoutError(
                f"megatron: layers = {list(self.layers)} names {len(self.layers)} model chunks, pp = {self.pp} times "
                f"vpp = {self.vpp} makes {self.pp * self.vpp}"
            )

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    def rank(self, rank: int, world: int) -> MegatronRank:
        """Coordinates of a rank of the trainer's world (ME-1).

        Raises:
            LayoutError: the world doesn't divide by the parallel sizes.
        """
        stage, left = divmod(world, self.pp)
        for what, size in (("tp", self.tp), ("ep times etp", self.ep * self.expert_tp)):
            if left or stage % size:
                raise LayoutError(f"megatron: {world} ranks don't divide by pp = {self.pp} times {what} = {size}")
        inside = rank % stage
        return MegatronRank(
            tp=inside % self.tp,
            pp=rank // stage,
            etp=inside % self.expert_tp,
            ep=inside // self.expert_tp % self.ep,
        )

    def chunks(self, model: ModelShape, pp: int) -> list[range]:
        """Layers of each model chunk of a stage."""
        count = self.pp * self.vpp
        if not self.layers and model.layers % count:
            raise LayoutError(
                f"megatron: {model.layers} layers don't divide by pp = {self.pp} times vpp = {self.vpp}; give `layers`"
            )
        sizes = self.layers or (model.layers // count,) * count
        if sum(sizes) != model.layers:
            raise LayoutError(f"megatron: layers = {list(sizes)} add up to {sum(sizes)}, the model has {model.layers}")
        starts = [sum(sizes[:i]) for i in range(count)]
        return [range(starts[i], starts[i] + sizes[i]) for i in range(pp, count, self.pp)]


class MegatronRank(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank stands in each group."""

    tp: int = 0
    pp: int = 0
    etp: int = 0
    ep: int = 0


def held(model: ModelShape, parallel: MegatronParallel, rank: MegatronRank) -> Held:
    """What a rank holds, and in which parameters.

    Raises:
        LayoutError: the model can't be split this way.
    """
    return Held(_Rank(model, parallel, rank).parts())


class _Rank:
    def __init__(self, model: ModelShape, parallel: MegatronParallel, rank: MegatronRank) -> None:
        self.model = model
        self.parallel = parallel
        self.rank = rank

    def parts(self) -> Iterator[Part]:
        chunks = self.parallel.chunks(self.model, self.rank.pp)
        last_stage = self.rank.pp == self.parallel.pp - 1
        weights = {w.name: w for w in self.model.outer_weights()}
        embedding = weights["model.embed_tokens.weight"]
        if self.rank.pp == 0:
            yield from self._vocab(embedding, "embedding.word_embeddings.weight", 0)
        for chunk, layers in enumerate(chunks):
            for local, layer in enumerate(layers):
                yield from self._layer(layer, f"decoder.layers.{local}", chunk)
        if last_stage:
            last = len(chunks) - 1
            yield self._whole(weights["model.norm.weight"], "decoder.final_layernorm.weight", last)
            if self.model.critic:
                for name in ("weight", "bias"):
                    yield self._whole(weights[f"score.{name}"], f"output_layer.{name}", last)
            elif not self.model.tied:
                yield from self._vocab(weights["lm_head.weight"], "output_layer.weight", last)
            elif self.parallel.pp > 1:
                yield from self._vocab(embedding, "output_layer.weight", last)

    def _layer(self, layer: int, prefix: str, chunk: int) -> Iterator[Part]:
        weights = {w.name: w for w in self.model.layer_weights(layer, experts=False)}
        names = _names(prefix, self.parallel.spec, self.model, self.model.is_sparse(layer))
        hugging = f"model.layers.{layer}"
        for name, weight in weights.items():
            param = names.get(name.removeprefix(f"{hugging}."))
            if param is not None:
                yield from self._plain(weight, param, chunk)
        if self.model.mla is None:
            yield from self._qkv(hugging, f"{prefix}.self_attention.linear_qkv", weights, chunk)
        if self.model.experts is None or not self.model.is_sparse(layer):
            yield from self._gate_up(f"{hugging}.mlp", f"{prefix}.mlp.linear_fc1.weight", self.model.ffn, chunk)
            return
        if self.model.experts.shared_width:
            width = self.model.experts.shared_width
            fc1 = f"{prefix}.mlp.shared_experts.linear_fc1.weight"
            yield from self._gate_up(f"{hugging}.mlp.shared_experts", fc1, width, chunk)
        yield from self._experts(layer, prefix, self.model.experts, chunk)

    def _whole(self, weight: Weight, param: str, chunk: int) -> Part:
        box = Box.whole(weight.shape)
        return Part.of_rows(weight.name, weight.shape, weight.dtype, box, param, (0,) * len(weight.shape), chunk)

    def _plain(self, weight: Weight, param: str, chunk: int) -> Iterator[Part]:
        """A parameter that holds one box at its start."""
        if weight.split is None and param.endswith("_down_proj.weight") and self.parallel.spec == "local":
            # The local spec cuts MLA's down projections by rows, where TransformerEngine's repeats them on every rank.
            weight = msgspec.structs.replace(weight, split=Split(0))
        if weight.split is None:
            yield self._whole(weight, param, chunk)
            return
        yield self._cut(weight, weight.split, param, chunk, self.rank.tp, self.parallel.tp)

    def _cut(self, weight: Weight, split: Split, param: str, chunk: int, rank: int, ranks: int) -> Part:
        a, b = Split(split.axis).part(weight.shape, rank, ranks, weight.name)
        box = _along(weight.shape, split.axis, a, b)
        return Part.of_rows(weight.name, weight.shape, weight.dtype, box, param, (0,) * len(weight.shape), chunk)

    def _vocab(self, weight: Weight, param: str, chunk: int) -> Iterator[Part]:
        multiple = self.parallel.vocab_divisor * self.parallel.tp
        rows = -(-weight.shape[0] // multiple) * multiple // self.parallel.tp
        start = min(self.rank.tp * rows, weight.shape[0])
        box = _along(weight.shape, 0, start, min(start + rows, weight.shape[0]))
        yield Part.of_rows(weight.name, weight.shape, weight.dtype, box, param, (0, 0), chunk)

    def _qkv(self, hugging: str, linear: str, weights: Mapping[str, Weight], chunk: int) -> Iterator[Part]:
        """ME-2."""
        model, dim = self.model, self.model.head_dim
        queries = model.heads // model.kv_heads
        fused = (queries + 2) * dim * model.kv_heads
        first, last = Split(0).part((fused,), self.rank.tp, self.parallel.tp, f"{hugging}.self_attn.q_proj.weight")
        for group in range(model.kv_heads):
            start = group * (queries + 2) * dim
            runs = (
                ("q", start, group * queries * dim, queries * dim),
                ("k", start + queries * dim, group * dim, dim),
                ("v", start + (queries + 1) * dim, group * dim, dim),
            )
            for part, fused_at, row, rows in runs:
                a, b = max(first, fused_at), min(last, fused_at + rows)
                if a >= b:
                    continue
                for kind in ("weight", "bias"):
                    weight = weights.get(f"{hugging}.self_attn.{part}_proj.{kind}")
                    if weight is not None:
                        box = _along(weight.shape, 0, row + a - fused_at, row + b - fused_at)
                        at = (a - first, *(0 for _ in weight.shape[1:]))
                        shape, dtype = weight.shape, weight.dtype
                        yield Part.of_rows(weight.name, shape, dtype, box, f"{linear}.{kind}", at, chunk)

    def _gate_up(self, hugging: str, param: str, width: int, chunk: int) -> Iterator[Part]:
        yield from self._pair(hugging, param, width, chunk, self.rank.tp, self.parallel.tp)

    def _pair(self, hugging: str, param: str, width: int, chunk: int, rank: int, ranks: int) -> Iterator[Part]:
        shape = (width, self.model.hidden)
        a, b = Split(0).part(shape, rank, ranks, f"{hugging}.gate_proj.weight")
        for part, at in (("gate", 0), ("up", b - a)):
            name, box = f"{hugging}.{part}_proj.weight", _along(shape, 0, a, b)
            yield Part.of_rows(name, shape, self.model.dtype, box, param, (at, 0), chunk)

    def _experts(self, layer: int, prefix: str, experts: Experts, chunk: int) -> Iterator[Part]:
        """ME-4."""
        if experts.count % self.parallel.ep:
            raise LayoutError(f"megatron: {experts.count} experts don't divide by ep = {self.parallel.ep}")
        count = experts.count // self.parallel.ep
        for local in range(count):
            hugging = f"model.layers.{layer}.mlp.experts.{self.rank.ep * count + local}"
            if self.parallel.spec == "local":
                fc1 = f"{prefix}.mlp.experts.local_experts.{local}.linear_fc1.weight"
                fc2 = f"{prefix}.mlp.experts.local_experts.{local}.linear_fc2.weight"
            else:
                fc1 = f"{prefix}.mlp.experts.linear_fc1.weight{local}"
                fc2 = f"{prefix}.mlp.experts.linear_fc2.weight{local}"
            rank, ranks = self.rank.etp, self.parallel.expert_tp
            yield from self._pair(hugging, fc1, experts.width, chunk, rank, ranks)
            down = Weight(f"{hugging}.down_proj.weight", (self.model.hidden, experts.width), self.model.dtype, Split(1))
            yield self._cut(down, Split(1), fc2, chunk, rank, ranks)


def _names(prefix: str, spec: str, model: ModelShape, sparse: bool) -> dict[str, str]:
    """Hugging Face name inside a layer -> megatron parameter, for those that hold one box each."""
    fused_norms = spec == "transformer_engine"
    attention, mlp = f"{prefix}.self_attention", f"{prefix}.mlp"
    names = {
        "input_layernorm.weight": f"{prefix}.input_layernorm.weight",
        "post_attention_layernorm.weight": f"{prefix}.pre_mlp_layernorm.weight",
        "self_attn.o_proj.weight": f"{attention}.linear_proj.weight",
        "self_attn.q_norm.weight": f"{attention}.q_layernorm.weight",
        "self_attn.k_norm.weight": f"{attention}.k_layernorm.weight",
        "self_attn.q_proj.weight": f"{attention}.linear_q_proj.weight",
        "self_attn.q_a_proj.weight": f"{attention}.linear_q_down_proj.weight",
        "self_attn.q_b_proj.weight": f"{attention}.linear_q_up_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight": f"{attention}.linear_kv_down_proj.weight",
        "self_attn.kv_b_proj.weight": f"{attention}.linear_kv_up_proj.weight",
        "self_attn.q_a_layernorm.weight": f"{attention}.q_layernorm.weight",
        "self_attn.kv_a_layernorm.weight": f"{attention}.kv_layernorm.weight",
        "mlp.down_proj.weight": f"{mlp}.linear_fc2.weight",
        "mlp.shared_experts.down_proj.weight": f"{mlp}.shared_experts.linear_fc2.weight",
        "mlp.gate.weight": f"{mlp}.router.weight",
        "mlp.gate.e_score_correction_bias": f"{mlp}.router.expert_bias",
    }
    if model.mla is None:
        del names["self_attn.q_proj.weight"]  # lies in linear_qkv
        if fused_norms:
            names["input_layernorm.weight"] = f"{attention}.linear_qkv.layer_norm_weight"
    elif fused_norms:
        names["self_attn.q_a_layernorm.weight"] = f"{attention}.linear_q_up_proj.layer_norm_weight"
        names["self_attn.kv_a_layernorm.weight"] = f"{attention}.linear_kv_up_proj.layer_norm_weight"
    if fused_norms and not sparse:
        names["post_attention_layernorm.weight"] = f"{mlp}.linear_fc1.layer_norm_weight"
    return names


def _along(shape: tuple[int, ...], axis: int, start: int, stop: int) -> Box:
    lo, hi = [0] * len(shape), list(shape)
    lo[axis], hi[axis] = start, stop
    return Box(tuple(lo), tuple(hi))
