"""Text out of tokens as they come, and where it reaches a stop string. Pure.

TX-1: what was given is never taken back: bytes of a character that has not ended, and text that may become a stop
      string, are held back. All that was given, with `finish`, is the text of all tokens.
TX-2: `stopped` turns true with the first token after which the text holds a stop string; what was given ends before it.
TX-3: a token costs the decoding of a few tokens, however long the text is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[list[int]], str]

_UNFINISHED = "\ufffd"  # what decoders write for bytes that are no character, or not yet

_CONTEXT, _WINDOW = 4, 16
"""Tokens that are decoded again with each new one, since spelling depends on neighbours: at least and at most."""


class TextStream:
    """The text of one completion.

    Args:
        decode: text of token ids.
        stop: strings that end the text.
        stop_ids: tokens that end it whatever their text.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), stop_ids: Collection[int] = ()) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = 0  # characters of their text
        self._until = Until(stop)
        self._stop_ids = stop_ids
        self.num_tokens = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain with this token; '' once it has stopped."""
        if self.stopped:
            return ""
        self.num_tokens += 1
        self._ids.append(token)
        text = self._decode(self._ids)
        certain = len(text) if len(self._ids) > 2 * _WINDOW else len(text.rstrip(_UNFINISHED))
        new, self._given = text[self._given : certain], max(self._given, certain)
        if len(self._ids) > _WINDOW and certain == len(text):
            del self._ids[:-_CONTEXT]
            self._given = len(self._decode(self._ids))
        given = self._until.push(new)
        self.stopped = self._until.found or token in self._stop_ids
        return given

    def finish(self) -> str:
        """What was held back, when no token comes any more."""
        if self._until.found:
            return ""
        rest = self._decode(self._ids)[self._given :] if self._ids else ""
        return self._until.push(rest) + self._until.finish()


class Until:
    """Text up to the first of some strings."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What is certain to stand before."""
        if self.found:
            return ""
        text = self._held + text
        places = [place for one in self._strings if (place := text.find(one)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max((_overlap(text, one) for one in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, when no text comes any more."""
        held, self._held = self._held, ""
        return held


def before(text: str, strings: Sequence[str]) -> str:
    """A text up to the first of some strings."""
    until = Until(strings)
    return until.push(text) + until.finish()


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of the text that is a beginning of the string, but not all of it."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
