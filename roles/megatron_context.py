"""Context parallelism: a row of positions over several ranks, for the local spec of megatron-core.

megatron leaves it to TransformerEngine's attention. Ours needs nothing of that: only attention and loss look beyond a
position, and both get all they look at by one exchange.

    everywhere    T / n positions, all heads          (rank r has the r-th run of the row)
    attention     T positions, heads / n              (all-to-all before it, and back after it)
    loss          T / n logprobs -> all of the row    (a sum over ranks)

MX-1: attention sees whole sequences, so that packed rows, windows and sinks are computed by the same kernels, and every
      rank has the same work, whatever lengths the row holds.
MX-2: every rank computes the whole loss of the row from the same numbers, and takes back the slope of its own logprobs
      alone: gradients are then summed over these ranks as over data-parallel ones.
MX-3: the number of ranks divides the query heads and the key-value heads that a tensor-parallel rank has
      (`trainer_config.check_model`), and the row is filled up to a multiple of it (MT-3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor


def ranks() -> int:
    """That share a row."""
    return int(parallel_state.get_context_parallel_world_size())


def run_of(total: int) -> slice:
    """This rank's positions of a row of `total`."""
    length = total // ranks()
    start = int(parallel_state.get_context_parallel_rank()) * length
    return slice(start, start + length)


def heads_of(total: int) -> slice:
    """The heads that this rank has in attention, of those of its tensor-parallel rank."""
    return run_of(total)


def to_heads(x: Tensor) -> Tensor:
    """[T / n, heads, D] of this rank's run to [T, heads / n, D] of the whole row."""
    run, heads, width = x.shape
    parts = x.view(run, ranks(), heads // ranks(), width).transpose(0, 1).contiguous()
    return _exchanged(parts.flatten(0, 1))


def to_run(x: Tensor) -> Tensor:
    """[T, heads / n, D] of the whole row to [T / n, heads, D] of this rank's run."""
    total, heads, width = x.shape
    parts = _exchanged(x.contiguous()).view(ranks(), total // ranks(), heads, width)
    return parts.transpose(0, 1).reshape(total // ranks(), ranks() * heads, width)


def whole(scores: Tensor, inside: Tensor, count: int) -> Tensor:
    """Scores of all chosen positions of a row, on every rank of it.

    Args:
        scores: [n, k] of the chosen positions in this rank's run.
        inside: [k] their places among all chosen positions.
        count: how many these are.
    """
    result: Tensor = _Whole.apply(scores, inside, count)  # type: ignore[no-untyped-call]
    return result


class _Whole(torch.autograd.Function):
    """MX-2."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, inside: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(inside)
        found = scores.new_zeros(len(scores), count)
        found[:, inside] = scores
        dist.all_reduce(found, group=_group())
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inside,) = ctx.saved_tensors
        return grads[0][:, inside], None, None


def _exchanged(x: Tensor) -> Tensor:
    """The i-th part of its first dimension to rank i, for all i."""
    received: Tensor = all_to_all(_group(), x)
    return received


def _group() -> Any:
    return parallel_state.get_context_parallel_group()
