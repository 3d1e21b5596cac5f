"""Which bytes go from which trainer rank to which rollout ranks. Pure: made without communication, from layouts alone.

PL-1: every element of every sink entry that is neither derived nor constant is carried by exactly one segment, and a
      segment lies inside its owner's box: nobody gathers, nothing is sent twice to one rank.
PL-2: one wire dtype and format per segment, the sink's; the owner casts or quantises. What could change meaning is
      refused (W7).
PL-3: boxes wanted alike by several sinks are packed once and read by all of them; with `spread`, once for each owner
      that they are spread over, so that no trainer rank serves all replicas of what its neighbours hold too.
PL-4: a piece that several trainer ranks hold goes to the least loaded of them, largest pieces first.
PL-5: a bucket has one owner, one set of sinks, at most `bucket_bytes` bytes (and a few scales more, where it
      cuts blocks), and segments at offsets aligned to ALIGN.
PL-6: the plan is a function of its inputs; `key` digests them, and a plan is valid as long as the key is equal (W1).
PL-7: buckets stand in the order of the layers as the sinks declare them.
PL-8: the scales of a quantised weight follow it in the same bucket. A scale whose block several segments touch is sent
      with the one that has the block's first element of the sink's box; all of them are `shared` then.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from sync.coverage import check_coverage, distinct, sent_entries
from sync.formats import Scaling
from sync.layout import ITEM_BYTES, Box, Entry, Layout

__all__ = ["ALIGN", "Bucket", "Plan", "Segment", "layer_of", "make_plan", "plan_key", "plan_key_of"]

ALIGN = 64
"""Segments start at multiples of this many bytes: a cache line, and enough for every dtype and vector load."""


class Segment(msgspec.Struct, frozen=True):
    """One box of one tensor, contiguous (row-major) inside a bucket."""

    name: str
    box: Box
    dtype: str
    """dtype on the wire: the one that the sinks asked for."""
    cast_from: str
    """dtype at the owner; equal to `dtype` when bytes are copied as they are."""
    offset: int
    """Bytes from the start of the bucket, a multiple of ALIGN."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    scaling: Scaling | None = None
    """The format that the owner quantises into; None where bytes are copied or cast."""
    shared: bool = False
    """Blocks of this segment reach beyond it: their largest values are agreed on before it is quantised."""
    scales_of: str = ""
    """On scales: the weight, in the segment before, that they belong to. Made, not read."""

    @property
    def num_bytes(self) -> int:
        return self.box.numel * ITEM_BYTES[self.dtype]


class Bucket(msgspec.Struct, frozen=True):
    """The unit of transfer."""

    index: int
    """Place in the plan; also the order in which every rank handles its buckets."""
    owner: int
    """Trainer rank that packs it."""
    sinks: tuple[int, ...]
    """Rollout ranks that read it, ascending."""
    place: int
    """Place among the buckets of its owner."""
    num_bytes: int
    segments: tuple[Segment, ...]


class Plan(msgspec.Struct, frozen=True, dict=True):
    """All buckets, in the order of the layers as the sinks declare them."""

    key: str
    num_senders: int
    num_sinks: int
    bucket_bytes: int
    buckets: tuple[Bucket, ...]

    def sent_by(self, rank: int) -> tuple[Bucket, ...]:
        """Buckets that trainer rank `rank` packs."""
        return self._sent.get(rank, ())

    def received_by(self, rank: int) -> tuple[Bucket, ...]:
        """Buckets that rollout rank `rank` reads."""
        return self._received.get(rank, ())

    @cached_property
    def _sent(self) -> dict[int, tuple[Bucket, ...]]:
        found: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            found[bucket.owner].append(bucket)
        return {rank: tuple(buckets) for rank, buckets in found.items()}

    @cached_property
    def _received(self) -> dict[int, tuple[Bucket, ...]]:
        found: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            for rank in bucket.sinks:
                found[rank].append(bucket)
        return {rank: tuple(buckets) for rank, buckets in found.items()}

    @cached_property
    def has_shared_scales(self) -> bool:
        """Whether trainer ranks must agree on largest values before they quantise (PL-8)."""
        return any(s.shared for b in self.buckets for s in b.segments)

    @cached_property
    def largest_bucket(self) -> int:
        """Bytes of the largest bucket, rounded up to ALIGN."""
        return _aligned(max((b.num_bytes for b in self.buckets), default=0))

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of weights packed for one version, each counted once however many sinks read it."""
        return sum(self.payloads.values())

    @cached_property
    def payloads(self) -> Mapping[int, int]:
        """Bucket index -> bytes of weights in it. Cached: a version of few GB takes as many ms as counting them."""
        return {b.index: sum(s.num_bytes for s in b.segments) for b in self.buckets}

    def explain(self) -> str:
        """The plan for people: totals, casts, load of every rank."""
        segments = [s for b in self.buckets for s in b.segments]
        casts: dict[str, int] = defaultdict(int)
        for s in segments:
            if s.cast_from != s.dtype and not s.scales_of:
                casts[f"{s.cast_from} -> {s.dtype}"] += s.num_bytes
        lines = [
            (
                f"plan {self.key[:12]}: {_size(self.payload_bytes)} in {len(segments)} segments, "
                f"{len(self.buckets)} buckets of at most {_size(self.bucket_bytes)}"
            ),
            *(f"  cast {what}: {_size(n)}" for what, n in sorted(casts.items())),
        ]
        for rank in range(self.num_senders):
            sent = self.sent_by(rank)
            lines.append(f"  trainer rank {rank} sends {_size(_payload(sent))} in {len(sent)} buckets")
        for rank in range(self.num_sinks):
            received = self.received_by(rank)
            owners = sorted({b.owner for b in received})
            lines.append(
                f"  rollout rank {rank} reads {_size(_payload(received))} in {len(received)} buckets "
                f"from trainer ranks {owners}"
            )
        return "\n".join(lines)


def make_plan(sources: Sequence[Layout], sinks: Sequence[Layout], *, bucket_bytes: int, spread: bool = False) -> Plan:
    """Intersect what trainer ranks hold with what rollout ranks need.

    Args:
        sources: layout of each trainer rank, in rank order.
        sinks: layout of each rollout rank, in rank order.
        bucket_bytes: upper limit of a bucket, a positive multiple of ALIGN. Larger tensors are split.
        spread: serve the sinks that want one box from as many of its holders as there are (PL-3): for transports where
            an owner sends to each sink by itself.

    Raises:
        LayoutError: the sides disagree on a shape, ask for a cast that is refused, or a tensor of a sink is not covered
            (W2). All uncovered names are in the text.
        ValueError: `bucket_bytes` is not a positive multiple of ALIGN.
    """
    if bucket_bytes <= 0 or bucket_bytes % ALIGN:
        raise ValueError(f"bucket_bytes = {bucket_bytes}: expected a positive multiple of {ALIGN} bytes")
    check_coverage(sources, sinks)
    holders = _holders(sources)
    pieces: list[_Piece] = []
    for entry, wanted_by in _wanted(sinks):
        left = [entry.box]
        for source, ranks in holders[entry.name]:
            next_left: list[Box] = []
            for box in left:
                common = box.intersect(source.box)
                if common is None:
                    next_left.append(box)
                    continue
                if common != box:
                    next_left.extend(box.minus(common))
                for part in _split(common, entry, bucket_bytes):
                    pieces.extend(_pieces(part, entry, source, ranks, wanted_by, spread=spread))
            left = next_left
            if not left:
                break
    owners = _choose_owners(pieces, len(sources))
    return Plan(
        key=plan_key(sources, sinks, bucket_bytes=bucket_bytes, spread=spread),
        num_senders=len(sources),
        num_sinks=len(sinks),
        bucket_bytes=bucket_bytes,
        buckets=tuple(_pack(pieces, owners, bucket_bytes)),
    )


def plan_key(sources: Sequence[Layout], sinks: Sequence[Layout], *, bucket_bytes: int, spread: bool = False) -> str:
    """Hex digest of everything that a plan depends on (PL-6). Layouts count in rank order."""
    digests = [s.digest for s in sources], [s.digest for s in sinks]
    return plan_key_of(*digests, bucket_bytes=bucket_bytes, spread=spread)


def plan_key_of(sources: Sequence[str], sinks: Sequence[str], *, bucket_bytes: int, spread: bool = False) -> str:
    """`plan_key` from the digests of the layouts."""
    content = msgspec.msgpack.encode((list(sources), list(sinks), bucket_bytes, spread, ALIGN))
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class _Piece(msgspec.Struct, frozen=True):
    name: str
    box: Box
    shape: tuple[int, ...]
    dtype: str
    cast_from: str
    holders: tuple[int, ...]
    sinks: tuple[int, ...]
    num_bytes: int
    """With its scales, which start at the next multiple of ALIGN."""
    scaling: Scaling | None = None
    scales: Box | None = None
    """The scales that this piece sends; None when it sends none."""
    shared: bool = False


def _holders(sources: Sequence[Layout]) -> dict[str, list[tuple[Entry, tuple[int, ...]]]]:
    """Name -> distinct non-empty boxes with the ranks that hold each, by position."""
    ranks: dict[Entry, list[int]] = defaultdict(list)
    for layout, alike in distinct(sources):
        for entry in layout.entries:
            if not entry.box.is_empty:
                ranks[entry].extend(alike)
    held: dict[str, list[tuple[Entry, tuple[int, ...]]]] = defaultdict(list)
    for entry, who in sorted(ranks.items(), key=lambda item: item[0].box):
        held[entry.name].append((entry, tuple(sorted(who))))
    return held


def _wanted(sinks: Sequence[Layout]) -> Iterator[tuple[Entry, tuple[int, ...]]]:
    """Distinct non-empty entries that must be sent, with the ranks that want each, in order of first declaration."""
    ranks: dict[Entry, list[int]] = defaultdict(list)
    for layout, alike in distinct(sinks):
        for entry in sent_entries(layout):
            if not entry.box.is_empty:
                ranks[entry].extend(alike)
    layers: dict[str, int] = {}
    for entry in ranks:
        layers.setdefault(layer_of(entry.name), len(layers))
    in_order = sorted(ranks.items(), key=lambda item: layers[layer_of(item[0].name)])  # stable: PL-7
    return ((entry, tuple(sorted(who))) for entry, who in in_order)


def layer_of(name: str) -> str:
    """The decoder layer of a tensor, or its own name outside of them."""
    found = _LAYER.match(name)
    return found.group() if found else name


_LAYER = re.compile(r".*?\.(\d+)\.")


def _pieces(
    part: Box, entry: Entry, source: Entry, holders: tuple[int, ...], sinks: tuple[int, ...], *, spread: bool
) -> Iterator[_Piece]:
    scaling = entry.scaling if entry.scaling != source.scaling else None
    num_bytes = part.numel * ITEM_BYTES[entry.dtype]
    scales, shared = None, False
    if scaling is not None:
        scales = _scales_sent(part, entry, scaling)
        shared = scaling.cuts(entry.shape, part.lo, part.hi)
        if scales is not None:
            num_bytes = _aligned(num_bytes) + scales.numel * ITEM_BYTES["float32"]
    groups = min(len(holders), len(sinks)) if spread else 1
    for group in range(groups):
        to = sinks[group::groups]
        yield _Piece(
            entry.name, part, entry.shape, entry.dtype, source.dtype, holders, to, num_bytes, scaling, scales, shared
        )


def _scales_sent(part: Box, entry: Entry, scaling: Scaling) -> Box | None:
    """The scales whose block has its first element inside the sink's box in this part (PL-8)."""
    block = scaling.block_of(entry.shape)
    lo = tuple(a // b if a == start else -(-a // b) for a, start, b in zip(part.lo, entry.box.lo, block, strict=True))
    hi = tuple(-(-z // b) for z, b in zip(part.hi, block, strict=True))
    if any(z <= a for a, z in zip(lo, hi, strict=True)):
        return None
    return Box(lo, hi)


def _split(box: Box, entry: Entry, bucket_bytes: int) -> Iterator[Box]:
    """Cut a box into parts that fit into a bucket, along the first dimension that can be cut, at edges of blocks."""
    limit = bucket_bytes // ITEM_BYTES[entry.dtype]
    grid: tuple[int, ...] = (1,) * len(box.lo)
    if entry.scaling is not None:
        rows, columns = entry.scaling.block_of(entry.shape)
        grid = (rows, columns) if entry.scaling.kind == "block" else (1, 1)
        each = 1 + ITEM_BYTES["float32"] / (min(rows, entry.shape[0]) * min(columns, entry.shape[1]))
        limit = max(ALIGN, int((limit - 2 * ALIGN) / each))
    return _cut(box, limit, grid)


def _cut(box: Box, max_numel: int, grid: tuple[int, ...]) -> Iterator[Box]:
    if box.numel <= max_numel:
        yield box
        return
    shape = box.shape
    d = next((i for i, n in enumerate(shape) if n > grid[i]), -1)
    if d < 0:  # a single block is larger than a bucket: cut it all the same
        grid, d = (1,) * len(grid), next(i for i, n in enumerate(shape) if n > 1)
    step = max(grid[d], max_numel * shape[d] // box.numel // grid[d] * grid[d])
    a = box.lo[d]
    while a < box.hi[d]:
        b = min((a + step) // grid[d] * grid[d], box.hi[d])
        b = b if b > a else min(a + step, box.hi[d])
        yield from _cut(Box((*box.lo[:d], a, *box.lo[d + 1 :]), (*box.hi[:d], b, *box.hi[d + 1 :])), max_numel, grid)
        a = b


def _choose_owners(pieces: Sequence[_Piece], num_senders: int) -> list[int]:
    """PL-4. Pieces with one holder have no choice and count first."""
    load = [0] * num_senders
    owners = [piece.holders[0] for piece in pieces]
    for piece in pieces:
        if len(piece.holders) == 1:
            load[piece.holders[0]] += piece.num_bytes
    shared = [i for i, piece in enumerate(pieces) if len(piece.holders) > 1]
    for i in sorted(shared, key=lambda i: (-pieces[i].num_bytes, i)):
        owners[i] = min(pieces[i].holders, key=lambda rank: (load[rank], rank))
        load[owners[i]] += pieces[i].num_bytes
    return owners


def _pack(pieces: Sequence[_Piece], owners: Sequence[int], bucket_bytes: int) -> Iterator[Bucket]:
    """Fill one open bucket per (owner, sinks); a bucket takes its number when its first piece arrives."""
    filled: list[tuple[int, tuple[int, ...], list[Segment]]] = []
    open_at: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
    for piece, owner in zip(pieces, owners, strict=True):
        group = (owner, piece.sinks)
        index, offset = open_at.get(group, (-1, 0))
        if index < 0 or offset + piece.num_bytes > bucket_bytes:
            index, offset = len(filled), 0
            filled.append((owner, piece.sinks, []))
        filled[index][2].extend(_segments(piece, offset))
        open_at[group] = (index, _aligned(offset + piece.num_bytes))
    places: dict[int, int] = defaultdict(int)
    for index, (owner, sinks, segments) in enumerate(filled):
        num_bytes = segments[-1].offset + segments[-1].num_bytes
        yield Bucket(index, owner, sinks, places[owner], num_bytes, tuple(segments))
        places[owner] += 1


def _segments(piece: _Piece, offset: int) -> Iterator[Segment]:
    weight = Segment(
        piece.name, piece.box, piece.dtype, piece.cast_from, offset, piece.shape, piece.scaling, piece.shared
    )
    yield weight
    if piece.scaling is not None and piece.scales is not None:
        yield Segment(
            name=piece.scaling.scale_name,
            box=piece.scales,
            dtype="float32",
            cast_from="float32",
            offset=_aligned(offset + weight.num_bytes),
            shape=piece.scaling.scale_shape(piece.shape),
            scales_of=piece.name,
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def _payload(buckets: Iterable[Bucket]) -> int:
    return sum(s.num_bytes for b in buckets for s in b.segments)


def _size(num_bytes: int) -> str:
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"
