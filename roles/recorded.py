"""What an agent said and heard over the HTTP endpoint, as exact tokens: sessions of threads of a dialogue.

    request with messages -> the thread that they continue: its own tokens + the tokens of the new messages
                          -> none: a new thread, spelled from the start

RD-1: a message that a thread holds is never spelled again: the tokens that were sampled are the tokens that are read
      and trained, also where the template would spell their text otherwise.
RD-2: messages that no thread of the session is a beginning of start a thread of their own: a fork, counted. The thread
      that they leave stays as it is.
RD-3: a thread answers one request at a time; two that continue the same thread at once make two threads.
RD-4: a request that got no answer leaves its thread as it was before: who asks again goes on with the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from roles.dialogue import Dialogue
from roles.transcript import Transcript
from roles.types import Completion


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One thread, as a trainer wants it."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    messages: list[dict[str, Any]]
    """The dialogue, the policy's turns included."""


class Thread:
    """A dialogue that only grew."""

    def __init__(self, messages: list[dict[str, Any]], tools: Any, transcript: Transcript) -> None:
        self.messages = messages
        self.tools = tools
        self.transcript = transcript
        self.latest: list[int] = []
        """Tokens of the policy's latest turn."""
        self.busy = False
        self.heard: list[dict[str, Any]] = []
        """Messages before the request under way."""


class Session:
    """All that one agent said under one name."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue
        self._threads: list[Thread] = []
        self.num_forks = 0
        """Threads that began although the session had one already (RD-2)."""

    def continued(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> Thread:
        """The thread that stands for these messages, with all their tokens, marked busy. `answered` frees it."""
        plain = [_plain(message) for message in messages]
        thread = self._longest_beginning(plain, tools)
        if thread is None:
            self.num_forks += bool(self._threads)
            transcript = Transcript(self._dialogue.prompt(plain, tools))
            thread = Thread(plain, tools, transcript)
            self._threads.append(thread)
        else:
            new, thread.heard = plain[len(thread.messages) :], thread.messages
            thread.transcript.observe(self._dialogue.reply(new, thread.latest))
            thread.messages = plain
        thread.busy = True
        return thread

    def continued_ids(self, ids: Sequence[int]) -> Thread:
        """As `continued`, for a prompt of tokens."""
        for thread in self._threads:
            held = thread.transcript.ids
            if not thread.busy and not thread.messages and len(held) < len(ids) and tuple(ids[: len(held)]) == held:
                thread.transcript.observe(list(ids[len(held) :]))
                break
        else:
            self.num_forks += bool(self._threads)
            thread = Thread([], None, Transcript(ids))
            self._threads.append(thread)
        thread.busy = True
        return thread

    def answered(self, thread: Thread, turn: Completion, message: Mapping[str, Any] | None) -> None:
        """The policy's turn, and the message that the agent was given for it."""
        thread.transcript.sample(turn)
        self._threads.remove(thread)
        self._threads.append(thread)
        thread.latest = turn.token_ids.tolist()
        if message is not None:
            thread.messages = [*thread.messages, _plain(message)]
        thread.busy = False

    def failed(self, thread: Thread) -> None:
        """No turn came (RD-4). Nothing happens to a thread that was answered."""
        if not thread.busy:
            return
        thread.busy = False
        if thread.transcript.num_turns == 0:
            self._threads.remove(thread)
        else:
            thread.transcript.unheard()
            thread.messages = thread.heard

    def trajectories(self) -> list[Trajectory]:
        """Threads with at least one turn, in the order of their latest ones: the last is where the session ended."""
        found = []
        for thread in self._threads:
            completion = thread.transcript.completion()
            if len(completion.token_ids):
                completion.text = self._dialogue.text(completion.token_ids.tolist())
                found.append(
                    Trajectory(prompt_ids=thread.transcript.prompt_ids, completion=completion, messages=thread.messages)
                )
        return found

    def _longest_beginning(self, messages: list[dict[str, Any]], tools: Any) -> Thread | None:
        fitting = [
            thread
            for thread in self._threads
            if not thread.busy
            and thread.tools == tools
            and 0 < len(thread.messages) < len(messages)
            and messages[: len(thread.messages)] == thread.messages
        ]
        return max(fitting, key=lambda thread: len(thread.messages), default=None)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without fields that say nothing: clients echo `None`s that were never sent."""
    plain = {key: value for key, value in message.items() if value not in (None, [], "") or key == "content"}
    plain["content"] = _text(plain.get("content"))
    return plain


def _text(content: Any) -> str:
    """Content as text; parts of other kinds are refused by the server before."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part["text"] for part in content)
