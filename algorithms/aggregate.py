"""From values per token to one number: sums over global denominators.

AG-1: a denominator is a count over the whole update, all micro-batches of all ranks (A4), never over this tensor:
      adding the results over micro-batches and ranks gives the result of one process that holds everything.
AG-2: values outside the mask never count, not even as NaN times zero (A6). A token that a correction masks out keeps
      its place in the denominator.
AG-3: an empty batch gives 0, not NaN.

Shapes: B sequences, L columns.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregate = Literal["token-mean", "sequence-mean", "sequence-sum", "constant"]
"""How token losses become the loss. With two sequences of token loss 1 x 2 tokens and 2 x 6 tokens:

token-mean      sum of all / tokens                          1.75   DAPO, arXiv:2503.14476
sequence-mean   mean over sequences of their token mean      1.5    GRPO, arXiv:2402.03300
sequence-sum    mean over sequences of their token sum       7      sequence-level policy gradient
constant        sum of all / (sequences * max_length)        0.7    Dr.GRPO, arXiv:2503.20783 (max_length 10)
"""


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the selected values; scalar of the dtype of `values` (int64 for bool)."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device)).sum()


def per_sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[B]: the mean over the selected tokens of each row, 0 for a row without any."""
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    return torch.where(mask, values, zero).sum(-1) / mask.sum(-1).clamp(min=1)


def aggregate(
    values: Tensor,
    mask: Tensor,
    how: Aggregate,
    *,
    num_tokens: int,
    num_sequences: int,
    max_length: int | None = None,
) -> Tensor:
    """The share of this micro-batch in the loss of the update; scalar.

    Args:
        values: [B, L] loss per token.
        mask: [B, L] bool, the trained tokens.
        how: see `Aggregate`.
        num_tokens: trained tokens of the update, global.
        num_sequences: sequences of the update with a trained token, global.
        max_length: L_max of "constant", in tokens: the length limit of the run, not of the batch.

    Raises:
        ValueError: unknown `how`, or "constant" without `max_length`.
    """
    if how == "token-mean":
        return masked_sum(values, mask) / max(num_tokens, 1)
    if how == "sequence-mean":
        return per_sequence_mean(values, mask).sum() / max(num_sequences, 1)
    if how == "sequence-sum":
        return masked_sum(values, mask) / max(num_sequences, 1)
    if how == "constant":
        if max_length is None or max_length < 1:
            raise ValueError(
                f"aggregate 'constant': expected max_length >= 1, got {max_length}; "
                "set it to the limit of sampled tokens of the run"
            )
        return masked_sum(values, mask) / (max(num_sequences, 1) * max_length)
    raise ValueError(f"aggregate: expected one of {', '.join(get_args(Aggregate))}, got {how!r}")
