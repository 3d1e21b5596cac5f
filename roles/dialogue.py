"""Between messages and tokens: how a tokenizer spells the turns of a dialogue, one turn at a time.

DG-1: what stands already is never spelled again: `reply` gives only the tokens that follow the policy's turn.
DG-2: for a chat template, prompt + turn + `reply` is the template's own spelling of the whole dialogue, as far as the
      template does not change earlier turns; that is checked when the object is made.
DG-3: without a template a reply is its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

Message = Mapping[str, Any]
"""`role` and `content`, and what the template knows besides, such as `tool_calls`."""

_MARK = "\u2063tutti\u2063"  # no text that people write


class Dialogue:
    """Args:
        tokenizer: of transformers, with or without a chat template.
        options: further arguments of the template, such as `enable_thinking`.

    Raises:
        ValueError: the template does not spell a dialogue turn after turn (DG-2).
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self.has_template = bool(tokenizer.chat_template)
        if self.has_template:
            self._spelled_reply([{"role": "user", "content": "x"}])

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The token that ends a turn, if the tokenizer names one."""
        end = self._tokenizer.eos_token_id
        return () if end is None else (int(end),)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[int, ...]:
        """Token ids of a dialogue up to where the policy's turn begins."""
        if not self.has_template:
            return tuple(self._tokenizer.encode("\n".join(str(m["content"]) for m in messages)))
        return self._encode(self._render(messages, tools))

    def reply(self, messages: Sequence[Message], turn: Sequence[int] = ()) -> tuple[int, ...]:
        """Token ids of what others say after a turn of the policy, up to where its next turn begins.

        Args:
            turn: the tokens that the policy sampled; an end token that it has sampled is not spelled again.
        """
        if not self.has_template:
            return tuple(self._tokenizer.encode("".join(str(m["content"]) for m in messages), add_special_tokens=False))
        ids = self._encode(self._spelled_reply(messages))
        ended = bool(turn) and bool(self.end_ids) and turn[-1] == self.end_ids[0]
        return ids[1:] if ended and ids[:1] == self.end_ids else ids

    def encode(self, text: str) -> tuple[int, ...]:
        """A text as it is, with what the tokenizer puts before every text."""
        return tuple(self._tokenizer.encode(text))

    def continued(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that goes on where the policy stopped."""
        return self._encode(text)

    def token(self, token: int) -> str:
        """One token as text, special ones too."""
        text: str = self._tokenizer.decode([token])
        return text

    def text(self, ids: Sequence[int]) -> str:
        """The text of a turn, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _spelled_reply(self, messages: Sequence[Message]) -> str:
        """What the template writes between the end of an assistant's turn and the beginning of the next."""
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        _, found, rest = self._render([*before, *messages], None).partition(_MARK)
        if not found:
            raise ValueError(
                "dialogue: the chat template leaves out earlier turns of the assistant, so tokens that were sampled "
                "can't stay as they are; use another template, or set its options so that it keeps them"
            )
        return rest

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Raises ValueError: the template knows no such dialogue."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_with_arguments(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"dialogue: the chat template can't spell these messages: {error}") from error
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _with_arguments(message: Message) -> Message:
    """Arguments of calls as objects, as templates want them; the API has them as JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed(call) for call in calls]}


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # what the policy wrote is no JSON: it is told as it is
    return {**call, "function": {**function, "arguments": arguments}}
