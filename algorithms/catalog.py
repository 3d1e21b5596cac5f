"""Names of objectives and advantages, as a job file writes them, to functions.

CA-1: a name of this catalog or `module:function`; anything else is refused before a process starts, with the nearest
      name.
CA-2: an objective stays a name on the controller (`ObjectiveSpec`) and is resolved on the rank, so that looking one up
      needs no torch; `check_objective` imports it and checks the names of its options.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from algorithms import advantages
from algorithms.advantages import AdvantageFunction
from roles.objective import ObjectiveSpec

OBJECTIVES: dict[str, str] = {
    "grpo": "algorithms.losses:grpo",
    "gspo": "algorithms.losses:gspo",
    "cispo": "algorithms.losses:cispo",
}

ADVANTAGES: dict[str, Callable[..., advantages.FloatArray]] = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
}


def objective(name: str, options: Mapping[str, Any] | None = None) -> ObjectiveSpec:
    """An objective by name or `module:function`, with its options.

    >>> objective("grpo", {"tis_cap": 2.0}).function
    'algorithms.losses:grpo'

    Raises:
        ValueError: neither a known name nor of the form `module:function`.
    """
    function = name if ":" in name else OBJECTIVES.get(name)
    if function is None:
        raise ValueError(_unknown("objective", name, OBJECTIVES))
    return ObjectiveSpec(function=function, options=dict(options or {}))


def check_objective(spec: ObjectiveSpec) -> None:
    """Import the objective and compare the options with its parameters. Loads torch.

    Raises:
        ValueError: the function does not exist, or has no such option.
    """
    function = _import(spec.function, "objective")
    _check_options(function, spec.options, f"objective {spec.function!r}", skip=1)


def advantage(name: str, options: Mapping[str, Any] | None = None) -> AdvantageFunction:
    """An advantage function by name or `module:function`, options bound.

    >>> rewards = advantages.np.array([1.0, 0, 0, 0])
    >>> advantage("grpo", {"ddof": 0, "eps": 0})(rewards).round(3).tolist()
    [1.732, -0.577, -0.577, -0.577]

    Raises:
        ValueError: unknown name, no such function, or no such option.
    """
    if ":" in name:
        function = _import(name, "advantage")
    elif name in ADVANTAGES:
        function = ADVANTAGES[name]
    else:
        raise ValueError(_unknown("advantage", name, ADVANTAGES))
    options = dict(options or {})
    _check_options(function, options, f"advantage {name!r}", skip=1)
    return functools.partial(function, **options) if options else function


def _import(text: str, what: str) -> Callable[..., Any]:
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ValueError(f"{what} {text!r}: expected 'module:function', such as 'my_rl.losses:my_loss'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{what} {text!r}: module {error.name!r} can't be imported; install it or put its folder on PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(f"{what} {text!r}: {_unknown(f'function of {module_name}', name, functions)}")
    return function  # type: ignore[no-any-return]


def _check_options(function: Callable[..., Any], options: Mapping[str, Any], where: str, *, skip: int) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters[skip:]]
    for option in options:
        if option not in names:
            raise ValueError(f"{where}: {_unknown('option', option, names)}")


def _unknown(what: str, got: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(got, names, n=3, cutoff=0.5)
    # Among equally close ones the same letters in another order win: swapped letters are the likeliest slip.
    nearest = sorted(close, key=lambda name: sorted(name) != sorted(got))
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    known = ", ".join(sorted(names)) or "none"
    return f"no {what} is called {got!r}{hint} (known: {known})"
