"""What a rank holds of DTensor parameters: FSDP2, HSDP, FSDP over tensor parallelism, any placements of torch.

DT-1: boxes follow from shape, mesh and placements by the rules of torch: `Shard` cuts like `torch.chunk` (the last
      ranks may get nothing), `_StridedShard(split_factor=f)` cuts each of f earlier parts, `Replicate` cuts nothing. A
      shard that is no interval is several boxes, one for each run of rows (LA-3).
DT-2: a partial sum is refused: it is no weight.
DT-3: experts that transformers stacks into `experts.gate_up_proj` [E, 2F, H] and `experts.down_proj` [E, H, F] are told
      apart into the checkpoint's names, gate and up of each expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

from sync.layout import Box, Entry, LayoutError
from sync.layouts.held import Held, Part

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["boxes_of", "held"]

Runs = list[tuple[int, int]]
"""Half-open intervals of one dimension, ascending: where local rows lie in the full tensor, in local order."""


def held(parameters: Iterable[tuple[str, Tensor]], *, split_experts: bool = False) -> Held:
    """Describe named parameters, DTensor or plain, of this rank.

    Args:
        parameters: as `named_parameters()` gives them: a tied parameter once, under its first name.
        split_experts: tell stacked experts apart (DT-3).
    """
    from torch.distributed.tensor import DTensor

    parts: list[Part] = []
    for name, param in parameters:
        dtype = str(param.dtype).removeprefix("torch.")
        shape = tuple(param.shape)
        local: list[tuple[Box, tuple[int, ...]]] = [(Box.whole(shape), (0,) * len(shape))]
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            local = list(boxes_of(name, shape, tuple(mesh.shape), _coordinate(mesh, name), param.placements))
        for box, at in local:
            if split_experts and len(shape) == 3:
                parts.extend(_experts(name, shape, dtype, box, at))
            else:
                parts.append(Part.of_rows(name, shape, dtype, box, name, at))
    return Held(parts)


def boxes_of(
    name: str, shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Boxes of the rank at `coordinate` of a mesh, each with its offset in the rank's local tensor.

    Args:
        placements: torch's, one a dimension of the mesh.

    Raises:
        LayoutError: a placement is a partial sum, or is not known.
    """
    runs: list[Runs] = [[(0, n)] for n in shape]
    for ranks, rank, placement in zip(mesh, coordinate, placements, strict=True):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise LayoutError(f"{name}: placement {placement} is not a part of a weight; redistribute it first")
        axis = placement.dim
        before = _chunks(runs[axis], placement.split_factor) if kind == "_StridedShard" else [runs[axis]]
        runs[axis] = _joined(run for part in before for run in _chunk(part, ranks, rank))
    starts = [[0, *accumulate(b - a for a, b in axis)] for axis in runs]
    for choice in product(*(range(len(axis)) for axis in runs)):
        box = Box(
            tuple(axis[i][0] for axis, i in zip(runs, choice, strict=True)),
            tuple(axis[i][1] for axis, i in zip(runs, choice, strict=True)),
        )
        yield box, tuple(axis[i] for axis, i in zip(starts, choice, strict=True))


def _coordinate(mesh: Any, name: str) -> Sequence[int]:
    coordinate: Sequence[int] | None = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"{name}: this rank is not part of the parameter's mesh {mesh}")
    return coordinate


def _chunks(runs: Runs, count: int) -> list[Runs]:
    return [_chunk(runs, count, i) for i in range(count)]


def _chunk(runs: Runs, count: int, index: int) -> Runs:
    """Part `index` of `count` of the rows in `runs`, as `torch.chunk` cuts; at least one interval, perhaps empty."""
    total = sum(b - a for a, b in runs)
    step = -(-total // count) if total else 0
    first, last = min(index * step, total), min((index + 1) * step, total)
    found: Runs = []
    at = 0
    for a, b in runs:
        lo, hi = max(first, at), min(last, at + b - a)
        if lo < hi:
            found.append((a + lo - at, a + hi - at))
        at += b - a
    if found:
        return found
    end = runs[-1][1]
    return [(end, end)]


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Neighbours made one; empty intervals left out unless nothing else is there."""
    found: Runs = []
    end = 0
    for a, b in runs:
        end = b
        if a == b:
            continue
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        else:
            found.append((a, b))
    return found or [(end, end)]


def _experts(name: str, shape: tuple[int, ...], dtype: str, box: Box, at: tuple[int, ...]) -> Iterator[Part]:
    """DT-3: the boxes of single experts inside a box of a stacked tensor."""
    _, rows, columns = shape
    stem, _, last = name.rpartition(".")
    halves: Mapping[str, tuple[int, int]]
    if last == "gate_up_proj":
        halves = {"gate_proj": (0, rows // 2), "up_proj": (rows // 2, rows)}
    elif last == "down_proj":
        halves = {"down_proj": (0, rows)}
    else:
        raise LayoutError(f"{name}: a stacked tensor that is not known; expected experts.gate_up_proj or .down_proj")
    for expert in range(box.lo[0], box.hi[0]):
        for half, (start, stop) in halves.items():
            a, b = max(box.lo[1], start), min(box.hi[1], stop)
            if a >= b:
                continue
            inside = Box((a - start, box.lo[2]), (b - start, box.hi[2]))
            e, row = at[0] + expert - box.lo[0], at[1] + a - box.lo[1]
            index = ((e, e + 1), (row, row + b - a), (at[2], at[2] + box.hi[2] - box.lo[2]))
            entry = Entry(f"{stem}.{expert}.{half}.weight", inside, (stop - start, columns), dtype)
            yield Part(entry, name, index)
