"""Stage, verify, commit: whether a whole fleet moves to a version or nobody does. Facts in, actions out; pure (W4).

        Packed, Staged                all staged and equal             Applied by all
    staging -----------> staging ----------------------> committing ----------------> done
       |  Failed, Expired, a digest that differs             | Failed: Fence that sink, go on with the others
       v                                                     v
    aborted: Abort to everybody, once                     done, when every sink has applied or is fenced

CM-1: Apply is issued once, to all sinks, and only when every sink has staged every shard it was to get with the digest
      that its owner packed. Before that no sink may apply; after an Abort none ever will.
CM-2: the decision is final. After Apply a failure fences the sink that failed (it must not serve: it may hold half of a
      version); it never takes the version back from the others. So no two sinks that may serve differ after the end.
CM-3: facts about another version are late: counted and ignored. A repeated fact changes nothing. A fact that
      contradicts an earlier one (another digest for the same shard) aborts.
CM-4: the machine holds no clock and no task; whoever drives it says when the deadline has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

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
    """The owner of a shard (a bucket of the plan) declares its digest."""

    version: int
    shard: int
    digest: int


class Staged(msgspec.Struct, frozen=True, tag=True):
    """A sink holds a shard in shadow memory; `digest` is of the bytes as they arrived."""

    version: int
    sink: int
    shard: int
    digest: int


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
        wanted: for each sink, in rank order, the shards it must stage.
        names: shard -> tensors in it, for reasons.
    """

    def __init__(self, version: int, wanted: Sequence[frozenset[int]], names: Mapping[int, str] | None = None) -> None:
        self.version = version
        self.phase: Phase = "staging"
        self.reason = ""
        """Why it was aborted."""
        self.num_late = 0
        """Facts about other versions (CM-3)."""
        self._wanted = list(wanted)
        self._names = names or {}
        self._packed: dict[int, int] = {}
        self._staged: list[dict[int, int]] = [{} for _ in wanted]
        self._applied: set[int] = set()
        self._fenced: set[int] = set()

    def on(self, fact: Fact) -> list[Action]:
        """Take in one fact; returns what must be done now, in order."""
        if fact.version != self.version:
            self.num_late += 1
            return []
        if self.phase == "staging":
            return self._on_staging(fact)
        if self.phase == "committing":
            return self._on_committing(fact)
        return []

    def waiting_for(self) -> str:
        """Who has not answered yet, in words."""
        if self.phase == "staging":
            unpacked = set().union(*self._wanted) - self._packed.keys()
            late = [
                f"rollout rank {sink} has not staged {self._name(min(wanted - staged.keys()))}"
                for sink, (wanted, staged) in enumerate(zip(self._wanted, self._staged, strict=True))
                if wanted - staged.keys()
            ]
            return f"trainer has not packed {self._name(min(unpacked))}" if unpacked else "; ".join(late)
        if self.phase == "committing":
            open_sinks = sorted(set(range(len(self._wanted))) - self._applied - self._fenced)
            return f"rollout ranks {open_sinks} have not applied version {self.version}"
        return ""

    @property
    def serving(self) -> frozenset[int]:
        """Sinks that have applied this version and are not fenced."""
        return frozenset(self._applied - self._fenced)

    def _on_staging(self, fact: Fact) -> list[Action]:
        match fact:
            case Packed(shard=shard, digest=digest):
                if self._packed.setdefault(shard, digest) != digest:
                    return self._abort(
                        f"{self._name(shard)}: its owner declared two digests for version {self.version}"
                    )
            case Staged(sink=sink, shard=shard, digest=digest):
                if shard not in self._wanted[sink]:
                    return self._abort(f"rollout rank {sink} staged {self._name(shard)}, which is not in its plan")
                if self._staged[sink].setdefault(shard, digest) != digest:
                    return self._abort(f"rollout rank {sink} staged {self._name(shard)} twice with different bytes")
            case Failed(side=side, rank=rank, reason=reason):
                return self._abort(f"{side} rank {rank}: {reason}")
            case Expired():
                return self._abort(f"deadline passed: {self.waiting_for()}")
            case Applied(sink=sink):
                return self._abort(f"rollout rank {sink} applied version {self.version} before it was decided")
        return self._decide()

    def _decide(self) -> list[Action]:
        for sink, staged in enumerate(self._staged):
            for shard, digest in staged.items():
                if self._packed.get(shard, digest) != digest:
                    return self._abort(
                        f"rollout rank {sink}: {self._name(shard)} arrived with digest {digest:016x}, its owner packed "
                        f"{self._packed[shard]:016x}"
                    )
        complete = all(wanted == staged.keys() for wanted, staged in zip(self._wanted, self._staged, strict=True))
        if not complete or set().union(*self._wanted) - self._packed.keys():
            return []
        self.phase = "committing" if self._wanted else "done"
        return [Apply(self.version)]

    def _on_committing(self, fact: Fact) -> list[Action]:
        actions: list[Action] = []
        match fact:
            case Applied(sink=sink):
                self._applied.add(sink)
            case Failed(side="rollout", rank=sink, reason=reason) if sink not in self._fenced:
                self._fenced.add(sink)
                actions.append(Fence(self.version, sink, reason))
            case Expired():
                for sink in sorted(set(range(len(self._wanted))) - self._applied - self._fenced):
                    self._fenced.add(sink)
                    actions.append(Fence(self.version, sink, "it did not apply the version within the deadline"))
            case _:
                pass  # trainers are done, repeated facts change nothing
        if len(self._applied | self._fenced) == len(self._wanted):
            self.phase = "done"
        return actions

    def _abort(self, reason: str) -> list[Action]:
        self.phase = "aborted"
        self.reason = reason
        return [Abort(self.version, reason)]

    def _name(self, shard: int) -> str:
        return self._names.get(shard, f"shard {shard}")
