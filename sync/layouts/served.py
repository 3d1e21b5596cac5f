"""What the ranks of one inference engine want: a model split over tensor- and expert-parallel ranks, in Hugging Face
names. Arithmetic only; for planning, for simulation, and for engines whose maps follow these rules.

SV-1: attention and dense layers are split over `tp` ranks by whole heads and rows; a KV head is wanted by several ranks
      where there are fewer heads than ranks. Vocabulary rows are split with padding, of which nobody is asked anything.
SV-2: with `ep` the routed experts lie whole on their rank, in the order of `placement` (live, after rebalancing), an
      expert on several ranks if it is replicated; without it each expert is split like a dense layer.
SV-3: a tied head is derived from the embedding on the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from sync.layout import Box, Entry, Layout, LayoutError
from sync.layouts.model import ModelShape, Weight

__all__ = ["Serving", "served"]


class Serving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one replica of the engine is spread over its ranks."""

    tp: int = 1
    """Tensor-parallel ranks, all ranks of the replica."""
    expert_parallel: bool = False
    """Routed experts lie whole on ranks instead of being split."""
    vocab_divisor: int = 64
    """The padded vocabulary is a multiple of this times `tp`."""
    dtype: str = ""
    """dtype of everything that is not float32 in the checkpoint; empty: the model's."""


def served(
    model: ModelShape, serving: Serving, rank: int, *, placement: Sequence[Sequence[int]] | None = None
) -> Layout:
    """The layout of one rank.

    Args:
        placement: for each rank the routed experts it holds now, by their number in the checkpoint; None: even, in
            order.

    Raises:
        LayoutError: the model can't be split this way, or an expert is placed nowhere.
    """
    if placement is None:
        placement = _even(model, serving)
    held = set(range(model.experts.count if model.experts else 0))
    if serving.expert_parallel and model.experts:
        lost = held - {expert for experts in placement for expert in experts}
        if lost:
            raise LayoutError(f"experts {sorted(lost)[:5]} are placed on no rank; every routed expert needs one")
        held = set(placement[rank])
    entries = tuple(_entries(model, serving, rank, held))
    derived = {}
    if model.tied:
        embedding = entries[0]
        entries = (*entries, msgspec.structs.replace(embedding, name="lm_head.weight"))
        derived = {"lm_head.weight": embedding.name}
    return Layout(entries, derived=derived)


def _even(model: ModelShape, serving: Serving) -> list[range]:
    count = model.experts.count if model.experts else 0
    if serving.expert_parallel and count % serving.tp:
        raise LayoutError(f"{count} experts don't divide by {serving.tp} expert-parallel ranks; give their placement")
    step = count // serving.tp
    return [range(r * step, (r + 1) * step) for r in range(serving.tp)]


def _entries(model: ModelShape, serving: Serving, rank: int, experts: set[int]) -> Iterator[Entry]:
    for weight in model.weights():
        dtype = serving.dtype if serving.dtype and weight.dtype != "float32" else weight.dtype
        whole = weight.expert >= 0 and serving.expert_parallel
        if whole and weight.expert not in experts:
            continue
        box = Box.whole(weight.shape) if whole or weight.split is None else _part(weight, serving, rank)
        yield Entry(weight.name, box, weight.shape, dtype)


def _part(weight: Weight, serving: Serving, rank: int) -> Box:
    assert weight.split is not None
    axis, size = weight.split.axis, weight.shape[weight.split.axis]
    if weight.role == "vocab":
        multiple = serving.vocab_divisor * serving.tp
        rows = -(-size // multiple) * multiple // serving.tp
        start, stop = min(rank * rows, size), min((rank + 1) * rows, size)
    else:
        start, stop = weight.split.part(weight.shape, rank, serving.tp, weight.name)
    lo, hi = [0] * len(weight.shape), list(weight.shape)
    lo[axis], hi[axis] = start, stop
    return Box(tuple(lo), tuple(hi))
