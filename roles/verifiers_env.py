"""Environments of the package `verifiers` (0.1.14), played in processes of their own against our endpoint.

    python -m roles.verifiers_env ENVIRONMENT questions.jsonl      # its dataset as a file for [data]

    [data]
    file = "questions.jsonl"
    [environment]
    name = "verifiers"
    options = { id = "my-environment", arguments = { difficulty = 2 } }

VF-1: the environment is the package's, unchanged: it rolls out with the `openai` client, and its rubric's reward is the
      sample's. What is trained are the tokens that the endpoint recorded (roles/agents.py).
VF-2: an episode whose environment raised, or took longer than `seconds` between two requests, is `Unscored` with the
      reason. What a reward function raises is 0 and a line in the log: that is the package's own rule.
VF-3: rewards of this package are plain functions that may compute for long: they run in a process that is no part of
      the controller. One that does not answer any more is ended and started anew; its groups are unscored.
VF-4: only this file imports the package. What it fetches or starts is its own business: read an environment before you
      train on it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from roles.agents import Address, Idle
from roles.types import Prompt, Reward, Scored, Unscored, finite
from runtime import Actor, DeadlineExceeded, ProcessDied, Restart, endpoint

if TYPE_CHECKING:
    from runtime import ActorMesh, HostMesh, ProcMesh

log = logging.getLogger(__name__)

VERSIONS = "0.1.14"
"""What the tests ran with. 0.4.0 pins openai < 3, and its environments fetch the programs that they run."""

MODEL = "policy"
MAX_GROUPS = 1024
"""Groups that a process plays at once."""

START_SECONDS = 300.0
"""How long an environment may take to load in a process that was started anew."""

ROW = "row"
"""Key of a question's entry under which the row of the environment's dataset stands."""


class VerifiersOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`options` of an `[environment]` of this kind."""

    id: str
    """An installed environment, as `verifiers.load_environment` takes it: a module with `load_environment`."""
    arguments: dict[str, Any] = {}
    """Passed to its `load_environment`."""
    processes: int = 1
    """That play episodes side by side."""


def options_of(options: Mapping[str, Any]) -> VerifiersOptions:
    """Raises ValueError: an option is wrong, or there is no such package or environment."""
    where = "[environment] name 'verifiers'"
    try:
        found = msgspec.convert(dict(options), VerifiersOptions)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: options: {error}") from error
    if found.processes < 1:
        raise ValueError(f"{where}: options.processes: expected at least 1, got {found.processes}")
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        raise ValueError(f"{where}: the package is not installed; pip install 'tutti[verifiers]'") from None
    if installed.split(".")[:2] != VERSIONS.split(".")[:2]:
        raise ValueError(f"{where}: expected verifiers {VERSIONS}, found {installed}; pip install 'tutti[verifiers]'")
    module = found.id.replace("-", "_").split("/")[-1]
    if not _is_there(module):
        raise ValueError(f"{where}: options.id {found.id!r}: there is no module {module!r}; install the environment")
    return found


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # "a.b" where there is no a; no name at all
        return False


def _load(options: VerifiersOptions) -> Any:
    import verifiers

    return verifiers.load_environment(options.id, **options.arguments)


# --- in its process ---------------------------------------------------------------------------------------------------


class VerifiersRank(Actor):
    """An environment, and the groups that it plays."""

    def __init__(self, options: VerifiersOptions, turns: int) -> None:
        from openai import AsyncOpenAI

        self._environment = _load(options)
        own = getattr(self._environment, "max_turns", 0)
        self._environment.max_turns = min(own, turns) if own > 0 else turns
        # Retries would ask an endpoint that knows its mind; a time limit would lose the longest answers.
        self._client = AsyncOpenAI(base_url="http://", api_key="none", max_retries=0, timeout=None)

    @endpoint(concurrency=MAX_GROUPS)
    async def play(self, row: dict[str, Any], addresses: list[Address], seconds: float) -> list[Reward]:
        """One episode at each address, scored together: rubrics may compare the samples of a group."""
        states = await asyncio.gather(*[self._episode(row, address, seconds) for address in addresses])
        played = [state for state in states if not isinstance(state, Unscored)]
        try:
            async with asyncio.timeout(seconds):
                if played:
                    await self._environment.rubric.score_group(played)
                for state in played:
                    await self._environment.rubric.cleanup(state)
        except Exception as error:  # VF-2: a rubric is user code
            verdict = Unscored(f"the rubric {_what(error)}")
            return [state if isinstance(state, Unscored) else verdict for state in states]
        return [state if isinstance(state, Unscored) else _reward(state) for state in states]

    @endpoint(concurrency=8)
    async def probe(self) -> None:
        """Returns when the loop that plays runs."""

    async def __cleanup__(self, error: BaseException | None = None) -> None:
        await self._client.close()

    async def _episode(self, row: dict[str, Any], address: Address, seconds: float) -> Any:
        """The package's state of one episode, or Unscored."""
        native = self._client.with_options(base_url=address.url, api_key=address.key)
        try:
            async with asyncio.timeout(seconds) as limit:
                state = await self._environment.rollout(row, _client(native, limit, seconds), MODEL, {})
        except Exception as error:  # VF-2: environments are user code
            return Unscored(f"the environment {_what(error)}")
        failed = state["error"]
        return state if failed is None else Unscored(f"the environment {_what(failed)}")


def _client(native: Any, limit: asyncio.Timeout, seconds: float) -> Any:
    """The package's own client, with an episode's time limit that stands still while the policy answers."""
    from verifiers.clients import OpenAIChatCompletionsClient

    loop = asyncio.get_running_loop()

    class Timed(OpenAIChatCompletionsClient):
        async def get_native_response(self, *args: Any, **more: Any) -> Any:
            limit.reschedule(None)
            try:
                return await super().get_native_response(*args, **more)
            finally:
                limit.reschedule(loop.time() + seconds)

        async def raise_from_native_response(self, response: Any) -> None:
            """An empty answer is one to be judged; the package would take it for an error."""

    return Timed(native)


def _what(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "took too long"
    cause = error.__cause__ or error
    return f"raised {type(cause).__name__}: {cause}"[:500]


def _reward(state: Any) -> Reward:
    if state["reward"] is None:
        return Unscored("the rubric gave no reward")
    parts = {name: float(value) for name, value in (state["metrics"] or {}).items()}
    try:
        return Scored(finite(state["reward"]), parts)
    except ValueError as error:
        return Unscored(f"the rubric gave {error}")


# --- the controller's side --------------------------------------------------------------------------------------------


class Verifiers:
    """Plays groups in processes of its own; a `roles.agents.Plays`. Made by `start`."""

    def __init__(self, procs: ProcMesh, mesh: ActorMesh, seconds: float) -> None:
        self._procs = procs
        self._ranks = [mesh.slice(rank=rank) for rank in range(len(mesh))]
        self._playing = [0] * len(mesh)
        self._loaded = [True] * len(mesh)  # has answered since it was started
        self._seconds = seconds

    @classmethod
    async def start(
        cls, host: HostMesh, options: VerifiersOptions, *, seconds: float, turns: int, name: str = "environment"
    ) -> Verifiers:
        """Start the processes; ready when it returns.

        Args:
            seconds: longest time between two requests of an episode, and of the scoring of a group.
            turns: most turns of an episode; the environment's own limit holds as well.
            name: of the processes.

        Raises:
            runtime.ActorError: the environment can't be loaded.
        """
        procs = await host.spawn_procs(
            {"rank": options.processes}, name=name, threads=1, start="fork", restart=Restart()
        )
        return cls(procs, await procs.spawn(name, VerifiersRank, options, turns), seconds)

    async def play(self, prompt: Prompt, addresses: Sequence[Address], idle: Idle) -> list[Reward]:
        if ROW not in prompt.entry:
            raise ValueError(
                "[environment] name 'verifiers': the questions have no rows of its dataset; write the file of [data] "
                "with python -m roles.verifiers_env"
            )
        rank = min(range(len(self._playing)), key=self._playing.__getitem__)
        self._playing[rank] += 1
        try:
            await self._ready(rank)
            return await self._played(rank, prompt.entry[ROW], list(addresses), idle)
        except ProcessDied as death:
            self._loaded[rank] = False
            return [Unscored(f"the environment's process died: {death.death.describe()}")] * len(addresses)
        finally:
            self._playing[rank] -= 1

    async def _ready(self, rank: int) -> None:
        """Wait for a process that was started anew: loading an environment may take longer than its answers."""
        if not self._loaded[rank]:
            await self._ranks[rank].probe.options(timeout=START_SECONDS).call_one()
            self._loaded[rank] = True

    async def _played(self, rank: int, row: Any, addresses: list[Address], idle: Idle) -> list[Reward]:
        calling = asyncio.ensure_future(self._ranks[rank].play.call_one(row, addresses, self._seconds))
        try:
            # The process keeps the limit of each episode itself. Asking it is for one that does not run any more.
            while not calling.done():
                await asyncio.wait([calling], timeout=self._seconds)
                if not calling.done() and min(map(idle, range(len(addresses)))) > self._seconds:
                    await self._answers_or_ends(rank)
            rewards: list[Reward] = calling.result()
            return rewards
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)

    async def _answers_or_ends(self, rank: int) -> None:
        """VF-3."""
        process = self._procs.ranks[rank].process
        try:
            await self._ranks[rank].probe.options(timeout=self._seconds).call_one()
        except DeadlineExceeded:
            log.warning("environment rank %d has not answered for %g s: it is started anew", rank, self._seconds)
            if process is not None:
                process.kill(signal.SIGKILL)


# --- its dataset as questions -----------------------------------------------------------------------------------------


def write_questions(options: VerifiersOptions, file: Path, *, held_out: bool = False) -> int:
    """Write the environment's dataset as a file for `[data]`: each line holds a row of it. Returns how many there are.

    Args:
        held_out: the dataset for evaluation instead.
    """
    environment = _load(options)
    rows = environment.get_eval_dataset() if held_out else environment.get_dataset()
    lines = [
        json.dumps(
            {"question": _question(row), "answer": str(row.get("answer") or "-"), "task": options.id, ROW: dict(row)},
            default=str,
        )
        for row in rows
    ]
    file.write_text("".join(f"{line}\n" for line in lines))
    return len(lines)


def _question(row: Mapping[str, Any]) -> str:
    """What is asked, as one text: the last message of the user. What the policy reads comes from the environment."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    said = [message["content"] for message in prompt if message["role"] == "user"]
    return str(said[-1] if said else prompt[-1]["content"])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m roles.verifiers_env", description="Write a dataset for [data].")
    parser.add_argument("id", help="the environment")
    parser.add_argument("file", type=Path, help="JSON Lines file to write")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of its load_environment, as JSON")
    parser.add_argument("--held-out", action="store_true", help="its dataset for evaluation")
    given = parser.parse_args(arguments)
    options = options_of({"id": given.id, "arguments": given.arguments})
    count = write_questions(options, given.file, held_out=given.held_out)
    sys.stdout.write(f"{count} questions in {given.file}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
