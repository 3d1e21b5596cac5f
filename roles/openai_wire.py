"""Bodies of the OpenAI API: what a request asks for, and how an answer is written. Pure.

OW-1: a parameter that would change the distribution, and that engines don't sample by, is refused, never ignored: the
      recorded logprobs would be wrong.
OW-2: a choice says the same whether it is sent at once or piece by piece: text up to the stop string or the first call
      of a tool, calls taken out of it.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from roles.dialogue import Dialogue
from roles.pieces import cut, joined_piece
from roles.text_stream import TextStream, Until, before
from roles.types import Completion, Piece, Sampling

MAX_CHOICES = 64
"""Answers of one request: prompts times n."""

CALL = "<tool_call>"
_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

_NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "functions": [],
    "function_call": "none",
    "min_p": 0,
    "repetition_penalty": 1,
}
"""Parameters that are refused unless they have this value (OW-1), or none."""

_SAME = ("temperature", "top_p", "top_k", "stop_token_ids")
"""Parameters that we call by their names."""

_NO_CHANCE = -9999.0
"""How the API writes the logprob of a token that could not come: JSON has no infinity."""


class Refused(Exception):
    """The client's fault, told in the form of the API. Agents look at `code`."""

    def __init__(self, text: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for besides its prompt."""

    sampling: Sampling
    limited: bool
    """The request says how long answers get. Otherwise they get no longer than there is room for."""
    count: int
    """Choices of each prompt."""
    seed: int | None
    logprobs: bool
    top: int
    """Likeliest tokens beside each, as the answer tells them."""
    stream: bool
    usage: bool
    """The last event of a stream counts tokens."""


def asked(body: Mapping[str, Any], default: Sampling, *, chat: bool) -> Asked:
    """Raises Refused."""
    for key, neutral in _NEUTRAL.items():
        if body.get(key, neutral) not in (neutral, None):
            raise Refused(f"{key}: engines don't sample by it, so recorded logprobs would be wrong; leave it out")
    count = 1 if body.get("n") is None else body["n"]
    if type(count) is not int or not 1 <= count <= MAX_CHOICES:
        raise Refused(f"n: expected 1 to {MAX_CHOICES}, got {count!r}")
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        raise Refused(f"seed: expected an integer, got {seed!r}")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused(f"stream_options: expected an object, got {options!r}")
    logprobs, top = _logprobs(body, chat)
    changes = {name: body[name] for name in _SAME if body.get(name) is not None}
    for name in ("max_tokens", "max_completion_tokens"):  # the newer name of the API wins
        if body.get(name) is not None:
            changes["max_tokens"] = body[name]
    if stop := body.get("stop"):
        changes["stop"] = [stop] if isinstance(stop, str) else stop
    try:
        sampling = msgspec.convert(msgspec.structs.asdict(default) | changes, Sampling)
    except msgspec.ValidationError as error:
        raise Refused(str(error)) from None
    # A greedy token is certain (types.py): what the model made of it stands in the list of the likeliest.
    wanted = max(top, int(logprobs and sampling.temperature == 0))
    return Asked(
        sampling=msgspec.structs.replace(sampling, top_logprobs=wanted),
        limited="max_tokens" in changes,
        count=count,
        seed=seed,
        logprobs=logprobs,
        top=top,
        stream=bool(body.get("stream")),
        usage=bool(options.get("include_usage")),
    )


def with_room(wanted: Asked, length: int, max_len: int) -> Sampling:
    """How to sample after so many tokens, where they and the answer may have `max_len` together; 0: nobody knows.

    Raises:
        Refused: there is no room.
    """
    sampling = wanted.sampling
    room = max_len - length if max_len else sampling.max_tokens
    if room < (sampling.max_tokens if wanted.limited else 1):
        asks = f"{sampling.max_tokens} (max_tokens)" if wanted.limited else "an answer"
        raise Refused(
            f"the maximum context length is max_len = {max_len} tokens, asked for are {length} and {asks}; shorten the "
            "messages, or lower max_tokens",
            code="context_length_exceeded",
        )
    return msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))


def _logprobs(body: Mapping[str, Any], chat: bool) -> tuple[bool, int]:
    """Whether logprobs are wanted, and how many of the likeliest: the two APIs differ."""
    given, top = body.get("logprobs"), body.get("top_logprobs") or 0
    if chat:
        if not isinstance(given, bool | None):
            raise Refused(f"logprobs: expected true or false, got {given!r}; how many are told by top_logprobs")
        if top and not given:
            raise Refused("top_logprobs: set logprobs to true as well")
    else:
        top = given or 0
    if not isinstance(top, int):
        raise Refused(f"{'top_logprobs' if chat else 'logprobs'}: expected an integer, got {top!r}")
    top = int(top)
    return given not in (None, False), top


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Raises Refused."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: expected a list with at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(f"messages[{place}]: expected an object with role and content")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if any(
            not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str)
            for part in parts
        ):
            raise Refused(f"messages[{place}].content: only text is known")
        if not isinstance(content, str | list) and not (content is None and message["role"] == "assistant"):
            raise Refused(f"messages[{place}].content: expected text")
    return messages


def tools_of(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, bool]:
    """The tools that the policy is told of, and whether calls of them are taken out of its text. Raises Refused."""
    tools, choice = body.get("tools") or None, body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise Refused("tool_choice: engines can't force calls; use 'auto' or 'none'")
    if tools is None:
        return None, False
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise Refused("tools: expected a list of objects with type 'function' and function.name")
    return tools, choice == "auto"


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and tool.get("type") == "function"


def prompts_of(prompt: Any, dialogue: Dialogue) -> list[Sequence[int]]:
    """Token ids of what `prompt` may be: a text, tokens, or a list of either. Raises Refused."""
    if isinstance(prompt, str):
        return [dialogue.encode(prompt)]
    if isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) and one for one in prompt):
        return [ids for one in prompt for ids in prompts_of(one, dialogue)]
    raise Refused("prompt: expected a text, a list of token ids, or a list of those")


def calls_in(text: str) -> list[dict[str, Any]]:
    """The calls of tools that a turn holds and that can be read."""
    calls = []
    for found in _CALLS.findall(text):
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # a policy may write [[[[[ without end
            call = json.loads(found)
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
            calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function})
    return calls


class Choice:
    """One choice of an answer: its text as its tokens come, and how both are written. See the two APIs below.

    Args:
        index: of the choice in the answer.
        dialogue: how tokens are spelled.
        wanted: what was asked for.
        tools: calls of tools are taken out of the text.
    """

    def __init__(self, index: int, dialogue: Dialogue, wanted: Asked, *, tools: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self._index = index
        self._dialogue = dialogue
        self._wanted = wanted
        self._tools = tools
        self._tokens = TextStream(dialogue.text, wanted.sampling.stop)
        self._content = Until([CALL] if tools else [])
        self._space = ""  # stands before a call, perhaps
        self._whole = self._given = ""
        self._turn: Completion
        self._untold: list[Piece] = []  # tokens whose text is held back

    def read(self, turn: Completion) -> None:
        """A turn that nobody has read along."""
        self._turn = turn
        text = before(self._dialogue.text(turn.token_ids.tolist()), self._wanted.sampling.stop)
        self._given = self._add(text)
        self._finish()

    def told(self) -> dict[str, Any]:
        """The choice, after `read`."""
        turn = self._turn
        logprobs = self._logprobs(turn) if self._wanted.logprobs else None
        said = {"index": self._index, "logprobs": logprobs, "finish_reason": self._reason(turn)}
        return said | self._said() | exact(turn)

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """What a stream tells of new tokens: one chunk for each that gives text."""
        for place, token in enumerate(piece.token_ids.tolist()):
            self._untold.append(cut(piece, place + 1, place))
            if text := self._add(self._tokens.push(token)):
                self._given += text
                yield self._chunk(text)

    def last_chunks(self, turn: Completion) -> list[dict[str, Any]]:
        """What it tells when the turn has ended: text that was held back, calls, and the reason."""
        text = self._add(self._tokens.finish())
        self._given += text
        text += self._finish()
        rest = [self._chunk(text)] if text else []
        return [*rest, self._chunk("") | self._end(turn)]

    def message(self) -> dict[str, Any] | None:
        """What a session remembers of it."""
        raise NotImplementedError

    def _said(self) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, part: Completion | Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, text: str) -> dict[str, Any]:
        piece, self._untold = joined_piece(self._untold) if self._untold else None, []
        logprobs = self._logprobs(piece) if piece is not None and self._wanted.logprobs else None
        told = {} if piece is None else exact(piece)
        return {"index": self._index, **self._delta(text), "logprobs": logprobs, "finish_reason": None} | told

    def _end(self, turn: Completion) -> dict[str, Any]:
        return {"finish_reason": self._reason(turn)}

    def _reason(self, turn: Completion) -> str:
        return "tool_calls" if self.calls else "length" if turn.finish_reason == "length" else "stop"

    def _add(self, text: str) -> str:
        """The content that is certain with more text."""
        self._whole += text
        text = self._content.push(text)
        if not self._tools:
            return text
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return kept

    def _finish(self) -> str:
        """The content that was held back, now that nothing comes any more; `calls` are known from here on."""
        self.calls = calls_in(self._whole) if self._tools else []
        rest = "" if self.calls else self._whole[len(self._given) :]
        self._given += rest
        return rest


class ChatChoice(Choice):
    """A choice of /chat/completions."""

    _began = False

    def message(self) -> dict[str, Any]:
        content = self._given
        return {"role": "assistant", "content": content} | (
            {"content": content or None, "tool_calls": self.calls} if self.calls else {}
        )

    def _said(self) -> dict[str, Any]:
        return {"message": self.message()}

    def _delta(self, text: str) -> dict[str, Any]:
        delta = {"content": text} if self._began else {"role": "assistant", "content": text}
        self._began = True
        return {"delta": delta}

    def _end(self, turn: Completion) -> dict[str, Any]:
        calls = [call | {"index": place} for place, call in enumerate(self.calls)]
        return super()._end(turn) | ({"delta": {"tool_calls": calls}} if calls else {})

    def _logprobs(self, part: Completion | Piece) -> dict[str, Any]:
        return chat_logprobs(part, self._dialogue, self._wanted.top)


class TextChoice(Choice):
    """A choice of /completions."""

    def message(self) -> None:
        return None

    def _said(self) -> dict[str, Any]:
        return {"text": self._given}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, part: Completion | Piece) -> dict[str, Any]:
        return text_logprobs(part, self._dialogue, self._wanted.top)


def chat_logprobs(part: Completion | Piece, dialogue: Dialogue, top: int) -> dict[str, Any]:
    """Of some tokens, as chat completions tell them."""
    return {
        "content": [
            _entry(token, logprob, dialogue)
            | {"top_logprobs": [_entry(other, value, dialogue) for other, value in others[:top]]}
            for token, logprob, others in _rows(part)
        ]
    }


def text_logprobs(part: Completion | Piece, dialogue: Dialogue, top: int) -> dict[str, Any]:
    """Of some tokens, as text completions tell them."""
    rows = list(_rows(part))
    return {
        "tokens": [dialogue.token(token) for token, _, _ in rows],
        "token_logprobs": [logprob for _, logprob, _ in rows],
        "top_logprobs": [{dialogue.token(id_): value for id_, value in others[:top]} for _, _, others in rows]
        if top
        else None,
        "text_offset": [],
    }


def exact(part: Completion | Piece) -> dict[str, Any]:
    """Beyond the API: what was sampled, and by which version."""
    return {"token_ids": part.token_ids.tolist(), "versions": part.versions.tolist()}


def _rows(part: Completion | Piece) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """(token, its logprob, the likeliest with theirs) of each. A greedy token has the logprob of the list."""
    tokens, logprobs = part.token_ids.tolist(), part.logprobs.tolist()
    others: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if part.top_ids is not None and part.top_logprobs is not None:
        likeliest = zip(part.top_ids.tolist(), part.top_logprobs.tolist(), strict=True)
        others = [[(id_, _finite(value)) for id_, value in zip(*row, strict=True)] for row in likeliest]
    for token, logprob, row in zip(tokens, logprobs, others, strict=True):
        yield token, dict(row).get(token, logprob) if logprob == 0 else logprob, row


def _entry(token: int, logprob: float, dialogue: Dialogue) -> dict[str, Any]:
    text = dialogue.token(token)
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _NO_CHANCE
