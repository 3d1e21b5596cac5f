"""Verifiers: an answer in, a number out. Pure functions, but for `code` (a sandbox) and `judge` (an endpoint).

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
import inspect
import math
import re
import secrets
import unicodedata
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from roles import gym, sandbox
from roles.judge import judge
from roles.types import Prompt, Scored

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


def boxed(prompt: Prompt, text: str) -> float:
    r"""1.0 if the last `\boxed{...}` equals `entry["answer"]` after `normalise`, else 0.0."""
    value = extract_boxed(text)
    return 1.0 if value is not None and normalise(value) == normalise(expected_answer(prompt)) else 0.0


def number(prompt: Prompt, text: str, *, tolerance: float = 0.0, anywhere: bool = False) -> float:
    """1.0 if the final answer is the number `entry["answer"]`, however it is written (1,000 / 1e3 / 3/4 / 50%).

    Args:
        tolerance: largest difference relative to the expected number; 0 compares exactly.
        anywhere: without `<answer>` or a box, the last number of the text counts, as in answers to GSM8K.

    Raises:
        ValueError: the expected answer is no number.
    """
    expected = parse_number(expected_answer(prompt))
    if expected is None:
        raise ValueError(f"number verifier: the expected answer {expected_answer(prompt)!r} is no number; use 'exact'")
    said = extract_answer(text)
    if said is None:
        said = extract_boxed(text)
    if said is None and anywhere:
        said = next(iter(NUMBER.findall(text)[::-1]), None)
    value = None if said is None else parse_number(said)
    return 1.0 if value is not None and abs(value - expected) <= abs(expected) * Fraction(tolerance) else 0.0


NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d{1,4})?(?:\s*/\s*\d+)?\s*%?")


def parse_number(text: str) -> Fraction | None:
    """The number that a text is, exactly; None when it is none. Signs of money, commas of thousands and % are read.

    >>> parse_number("$1,000.50"), parse_number("3/4"), parse_number("50%"), parse_number("five")
    (Fraction(2001, 2), Fraction(3, 4), Fraction(1, 2), None)
    """
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").strip().strip("$\u20ac\u00a3.").replace(" ", "")
    if NUMBER.fullmatch(text) is None:
        return None
    percent = text.endswith("%")
    try:
        value = Fraction(text.rstrip("%").replace(",", ""))
    except (ValueError, ZeroDivisionError):  # 1.5/2 and 1/0 are no numbers
        return None
    return value / 100 if percent else value


def code(prompt: Prompt, text: str, *, seconds: float = 2.0, memory_mb: int = 512, weaker: bool = False) -> float:
    """1.0 if the last fenced program of the text passes all tests of the entry, else 0.0 (`roles.sandbox`).

    `entry["tests"]` is a list of {"input": ..., "output": ...}: the program is run for each and must print the output,
    up to trailing whitespace of lines. `entry["test_code"]` is Python that is run after the program in the same
    interpreter; an exception means failed, and so does ending before it. There, code that sets out to deceive its tests
    can: prefer input and output.

    Args:
        seconds: for each run. `[reward] timeout_s` must leave time for all of them.
        memory_mb, weaker: see `sandbox.run`.

    Raises:
        ValueError: the entry has no tests.
        SandboxError: nothing could be run.
    """
    tests, test_code = prompt.entry.get("tests", []), prompt.entry.get("test_code", "")
    if not tests and not test_code:
        raise ValueError(f"code verifier: prompt {prompt.position} has neither 'tests' nor 'test_code'")
    program = extract_code(text)
    if program is None:
        return 0.0

    def execute(source: str, stdin: str) -> sandbox.Result:
        return sandbox.run(source, stdin=stdin, seconds=seconds, memory_mb=memory_mb, weaker=weaker)

    for test in tests:
        result = execute(program, str(test["input"]))
        if result.outcome != "ok" or _lines(result.stdout) != _lines(str(test["output"])):
            return 0.0
    if test_code:
        mark = secrets.token_hex(16)
        result = execute(f"{program}\n\n{test_code}\n\nprint({mark!r})\n", "")
        if result.outcome != "ok" or not _lines(result.stdout)[-1:] == [mark]:
            return 0.0
    return 1.0


FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def extract_code(text: str) -> str | None:
    """The last fenced block of Python in a text; None when there is none."""
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def expected_answer(prompt: Prompt) -> str:
    """`entry["answer"]` as text.

    Raises:
        ValueError: the entry has none.
    """
    answer = prompt.entry.get("answer")
    if answer is None:
        raise ValueError(f"prompt {prompt.position} of task {prompt.task!r} has no 'answer' to compare with")
    return str(answer)


BY_NAME: dict[str, Callable[..., object]] = {
    "reasoning_gym": reasoning_gym,
    "exact": exact,
    "boxed": boxed,
    "number": number,
    "math": math_equal,
    "code": code,
    "judge": judge,
}


def by_task(prompt: Prompt, text: str) -> object:
    """The verifier that the prompt's source named (`entry["verifier"]`); reasoning-gym's where it named none."""
    return BY_NAME[prompt.entry.get("verifier", "reasoning_gym")](prompt, text)


def resolve_verifier(name: str) -> Verifier:
    """'task' (what each prompt's source says), a name of `BY_NAME`, or `module:function` of the user.

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


def bind(name: str, options: Mapping[str, Any], where: str) -> Verifier:
    """A verifier with its options.

    Args:
        where: the place in the job file, which opens the error text.

    Raises:
        ValueError: it is not there, or has no such option, or needs one that is missing.
    """
    verifier = resolve_verifier(name)
    parameters = inspect.signature(verifier).parameters
    own = [p for p in list(parameters.values())[2:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in own]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option not in names and not takes_all:
            known = ", ".join(names) or "none"
            raise ValueError(f"{where} {name!r}: no option {option!r}{gym.nearest(option, names)}; it has: {known}")
    missing = [p.name for p in own if p.default is p.empty and p.name not in options]
    if missing:
        raise ValueError(f"{where} {name!r}: needs options.{', options.'.join(missing)}")
    return functools.partial(verifier, **options) if options else verifier


def verdict(value: object) -> Scored:
    """The verdict with a finite float (VE-3). A verifier may also return `Scored` itself, with parts.

    Raises:
        BadVerdict: the value is not a number, or not finite.
    """
    if isinstance(value, Scored):
        parts = {str(name): verdict(part).value for name, part in value.parts.items()}
        return Scored(verdict(value.value).value, parts)
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        number = float(value)
    elif isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "biuf":
        number = float(value.item())
    else:
        raise BadVerdict(f"the verifier returned {type(value).__name__} {value!r:.80}; expected a float such as 1.0")
    if not math.isfinite(number):
        raise BadVerdict(f"the verifier returned {number}; expected a finite float such as 1.0")
    return Scored(number)
