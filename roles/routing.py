"""Which replica gets a request. Pure bookkeeping, no clock and no mesh.

RO-1: a request goes to a replica whose outstanding tokens are minimal; among equals the lowest rank.
RO-2: what `place` adds for a request, `release` takes away: with nothing in flight every load is 0.
RO-3: a request of a session goes to the replica that served the session last, where its prefix is cached, unless that
      replica is out of service or more than SLACK_TOKENS busier than the least busy one.
      The first request of a `Member` goes where its group was served last, under the same conditions: episodes of one
      prompt read the same beginning.
RO-4: a replica out of service gets nothing; what it holds stays counted until it is released.
RO-5: sessions are forgotten when told to, and the longest unused ones beyond MAX_SESSIONS.

The samples of a group are one request, unless they are episodes. The load of a request is an upper bound, since
nobody knows how long completions get: each sample may take its whole limit, and the prompt is computed once for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

SLACK_TOKENS = 4096
"""What computing a long prefix again may cost in tokens: beyond this, balance is worth more than a warm cache."""

MAX_SESSIONS = 65_536


def request_tokens(prompt_length: int, num_samples: int, max_tokens: int) -> int:
    """Most tokens that a replica may have to compute for a request."""
    return prompt_length + num_samples * max_tokens


class Member(NamedTuple):
    """The session of one episode of a group that begins alike."""

    group: Hashable
    name: Hashable


class NoReplica(RuntimeError):
    """Every replica is out of service."""


class Router:
    """Outstanding tokens of each replica, and where sessions live.

    Args:
        num_replicas: ranks 0..num_replicas-1.
    """

    def __init__(self, num_replicas: int) -> None:
        if num_replicas < 1:
            raise ValueError(f"routing: expected at least one replica, got {num_replicas}; give [rollout] a rank")
        self._outstanding = [0] * num_replicas
        self._serving = [True] * num_replicas
        self._sessions: OrderedDict[Hashable, int] = OrderedDict()

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Tokens placed and not released, by rank."""
        return tuple(self._outstanding)

    @property
    def serving(self) -> tuple[int, ...]:
        """Ranks in service."""
        return tuple(rank for rank, serving in enumerate(self._serving) if serving)

    def place(self, tokens: int, session: Hashable | None = None) -> int:
        """Choose a replica for a request of so many tokens, count them, and return its rank.

        Raises:
            NoReplica: none is in service.
        """
        if not self.serving:
            raise NoReplica("routing: no replica is in service")
        rank = min(self.serving, key=self._outstanding.__getitem__)
        if session is not None:
            group = session.group if isinstance(session, Member) else session
            home = self._sessions.get(session, self._sessions.get(group, rank))
            if self._serving[home] and self._outstanding[home] <= self._outstanding[rank] + SLACK_TOKENS:
                rank = home
            for key in dict.fromkeys((group, session)):
                self._sessions[key] = rank
                self._sessions.move_to_end(key)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self._outstanding[rank] += tokens
        return rank

    def release(self, rank: int, tokens: int) -> None:
        """The request has left the replica, in whatever way.

        Raises:
            RuntimeError: more is released than was placed: some request is counted twice.
        """
        if tokens > self._outstanding[rank]:
            raise RuntimeError(
                f"routing: replica {rank} has {self._outstanding[rank]} outstanding tokens, asked to release {tokens}; "
                f"each request must be released once, with the tokens it was placed with"
            )
        self._outstanding[rank] -= tokens

    def forget(self, session: Hashable) -> None:
        """The session has ended. Unknown ones are no error."""
        self._sessions.pop(session, None)

    def serve(self, rank: int, serving: bool) -> None:
        """Take a replica into service or out of it."""
        self._serving[rank] = serving
