"""A micro-batch as a model computes it: one row of positions without padding. Pure numpy.

    rows of a micro-batch    a b c d .      token_ids   a b c p q     what d and r predict is not asked
                             p q r . .      positions   0 1 2 0 1
                                            starts      0 3 5

FL-1: padding and the last token of each sequence are left out: exactly the positions that predict something remain.
FL-2: `chosen` lists the positions that predict trained tokens in the order of the mask, so that
      `zeros.masked_scatter(mask, values)` puts one value each back in its place.
FL-3: routes line up with the positions. Positions without a recorded route get experts 0..k-1.
"""

from __future__ import annotations

import msgspec
import numpy as np

from roles.types import MicroBatch


class Flat(msgspec.Struct, kw_only=True):
    """T positions in one row."""

    token_ids: np.ndarray
    """[T] int64: of each sequence all tokens but the last."""
    positions: np.ndarray
    """[T] int64, counted from 0 in each sequence."""
    starts: np.ndarray
    """[n + 1] int32: where each sequence begins, then T."""
    longest: int
    """Positions of the longest sequence."""
    chosen: np.ndarray
    """[K] int64: the positions that predict a trained token, in the order of the mask."""
    targets: np.ndarray
    """[K] int64: these tokens."""
    routes: np.ndarray | None
    """[T, MoE layers, experts per token], if they were recorded."""


def flatten(micro: MicroBatch, *, multiple: int = 1) -> Flat:
    """Take the padding out of a micro-batch.

    Args:
        multiple: T is filled up to a multiple of this by a sequence of its own, of which nothing is trained: what
            splitting the row over ranks asks for.
    """
    sequences = [ids[: max(1, length - 1)] for ids, length in zip(micro.token_ids, micro.lengths, strict=True)]
    total = sum(map(len, sequences))
    if filling := -total % multiple:
        sequences.append(np.zeros(filling, np.int64))
    lengths = [len(ids) for ids in sequences]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    rows, columns = np.nonzero(micro.mask)
    routes = micro.routes
    if routes is not None and len(routes) < starts[-1]:  # a row of one token, or the filling: any valid experts do
        routes = _fill_routes(micro, routes, int(starts[-1]))
    return Flat(
        token_ids=np.concatenate(sequences),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        starts=starts,
        longest=max(lengths),
        chosen=starts[rows].astype(np.int64) + columns - 1,
        targets=micro.token_ids[rows, columns],
        routes=routes,
    )


def _fill_routes(micro: MicroBatch, routes: np.ndarray, total: int) -> np.ndarray:
    """Positions without a recorded route (a sequence of one token, the filling) get experts 0..k-1."""
    filled = np.broadcast_to(np.arange(routes.shape[2], dtype=routes.dtype), (total, *routes.shape[1:])).copy()
    source = target = 0
    for length in micro.lengths:
        count = max(0, length - 1)
        filled[target : target + count] = routes[source : source + count]
        source += count
        target += max(1, length - 1)
    return filled
