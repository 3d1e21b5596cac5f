"""Agents that bring their own loop: each plays an episode against our HTTP endpoint, and what was sampled is trained.

    prompt --> n sessions of the endpoint --> agent(prompt, address) --> reward
                    |                                                      |
                    '--- exact tokens, logprobs, versions ---> Group <-----'

    async def agent(prompt: Prompt, address: Address) -> float:        # any program that takes a base URL and a key
        client = AsyncOpenAI(base_url=address.url, api_key=address.key)
        ...

AG-1: what is trained are the tokens that the endpoint recorded under the agent's address, never their text spelled
      again (openai_server.py, OA-2).
AG-2: an agent has one completion: the thread of its latest turn. Threads that it left (a changed history, a question
      aside) are not trained, and counted. What a thread says beyond the beginning that all agents of the group share is
      masked.
AG-3: an agent that raises, or that asks for nothing for `seconds`, is `Unscored` with the reason; the run goes on.
      When too many are it ends, as with verdicts (tally.py, RW-5).
AG-4: an address lives as long as its episode, whatever happens.
AG-5: what is trained was drawn at the temperature that the trainer computes with, and of all tokens: a request that
      brings a temperature, top_p or top_k of its own is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from roles.openai_server import OpenAIServer
from roles.recorded import Trajectory
from roles.seeds import completion_seed
from roles.tally import Tally, tally_of_episodes
from roles.transcript import Transcript
from roles.types import Completion, Group, Prompt, Reward, Sampling, Scored, Unscored, finite
from runtime import TaskGroup

log = logging.getLogger(__name__)


END_SECONDS = 10.0
"""How long a cancelled agent may tidy up. One that swallows its cancellation must not stop the run."""


class Address(NamedTuple):
    """Where one agent finds the policy."""

    url: str
    key: str


Agent = Callable[[Prompt, Address], Awaitable[float]]
"""Plays one episode and says what it is worth."""

Idle = Callable[[int], float]
"""For how many seconds the agent with this number has asked for nothing; 0 while it is answered."""


class Plays(Protocol):
    """Who plays all episodes of a group."""

    async def play(self, prompt: Prompt, addresses: Sequence[Address], idle: Idle) -> list[Reward]: ...


class AgentEpisodes:
    """Plays groups of episodes: takes the place of a `Rollout` on an algorithm's page, with rewards given already.

    Args:
        server: the endpoint, serving.
        players: what plays against it.
        tally: how many may be unscored.
    """

    def __init__(self, server: OpenAIServer, players: Plays, tally: Tally | None = None) -> None:
        self._server = server
        self._players = players
        self._tally = tally or tally_of_episodes("the agent")
        self._num_groups = 0

    @property
    def num_forks(self) -> int:
        """Threads that agents have left (AG-2)."""
        return self._server.num_forks

    async def group(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0) -> Group:
        """n episodes of one prompt at the same time, as a scored group."""
        self._num_groups += 1
        names = [f"{self._num_groups}-{prompt.position}-{sample}" for sample in range(n)]
        addresses = [
            Address(
                self._server.url(
                    name,
                    sampling=sampling,
                    seed=completion_seed(seed, prompt.position, sample, attempt),
                    near=f"group-{self._num_groups}",
                    fixed=True,
                ),
                self._server.key,
            )
            for sample, name in enumerate(names)
        ]
        threads = list[list[Trajectory]]()
        try:
            rewards = await self._players.play(prompt, addresses, lambda number: self._server.idle(names[number]))
        finally:
            forks = self.num_forks
            threads = [self._server.close_session(name) for name in names]  # AG-4
            if self.num_forks > forks == 0:
                log.warning("an agent left a dialogue or changed what was said: what it left is not trained (AG-2)")
        return _group(prompt, [found[-1] if found else None for found in threads], rewards)

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling, seed: int) -> Group:
        """As `group`: what an evaluation calls."""
        return await self.group(prompt, n, sampling, seed)

    async def score(self, group: Group) -> Group:
        """Takes the place of a `RewardPool`: the agents have said what their episodes are worth. Raises RewardFailed
        when too many of them have not."""
        self._tally.count(group)
        return group


class AgentsHere:
    """Agents as coroutines of this process.

    Args:
        agent: called for each episode.
        seconds: longest time between two of its requests (AG-3).
    """

    def __init__(self, agent: Agent, seconds: float) -> None:
        self._agent = agent
        self._seconds = seconds

    async def play(self, prompt: Prompt, addresses: Sequence[Address], idle: Idle) -> list[Reward]:
        async with TaskGroup(f"agents of prompt {prompt.position}") as tasks:
            running = [
                tasks.start(self._one(prompt, address, partial(idle, number)), name=f"agent {number}")
                for number, address in enumerate(addresses)
            ]
        return [task.result() for task in running]

    async def _one(self, prompt: Prompt, address: Address, idle: Callable[[], float]) -> Reward:
        playing = asyncio.ensure_future(self._agent(prompt, address))
        try:
            while not playing.done() and (left := self._seconds - idle()) > 0:
                await asyncio.wait([playing], timeout=left)
            if not playing.done():
                return Unscored(f"the agent asked for nothing for {self._seconds:g} s")
            if playing.cancelled():  # raised here it would end the run
                return Unscored("the agent raised CancelledError")
            return Scored(finite(playing.result()))
        except Exception as error:  # AG-3: agents are user code
            return Unscored(f"the agent raised {type(error).__name__}: {error}")
        finally:
            playing.cancel()
            await asyncio.wait([playing], timeout=END_SECONDS)
            if not playing.done():
                log.warning("an agent of prompt %d goes on after it was cancelled; let it end", prompt.position)
            elif not playing.cancelled():
                playing.exception()  # it has been told


def _group(prompt: Prompt, last: Sequence[Trajectory | None], rewards: list[Reward]) -> Group:
    """AG-2: one completion for each agent, after the beginning that they share."""
    begins = [one.prompt_ids for one in last if one is not None]
    shared = _beginning(begins) if begins else prompt.token_ids
    if not shared:
        shared, last = prompt.token_ids, [None] * len(last)
        rewards = [Unscored("the agents of this prompt have no beginning in common: they can't be compared")] * len(
            last
        )
    nothing = Transcript(shared).completion()
    return Group(
        prompt=msgspec.structs.replace(prompt, token_ids=shared),
        completions=[nothing if one is None else _after(one, len(shared)) for one in last],
        rewards=rewards,
    )


def _beginning(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The tokens that all begin with."""
    same = takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
    return tuple(column[0] for column in same)


def _after(trajectory: Trajectory, length: int) -> Completion:
    """All tokens from there on; those that the policy read before its first turn are masked."""
    completion, read = trajectory.completion, np.array(trajectory.prompt_ids[length:], np.int32)
    if not len(read):
        return completion
    count = len(read)
    mask = np.ones(len(completion.token_ids), bool) if completion.mask is None else completion.mask
    return msgspec.structs.replace(
        completion,
        token_ids=np.concatenate([read, completion.token_ids]),
        logprobs=np.concatenate([np.zeros(count, np.float32), completion.logprobs]),
        versions=np.concatenate([np.full(count, completion.versions[0], np.int32), completion.versions]),
        mask=np.concatenate([np.zeros(count, bool), mask]),
    )


async def serve(server: OpenAIServer, tasks: TaskGroup) -> None:
    """Let the endpoint listen for as long as the group of tasks runs; it does when this returns."""
    listening = asyncio.Event()

    async def forever() -> None:
        async with server.serving():
            listening.set()
            await asyncio.Event().wait()

    tasks.forever(forever(), name="endpoint for agents")
    await listening.wait()
