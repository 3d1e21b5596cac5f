"""Which replica gets a request: the one with the least outstanding tokens. Pure bookkeeping, no clock and no mesh.

RO-1: a request goes to a replica whose outstanding tokens are minimal; among equals the lowest rank.
RO-2: what `place` adds for a request, `release` takes away: with nothing in flight every load is 0.

The load of a request is an upper bound, since nobody knows how long completions get: each sample may take its whole
limit, and the prompt is computed once for all of them.
"""

from __future__ import annotations


def request_tokens(prompt_length: int, num_samples: int, max_tokens: int) -> int:
    """Most tokens that a replica may have to compute for a request."""
    return prompt_length + num_samples * max_tokens


class LeastTokens:
    """Outstanding tokens of each replica.

    Args:
        num_replicas: ranks 0..num_replicas-1.
    """

    def __init__(self, num_replicas: int) -> None:
        if num_replicas < 1:
            raise ValueError(f"routing: expected at least one replica, got {num_replicas}; give [rollout] a rank")
        self._outstanding = [0] * num_replicas

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Tokens placed and not released, by rank."""
        return tuple(self._outstanding)

    def place(self, tokens: int) -> int:
        """Choose a replica for a request of so many tokens, count them, and return its rank."""
        rank = min(range(len(self._outstanding)), key=self._outstanding.__getitem__)
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
