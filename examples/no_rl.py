"""The runtime alone, nothing about learning: a number estimated by several processes, with a failure on the way.

python -m examples.no_rl
"""

from __future__ import annotations

import asyncio
import random

from runtime import Actor, current_rank, endpoint, this_host


# --8<-- [start:no-rl]
class Darts(Actor):
    """Throws darts at a square and counts those in the circle."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(1000 * seed + current_rank())

    @endpoint
    def throw(self, darts: int) -> int:
        if darts < 1:
            raise ValueError(f"darts: expected at least 1, got {darts}")
        return sum(self._random.random() ** 2 + self._random.random() ** 2 < 1 for _ in range(darts))


async def estimate(processes: int, darts: int) -> float:
    async with this_host() as host:
        procs = await host.spawn_procs({"rank": processes}, name="darts")
        mesh = await procs.spawn("darts", Darts, seed=7)
        try:
            await mesh.throw.call(0)
        except ValueError as error:  # the user's own class, with role, rank and remote traceback in its text
            print(f"refused: {str(error).splitlines()[0]}")
        hits = await mesh.throw.call(darts)
        return 4.0 * int(sum(hits.values())) / (processes * darts)


# --8<-- [end:no-rl]


if __name__ == "__main__":
    print(f"pi is about {asyncio.run(estimate(processes=2, darts=200_000)):.3f}")
