"""Promises of roles/recorded.py without a server: which thread a request continues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from roles.dialogue import Dialogue
from roles.recorded import Session, Thread
from roles.types import Completion
from tests.roles.tiny import CHAT, END, save_tiny_policy


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> Dialogue:
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_policy(tmp_path_factory.mktemp("policy")))
    tokenizer.chat_template = CHAT
    return Dialogue(tokenizer)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def say(session: Session, thread: Thread, token: int, *, text: bool = False) -> None:
    ids = np.array([token, END], np.int32)
    turn = Completion(token_ids=ids, logprobs=-ids / 100, versions=ids * 0, finish_reason="stop")
    session.answered(thread, turn, None if text else assistant(f"w{token}"))


def test_two_requests_that_continue_one_thread_at_once_make_two_rd3(dialogue: Dialogue) -> None:
    session = Session(dialogue)
    say(session, session.continued([user("w1")], None), 5)
    history = [user("w1"), assistant("w5"), user("w2")]
    first = session.continued(history, None)
    same, longer = session.continued(history, None), session.continued([*history, user("w3")], None)
    assert len({id(first), id(same), id(longer)}) == 3
    session.failed(longer)
    second = same
    say(session, second, 7)
    say(session, first, 6)
    assert session.num_forks == 2
    left, right = session.trajectories()
    assert left.completion.token_ids.tolist() == [7, END]
    assert right.completion.mask is not None
    assert right.completion.token_ids[right.completion.mask].tolist() == [5, END, 6, END]


def test_the_longest_beginning_is_continued_and_other_tools_are_another_dialogue_rd2(dialogue: Dialogue) -> None:
    session = Session(dialogue)
    tools = [{"type": "function", "function": {"name": "add"}}]
    say(session, session.continued([user("w1")], None), 5)
    longer = [user("w1"), assistant("w5"), user("w2")]
    say(session, session.continued(longer, None), 6)
    whole = [*longer, assistant("w6"), user("w3")]
    for given, continues in ((None, True), (tools, False)):
        thread = session.continued(whole, given)
        assert (thread.transcript.num_turns > 0) is continues
        session.failed(thread)
    assert session.num_forks == 1
    assert len(session.trajectories()) == 1  # what failed before its first turn is gone


def test_fields_that_say_nothing_and_texts_in_parts_are_the_same_message_rd1(dialogue: Dialogue) -> None:
    session = Session(dialogue)
    say(session, session.continued([user("w1")], None), 5)
    echoed = assistant("w5") | {"refusal": None, "tool_calls": None, "annotations": [], "name": ""}
    parts = [{"type": "text", "text": "w1"}]
    session.continued([user(parts), echoed, user("w2")], None)  # type: ignore[arg-type]
    assert session.num_forks == 0


def test_a_prompt_of_tokens_continues_what_begins_it_rd1(dialogue: Dialogue) -> None:
    session = Session(dialogue)
    thread = session.continued_ids([1, 2])
    say(session, thread, 5, text=True)
    assert session.continued_ids([1, 2, 5, END, 3]) is thread
    assert session.continued_ids([1, 2, 5, END, 3, 4]) is not thread  # it is busy
    assert session.num_forks == 1
