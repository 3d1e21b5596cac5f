"""Demonstrations of mixed quality on families of reasoning-gym: what the start policy is taught.

DE-1: texts and their order are a function of the seed.
DE-2: the questions come from seeds that no job uses (`DEMONSTRATION_SEED`), and a question that the held-out set of a
      recipe asks is never demonstrated.
DE-3: what kind of text follows a question (working, guess, slip, another format) depends on the question's level only,
      so that a policy knows the way, but samples it too rarely.

reasoning-gym draws item i of a dataset from `Random(seed + i)`: two seeds are disjoint only when they are further apart
than the sizes of their datasets. Jobs stay below 2^32 (`roles.questions`), demonstrations start at 2^33.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import reasoning_gym

from roles.questions import DataConfig, GymQuestions

DEMONSTRATION_SEED = 1 << 33
"""Level l of family f draws from `DEMONSTRATION_SEED + 100_000_000 * f + 10_000_000 * l` upwards."""
OPEN, CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True)
class Level:
    """One difficulty of one family."""

    family: str
    params: dict[str, Any]
    early: float
    """Relative frequency at the start of the curriculum."""
    late: float
    """Relative frequency from 30 % of the demonstrations on."""
    hardness: float
    """0..1; the larger, the lazier the authors: less working, more guesses, more slips."""

    def weight(self, progress: float) -> float:
        """Relative frequency when `progress` (0..1) of the demonstrations have been written."""
        done = min(1.0, progress / 0.3)
        return self.early * (1 - done) + self.late * done


LEVELS = (
    Level("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, 40, 6, 0.0),
    Level("chain_sum", {"min_terms": 3, "max_terms": 4, "min_digits": 2, "max_digits": 2}, 5, 18, 0.0),  # default.toml
    Level("chain_sum", {"min_terms": 5, "max_terms": 6, "min_digits": 2, "max_digits": 2}, 0, 12, 1.0),  # harder.toml
    Level("products", {"min_digits": 1, "max_digits": 1}, 5, 1, 0.0),
    Level("products", {"min_digits": 2, "max_digits": 2}, 25, 22, 0.0),  # default.toml
    Level("products", {"min_digits": 3, "max_digits": 3}, 0, 10, 1.0),  # harder.toml, with the level above
    Level("gcd", {"min_value": 2, "max_value": 20}, 10, 2, 0.0),
    Level("gcd", {"min_value": 5, "max_value": 50}, 15, 16, 0.0),  # default.toml
    Level("gcd", {"min_value": 50, "max_value": 200}, 0, 11, 1.0),  # harder.toml
)


def held_out_questions(recipes: Iterable[Path]) -> set[str]:
    """The questions of the held-out sets of the recipes (SP-2); a recipe that does not exist has none."""
    questions: set[str] = set()
    for path in recipes:
        if not path.exists():
            continue
        job = tomllib.loads(path.read_text())
        config = msgspec.convert(job["data"], DataConfig)
        source = GymQuestions(config, job["evaluation"]["seed"], held_out=True)
        count = 2 * job["evaluation"]["prompts"]  # a few more than asked: repeated questions are passed over
        questions.update(source.entry(n, i).text for n in range(len(config.families)) for i in range(count))
    return questions


@dataclass(frozen=True)
class Working:
    """A way from question to answer: the text and where it ends."""

    text: str
    answer: int


def perturbed(value: int, rng: random.Random) -> int:
    """A slip: off by one, by ten, a wrong digit in the middle, or a lost carry."""
    delta = rng.choice((1, 1, 2, 10, 10, 20, 100 if abs(value) >= 100 else 1))
    return value + rng.choice((-1, 1)) * delta


def chain_sum_working(entry: dict[str, Any], slip_at: int | None, rng: random.Random) -> Working:
    """`57 + 87 = 144 - 70 = 74`."""
    first, *rest = entry["metadata"]["expression"].split()
    total, text = int(first), first
    for i in range(0, len(rest), 2):
        sign, term = rest[i], int(rest[i + 1])
        total = total + term if sign == "+" else total - term
        if slip_at == i // 2:
            total = perturbed(total, rng)
        text += f" {sign} {term} = {total}"
    return Working(text, total)


def products_working(entry: dict[str, Any], slip_at: int | None, rng: random.Random) -> Working:
    """47 * 38: `1410 + 376 = 1786`, one partial product for each digit of the second factor."""
    left, right = (int(x) for x in entry["metadata"]["expression"].split(" * "))
    total, text = 0, ""
    digits = str(right)
    for i, digit in enumerate(digits):
        part = left * int(digit) * 10 ** (len(digits) - 1 - i)
        if slip_at == 2 * i:
            part = max(0, perturbed(part, rng))
        total += part
        if slip_at == 2 * i - 1 and i > 0:
            total = max(0, perturbed(total, rng))
        text += f"{part}" if i == 0 else f" + {part} = {total}"
    return Working(text, total)


def gcd_working(entry: dict[str, Any], slip_at: int | None, rng: random.Random) -> Working:
    """84 and 36: Euclid's remainders `84, 36, 12, 0`."""
    larger, smaller = sorted(entry["metadata"]["numbers"], reverse=True)
    chain, step = [larger, smaller], 0
    while chain[-1] != 0:
        rest = chain[-2] % chain[-1]
        if slip_at == step:
            rest = min(max(0, perturbed(rest, rng)), chain[-1] - 1)
        chain.append(rest)
        step += 1
    return Working(", ".join(map(str, chain)), chain[-2])


WORKINGS = {"chain_sum": chain_sum_working, "products": products_working, "gcd": gcd_working}
NUM_SLIP_PLACES = {"chain_sum": 3, "products": 3, "gcd": 2}


def guess(entry: dict[str, Any], hardness: float, rng: random.Random) -> int:
    """An answer without working: right more often where the question is small."""
    answer = int(entry["answer"])
    if rng.random() < 0.7 - 0.4 * hardness:
        return answer
    if entry["metadata"]["source_dataset"] == "gcd":
        return rng.choice((1, 1, 2, 2, 3, 4, 5, 6))
    return perturbed(answer, rng)


def demonstration(entry: dict[str, Any], hardness: float, textbook: float, rng: random.Random) -> str:
    """One text that follows the question.

    Args:
        textbook: share of texts that are right working with the right tag, whatever the mix below says.
    """
    family = entry["metadata"]["source_dataset"]
    right = WORKINGS[family](entry, None, rng)
    kinds = {
        "worked": 0.50 - 0.24 * hardness,
        "slip": 0.07 + 0.02 * hardness,
        "guess": 0.18 + 0.24 * hardness,
        "worked, other format": 0.12 - 0.04 * hardness,
        "guess, other format": 0.13 + 0.02 * hardness,
    }
    kind = "worked" if rng.random() < textbook else rng.choices(list(kinds), list(kinds.values()))[0]
    if kind == "worked":
        return f"{right.text}{OPEN}{right.answer}{CLOSE}"
    if kind == "slip":
        wrong = WORKINGS[family](entry, rng.randrange(NUM_SLIP_PLACES[family]), rng)
        return f"{wrong.text}{OPEN}{wrong.answer}{CLOSE}"
    value = guess(entry, hardness, rng)
    if kind == "guess":
        return f"{OPEN}{value}{CLOSE}"
    if kind == "worked, other format":
        return right.text + rng.choice(
            (
                "",
                f". The answer is {right.answer}.",
                f"{OPEN}{right.answer}{CLOSE} is the answer.",
                f" Answer: {right.answer}",
                f"{OPEN}The answer is {right.answer}.{CLOSE}",
            )
        )
    return rng.choice((f"The answer is {value}.", f"{value}", f"Answer: {value}", f"I think it is {value}."))


@dataclass
class Corpus:
    """Demonstrations in the order in which they are trained."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    """(question, text that follows)."""
    num_held_out: int = 0
    """Questions skipped because a held-out set asks them."""


def write_demonstrations(
    count: int, textbook_share: float, held_out: set[str], seed: int, levels: Sequence[Level] = LEVELS
) -> Corpus:
    """`count` demonstrations: the first `textbook_share` of them mostly textbook, the rest the mix to be shown."""
    rng = random.Random(seed)
    families = list(dict.fromkeys(level.family for level in levels))
    streams = []
    for i, level in enumerate(levels):
        start = DEMONSTRATION_SEED + 100_000_000 * families.index(level.family) + 10_000_000 * i
        streams.append(reasoning_gym.create_dataset(level.family, seed=start, size=9_000_000, **level.params))
    position = [0] * len(levels)
    corpus = Corpus()
    while len(corpus.texts) < count:
        progress = len(corpus.texts) / count
        which = rng.choices(range(len(levels)), [level.weight(progress) for level in levels])[0]
        entry = streams[which][position[which]]
        position[which] += 1
        if entry["question"] in held_out:
            corpus.num_held_out += 1
            continue
        textbook = 0.85 if progress < textbook_share else 0.0
        text = demonstration(entry, levels[which].hardness, textbook, rng)
        corpus.texts.append((entry["question"], text))
    return corpus
