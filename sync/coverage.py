"""Proof that every tensor of a rollout rank is accounted for, before the first transfer (W2).

CO-1: each entry of a sink is *sent* (covered by boxes of trainer ranks, every element), *derived* on the sink from an
      entry that is sent, or *constant*. Anything else fails here, with every name in the text.
CO-2: trainer and sink agree on the full shape of a tensor, and trainer ranks agree on its dtype.
CO-3: a rollout rank wants one box of a name (LA-3).
CO-4: a derived tensor that is listed as an entry has the box, shape and dtype of its origin, so that both can share
      memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from sync.layout import Box, Entry, Layout, LayoutError

__all__ = ["check_coverage", "sent_entries"]


def sent_entries(sink: Layout) -> Iterator[Entry]:
    """Entries of a sink that trainer ranks must send: all but the derived and the constant ones."""
    constant = set(sink.constant)
    return (e for e in sink.entries if e.name not in sink.derived and e.name not in constant)


def check_coverage(sources: Sequence[Layout], sinks: Sequence[Layout]) -> None:
    """Check CO-1 to CO-4 for every rollout rank.

    Raises:
        LayoutError: with one line per tensor and rank that fails, up to 20, and the count of the rest.
    """
    held: dict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for rank, layout in enumerate(sources):
        for entry in layout.entries:
            held[entry.name].append((rank, entry))
    faults = [*_trainer_faults(held)]
    checked: set[Entry] = set()
    for rank, sink in enumerate(sinks):
        several = [
            f"{name}: rollout rank {rank} wants {len(parts)} boxes of it; one of a name can be staged, so want the box "
            f"around them"
            for name, parts in sink.parts.items()
            if len(parts) > 1
        ]
        faults.extend(several or _derived_faults(rank, sink))
        for entry in sent_entries(sink):
            if entry not in checked:
                checked.add(entry)
                faults.extend(_sent_faults(rank, entry, held.get(entry.name, [])))
    if faults:
        shown = "\n  ".join(faults[:20])
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise LayoutError(
            f"weights can't be planned:\n  {shown}{more}\nBoth sides must load one model; a tensor that is made on the "
            f"rollout rank belongs in `derived`, one that never changes in `constant` of its layout"
        )


def _trainer_faults(held: dict[str, list[tuple[int, Entry]]]) -> Iterator[str]:
    for name, entries in held.items():
        first_rank, first = entries[0]
        for rank, entry in entries[1:]:
            if (entry.shape, entry.dtype) != (first.shape, first.dtype):
                yield (
                    f"{name}: trainer rank {first_rank} declares {first.dtype} {list(first.shape)}, "
                    f"trainer rank {rank} declares {entry.dtype} {list(entry.shape)}"
                )


def _derived_faults(rank: int, sink: Layout) -> Iterator[str]:
    sent = {entry.name: entry for entry in sent_entries(sink)}
    for name, origin in sink.derived.items():
        source, entry = sent.get(origin), sink.by_name.get(name)
        if source is None:
            yield f"{name}: rollout rank {rank} derives it from {origin}, which is not among the tensors sent to it"
        elif entry is not None and (entry.box, entry.shape, entry.dtype) != (source.box, source.shape, source.dtype):
            yield (
                f"{name}: rollout rank {rank} derives it from {origin}, but wants {entry.dtype} {entry.box} of "
                f"{list(entry.shape)} and its origin is {source.dtype} {source.box} of {list(source.shape)}"
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
    left = [] if entry.box.is_empty else [entry.box]
    for box in {e.box for _, e in held}:
        left = [rest for part in left for rest in _without(part, box)]
    if left:
        missing = ", ".join(str(box) for box in sorted(left)[:3])
        yield f"{entry.name}: rollout rank {rank} needs {entry.box}, no trainer rank holds {missing}"


def _without(part: Box, box: Box) -> list[Box]:
    return [part] if box.is_empty else part.minus(box)
