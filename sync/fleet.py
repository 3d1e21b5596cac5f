"""The ranks of a weight session as the controller sees them: who belongs, who is behind, who is gone.

A rank is an actor. The weights of a rollout actor may lie in several processes, its *parts*: workers of one engine. The
plan knows parts only: each has a number there and a layout of its own (`Seat`). What is decided is decided of ranks.

FL-1: replicas are left out and come back whole: all ranks of one that has lost a rank are out.
FL-2: a rank that was left out is asked again before every version, and belongs as soon as it answers. One that all have
      waited for until a deadline, time after time, is given 1, 3, 7 ... versions of rest between, unless its process is
      another: it does not hold up every version.
FL-3: calls to many ranks run at once; the first error cancels the others and is raised as itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from runtime import ActorMesh, TaskGroup

__all__ = ["Fleet", "Rank", "Seat", "first_line", "seated", "together"]

T = TypeVar("T")

MOST_REST = 31
"""Versions (FL-2)."""


class Rank:
    """One actor of a mesh, with the name that errors use."""

    def __init__(self, mesh: ActorMesh, side: Literal["trainer", "rollout"], index: int) -> None:
        self.side = side
        self.index = index
        self.seats = [Seat(self, 0, index)]
        """Its parts. There is one, until it says that there are more."""
        self.version: int | None = None
        """Rollout: the version it has put into service through this session."""
        self.untold: tuple[int, str, str] | None = None
        """Rollout: what `sync_fence` is to tell it, and has not reached it yet."""
        self.times_late = 0
        """Rollout: how often in a row a version was held up by it."""
        self.rest = 0
        """Rollout: versions that are yet to go on without it, whatever it answers (FL-2)."""
        self._mesh = mesh

    def __str__(self) -> str:
        return f"{self.side} rank {self.index}"

    async def call(self, endpoint: str, *args: object, timeout: float) -> Any:
        return await getattr(self._mesh, endpoint).options(timeout=timeout).call_one(*args)

    def was_late(self) -> None:
        """All have waited for it until a deadline."""
        self.rest = min(2**self.times_late - 1, MOST_REST)
        self.times_late += 1

    def was_on_time(self) -> None:
        """It has taken a version, or is another process."""
        self.times_late = self.rest = 0

    def has_rested(self) -> bool:
        """Whether it may take part in the next version; asked once for each."""
        self.rest, rested = max(0, self.rest - 1), self.rest == 0
        return rested

    def have_parts(self, count: int) -> None:
        """It has said how many parts it has."""
        if count != len(self.seats):
            self.seats = [Seat(self, part, self.index) for part in range(count)]

    @classmethod
    def all_of(cls, mesh: ActorMesh, side: Literal["trainer", "rollout"]) -> list[Rank]:
        return [cls(mesh.slice(**mesh.shape.coordinates(i)), side, i) for i in range(len(mesh))]


class Seat:
    """A part of a rank: what the plan calls a sender or a sink."""

    def __init__(self, rank: Rank, part: int, number: int) -> None:
        self.rank = rank
        self.part = part
        self.number = number
        """In the plan; that of the rank where every rank has one part."""
        self.known = ""
        """Digest of the layout that the session has from it."""
        self.incarnation = ""

    @property
    def side(self) -> Literal["trainer", "rollout"]:
        return self.rank.side

    def __str__(self) -> str:
        return f"{self.rank}, worker {self.part}" if len(self.rank.seats) > 1 else str(self.rank)

    async def call(self, endpoint: str, *args: object, timeout: float) -> Any:
        """An endpoint that wants the part, behind its other arguments, on rollout ranks."""
        part = (self.part,) if self.side == "rollout" else ()
        return await self.rank.call(endpoint, *args, *part, timeout=timeout)


def seated(ranks: Iterable[Rank]) -> list[Seat]:
    """The parts of all these ranks, numbered for a plan: also those of ranks that take no part in it."""
    seats = [seat for rank in ranks for seat in rank.seats]
    for number, seat in enumerate(seats):
        seat.number = number
    return seats


class Fleet:
    """The rollout ranks, in replicas of equal size.

    Args:
        quorum: replicas that must take part; 0: all.
    """

    def __init__(self, ranks: Sequence[Rank], ranks_per_replica: int, quorum: int) -> None:
        if ranks_per_replica < 1 or len(ranks) % ranks_per_replica:
            raise ValueError(
                f"{len(ranks)} rollout ranks don't divide into replicas of {ranks_per_replica}; give the ranks of one "
                f"engine"
            )
        replicas = len(ranks) // ranks_per_replica
        if quorum > replicas:
            raise ValueError(f"[sync] quorum = {quorum}: there are {replicas} rollout replicas; choose at most as many")
        self.ranks = list(ranks)
        self.left_out: dict[int, str] = {}
        """Rank -> why it does not take part."""
        self._size = ranks_per_replica
        self._quorum = quorum or replicas

    @property
    def members(self) -> list[Rank]:
        """Ranks that take part."""
        return [rank for rank in self.ranks if rank.index not in self.left_out]

    def leave_out(self, lost: dict[int, str]) -> bool:
        """Leave the replicas of these ranks out (FL-1); False, with nothing changed, if too few would remain."""
        out = dict(self.left_out)
        for index, reason in lost.items():
            first = index // self._size * self._size
            for rank in range(first, first + self._size):
                out.setdefault(rank, reason if rank == index else f"rollout rank {index} of its replica: {reason}")
        if (len(self.ranks) - len(out)) // self._size < self._quorum:
            return False
        self.left_out = out
        return True

    def take_back(self, answering: Iterable[int]) -> None:
        """Ranks that answer again; a replica belongs when all of its ranks do."""
        back = set(answering)
        for first in range(0, len(self.ranks), self._size):
            replica = range(first, first + self._size)
            if all(rank in back or rank not in self.left_out for rank in replica):
                for rank in replica:
                    self.left_out.pop(rank, None)


async def together(coros: Iterable[Awaitable[T]]) -> list[T]:
    """Run all at once; the first error cancels the others and is raised as itself (FL-3)."""

    async def one(coro: Awaitable[T]) -> T:
        return await coro

    async with TaskGroup("sync") as tasks:
        running = [tasks.start(one(coro), name=f"rank {i}") for i, coro in enumerate(coros)]
    return [task.result() for task in running]


def first_line(error: BaseException) -> str:
    """A remote error's names mesh, rank, endpoint and text; its traceback stays with the cause."""
    return str(error).partition("\n")[0] or type(error).__name__
