"""Where questions come from: generated families or a file of the user, each an endless deterministic stream.

QU-1: the question at a position depends only on the settings, the seed and the position, not on what was asked before.
QU-2: generated questions of training and of held-out sets come from ranges of seeds that can't meet (`GY-1`).
QU-3: a file is read in an order shuffled anew for each epoch by (seed, epoch); each epoch holds every kept row once.
QU-4: two questions are the same if their texts are equal up to whitespace (`question_key`).
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from roles import gym


class FamilyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One family of generated tasks in the mix."""

    name: str
    """A family of reasoning-gym, such as "chain_sum"."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Share of the questions, relative to the other families."""
    params: dict[str, Any] = {}
    """The family's own parameters, such as max_terms; what is left out keeps the library's default."""


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked. Either `families` or `file`."""

    families: list[FamilyConfig] = []
    """Generated tasks, mixed by weight."""
    file: str = ""
    """A JSON Lines file of your own: one object a line with "question", "answer" and, for scores by task, "task". What
    else it has, a verifier or environment finds in `prompt.entry`, such as the "tests" of "code"."""
    held_out_file: str = ""
    """The file of held-out questions that belongs to `file`. Empty: a part of `file` is kept out of training."""
    verifier: Literal["exact", "boxed", "number", "math", "code"] = "exact"
    """How answers to questions of a file are judged where `[reward] verifier` is "task". With "code" a row has "tests"
    or "test_code" in place of an answer."""
    seed: int = 0
    """Orders the stream. The same seed gives the same questions in the same order. 0: the seed of the job."""
    max_prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    """Longer prompts are left out of the stream. 0: derived, what the model has positions for besides the longest
    answer."""
    template: str = "{question}"
    """What the user turn says; {question} is replaced. A model that was not taught to end its answer with
    <answer>...</answer> must be told so here."""
    system: str = ""
    """System turn; needs a tokenizer with a chat template."""
    chat_template_options: dict[str, Any] = {}
    """Passed to the chat template, such as enable_thinking = false."""
    prefetch: Annotated[int, Meta(ge=0)] = 64
    """How many prompts are made ahead, in a thread, when one takes longer than a millisecond. 0: never."""


class Question(NamedTuple):
    text: str
    task: str
    entry: dict[str, Any]
    """What the verifier needs; builtins only."""


class Questions(Protocol):
    """An endless stream of questions."""

    def at(self, position: int, attempt: int) -> Question | None:
        """The question at a position (QU-1). `attempt` counts the ones refused there; None: there is no other."""
        ...


def stable_hash(*parts: object) -> int:
    """64 bits that depend on the parts' texts only, equal in every process and version of Python."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def question_key(text: str) -> str:
    """Equal for equal questions (QU-4); 32 hexadecimal digits."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).hexdigest()


class GymQuestions:
    """Families of reasoning-gym, mixed by seeded weighted choice."""

    def __init__(self, config: DataConfig, seed: int, *, held_out: bool = False) -> None:
        self._seed = seed
        total = sum(family.weight for family in config.families)
        self._bounds = [bound / total for bound in accumulate(family.weight for family in config.families)]
        offset = 2 * gym.SPAN if held_out else 0  # QU-2: [0, 2 SPAN) is for training, [2 SPAN, 4 SPAN) is held out
        self._families = [
            gym.Family(family.name, family.params, base=offset + stable_hash(seed, family.name) % gym.SPAN)
            for family in config.families
        ]

    def at(self, position: int, attempt: int = 0) -> Question:
        """First attempts and later ones use two halves of the family's range, so that neither repeats the other."""
        number = self.family_at(stable_hash(self._seed, "family", position) / 2**64)
        half = gym.SPAN // 2
        index = position % half
        if attempt:
            index = half + stable_hash(self._seed, "again", position, attempt) % half
        return self.entry(number, index)

    def family_at(self, fraction: float) -> int:
        """Number of the family that a point of [0, 1) falls into, by weight."""
        return next((n for n, bound in enumerate(self._bounds) if fraction < bound), len(self._bounds) - 1)

    def entry(self, number: int, index: int) -> Question:
        """Entry `index` of the family with that number."""
        family = self._families[number]
        entry = family.entry(index)
        return Question(entry["question"], family.name, entry)


class FileQuestions:
    """The kept rows of a JSON Lines file, in a new order each epoch (QU-3)."""

    def __init__(self, rows: list[Question], seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    def at(self, position: int, attempt: int = 0) -> Question | None:
        if attempt:
            return None  # rows that can't be asked are not among the kept ones
        epoch, place = divmod(position, len(self._rows))
        if self._order[0] != epoch:
            order = list(range(len(self._rows)))
            Random(stable_hash(self._seed, "epoch", epoch)).shuffle(order)
            self._order = (epoch, order)
        return self._rows[self._order[1][place]]


def read_rows(path: str, verifier: str, where: str) -> list[Question]:
    """All rows of a JSON Lines file. Blank lines are skipped.

    Raises:
        ValueError: the file is missing, empty, or a line is not an object with a question and an answer.
    """
    source = Path(path)
    try:
        lines = source.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()  # some editors begin a file with a mark
    except OSError as error:
        raise ValueError(f"{where}: {path} can't be read: {error.strerror}. Give a JSON Lines file") from error
    rows = [
        _row(line, f"{where}: {path} line {number}", source.stem, verifier)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not rows:
        raise ValueError(f"{where}: {path} has no rows. Give one object a line, with 'question' and 'answer'")
    return rows


def _row(line: bytes, where: str, stem: str, verifier: str) -> Question:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error}. Give one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with 'question' and 'answer', got {type(row).__name__}")
    question, answer, task = row.get("question"), row.get("answer"), row.get("task", stem)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: expected a text in 'question'; the object has {sorted(row)}")
    if not isinstance(task, str):
        raise ValueError(f"{where}: expected a text in 'task', got {task!r}")
    if verifier == "code":
        _check_tests(row, where)
    elif isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == "":
        raise ValueError(f"{where}: expected a text or number in 'answer'; the object has {sorted(row)}")
    told = {} if answer is None else {"answer": answer if isinstance(answer, str) else str(answer)}
    return Question(question, task, {**row, **told, "verifier": verifier})


def _check_tests(row: dict[str, Any], where: str) -> None:
    """What "code" wants of a row. Raises ValueError."""
    tests, test_code = row.get("tests", []), row.get("test_code", "")
    pairs = isinstance(tests, list) and all(isinstance(t, dict) and {"input", "output"} <= t.keys() for t in tests)
    if not pairs or not isinstance(test_code, str) or not (tests or test_code):
        raise ValueError(
            f"{where}: expected 'tests', a list of objects with 'input' and 'output', or 'test_code', a text; the "
            f"object has {sorted(row)}"
        )


def distinct(questions: Iterator[Question], refused: Callable[[Question], bool]) -> Iterator[Question]:
    """The questions that are not refused, each text once."""
    seen: set[str] = set()
    for question in questions:
        key = question_key(question.text)
        if key not in seen and not refused(question):
            seen.add(key)
            yield question
