"""The endless prompt stream of a run: order, position, resume, and the held-out set that it never touches.

PR-1: the prompt at a position depends only on (settings, held-out set, position). `take` gives every position once, in
      order; `at` gives one again to whoever knows its position (admission, which issues lost prompts again).
PR-2: `state` is a position and a digest. After `restore` the stream goes on where it stood (A5): none is skipped or
      repeated.
PR-3: no training prompt has the question of a held-out prompt. Generated sets use ranges of seeds that can't meet; as
      two seeds may still give one question, the *training* stream skips every question whose text is in the held-out
      set. In a generated stream another question takes its place; rows of a file are left out before shuffling.
PR-4: `take` waits for the making of two prompts at most (its own and the one a thread is at), and for none once the
      thread is ahead. The prompts are the same with and without the thread.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import msgspec

from roles import gym
from roles.questions import (
    DataConfig,
    FamilyConfig,
    FileQuestions,
    GymQuestions,
    Question,
    Questions,
    distinct,
    question_key,
    read_rows,
    stable_hash,
)
from roles.types import Prompt

__all__ = [
    "DataConfig",
    "FamilyConfig",
    "PromptEncoder",
    "PromptSource",
    "check_data",
    "check_stream",
    "held_out",
    "question_key",
]

HELD_OUT_START = 1 << 40
"""Positions of held-out prompts start here, so that they never equal a position of the training stream."""

MAX_ATTEMPTS = 1000
"""Questions tried at one place before the stream says that there are too few."""

SLOW_SECONDS = 1e-3
"""Mean CPU time of making a prompt above which prompts are made ahead (a loaded machine does not count)."""

TIMED = 8
"""Prompts made before their mean time is believed."""


def check_data(config: DataConfig) -> None:
    """Everything about `[data]` that can be known before a process starts. Imports reasoning_gym if families are used.

    Raises:
        ValueError: no source or two, unknown family or parameter, unreadable file, template without {question}.
    """
    if bool(config.families) == bool(config.file):
        got = "both" if config.file else "neither"
        raise ValueError(
            f"[data]: expected either families or file, got {got}. Write [[data.families]] with a name for generated "
            f'tasks, or file = "questions.jsonl" for your own'
        )
    if config.held_out_file and not config.file:
        raise ValueError("[data] held_out_file: only used with file; generated families make their own held-out set")
    if "{question}" not in config.template:
        raise ValueError(f"[data] template: expected a text with {{question}} in it, got {config.template!r}")
    names = [family.name for family in config.families]
    for number, family in enumerate(config.families):
        where = f"[data] families[{number}]"
        if family.name in names[:number]:
            raise ValueError(f"{where}: {family.name!r} is listed twice; widen its parameters (min_*, max_*) instead")
        gym.check_family(family.name, family.params, where)
    if config.file:
        read_rows(config.file, config.verifier, "[data] file")
    if config.held_out_file:
        read_rows(config.held_out_file, config.verifier, "[data] held_out_file")


class PromptEncoder:
    """Questions to the text and token ids that a policy reads."""

    def __init__(self, tokenizer: str | Path, config: DataConfig) -> None:
        """Load a tokenizer in Hugging Face format from a folder; nothing is fetched.

        Raises:
            ValueError: the folder has no tokenizer, or `system` is set and the tokenizer has no chat template.
        """
        from transformers import AutoTokenizer

        if not Path(tokenizer).is_dir():
            raise ValueError(f"tokenizer {str(tokenizer)!r}: expected a folder with tokenizer.json, found none")
        self._tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
        self._chat = bool(self._tokenizer.chat_template)
        self._config = config
        if config.system and not self._chat:
            raise ValueError(
                f"[data] system: the tokenizer in {str(tokenizer)!r} has no chat template, so there is no system turn. "
                f"Remove system, or put the text into template"
            )

    def encode(self, question: str) -> tuple[str, tuple[int, ...]]:
        """The user turn and the token ids of the whole prompt, up to where the answer starts."""
        text = self._config.template.replace("{question}", question)
        if not self._chat:
            return text, tuple(self._tokenizer.encode(text))
        turns = [{"role": "user", "content": text}]
        if self._config.system:
            turns.insert(0, {"role": "system", "content": self._config.system})
        rendered = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **self._config.chat_template_options
        )
        return text, tuple(self._tokenizer.encode(rendered, add_special_tokens=False))

    def prompt(self, position: int, question: Question) -> Prompt | None:
        """The prompt of a question; None when it is longer than `max_prompt_tokens`."""
        text, ids = self.encode(question.text)
        if 0 < self._config.max_prompt_tokens < len(ids):
            return None
        return Prompt(position=position, text=text, token_ids=ids, task=question.task, entry=question.entry)


def held_out(config: DataConfig, count: int, seed: int, encoder: PromptEncoder) -> list[Prompt]:
    """`count` prompts with different questions for evaluation. `PromptSource` is given them and avoids them (PR-3).

    Families get their exact share by weight. Positions start at HELD_OUT_START.

    Raises:
        ValueError: there are fewer than `count` different questions that fit `max_prompt_tokens`.
    """
    if config.file:
        questions = _held_out_rows(config, count, seed, encoder)
    else:
        questions = _held_out_generated(config, count, seed, encoder)
    prompts = [encoder.prompt(HELD_OUT_START + place, question) for place, question in enumerate(questions)]
    return [prompt for prompt in prompts if prompt is not None]


def _held_out_generated(config: DataConfig, count: int, seed: int, encoder: PromptEncoder) -> list[Question]:
    source = GymQuestions(config, seed, held_out=True)
    numbers = [source.family_at((place + 0.5) / count) for place in range(count)]
    questions: list[Question] = []
    for number, family in enumerate(config.families):
        wanted = numbers.count(number)
        num_tries = MAX_ATTEMPTS + 20 * wanted
        tries = (source.entry(number, index) for index in range(num_tries))
        found = list(islice(distinct(tries, lambda q: encoder.prompt(0, q) is None), wanted))
        if len(found) < wanted:
            raise ValueError(
                f"[data] families[{number}]: {wanted} held-out questions wanted, but family {family.name!r} gave only "
                f"{len(found)} different ones of at most {config.max_prompt_tokens} tokens in {num_tries} tries. "
                f"Widen its parameters, raise max_prompt_tokens or hold out fewer ([evaluation] prompts)"
            )
        questions += found
    return questions


def _held_out_rows(config: DataConfig, count: int, seed: int, encoder: PromptEncoder) -> list[Question]:
    key, path = ("held_out_file", config.held_out_file) if config.held_out_file else ("file", config.file)
    rows = read_rows(path, config.verifier, f"[data] {key}")
    Random(stable_hash(seed, "held out")).shuffle(rows)
    found = list(islice(distinct(iter(rows), lambda q: encoder.prompt(0, q) is None), count))
    if len(found) < count:
        raise ValueError(
            f"[data] {key}: {count} held-out questions wanted, but {path} has only {len(found)} different ones of at "
            f"most {config.max_prompt_tokens} tokens. Hold out fewer ([evaluation] prompts), raise "
            f"max_prompt_tokens or add rows"
        )
    return found


class PromptSource:
    """Gives out prompts and knows where it stands. One event loop uses it; `take` never awaits."""

    def __init__(self, config: DataConfig, encoder: PromptEncoder, held_out: Sequence[Prompt] = ()) -> None:
        """Args:
            held_out: prompts whose questions training must not see (PR-3).

        Raises:
            ValueError: no row of the file is left for training.
        """
        self._config = config
        self._encoder = encoder
        self._excluded = _questions_of(held_out)
        self.num_left_out = 0
        """Rows of the file that are never asked: held out, or longer than max_prompt_tokens."""
        self._digest = _digest_of(config, self._excluded)
        self._questions: Questions = self._file_questions() if config.file else GymQuestions(config, config.seed)
        self._next = 0
        self._making = Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[Prompt]] = {}
        self._warm = False  # the first prompt may import the library, and is not timed
        self._num_timed, self._seconds = 0, 0.0

    def _file_questions(self) -> FileQuestions:
        config = self._config
        rows = read_rows(config.file, config.verifier, "[data] file")
        kept = [row for row in rows if not self._is_excluded(row) and self._encoder.prompt(0, row) is not None]
        if not kept:
            raise ValueError(
                f"[data] file: none of the {len(rows)} rows of {config.file} is left for training: "
                f"{sum(self._is_excluded(row) for row in rows)} are held out, the others are longer than "
                f"{config.max_prompt_tokens} tokens. Hold out fewer ([evaluation] prompts), raise "
                f"max_prompt_tokens or add rows"
            )
        self.num_left_out = len(rows) - len(kept)
        return FileQuestions(kept, config.seed)

    def _is_excluded(self, question: Question) -> bool:
        return question_key(question.text) in self._excluded

    def take(self) -> Prompt:
        """The prompt at the next position.

        Raises:
            ValueError: no question can be asked at that place (too few different ones, all held out or too long).
        """
        position, self._next = self._next, self._next + 1
        return self._prompt_at(position)

    def at(self, position: int) -> Prompt:
        """The prompt at a position (PR-1), for one who knows it from a checkpoint. Issues nothing. Raises as `take`."""
        return self._make(position)

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as builtins for a checkpoint (PR-2)."""
        return {"next": self._next, "digest": self._digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where `state` was taken.

        Raises:
            ValueError: the state belongs to other settings, another file or another held-out set.
        """
        _check_digest(self._digest, state)
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
        self._next = state["next"]

    def close(self) -> None:
        """End the thread that makes prompts ahead. The stream can still be used, without it."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
        self._ahead.clear()
        self._num_timed, self._seconds = 0, 0.0

    def _prompt_at(self, position: int) -> Prompt:
        """Inline while prompts are quick to make; from a thread that works ahead once they are not (PR-4)."""
        if self._thread is None:
            started = time.thread_time()
            prompt = self._make(position)
            if self._warm:
                self._num_timed, self._seconds = self._num_timed + 1, self._seconds + time.thread_time() - started
            self._warm = True
            if self._num_timed >= TIMED and self._seconds > SLOW_SECONDS * self._num_timed and self._config.prefetch:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
            return prompt
        for ahead in range(position + 1, position + 1 + self._config.prefetch):
            if ahead not in self._ahead:
                self._ahead[ahead] = self._thread.submit(self._make, ahead)
        future = self._ahead.pop(position, None)
        return future.result() if future is not None else self._make(position)

    def _make(self, position: int) -> Prompt:
        with self._making:  # families keep their current chunk, which two threads must not exchange under each other
            for attempt in range(MAX_ATTEMPTS):
                question = self._questions.at(position, attempt)
                if question is None:
                    break
                if self._is_excluded(question):
                    continue
                prompt = self._encoder.prompt(position, question)
                if prompt is not None:
                    return prompt
        raise ValueError(
            f"[data]: no question found for position {position} that is not held out and has at most "
            f"{self._config.max_prompt_tokens} tokens ({len(self._excluded)} are held out). Widen the parameters of "
            f"the families, raise max_prompt_tokens or hold out fewer ([evaluation] prompts)"
        )


def check_stream(config: DataConfig, held_out: Sequence[Prompt], state: Mapping[str, Any]) -> None:
    """Whether the `PromptSource` of these settings could stand where `state` was taken. Raises as its `restore`."""
    _check_digest(_digest_of(config, _questions_of(held_out)), state)


def _questions_of(prompts: Sequence[Prompt]) -> frozenset[str]:
    return frozenset(question_key(prompt.entry["question"]) for prompt in prompts)


def _digest_of(config: DataConfig, excluded: frozenset[str]) -> str:
    """Of all that decides about the order of the stream."""
    order = msgspec.structs.replace(config, prefetch=0, file="", held_out_file="")
    digest = hashlib.blake2b(msgspec.json.encode([order, sorted(excluded)]), digest_size=16)
    if config.file:
        digest.update(Path(config.file).read_bytes())
    return digest.hexdigest()


def _check_digest(digest: str, state: Mapping[str, Any]) -> None:
    if state.get("digest") != digest:
        raise ValueError(
            "[data]: the checkpoint was made with another prompt stream: the settings of [data], the content of "
            "its file or the held-out set have changed. Resume with the ones of that run, or start a new run"
        )
