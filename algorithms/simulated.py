"""Roles that take time and compute nothing: what a page drives when a whole run is played under a virtual clock.

They stand where Rollout, RewardPool, Trainer and WeightSession stand. Page, admission, buffer and routing are the real
ones.

SI-1: a replica decodes all its sequences together, one token each per step; a step takes `seconds_per_step(running)`.
      At most `max_running` sequences run, the others wait in order.
SI-2: weights are swapped between two steps: tokens before carry the old version, tokens after the new one.
SI-3: a training step takes `seconds_per_batch + seconds_per_token * tokens`, a publication `publish_seconds`.
SI-4: everything is a function of the seed: lengths and rewards of a completion depend on (seed, position, sample,
      attempt) alone, as with the real engine.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import heapq
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from roles.objective import ObjectiveSpec
from roles.routing import Router
from roles.seeds import completion_seed
from roles.types import Completion, Dropped, Group, Prompt, Sampling, Scored, StepResult, TrainSample
from sync.session import Commit

Lengths = Callable[[random.Random], int]
"""Draws the length of one completion, in tokens."""


def lognormal(mean: float, sigma: float, longest: int) -> Lengths:
    """Lengths with a long tail: log-normal of that mean, `sigma` of the logarithm, cut at `longest`. 0: constant."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng: max(1, min(longest, round(rng.lognormvariate(mu, sigma))))


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """How long things take, in seconds."""

    step_base: float
    """Of one decoding step of a replica with nothing to do but itself."""
    step_per_sequence: float
    """What each running sequence adds to a step."""
    train_base: float
    train_per_token: float
    publish: float
    max_running: int = 256

    def __post_init__(self) -> None:
        if min(self.step_base, self.step_per_sequence) < 0 or self.decode_step(1) <= 0:
            raise ValueError(
                f"times: a decoding step takes {self.step_base} s + {self.step_per_sequence} s a sequence, expected "
                "numbers of at least 0, one of them more"
            )

    def decode_step(self, running: int) -> float:
        return self.step_base + self.step_per_sequence * running


class Replica:
    """One engine (SI-1, SI-2). Progress is counted in steps: every running sequence makes one token in each."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._steps = 0.0
        self._since = 0.0
        self._running: list[tuple[float, int, asyncio.Future[float], float]] = []
        self._waiting: deque[tuple[int, asyncio.Future[float]]] = deque()
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._swaps: list[tuple[float, int]] = [(0.0, 0)]
        self.busy_seconds = 0.0

    def swap(self, version: int) -> None:
        """Serve another version from the next step on."""
        self._advance()
        self._swaps.append((self._steps, version))
        self._arm()

    async def decode(self, tokens: int) -> np.ndarray:
        """[tokens] int32, the version of each."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._advance()
        self._waiting.append((tokens, future))
        self._arm()
        start = await future
        return self._versions(start, tokens)

    def _advance(self) -> None:
        """Count the steps since the last change."""
        now, running = asyncio.get_running_loop().time(), len(self._running)
        if running:
            self._steps += (now - self._since) / self._speeds.decode_step(running)
            self.busy_seconds += now - self._since
        self._since = now

    def _arm(self) -> None:
        """Admit who waits, and set the timer for the next one that ends."""
        while self._waiting and len(self._running) < self._speeds.max_running:
            tokens, future = self._waiting.popleft()
            self._count += 1
            heapq.heappush(self._running, (self._steps + tokens, self._count, future, self._steps))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            left = (self._running[0][0] - self._steps) * self._speeds.decode_step(len(self._running))
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._end_next)

    def _end_next(self) -> None:
        self._timer = None
        self._advance()
        end = self._running[0][0]
        self._steps = max(self._steps, end)
        while self._running and self._running[0][0] <= end:
            _, _, future, start = heapq.heappop(self._running)
            if not future.done():
                future.set_result(start)
        self._arm()

    def _versions(self, start: float, tokens: int) -> np.ndarray:
        """Of the tokens made in steps start to start + tokens."""
        first = bisect.bisect_right(self._swaps, (start, sys.maxsize)) - 1
        versions = np.full(tokens, self._swaps[first][1], np.int32)
        for step, version in self._swaps[first + 1 :]:
            versions[math.ceil(step - start - 1e-9) :] = version
        return versions


class SimulatedRollout:
    """Stands where `roles.rollout.Rollout` stands."""

    def __init__(self, replicas: Sequence[Replica], lengths: Lengths) -> None:
        self.replicas = list(replicas)
        self._lengths = lengths
        self._router = Router(len(self.replicas))

    async def group(
        self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0
    ) -> Group | Dropped:
        return await self.generate(prompt, n, sampling, seed, attempt=attempt)

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0) -> Group:
        randoms = [random.Random(completion_seed(seed, prompt.position, i, attempt)) for i in range(n)]
        lengths = [self._lengths(rng) for rng in randoms]
        rank = self._router.place(n * sampling.max_tokens)
        try:
            versions = await asyncio.gather(*(self.replicas[rank].decode(length) for length in lengths))
        finally:
            self._router.release(rank, n * sampling.max_tokens)
        completions = [
            Completion(
                token_ids=np.full(length, rng.getrandbits(16), np.int32),
                logprobs=np.full(length, -rng.random(), np.float32),
                versions=version,
                finish_reason="stop",
            )
            for rng, length, version in zip(randoms, lengths, versions, strict=True)
        ]
        return Group(prompt=prompt, completions=completions, replica=rank)


class SimulatedReward:
    """Stands where `roles.reward.RewardPool` stands: 1 or 0, by the first token of the completion."""

    def __init__(self, *, seconds: float = 0.0, success: float = 0.5) -> None:
        self._seconds = seconds
        self._success = success

    async def score(self, group: Group) -> Group:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        rewards = [Scored(float(int(c.token_ids[0]) < self._success * 2**16)) for c in group.completions]
        return msgspec.structs.replace(group, rewards=rewards)


class SimulatedTrainer:
    """Stands where `roles.trainer.Trainer` stands. Its weights are a digest of everything that it was trained on."""

    def __init__(self, speeds: Speeds, *, version: int = 0) -> None:
        self._speeds = speeds
        self.version = version
        self.weights = b""
        self.busy_seconds = 0.0

    async def train_step(
        self, samples: Sequence[TrainSample], objective: ObjectiveSpec, temperature: float = 1.0
    ) -> StepResult:
        tokens = sum(len(sample.token_ids) for sample in samples)
        seconds = self._speeds.train_base + self._speeds.train_per_token * tokens
        await asyncio.sleep(seconds)
        digest = hashlib.blake2b(self.weights, digest_size=16)
        for sample in samples:
            digest.update(sample.token_ids.tobytes() + sample.advantages.tobytes())
            digest.update(b"" if sample.ages is None else sample.ages.tobytes())
        self.weights = digest.digest()
        self.version += 1
        self.busy_seconds += seconds
        return StepResult(
            version=self.version,
            sums={"tokens": float(tokens)},
            maxima={},
            grad_norm=0.0,
            learning_rate=0.0,
            seconds=seconds,
        )

    async def begin_save(self, path: str | Path) -> None:
        _write(Path(path), self.version.to_bytes(8) + self.weights)

    async def save_ended(self) -> bool:
        return True

    async def finish_save(self) -> None:
        pass

    async def load(self, path: str | Path) -> None:
        saved = _read(Path(path))
        self.version, self.weights = int.from_bytes(saved[:8]), saved[8:]


def _write(folder: Path, weights: bytes) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(weights)


def _read(folder: Path) -> bytes:
    return (folder / "weights").read_bytes()


class SimulatedWeights:
    """Stands where `sync.session.WeightSession` stands."""

    def __init__(self, replicas: Sequence[Replica], speeds: Speeds) -> None:
        self._replicas = replicas
        self._speeds = speeds

    async def publish(self, version: int) -> Commit:
        await asyncio.sleep(self._speeds.publish)
        for replica in self._replicas:
            replica.swap(version)
        return Commit(
            version=version,
            bytes=0,
            wire_bytes=0,
            seconds=self._speeds.publish,
            pack_seconds=0.0,
            stage_seconds=self._speeds.publish,
            pause_seconds=0.0,
            transport="shm",
        )


class CountedPrompts:
    """Stands where `roles.prompts.PromptSource` stands: an endless stream without content."""

    def __init__(self, position: int = 0, tokens: int = 8) -> None:
        self.position = position
        self._token_ids = tuple(range(1, tokens + 1))

    def take(self) -> Prompt:
        self.position += 1
        return self.at(self.position - 1)

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def at(self, position: int) -> Prompt:
        return Prompt(position=position, text="", token_ids=self._token_ids, task="simulated", entry={})
