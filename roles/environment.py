"""Episodes: a policy and an environment take turns, and one completion comes out of it.

    reset -> prompt | policy samples -> step(text) -> reply | policy samples -> ... -> Episode

    class Guess:                                    # an environment: these three, all async
        async def reset(self, prompt): return None            # or messages that replace the prompt's own
        async def step(self, text): return Reply("too low")    # or Reply(done=True, reward=1.0)
        async def close(self): ...

EP-1: tokens are append-only (transcript.py): nothing is tokenised twice, and what the environment says is masked out of
      the loss.
EP-2: budgets hold for a turn (`sampling.max_tokens`), for the episode (`tokens`, `turns`) and for each call of the
      environment (`seconds`). A reply that does not fit is left out whole, and the episode ends.
EP-3: what an environment raises or returns wrongly, or a call of it that takes too long, makes that episode `Unscored`
      with the reason; the run goes on. When too many are it ends, as with verdicts (tally.py, RW-5).
EP-4: each turn of one episode goes to the same replica, where what was read is cached, and the first turns of a group
      to one replica as far as that is no busier than others (routing.py, RO-3).
EP-5: an environment is closed once, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from roles.dialogue import Dialogue, Message
from roles.routing import Member
from roles.seeds import completion_seed
from roles.tally import Tally, tally_of_episodes
from roles.transcript import Transcript
from roles.types import Completion, Group, Prompt, Reward, Sampling, Scored, Unscored, finite
from runtime import TaskGroup


class Reply(msgspec.Struct, frozen=True):
    """What an environment says to a turn of the policy."""

    text: str = ""
    done: bool = False
    """The episode is over; `text` is not read by anybody."""
    reward: float | None = None
    """Of this turn; the rewards of an episode are added. None: this turn has none."""
    role: str = "user"
    """Who says it, for chat templates: `user` or `tool`. Empty: nobody, the text goes on where the policy stopped, such
    as a result behind a stop string."""


class Environment(Protocol):
    """One episode. Made anew for each."""

    async def reset(self, prompt: Prompt) -> Sequence[Message] | None:
        """Begin. None: the policy reads the prompt as it is; else these messages take its place."""
        ...

    async def step(self, text: str) -> Reply:
        """Answer a turn of the policy, given as text without special tokens."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class EpisodeLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an episode ends although its environment would go on."""

    turns: int = 8
    """Turns of the policy."""
    tokens: int = 4096
    """Prompt, turns and replies together; at most the engine's max_len."""
    seconds: float = 30.0
    """Of one call of the environment."""

    def __post_init__(self) -> None:
        if self.turns < 1 or self.tokens < 2 or not self.seconds > 0:
            raise ValueError(f"episode limits: expected turns >= 1, tokens >= 2, seconds > 0, got {self}")


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode went."""

    completion: Completion
    reward: Reward
    prompt_ids: tuple[int, ...]
    """What the policy read before its first turn."""
    turns: int
    ended: Literal["done", "turns", "tokens", "error", "aborted"]


class Completes(Protocol):
    """What is needed of `roles.rollout.Rollout`."""

    async def complete(
        self, token_ids: Sequence[int], sampling: Sampling, seed: int, *, session: Any = None
    ) -> Completion: ...

    def forget(self, session: Any) -> None: ...


class Episodes:
    """Plays groups of episodes: takes the place of a `Rollout` on an algorithm's page, with rewards given already.

    Args:
        rollout: where the policy is.
        make: a new environment for each episode.
        dialogue: how replies are spelled.
        limits: of each episode.
        tally: how many may be unscored.
    """

    def __init__(
        self,
        rollout: Completes,
        make: Callable[[], Environment],
        dialogue: Dialogue,
        limits: EpisodeLimits | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._rollout = rollout
        self._make = make
        self._dialogue = dialogue
        self._limits = limits or EpisodeLimits()
        self._tally = tally or tally_of_episodes("the environment")

    async def group(self, prompt: Prompt, n: int, sampling: Sampling, seed: int, *, attempt: int = 0) -> Group:
        """n episodes of one prompt at the same time, as a scored group."""
        seeds = [completion_seed(seed, prompt.position, sample, attempt) for sample in range(n)]
        together = seeds[0]
        try:
            async with TaskGroup(f"episodes of prompt {prompt.position}") as tasks:
                running = [
                    tasks.start(self.play(prompt, sampling, own, near=together), name=f"episode {sample}")
                    for sample, own in enumerate(seeds)
                ]
        finally:
            self._rollout.forget(together)
        episodes = [task.result() for task in running]
        begun = [episode for episode in episodes if episode.turns] or episodes[:1]
        first = begun[0].prompt_ids
        if any(episode.prompt_ids != first for episode in begun):
            raise ValueError(
                f"environment: the episodes of prompt {prompt.position} began with different messages; derive what "
                "reset returns from the prompt alone, so that they can be compared"
            )
        return Group(
            prompt=msgspec.structs.replace(prompt, token_ids=first),
            completions=[episode.completion for episode in episodes],
            rewards=[episode.reward for episode in episodes],
        )

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling, seed: int) -> Group:
        """As `group`: what an evaluation calls."""
        return await self.group(prompt, n, sampling, seed)

    async def score(self, group: Group) -> Group:
        """Takes the place of a `RewardPool`: the episodes were judged by their environments. Raises RewardFailed when
        too many of them were not."""
        self._tally.count(group)
        return group

    async def play(self, prompt: Prompt, sampling: Sampling, seed: int, *, near: Hashable | None = None) -> Episode:
        """One episode.

        Args:
            seed: 64 bits; says what the policy draws in it.
            near: episodes of the same are read by the same replica, where what they begin with is cached.
        """
        session = seed if near is None else Member(near, seed)
        environment: Environment | None = None
        closed: Unscored | None = None
        try:
            async with self._of_the_environment("making"):
                environment = self._make()
            episode = await self._play(environment, prompt, sampling, seed, session)
        except _Faulty as fault:
            episode = self._ended(fault.transcript or Transcript(prompt.token_ids), fault.verdict, "error")
        finally:
            self._rollout.forget(session)
            if environment is not None:
                closed = await self._closed(environment)
        return episode if closed is None else msgspec.structs.replace(episode, reward=closed, ended="error")

    async def _play(
        self, environment: Environment, prompt: Prompt, sampling: Sampling, seed: int, session: Hashable
    ) -> Episode:
        async with self._of_the_environment("reset"):
            messages = await environment.reset(prompt)
            transcript = Transcript(prompt.token_ids if messages is None else self._dialogue.prompt(messages))
            if not len(transcript):
                raise ValueError("it has no messages")
        rewards = list[float]()
        while (room := self._limits.tokens - len(transcript)) > 0:
            try:
                turn = await self._rollout.complete(
                    transcript.ids,
                    msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room)),
                    completion_seed(seed, transcript.num_turns, 0),
                    session=session,
                )
            except ValueError as error:  # what the environment has said so far is nothing that the engine can read
                raise _Faulty(Unscored(f"the policy can't answer: {error}"), transcript) from error
            transcript.sample(turn)
            if turn.finish_reason == "abort":
                return self._ended(transcript, Unscored("the turn was aborted"), "aborted")
            async with self._of_the_environment("step", transcript):
                reply = await environment.step(self._dialogue.text(turn.token_ids.tolist()))
                if reply.reward is not None:
                    rewards.append(finite(reply.reward))
                if reply.done:
                    return self._ended(transcript, _total(rewards), "done")
                said = self._spelled(reply, turn)
            if transcript.num_turns == self._limits.turns:
                return self._ended(transcript, _total(rewards), "turns")
            if len(transcript) + len(said) >= self._limits.tokens:
                break
            transcript.observe(said)
        if not transcript.num_turns:
            most = self._limits.tokens
            return self._ended(transcript, Unscored(f"it begins with {len(transcript)} tokens of {most}"), "tokens")
        return self._ended(transcript, _total(rewards), "tokens")

    @contextlib.asynccontextmanager
    async def _of_the_environment(self, call: str, transcript: Transcript | None = None) -> AsyncIterator[None]:
        """EP-2, EP-3: environments are user code."""
        try:
            async with asyncio.timeout(self._limits.seconds):
                yield
        except Exception as error:
            raise _Faulty(_unscored(call, error), transcript) from error

    async def _closed(self, environment: Environment) -> Unscored | None:
        """EP-5. An environment that can't let go is no reason to end a run, but one not to trust the episode."""
        try:
            async with self._of_the_environment("close"):
                await environment.close()
        except _Faulty as fault:
            return fault.verdict
        return None

    def _spelled(self, reply: Reply, turn: Completion) -> tuple[int, ...]:
        if not reply.role:
            return self._dialogue.continued(reply.text)
        return self._dialogue.reply([{"role": reply.role, "content": reply.text}], turn.token_ids.tolist())

    def _ended(self, transcript: Transcript, reward: Reward, how: Any) -> Episode:
        completion = transcript.completion()
        completion.text = self._dialogue.text(completion.token_ids.tolist())
        return Episode(
            completion=completion,
            reward=reward,
            prompt_ids=transcript.prompt_ids,
            turns=transcript.num_turns,
            ended=how,
        )


class _Faulty(Exception):
    """The environment of an episode has failed."""

    def __init__(self, verdict: Unscored, transcript: Transcript | None) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict
        self.transcript = transcript


def _total(rewards: Sequence[float]) -> Reward:
    """An episode that never was rewarded has earned nothing: 0, like one that failed its task."""
    return Scored(sum(rewards))


def _unscored(call: str, error: Exception) -> Unscored:
    text = "took too long" if isinstance(error, TimeoutError) else f"raised {type(error).__name__}: {error}"
    return Unscored(f"{call} of the environment {text}")
