"""The only file that imports reasoning_gym: families of generated tasks by name, their entries by index, their scorers.

GY-1: an entry depends only on (family, params, base, index). Generators of reasoning_gym draw entry k of a dataset from
      seed + k, so streams with different bases share no entry as long as their ranges base..base+SPAN do not overlap.
GY-2: entries are made of builtins only (no numpy scalar, no tuple), so that a message does not change them.
GY-3: `check_family` shows before a run that the family makes entries, that its scorer judges them the same after a
      message as before, and that it gives no full marks to nonsense.

The library takes seconds to import; it is imported on first use.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

SPAN = 1 << 30
"""Indices of one stream, and the distance that bases of different streams keep. Base + index stays below 2^32, the
limit of numpy seeds."""

NONSENSE = ("\u00a7", "nan")
"""Answers that are wrong in every family; some scorers of the library give them full marks."""

CHUNK = 4096
"""Entries of one dataset object. Some families draw lists as long as the dataset when it is made, so an endless stream
is cut into datasets of this size, whose seeds continue each other."""

RESERVED = ("seed", "size")
"""Parameters that the stream owns."""

ABSENT = ("composite",)
"""Registered names that are not a family of tasks: `[data] families` mixes families itself."""


@functools.cache
def _registry() -> dict[str, tuple[Any, Any]]:
    import reasoning_gym.factory

    return {name: pair for name, pair in reasoning_gym.factory.DATASETS.items() if name not in ABSENT}


def nearest(word: str, known: Iterable[str]) -> str:
    """' (nearest: ...)' for an error text, or '' when nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (nearest: {close[0]!r})" if close else ""


def check_family(name: str, params: Mapping[str, Any], where: str) -> None:
    """Refuse what can't work before any process starts.

    Args:
        where: the place in the job file, which opens the error text.

    Raises:
        ValueError: unknown family or parameter, a value the family refuses, or a family whose scorer needs objects that
            a message does not keep.
    """
    registry = _registry()
    if name not in registry:
        raise ValueError(
            f"{where}: unknown task family {name!r}{nearest(name, registry)}. "
            f"Use a family of reasoning-gym: {', '.join(sorted(registry))}"
        )
    valid = [field.name for field in fields(registry[name][1]) if field.name not in RESERVED]
    for key in params:
        if key in RESERVED:
            raise ValueError(f"{where}.params.{key}: the stream sets it; remove it and use [data] seed")
        if key not in valid:
            raise ValueError(
                f"{where}.params.{key}: family {name!r} has no such parameter{nearest(key, valid)}. "
                f"Valid: {', '.join(valid)}"
            )
    try:
        dataset = _dataset(name, params, seed=1)
        raws = [dataset[k] for k in range(4)]
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(f"{where}.params: family {name!r} refuses {dict(params)}: {error}") from error
    for raw in raws:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plain(raw)))
        right = raw["answer"]
        if isinstance(right, str) and score(name, params, right, raw) != score(name, params, right, sent):
            raise ValueError(
                f"{where}: the scorer of family {name!r} tells lists from tuples, which a message to a reward worker "
                "does not keep, so that right answers would count as wrong. Use another family"
            )
        for wrong in NONSENSE:
            if _full_marks(name, params, wrong, sent):
                raise ValueError(
                    f"{where}: the scorer of family {name!r} gives full marks to {wrong!r} for the question "
                    f"{raw['question']!r:.120}. A policy would learn to answer that. Use another family"
                )


def _full_marks(name: str, params: Mapping[str, Any], value: str, entry: Mapping[str, Any]) -> bool:
    try:
        return score(name, params, value, entry) >= 1.0
    except CANT_READ:
        return False


class Family:
    """The endless entries of one family from one base (GY-1)."""

    def __init__(self, name: str, params: Mapping[str, Any], base: int) -> None:
        self.name = name
        self._params = dict(params)
        self._base = base
        self._open: tuple[int, Any] | None = None

    def entry(self, index: int) -> dict[str, Any]:
        """Entry `index` (0 <= index < SPAN) of builtins: question, answer, metadata, and params if there are any."""
        number, k = divmod(index, CHUNK)
        if self._open is None or self._open[0] != number:
            self._open = (number, _dataset(self.name, self._params, seed=self._base + number * CHUNK))
        entry: dict[str, Any] = plain(self._open[1][k])
        if self._params:
            entry["params"] = self._params
        return entry


CANT_READ = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
"""What scorers of the library raise when an answer does not have the form they parse."""


def is_right(name: str, params: Mapping[str, Any], value: str, entry: Mapping[str, Any]) -> bool:
    """True if the family's scorer gives an answer full marks (1.0); partial credit is not right.

    Many scorers raise on an answer of another form ('abc' where a number belongs). Such an answer is wrong, provided
    that the scorer can judge the entry's own answer; if it can't, entry or scorer are broken and the error is raised.

    Raises:
        Exception: what the scorer raises on the entry's own answer.
    """
    try:
        return score(name, params, value, entry) >= 1.0
    except CANT_READ:
        score(name, params, entry["answer"], entry)
        return False


def score(name: str, params: Mapping[str, Any], value: str, entry: Mapping[str, Any]) -> float:
    """What reasoning-gym's own scorer says about an answer, usually 0 to 1; raises what the scorer raises."""
    return float(_scorer(name, msgspec.json.encode(params, order="sorted")).score_answer(value, entry))


@functools.lru_cache(maxsize=64)
def _scorer(name: str, params: bytes) -> Any:
    return _dataset(name, msgspec.json.decode(params), seed=0)


def _dataset(name: str, params: Mapping[str, Any], *, seed: int) -> Any:
    _registry()
    import reasoning_gym.factory

    return reasoning_gym.factory.create_dataset(name, **params, seed=seed, size=CHUNK)


def plain(value: Any) -> Any:
    """The same value of builtins only: tuples become lists, numpy scalars and arrays Python's own (GY-2)."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    return value
