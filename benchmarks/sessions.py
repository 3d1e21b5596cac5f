"""1,000 concurrent sessions of several turns on the small engine: memory after warm-up, and the lag of the controller's
loop. `python -m benchmarks sessions`.

Each session is an episode of 6 turns whose environment answers at once, so that the controller has as much to do as it
ever has. Each is replaced as it ends: 6,000 in all. Memory is the controller's and the replica's together, at every
thousandth end; what is told is after the first 2,000.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.table import Row

TITLE = "Rollout: 1,000 concurrent sessions of several turns (small engine)"

SESSIONS, TURNS, ROUNDS, WARM = 1000, 6, 6, 2
"""Episodes are `ROUNDS` times `SESSIONS`; memory is compared after `WARM` times as many and at the end."""


class Answers:
    """Says two words after each turn, and ends after the last."""

    def __init__(self) -> None:
        self._turns = 0

    async def reset(self, prompt: Any) -> None:
        return None

    async def step(self, text: str) -> Any:
        from roles.environment import Reply

        self._turns += 1
        return Reply("w1 w2", done=self._turns == TURNS, reward=0.0)

    async def close(self) -> None:
        return None


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_run(Path(folder)))


async def _run(folder: Path) -> list[Row]:
    from transformers import AutoTokenizer

    from roles.dialogue import Dialogue
    from roles.environment import EpisodeLimits, Episodes
    from roles.rollout import Rollout, RolloutConfig
    from roles.types import Prompt, Sampling
    from runtime import TaskGroup, this_host
    from tests.roles.tiny import save_tiny_policy

    policy = save_tiny_policy(folder)
    dialogue = Dialogue(AutoTokenizer.from_pretrained(policy))
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    lags: list[float] = []
    async with this_host() as host, TaskGroup("benchmark") as tasks:
        rollout = await Rollout.start(host, RolloutConfig(max_running=256, max_len=256), policy)
        assert rollout.procs is not None
        pids = ["self", *map(str, rollout.procs.pids)]
        episodes = Episodes(rollout, Answers, dialogue, EpisodeLimits(turns=TURNS, tokens=256))

        async def one(number: int) -> int:
            ids = tuple((7 * number + i) % 60 for i in range(8))
            prompt = Prompt(position=number, text="", token_ids=ids, task="", entry={})
            return len((await episodes.play(prompt, sampling, number)).completion.token_ids)

        memory, tokens, began, ended = list[int](), 0, 0.0, 0

        async def slot(first: int) -> None:
            """A session after the other."""
            nonlocal tokens, began, ended
            for turn in range(ROUNDS):
                sampled = await one(turn * SESSIONS + first)
                tokens, ended = tokens + sampled, ended + 1
                if ended % SESSIONS == 0:
                    memory.append(sum(map(_rss, pids)))
                if ended == WARM * SESSIONS:
                    lags.clear()
                    tokens, began = 0, time.perf_counter()

        tasks.forever(_lag(lags), name="lag")
        await asyncio.gather(*[slot(first) for first in range(SESSIONS)])
        seconds = time.perf_counter() - began
    ordered = sorted(lags)
    grown = (memory[-1] - memory[WARM - 1]) / 2**20
    return [
        Row(name="memory after warm-up, 4,000 sessions later", ours=grown, unit="MiB more", goal="<= 8"),
        Row(name="lag of the loop, 99 of 100 below", ours=1000 * ordered[int(0.99 * len(ordered))], unit="ms",
            goal="<= 50"),
        Row(name="sessions in flight", ours=SESSIONS, note=f"{TURNS} turns each"),
        Row(name="tokens in them", ours=tokens / seconds, unit="tokens/s"),
    ]  # fmt: skip


async def _lag(lags: list[float]) -> None:
    """How much later than asked the loop comes back to us."""
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(0.01)
        lags.append(time.perf_counter() - asked - 0.01)


def _rss(pid: str) -> int:
    """Bytes of resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096
