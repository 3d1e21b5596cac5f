"""Proof that every tensor of a rollout rank is accounted for, before the first transfer (W2).

CO-1: each entry of a sink is *sent* (covered by boxes of trainer ranks, every element), *scales* of a weight that is
      quantised on its way, *derived* on the sink from an entry that is sent, or *constant*. Anything else fails here,
      with every name in the text. What trainer ranks hold by itself is not derived: a head is tied on both sides or on
      none.
CO-2: trainer and sink agree on the full shape of a tensor, and trainer ranks agree on its dtype and format.
CO-3: a rollout rank wants one box of a name (LA-3), and a quantised box that doesn't cut blocks.
CO-4: a derived tensor that is listed as an entry has the box, shape and dtype of its origin, so that both can share
      memory. The scales of a quantised weight are listed with the box that its blocks make.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from sync.formats import QUANTISED
from sync.layout import Box, Entry, Layout, LayoutError

__all__ = ["check_coverage", "distinct", "sent_entries"]

Holders = Mapping[str, list[tuple[int, Entry]]]
"""Name -> the distinct entries of trainer ranks, each with the first rank that declares it."""

_CASTS = {"float16", "bfloat16", "float32", "float64"}


def sent_entries(sink: Layout) -> list[Entry]:
    """Entries of a sink that trainer ranks must send: all but the derived, the constant and the scales."""
    made = {entry.scaling.scale_name for entry in sink.entries if entry.scaling is not None}
    made.update(sink.derived, sink.constant)
    return [entry for entry in sink.entries if entry.name not in made]


def distinct(layouts: Sequence[Layout]) -> list[tuple[Layout, list[int]]]:
    """Each layout once, with the ranks that have it: the replicas of a fleet are planned once."""
    ranks: dict[str, tuple[Layout, list[int]]] = {}
    for rank, layout in enumerate(layouts):
        ranks.setdefault(layout.digest, (layout, []))[1].append(rank)
    return list(ranks.values())


def check_coverage(sources: Sequence[Layout], sinks: Sequence[Layout]) -> None:
    """Check CO-1 to CO-4 for every rollout rank.

    Raises:
        LayoutError: with one line per tensor and rank that fails, up to 20, and the count of the rest.
    """
    held: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    untied: dict[str, int] = {}
    for layout, ranks in distinct(sources):
        for entry in layout.entries:
            held[entry.name].append((ranks[0], entry))
            if entry.name not in layout.derived:
                untied[entry.name] = ranks[0]
    faults = [*_trainer_faults(held)]
    checked: set[Entry] = set()
    for sink, ranks in distinct(sinks):
        faults.extend(_shape_faults(ranks[0], sink) or _derived_faults(ranks[0], sink, untied))
        for entry in sent_entries(sink):
            if entry not in checked:
                checked.add(entry)
                faults.extend(_sent_faults(ranks[0], entry, held.get(entry.name, [])))
    if faults:
        shown = "\n  ".join(faults[:20])
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise LayoutError(
            f"weights can't be planned:\n  {shown}{more}\nBoth sides must load one model; a tensor that is made on the "
            f"rollout rank belongs in `derived`, one that never changes in `constant` of its layout"
        )


def _trainer_faults(held: Holders) -> Iterator[str]:
    for name, entries in held.items():
        first_rank, first = entries[0]
        for rank, entry in entries[1:]:
            if entry.shape != first.shape or entry.dtype != first.dtype or entry.scaling != first.scaling:
                yield f"{name}: trainer rank {first_rank} declares {first}, trainer rank {rank} declares {entry}"


def _shape_faults(rank: int, sink: Layout) -> list[str]:
    """CO-3, and CO-4 for scales."""
    faults = [
        f"{name}: rollout rank {rank} wants {len(parts)} boxes of it; one of a name can be staged, so want the box "
        f"around them"
        for name, parts in sink.parts.items()
        if len(parts) > 1
    ]
    for entry in sink.entries:
        if entry.scaling is None:
            continue
        if entry.scaling.kind == "block" and entry.scaling.cuts(entry.shape, entry.box.lo, entry.box.hi):
            faults.append(
                f"{entry.name}: rollout rank {rank} wants {entry}, whose edges run through blocks; split the tensor at "
                f"multiples of {entry.scaling.block[0]} rows and {entry.scaling.block[1]} columns"
            )
        expected = entry.scales()
        listed = sink.parts.get(expected.name, ())
        if not listed or listed[0] != expected:
            found = str(listed[0]) if listed else "nothing"
            faults.append(
                f"{expected.name}: scales of {entry.name} are {expected}, rollout rank {rank} lists {found}; list them "
                f"as they are"
            )
    return faults


def _derived_faults(rank: int, sink: Layout, untied: Mapping[str, int]) -> Iterator[str]:
    sent = {entry.name: entry for entry in sent_entries(sink)}
    for name, origin in sink.derived.items():
        source, entry = sent.get(origin), sink.by_name.get(name)
        if source is None:
            yield f"{name}: rollout rank {rank} derives it from {origin}, which is not among the tensors sent to it"
        elif name in untied:
            yield (
                f"{name}: rollout rank {rank} derives it from {origin}, trainer rank {untied[name]} holds it by "
                f"itself; tie it on both sides or on none (tie_word_embeddings)"
            )
        elif entry is not None and (entry.box, entry.shape, entry.dtype) != (source.box, source.shape, source.dtype):
            yield (
                f"{name}: rollout rank {rank} derives it from {origin}, but wants {entry} and its origin is {source}"
            )


def _sent_faults(rank: int, entry: Entry, held: list[tuple[int, Entry]]) -> Iterator[str]:
    if not held:
        yield f"{entry.name}: rollout rank {rank} needs it and no trainer rank has it"
        return
    source_rank, source = held[0]
    if source.shape != entry.shape:
        yield (
            f"{entry.name}: trainer rank {source_rank} has shape {list(source.shape)}, "
            f"rollout rank {rank} wants {list(entry.shape)}"
        )
        return
    if not _can_become(source, entry):
        yield (
            f"{entry.name}: trainer rank {source_rank} holds {source}, rollout rank {rank} wants {entry}; casts "
            f"between {', '.join(sorted(_CASTS))} and quantising from them are all that is made on the way"
        )
        return
    if any(e.box.contains(entry.box) for _, e in held):
        return
    left = [] if entry.box.is_empty else [entry.box]
    for box in {e.box for _, e in held}:
        left = [rest for part in left for rest in _without(part, box)]
        if not left:
            return
    missing = ", ".join(str(box) for box in sorted(left)[:3])
    yield f"{entry.name}: rollout rank {rank} needs {entry.box}, no trainer rank holds {missing}"


def _can_become(source: Entry, entry: Entry) -> bool:
    if source.dtype == entry.dtype:
        return source.scaling == entry.scaling
    if source.dtype not in _CASTS:
        return False
    return entry.dtype in _CASTS or (entry.dtype in QUANTISED and entry.scaling is not None)


def _without(part: Box, box: Box) -> list[Box]:
    return [part] if box.is_empty else part.minus(box)
