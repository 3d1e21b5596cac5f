"""Stage, verify, commit: whether a whole fleet moves to a version or nobody does. Facts in, actions out; pure (W4).

        Packed, Staged                all staged and equal             Applied by all
    staging -----------> staging ----------------------> committing ----------------> done
       |  Failed, Expired, a digest that differs             | Failed: Fence that sink, go on with the others
       v                                                     v
    aborted: Abort to everybody, once                     done, when every sink has applied or is fenced

CM-1: Apply is issued once, to all sinks, and only when every sink has staged every shard it was to get with the digests
      that its owner packed, segment by segment. Before that no sink may apply; after an Abort none ever will.
CM-2: the decision is final. After Apply a failure fences the sink that failed (it must not serve: it may hold half of a
      version); it never takes the version back from the others. So no two sinks that may serve differ after the end.
CM-3: facts about another version are late and ignored. A repeated fact changes nothing. A fact that
      contradicts an earlier one (another digest for the same shard) aborts.
CM-4: the machine holds no clock and no task; whoever drives it says when the deadline has passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from sync.plan import Bucket
from sync.transport import tensors_of

__all__ = [
    "Abort",
    "Action",
    "Applied",
    "Apply",
    "CommitMachine",
    "Expired",
    "Fact",
    "Failed",
    "Fence",
    "Packed",
    "Staged",
]


class Packed(msgspec.Struct, frozen=True, tag=True):
    """The owner of a shard (a bucket of the plan) declares the digests of its segments."""

    version: int
    shard: int
    digests: tuple[int, ...]


class Staged(msgspec.Struct, frozen=True, tag=True):
    """A sink holds a shard in shadow memory; `digests` are of the bytes as they lie there."""

    version: int
    sink: int
    shard: int
    digests: tuple[int, ...]


class Applied(msgspec.Struct, frozen=True, tag=True):
    """A sink has put the version into service."""

    version: int
    sink: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank can't go on with this version."""

    version: int
    side: Literal["trainer", "rollout"]
    rank: int
    reason: str


class Expired(msgspec.Struct, frozen=True, tag=True):
    """The deadline of the version has passed."""

    version: int


class Apply(msgspec.Struct, frozen=True, tag=True):
    """To all sinks: put the version into service."""

    version: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """To all ranks of both sides: forget the version; the one before it keeps serving."""

    version: int
    reason: str


class Fence(msgspec.Struct, frozen=True, tag=True):
    """This sink must not serve any more."""

    version: int
    sink: int
    reason: str


Fact = Packed | Staged | Applied | Failed | Expired
Action = Apply | Abort | Fence
Phase = Literal["staging", "committing", "done", "aborted"]


class CommitMachine:
    """The decision about one version.

    Args:
        version: the version being published.
        wanted: for each sink the shards it must stage.
        buckets: shard -> the bucket that it is, for reasons.
        sinks: what people call them, for reasons; "rollout rank 3" where nothing is said.
    """

    def __init__(
        self,
        version: int,
        wanted: Mapping[int, frozenset[int]],
        buckets: Mapping[int, Bucket] | None = None,
        sinks: Mapping[int, str] | None = None,
    ) -> None:
        self.version = version
        self.phase: Phase = "staging"
        self.reason = ""
        """Why it was aborted."""
        self._wanted = dict(wanted)
        self._buckets = buckets or {}
        self._sinks = sinks or {}
        self._packed: dict[int, tuple[int, ...]] = {}
        self._unpacked = set().union(*wanted.values())
        self._staged: dict[int, dict[int, tuple[int, ...]]] = {sink: {} for sink in wanted}
        self._open = sum(len(shards) for shards in wanted.values())
        """Shards that sinks have yet to stage, over all sinks."""
        self._applied: set[int] = set()
        self._fenced: set[int] = set()

    def on(self, fact: Fact) -> list[Action]:
        """Take in one fact; returns what must be done now, in order."""
        if fact.version != self.version:
            return []
        if self.phase == "staging":
            return self._on_staging(fact)
        if self.phase == "committing":
            return self._on_committing(fact)
        return []

    def waiting_for(self) -> str:
        """Who has not answered yet, in words."""
        if self.phase == "staging":
            if self._unpacked:
                return f"trainer has not packed {self._name(min(self._unpacked))}"
            return "; ".join(
                f"{self._sink(sink)} has not staged {self._name(min(wanted - self._staged[sink].keys()))}"
                for sink, wanted in self._wanted.items()
                if wanted - self._staged[sink].keys()
            )
        if self.phase == "committing":
            return f"{', '.join(map(self._sink, sorted(self._unanswered())))} have not applied version {self.version}"
        return ""

    @property
    def serving(self) -> frozenset[int]:
        """Sinks that have applied this version and are not fenced."""
        return frozenset(self._applied - self._fenced)

    def _on_staging(self, fact: Fact) -> list[Action]:
        match fact:
            case Packed(shard=shard, digests=digests):
                if self._packed.setdefault(shard, digests) != digests:
                    return self._abort(
                        f"{self._name(shard)}: its owner declared two digests for version {self.version}"
                    )
                self._unpacked.discard(shard)
                for sink, staged in self._staged.items():
                    if shard in staged and staged[shard] != digests:
                        return self._abort(self._differs(sink, shard, staged[shard]))
            case Staged(sink=sink, shard=shard, digests=digests):
                if shard not in self._wanted.get(sink, ()):
                    return self._abort(f"{self._sink(sink)} staged {self._name(shard)}, which is not in its plan")
                if shard not in self._staged[sink]:
                    self._staged[sink][shard] = digests
                    self._open -= 1
                if self._staged[sink][shard] != digests:
                    return self._abort(f"{self._sink(sink)} staged {self._name(shard)} twice with different bytes")
                if self._packed.get(shard, digests) != digests:
                    return self._abort(self._differs(sink, shard, digests))
            case Failed(side=side, rank=rank, reason=reason):
                return self._abort(f"{self._sink(rank) if side == 'rollout' else f'trainer rank {rank}'}: {reason}")
            case Expired():
                return self._abort(f"deadline passed: {self.waiting_for()}")
            case Applied(sink=sink):
                return self._abort(f"{self._sink(sink)} applied version {self.version} before it was decided")
        if self._open or self._unpacked:
            return []
        self.phase = "committing" if self._wanted else "done"
        return [Apply(self.version)]

    def _differs(self, sink: int, shard: int, found: tuple[int, ...]) -> str:
        """Which segment is not what its owner packed."""
        packed = self._packed[shard]
        if len(packed) != len(found):
            return f"{self._sink(sink)}: {self._name(shard)} has {len(found)} segments, its owner packed {len(packed)}"
        index = next(i for i, (a, b) in enumerate(zip(packed, found, strict=True)) if a != b)
        what = self._name(shard)
        owner = "its owner"
        if shard in self._buckets:
            bucket = self._buckets[shard]
            segment = bucket.segments[index]
            what, owner = f"{segment.name}, box {segment.box},", f"trainer rank {bucket.owner}"
        return (
            f"{self._sink(sink)}: {what} arrived with digest {found[index]:016x}, {owner} packed "
            f"{packed[index]:016x}; the bytes changed on the way. Publish the version again, and look for faulty "
            f"memory if it repeats"
        )

    def _on_committing(self, fact: Fact) -> list[Action]:
        actions: list[Action] = []
        match fact:
            case Applied(sink=sink):
                self._applied.add(sink)
            case Failed(side="rollout", rank=sink, reason=reason) if sink not in self._fenced:
                self._fenced.add(sink)
                actions.append(Fence(self.version, sink, reason))
            case Expired():
                for sink in sorted(self._unanswered()):
                    self._fenced.add(sink)
                    actions.append(Fence(self.version, sink, "it did not apply the version within the deadline"))
            case _:
                pass  # trainers are done, repeated facts change nothing
        if not self._unanswered():
            self.phase = "done"
        return actions

    def _unanswered(self) -> set[int]:
        return set(self._wanted) - self._applied - self._fenced

    def _abort(self, reason: str) -> list[Action]:
        self.phase = "aborted"
        self.reason = reason
        return [Abort(self.version, reason)]

    def _sink(self, number: int) -> str:
        return self._sinks.get(number, f"rollout rank {number}")

    def _name(self, shard: int) -> str:
        if shard not in self._buckets:
            return f"shard {shard}"
        return f"bucket {shard} ({tensors_of(self._buckets[shard])})"
