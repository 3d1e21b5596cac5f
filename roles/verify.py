"""Verifiers: an answer in, a number out. Pure functions without clock, process or retry.

VE-1: strict. A completion is judged by one final answer at its very end; an answer followed by more text, two answers,
      or none are wrong (0.0), and partial credit counts as wrong.
VE-2: a verifier never guesses. What it can't judge is raised, and becomes Unscored in `reward.py`, never 0.0.
VE-3: a verdict is a finite float. Numbers of numpy and booleans are converted; None, text, tuples and NaN are refused.
VE-4: no verifier uses signals or threads: time limits belong to the caller. Those of math-verify are switched off, for
      they need the main thread and take over the alarm of the process.
"""

from __future__ import annotations

import functools
import importlib
import math
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np

from roles import gym
from roles.types import Prompt

OPEN, CLOSE = "<answer>", "</answer>"

Verifier = Callable[[Prompt, str], object]
"""`verifier(prompt, text) -> float`, with the text of one completion."""


class BadVerdict(TypeError):
    """A verifier returned something that is not a finite number."""


def extract_answer(text: str) -> str | None:
    """The VALUE of a text that ends with exactly one `<answer>VALUE</answer>` and whitespace at most; else None (VE-1).

    VALUE comes without surrounding whitespace. A second opening or closing tag anywhere makes it None.
    """
    text = text.rstrip()
    if not text.endswith(CLOSE) or text.count(CLOSE) != 1 or text.count(OPEN) != 1:
        return None
    return text[text.index(OPEN) + len(OPEN) : -len(CLOSE)].strip()


def extract_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, braces matched; None when there is none or it is not closed."""
    _, opening, rest = text.rpartition(r"\boxed{")
    if not opening:
        return None
    depth = 1
    for at, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:at].strip()
    return None


def normalise(text: str) -> str:
    """For comparing answers as text: Unicode NFKC, case folded, runs of whitespace made one space, ends stripped."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def reasoning_gym(prompt: Prompt, text: str) -> float:
    """1.0 if the scorer of the prompt's family gives the final answer full marks, else 0.0."""
    value = extract_answer(text)
    if value is None:
        return 0.0
    return 1.0 if gym.is_right(prompt.task, prompt.entry.get("params", {}), value, prompt.entry) else 0.0


def exact(prompt: Prompt, text: str) -> float:
    """1.0 if the final answer equals `entry["answer"]` after `normalise`, else 0.0."""
    value = extract_answer(text)
    return 1.0 if value is not None and normalise(value) == normalise(expected_answer(prompt)) else 0.0


def math_equal(prompt: Prompt, text: str) -> float:
    r"""1.0 if the final answer is mathematically equal to `entry["answer"]` (library math-verify), else 0.0.

    The final answer is the one of `extract_answer`; models that were taught `\boxed{}` are judged by the last of these.

    Raises:
        ValueError: the expected answer is no mathematical expression.
    """
    value = extract_answer(text)
    if value is None:
        value = extract_boxed(text)
    if not value:
        return 0.0
    expected = expected_answer(prompt)
    if normalise(value) == normalise(expected):
        return 1.0
    gold = _parse_math(expected)
    if not gold:
        raise ValueError(f"math verifier: the expected answer {expected!r} is no mathematical expression; use 'exact'")
    from math_verify import verify

    target = _parse_math(value)
    return 1.0 if target and verify(gold, target, timeout_seconds=None, raise_on_error=True) else 0.0


def _parse_math(text: str) -> list[Any]:
    _quiet_math_verify()
    from math_verify import parse

    parsed: list[Any] = parse(text if "$" in text else f"${text}$", parsing_timeout=None)
    return parsed


@functools.cache
def _quiet_math_verify() -> None:
    """math-verify warns once that its time limits are off; that is our intention (VE-4)."""
    import math_verify.grader
    import math_verify.parser

    math_verify.grader.TIMEOUT_WARNING_SHOWN = True
    math_verify.parser.TIMEOUT_WARNING_SHOWN = True


def expected_answer(prompt: Prompt) -> str:
    """`entry["answer"]` as text.

    Raises:
        ValueError: the entry has none.
    """
    answer = prompt.entry.get("answer")
    if answer is None:
        raise ValueError(f"prompt {prompt.position} of task {prompt.task!r} has no 'answer' to compare with")
    return str(answer)


BY_NAME: dict[str, Verifier] = {"reasoning_gym": reasoning_gym, "exact": exact, "math": math_equal}


def by_task(prompt: Prompt, text: str) -> object:
    """The verifier that the prompt's source named (`entry["verifier"]`); reasoning-gym's where it named none."""
    return BY_NAME[prompt.entry.get("verifier", "reasoning_gym")](prompt, text)


def resolve_verifier(name: str) -> Verifier:
    """'task' (what each prompt's source says), 'exact', 'math', 'reasoning_gym', or `module:function` of the user.

    Raises:
        ValueError: the name is none of these, or the module can't be imported or has no such function.
    """
    if name == "task":
        return by_task
    if name in BY_NAME:
        return BY_NAME[name]
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        known = ("task", *BY_NAME)
        raise ValueError(
            f"[reward] verifier: unknown {name!r}{gym.nearest(name, known)}. Use one of {', '.join(known)}, "
            f"or 'module:function' for your own, called as function(prompt, text) -> float"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"[reward] verifier {name!r}: module {module_name!r} can't be imported: {error}. "
            f"It must be on the Python path of the reward workers"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
        raise ValueError(
            f"[reward] verifier {name!r}: module {module_name!r} has no function {function_name!r}"
            f"{gym.nearest(function_name, names)}"
        )
    verifier: Verifier = function
    return verifier


def verdict(value: object) -> float:
    """The verdict as a finite float (VE-3).

    Raises:
        BadVerdict: the value is not a number, or not finite.
    """
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        number = float(value)
    elif isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "biuf":
        number = float(value.item())
    else:
        raise BadVerdict(f"the verifier returned {type(value).__name__} {value!r:.80}; expected a float such as 1.0")
    if not math.isfinite(number):
        raise BadVerdict(f"the verifier returned {number}; expected a finite float such as 1.0")
    return number
