"""Names of objectives and advantages, as a job file writes them, to functions.

CA-1: a name of this catalog or `module:function`; anything else is refused before a process starts, with the nearest
      name.
CA-2: an objective stays a name on the controller (`ObjectiveSpec`) and is resolved on the rank, so that looking one up
      needs no torch; `check_objective` imports it and checks the names of its options.
CA-3: a name stands for a function and arguments, nothing more: whatever a name does, the arguments do as well.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, get_args, get_type_hints

from algorithms import advantages
from algorithms.advantages import Advantage, GroupFunction
from roles.objective import ObjectiveSpec

OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("algorithms.losses:ppo", {}),
    "ppo": ("algorithms.losses:ppo", {"clip_high": 0.2}),
    "dapo": ("algorithms.losses:ppo", {"clip_low": 0.2, "clip_high": 0.28, "aggregate": "token-mean"}),
    "dr_grpo": ("algorithms.losses:ppo", {"clip_high": 0.2, "aggregate": "constant"}),
    "decoupled": ("algorithms.losses:ppo", {"clip_high": 0.2, "proximal": "recompute", "tis_cap": 5.0}),
    "a3po": ("algorithms.losses:ppo", {"clip_high": 0.2, "proximal": "interpolate", "tis_cap": 5.0}),
    "gspo": ("algorithms.losses:gspo", {}),
    "cispo": ("algorithms.losses:cispo", {}),
    "dppo": ("algorithms.losses:dppo", {}),
    "sapo": ("algorithms.losses:sapo", {}),
    "reinforce": ("algorithms.losses:reinforce", {}),
    "value": ("algorithms.losses:value", {}),
}

ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(group=advantages.grpo),
    "dr_grpo": Advantage(group=advantages.dr_grpo),
    "rloo": Advantage(group=advantages.rloo),
    "maxrl": Advantage(group=advantages.maxrl),
    "reinforce": Advantage(group=advantages.reward, contrast=False),
    "reinforce++": Advantage(group=advantages.reward, contrast=False, whiten="tokens"),
    "reinforce++-baseline": Advantage(group=advantages.dr_grpo, whiten="tokens"),
    "lite_ppo": Advantage(group=advantages.dr_grpo, whiten="reward-std"),
    "gdpo": Advantage(group=advantages.gdpo, parts=True, whiten="sequences"),
}


def objective(name: str | Callable[..., Any], options: Mapping[str, Any] | None = None) -> ObjectiveSpec:
    """An objective by name, `module:function`, or as the function itself, with its options.

    >>> objective("dapo", {"tis_cap": 4.0}).options["tis_cap"]
    4.0

    Raises:
        ValueError: neither a known name nor of the form `module:function`, or a function that the ranks can't import.
    """
    if not isinstance(name, str):
        name = _importable(name)
    if ":" in name:
        return ObjectiveSpec(function=name, options=dict(options or {}))
    if name not in OBJECTIVES:
        raise ValueError(_unknown("objective", name, OBJECTIVES))
    function, preset = OBJECTIVES[name]
    return ObjectiveSpec(function=function, options={**preset, **(options or {})})


def check_objective(spec: ObjectiveSpec) -> None:
    """Import the objective and compare the options with its parameters. Loads torch.

    Raises:
        ValueError: the function does not exist, or has no such option.
    """
    function = _import(spec.function, "objective")
    if not callable(function):
        raise ValueError(f"objective {spec.function!r}: expected a function, got {type(function).__name__}")
    _check_options(function, spec.options, f"objective {spec.function!r}", skip=1)
    if spec.options.get("aggregate") == "constant" and not spec.options.get("max_length"):
        raise ValueError(
            f"objective {spec.function!r}: aggregate = 'constant' divides by max_length, which is not given; set it to "
            "the limit of sampled tokens, such as [grpo.loss_options] max_length = 64"
        )


def advantage(name: str, options: Mapping[str, Any] | None = None) -> Advantage:
    """An advantage by name or `module:function` (or `module:name` of an `Advantage`), options bound to its function.

    >>> rewards = advantages.np.array([1.0, 0, 0, 0])
    >>> advantage("grpo", {"ddof": 0, "eps": 0}).group(rewards).round(3).tolist()
    [1.732, -0.577, -0.577, -0.577]

    Raises:
        ValueError: unknown name, no such function, or no such option.
    """
    if ":" in name:
        found = _import(name, "advantage")
    elif name in ADVANTAGES:
        found = ADVANTAGES[name]
    else:
        raise ValueError(_unknown("advantage", name, ADVANTAGES))
    how = found if isinstance(found, Advantage) else Advantage(group=found)
    options = dict(options or {})
    _check_options(how.group, options, f"advantage {name!r}", skip=1)
    group: GroupFunction = functools.partial(how.group, **options) if options else how.group
    return replace(how, group=group)


def _importable(function: Callable[..., Any]) -> str:
    """A function as `module:function`: the ranks import it, so it must stand by name in a module of theirs."""
    module, name = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", repr(function))
    if module == "__main__" or not name.isidentifier():
        raise ValueError(
            f"objective: {name} of {module} can't be imported by the trainer ranks; put it into a module as a function "
            "with a name"
        )
    return f"{module}:{name}"


def _import(text: str, what: str) -> Any:
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ValueError(f"{what} {text!r}: expected 'module:function', such as 'my_rl.losses:my_loss'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{what} {text!r}: module {error.name!r} can't be imported; install it or put its folder on PYTHONPATH"
        ) from error
    found = getattr(module, name, None)
    if not (callable(found) or isinstance(found, Advantage)):
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(f"{what} {text!r}: {_unknown(f'function of {module_name}', name, functions)}")
    return found


def _check_options(function: Callable[..., Any], options: Mapping[str, Any], where: str, *, skip: int) -> None:
    names = _parameters(function, skip)
    for option in options:
        if names is not None and option not in names:
            raise ValueError(f"{where}: {_unknown('option', option, names)}")


def _parameters(function: Callable[..., Any], skip: int) -> list[str] | None:
    """Names of the options; None when it takes any. `**shared: Unpack[SomeTypedDict]` has those of the TypedDict."""
    names: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[skip:]:
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.append(parameter.name)
            continue
        typed = get_args(get_type_hints(function, include_extras=True).get(parameter.name))
        if not typed:
            return None
        names += typed[0].__annotations__
    return names


def _unknown(what: str, got: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(got, names, n=3, cutoff=0.5)
    # Among equally close ones the same letters in another order win: swapped letters are the likeliest slip.
    nearest = sorted(close, key=lambda name: sorted(name) != sorted(got))
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    known = ", ".join(sorted(names)) or "none"
    return f"no {what} is called {got!r}{hint} (known: {known})"
