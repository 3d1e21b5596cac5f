"""The `[environment]` table of a job: which environment the policy plays in, found and tried out before a run starts.

EC-1: a name, an option or a class that can't work is refused by `tools_of`, in words of the job file.
EC-2: what an environment takes as `judge` is the job's own reward: its verifier, workers and time limits judge the
      answer of an episode as they judge one of a single turn.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from roles.gym import nearest
from roles.types import Completion, Group, Prompt, Unscored

if TYPE_CHECKING:
    from roles.agents import Plays
    from roles.environment import Environment
    from runtime import HostMesh

Judge = Callable[[Prompt, str], Awaitable[float]]
"""Reward of a final answer."""

BY_NAME = {
    "gym": "roles.gym_environment:GymEnvironment",
    "tools": "roles.tools:tool_environment",
    "calculator": "roles.tools:CalculatorEnvironment",
}
"""Name in a job file -> what is called with its options for each episode."""

OWN_LOOP = ("agent", "verifiers")
"""Names of what plays against the HTTP endpoint instead of being asked turn by turn."""

METHODS = ("reset", "step", "close")


class EnvironmentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[environment]` table of a job."""

    name: str = ""
    """`gym`: several tries at each question. `tools`: calls of tools until there is an answer. `calculator`: results
    stand behind each "=", which must be one of sampling.stop. `module:Class`: your own, made with the options for each
    episode; what it takes as `judge` is the job's reward. `agent`: an async function, options.function =
    "module:function", that plays against an OpenAI-compatible endpoint and returns its reward. `verifiers`: an
    environment of that package, options.id. Empty: one turn, no environment."""
    options: dict[str, Any] = {}
    """Passed to it, such as tools = ["calculator", "python"] or tries = 3."""
    turns: Annotated[int, Meta(ge=1)] = 8
    """Most turns of the policy in an episode; sampling.max_tokens holds for each. An `agent` counts its own."""
    tokens: Annotated[int, Meta(ge=0)] = 0
    """Prompt, turns and replies together. 0: derived, rollout.max_len or what a micro-batch holds, the less."""
    seconds: Annotated[float, Meta(gt=0)] = 30.0
    """Longest time of one answer of the environment, or between two requests of an agent; then the episode is
    unscored."""


def environments(config: EnvironmentConfig, judge: Judge) -> Callable[[], Environment]:
    """What makes an environment for each episode.

    Raises:
        ValueError: it is not there, or has no such option, or needs one that is missing.
    """
    where = f"[environment] name {config.name!r}"
    make = _found(config.name, where)
    parameters = inspect.signature(make).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = dict(config.options) | ({"judge": judge} if "judge" in parameters else {})
    for option in given:
        if option not in parameters and not takes_all:
            known = ", ".join(name for name in parameters if name != "judge") or "none"
            raise ValueError(f"{where}: no option {option!r}{nearest(option, parameters)}; it has: {known}")
    single = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in single and p.name not in given
    ]
    if missing:
        raise ValueError(f"{where}: needs options.{', options.'.join(missing)}")
    return functools.partial(make, **given)


def tools_of(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Make an environment and look at it (EC-1): descriptions of the tools that it offers, for the chat template; empty
    for one without, and for no environment.

    Raises:
        ValueError: what `environments` says, or what it makes is no environment.
    """
    if config.name == "agent":
        _agent(config)
    elif config.name == "verifiers":
        from roles.verifiers_env import options_of

        options_of(config.options)
    elif config.name:
        return list(getattr(_tried(config), "descriptions", ()))
    elif config.options:
        raise ValueError("[environment] options are given without a name; say which environment they are of")
    return []


async def players_of(config: EnvironmentConfig, judge: Judge, host: HostMesh, name: str) -> Plays:
    """Who plays the episodes of one of `OWN_LOOP`.

    Args:
        name: of the processes, where it has some.

    Raises:
        ValueError: as `tools_of`.
    """
    if config.name == "agent":
        from roles.agents import AgentsHere

        return AgentsHere(_agent(config, judge), config.seconds)
    from roles.verifiers_env import Verifiers, options_of

    options = options_of(config.options)
    return await Verifiers.start(host, options, seconds=config.seconds, turns=config.turns, name=name)


def judge_of(score: Callable[[Group], Awaitable[Group]]) -> Judge:
    """The job's reward as the judge of an answer (EC-2). It raises RuntimeError where there is no verdict."""

    async def judge(prompt: Prompt, answer: str) -> float:
        nothing = np.zeros(0, np.int32)
        completion = Completion(
            token_ids=nothing, logprobs=np.zeros(0, np.float32), versions=nothing, finish_reason="stop", text=answer
        )
        (reward,) = (await score(Group(prompt=prompt, completions=[completion]))).rewards
        if isinstance(reward, Unscored):
            raise RuntimeError(reward.reason)
        return reward.value

    return judge


async def _no_verdict(prompt: Prompt, answer: str) -> float:
    raise NotImplementedError


def _agent(config: EnvironmentConfig, judge: Judge = _no_verdict) -> Callable[..., Awaitable[float]]:
    """The function of an agent, with the other options as its arguments."""
    where = "[environment] name 'agent'"
    options = dict(config.options)
    name = options.pop("function", "")
    if not isinstance(name, str) or ":" not in name:
        raise ValueError(f"{where}: expected options.function = 'module:function', got {name!r}")
    function = _attribute(name, where)
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{where}: {name} is no 'async def'; it is awaited with a prompt and an address")
    if "judge" in inspect.signature(function).parameters:
        options["judge"] = judge
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        raise ValueError(f"{where}: {name}(prompt, address, ...) can't take the other options: {error}") from error
    return functools.partial(function, **options)


def _tried(config: EnvironmentConfig) -> Environment:
    where = f"[environment] name {config.name!r}"
    make = environments(config, _no_verdict)
    try:
        environment = make()
    except Exception as error:  # user code, and options of any kind
        raise ValueError(f"{where}: making one raised {type(error).__name__}: {error}") from error
    for method in METHODS:
        if not inspect.iscoroutinefunction(getattr(environment, method, None)):
            raise ValueError(
                f"{where}: {type(environment).__name__} has no 'async def {method}'; an environment has "
                f"{', '.join(METHODS)}, all async"
            )
    return environment


def _found(name: str, where: str) -> Callable[..., Environment]:
    path = BY_NAME.get(name, name)
    if not all(part for part in path.partition(":")):
        known = (*BY_NAME, *OWN_LOOP)
        raise ValueError(
            f"{where}: unknown{nearest(name, known)}. Use one of {', '.join(known)}, or 'module:Class' for your own"
        )
    made: Callable[..., Environment] = _attribute(path, where)
    return made


def _attribute(path: str, where: str) -> Callable[..., Any]:
    """What `module:name` names."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{where}: module {module_name!r} can't be imported: {error}. It must be on the Python path"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
        raise ValueError(f"{where}: module {module_name!r} has no {attribute!r}{nearest(attribute, names)}")
    named: Callable[..., Any] = found
    return named
