"""Rewards: worker processes that judge completions, and a handle that survives what a verifier does to its worker.

RW-1: unscored is never 0. A completion without a verdict (time limit, error, dead worker) is `Unscored`, with why.
RW-2: one completion takes `timeout_s` at most, or about a second more when it must be stopped by ending its worker.
      Then the completions of that group are `Unscored`, the next group gets a new worker, the run goes on.
RW-3: each worker has at most one group; further callers of `score` wait until one is free.
RW-4: a verifier runs on the main thread of its process: signals work there (so does code that uses them), and nothing
      else of the run is delayed by it.
RW-5: a verifier that fails too often stops the run (tally.py).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from roles import limits
from roles.reward_config import RewardConfig as RewardConfig
from roles.tally import RewardFailed as RewardFailed
from roles.tally import Tally
from roles.types import Group, Prompt, Reward, Scored, Unscored
from roles.verify import BY_NAME, Verifier, bind, by_task, verdict
from runtime import Actor, DeadlineExceeded, ProcessDied, Stopped, TaskGroup, context, endpoint

if TYPE_CHECKING:
    from runtime import ActorMesh, Failure, HostMesh, ProcMesh

ANSWER_MARGIN = 30.0
"""Seconds beyond the limits of all its completions after which a worker that has neither answered nor ended is stopped.
Imports of a first call fall into it. Only a worker that does not run at all (stopped, swapped out) gets here."""

MAX_REASON = 500
"""Characters of a reason; a verifier may put a whole completion into its error."""


class RewardStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since the start of the pool."""

    scored: int
    """Completions with a verdict."""
    unscored: dict[str, int]
    """Completions without one, by kind: "time limit", "worker died", or the class of the exception."""
    replaced: int
    """Workers that ended and were replaced."""
    busy_seconds: float
    """Seconds that workers spent on groups, messages included, added over the workers."""

    @property
    def failure_rate(self) -> float:
        """Share of completions without a verdict; 0 when none was judged."""
        failed = sum(self.unscored.values())
        return failed / (self.scored + failed) if failed else 0.0


def check_reward(config: RewardConfig) -> None:
    """Import the verifier, and look for the model, before any process starts.

    Raises:
        ValueError: it can't be found, or the limit of a call leaves it no time.
    """
    make_verifier(config)
    check_time("[reward]", config.verifier, config.options, config.timeout_s)
    for name, part in config.parts.items():
        check_time(f"[reward.parts.{name}]", part.verifier, part.options, config.timeout_s)
    if config.parts and (config.verifier != "task" or config.options):
        raise ValueError(
            f"[reward] verifier {config.verifier!r} and parts {', '.join(config.parts)} are both given; make the "
            "verifier one of the parts"
        )
    if config.model is not None and (config.parts or config.verifier != "task"):
        raise ValueError("[reward] model is given besides a verifier; a reward model judges alone, remove one of them")
    if config.model is not None and not (Path(config.model.path) / "config.json").is_file():
        raise ValueError(
            f"[reward.model] path: {config.model.path} has no config.json; give the folder of a Hugging Face model"
        )


def check_time(where: str, verifier: str, options: Mapping[str, Any], timeout_s: float) -> None:
    """A verifier of ours that limits itself must come to its verdict before the limit of the call takes it away.

    Raises:
        ValueError: it has no time for that.
    """
    own = inspect.signature(BY_NAME[verifier]).parameters.get("seconds") if verifier in BY_NAME else None
    seconds = options.get("seconds", own.default) if own is not None else 0.0
    if isinstance(seconds, int | float) and seconds >= timeout_s:
        raise ValueError(
            f"[reward] timeout_s = {timeout_s:g} is not above the {seconds:g} seconds that {where} verifier "
            f"{verifier!r} may take: what takes so long would be unscored. Raise timeout_s, or lower options.seconds"
        )


def make_verifier(config: RewardConfig) -> Verifier:
    """The verifier of a pool: one, or a weighted sum of several.

    Raises:
        ValueError: one can't be found or has no such option.
    """
    if not config.parts:
        return bind(config.verifier, config.options, "[reward] verifier")
    parts = {
        name: (part.weight, bind(part.verifier, part.options, f"[reward.parts.{name}] verifier"))
        for name, part in config.parts.items()
    }

    def weighted_sum(prompt: Prompt, text: str) -> Scored:
        values = {name: verdict(verifier(prompt, text)).value for name, (_, verifier) in parts.items()}
        return Scored(sum(parts[name][0] * value for name, value in values.items()), values)

    return weighted_sum


class RewardRank(Actor):
    """Judges on one process."""

    def __init__(self, config: RewardConfig) -> None:
        self._verifier = make_verifier(config)
        self._slow = _slow_at_first(config)
        self._timeout = config.timeout_s
        self._warm: set[str] = set()

    @endpoint
    def score(self, prompt: Prompt, texts: list[str]) -> list[Reward]:
        """One reward for each text, in their order. Stops early once nobody waits for it (the list is then shorter).

        A text that can't be interrupted ends the process (LI-2).
        """
        self._warm_up(prompt)
        rewards: list[Reward] = []
        for text in texts:
            if context().cancelled:
                break
            rewards.append(judge(self._verifier, prompt, text, self._timeout))
        return rewards

    def _warm_up(self, prompt: Prompt) -> None:
        """Our own verifiers import large libraries and build data sets on first use, which the limit must not count: an
        import that is interrupted leaves half a module behind, and every later call fails. One of the user may call
        ours; what it imports itself belongs where its module is imported."""
        if prompt.task in self._warm:
            return
        self._warm.add(prompt.task)
        for verifier in self._slow:
            for value in (
                prompt.entry.get("answer"),
                "x + 1",
            ):  # a right answer may be seen to be so without the library
                judge(verifier, prompt, f"<answer>{value}</answer>", ANSWER_MARGIN)


def _slow_at_first(config: RewardConfig) -> list[Verifier]:
    """Those of ours that may be called by this pool and need a library."""
    names = {part.verifier for part in config.parts.values()} if config.parts else {config.verifier}
    slow: list[Verifier] = [by_task] if "task" in names or any(":" in name for name in names) else []
    return [*slow, *(BY_NAME[name] for name in ("math", "reasoning_gym") if name in names)]


def judge(verifier: Verifier, prompt: Prompt, text: str, timeout_s: float) -> Reward:
    """The verdict on one text, or why there is none (RW-1). Needs the main thread; `limits` says what a limit does."""
    try:
        return limits.limited(lambda: verdict(verifier(prompt, text)), timeout_s)
    except limits.TimeUp:
        return Unscored(f"time limit: no verdict after {timeout_s:g} s")
    except (Exception, SystemExit) as error:  # foreign code may raise anything; it may cost this one completion
        return Unscored(f"{type(error).__name__}: {error}"[:MAX_REASON])


class _Life:
    """Owner of one process: takes its death as handled, for the worker's place gets a new one (RW-2)."""

    def __init__(self) -> None:
        self.ended = False

    def __supervise__(self, failure: Failure) -> bool:
        self.ended = self.ended or isinstance(failure.error, ProcessDied)
        return self.ended


class _Worker:
    """One place in the pool: a process that is started when needed and dropped when it has ended."""

    def __init__(self, host: HostMesh, config: RewardConfig, number: int) -> None:
        self._host = host
        self._config = config
        self._name = f"reward.{number}" if config.workers > 1 else "reward"
        self._procs: ProcMesh | None = None
        self._ranks: ActorMesh | None = None
        self._life = _Life()
        self.num_started = 0

    async def start(self) -> ActorMesh:
        if self._life.ended or self._ranks is None:  # it ended while it was idle, or its start was cancelled half way
            await self.stop(grace=0.0)
        if self._ranks is None:
            self.num_started += 1
            self._life = _Life()
            self._procs = await self._host.spawn_procs(
                {"rank": 1}, name=self._name, threads=1, start="fork", owner=self._life
            )
            self._ranks = await self._procs.spawn(self._name, RewardRank, self._config)
        return self._ranks

    async def score(self, prompt: Prompt, texts: list[str]) -> list[Reward]:
        ranks = await self.start()
        limit = len(texts) * (self._config.timeout_s + limits.HARD_MARGIN) + ANSWER_MARGIN
        try:
            rewards: list[Reward] = await ranks.score.options(timeout=limit).call_one(prompt, texts)
        except ProcessDied as death:
            await self.stop(grace=0.0)
            return [Unscored(self._reason(death))] * len(texts)
        except DeadlineExceeded:
            await self.stop(grace=0.0)
            return [Unscored(f"time limit: the worker gave no answer for {limit:g} s")] * len(texts)
        return rewards

    def _reason(self, death: ProcessDied) -> str:
        place = limits.stuck_at(death.stderr_tail)
        if place is None:
            return f"worker died: {death.death.describe()}"
        return f"time limit: a completion of this group could not be interrupted, its worker was ended at {place}"

    async def stop(self, *, grace: float = 3.0) -> None:
        procs, self._procs, self._ranks = self._procs, None, None
        if procs is not None:
            await procs.stop(grace=grace)


class RewardPool:
    """The controller's handle: `pool = await RewardPool.start(host, config)`; `group = await pool.score(group)`."""

    def __init__(self, workers: Sequence[_Worker], config: RewardConfig) -> None:
        self._config = config
        self._workers = list(workers)
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in workers:
            self._idle.put_nowait(worker)
        self._busy_seconds = 0.0
        self._stopped = False
        names = ", ".join(config.parts) or config.verifier
        self._tally = Tally(
            f"[reward] verifier {names!r}",
            "Fix the verifier, or raise [reward] timeout_s if it is only slow",
            max_unscored=config.max_unscored,
            window=config.window,
        )

    @classmethod
    async def start(cls, host: HostMesh, config: RewardConfig) -> RewardPool:
        """Start the workers; returns when all are ready.

        Raises:
            ValueError: a worker can't find the verifier.
        """
        workers = [_Worker(host, config, number) for number in range(config.workers)]
        async with TaskGroup("reward workers") as tasks:
            for number, worker in enumerate(workers):
                tasks.start(worker.start(), name=str(number))
        return cls(workers, config)

    async def score(self, group: Group) -> Group:
        """The group with one reward for each completion. Waits until a worker is free (RW-3).

        Raises:
            RewardFailed: too many of the last completions could not be judged (RW-5).
            Stopped: the pool has been stopped.
        """
        worker = await self._idle.get()
        if self._stopped:
            self._idle.put_nowait(worker)  # for whoever waits behind
            raise Stopped("the reward pool has been stopped")
        started = asyncio.get_running_loop().time()
        try:
            rewards = await worker.score(group.prompt, [completion.text for completion in group.completions])
        finally:
            self._busy_seconds += asyncio.get_running_loop().time() - started
            self._idle.put_nowait(worker)
        scored = msgspec.structs.replace(group, rewards=rewards)
        self._tally.count(scored)
        return scored

    def stats(self) -> RewardStats:
        """What has happened so far."""
        return RewardStats(
            scored=self._tally.scored,
            unscored=dict(self._tally.unscored),
            replaced=sum(max(worker.num_started - 1, 0) for worker in self._workers),
            busy_seconds=self._busy_seconds,
        )

    async def stop(self) -> None:
        """End the workers. Pending and later calls of `score` raise Stopped."""
        self._stopped = True
        async with TaskGroup("reward workers") as tasks:
            for number, worker in enumerate(self._workers):
                tasks.start(worker.stop(), name=str(number))
