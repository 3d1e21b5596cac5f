"""Completions in pieces: cut, joined, and as far as they have come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from roles.types import Completion, FinishReason, Piece

T = TypeVar("T", Piece, Completion)

_PER_TOKEN = ("token_ids", "logprobs", "versions", "top_ids", "top_logprobs")


def cut(part: T, stop: int, start: int = 0) -> T:
    """Its tokens from `start` to `stop`, without text and routes."""
    values = {name: getattr(part, name) for name in _PER_TOKEN}
    changes = {name: value[start:stop] for name, value in values.items() if value is not None}
    if isinstance(part, Completion):
        return msgspec.structs.replace(part, **changes, text="", routes=None)
    return msgspec.structs.replace(part, **changes)


def as_piece(completion: Completion) -> Piece:
    """Its tokens."""
    return Piece(**{name: getattr(completion, name) for name in _PER_TOKEN})


def as_completion(piece: Piece, finish_reason: FinishReason = "abort") -> Completion:
    """The completion of these tokens."""
    return Completion(**{name: getattr(piece, name) for name in _PER_TOKEN}, finish_reason=finish_reason)


def last_piece(completion: Completion) -> Piece:
    """What a stream ends with: nothing more, and the whole."""
    nothing = completion.token_ids[:0]
    return Piece(token_ids=nothing, logprobs=completion.logprobs[:0], versions=nothing, completion=completion)


def joined_piece(pieces: Sequence[Piece]) -> Piece:
    """One piece of several."""
    return pieces[0] if len(pieces) == 1 else Piece(**_joined(pieces))


def joined(pieces: Sequence[Completion], prompt_length: int) -> Completion:
    """One completion of the pieces that updates have cut it into. Each token keeps logprob, version and experts of the
    piece that sampled it; a piece without experts has those of the next one, which computed its tokens again."""
    finish_reason = pieces[-1].finish_reason
    pieces = [piece for piece in pieces if len(piece.token_ids)] or pieces[-1:]
    if len(pieces) == 1:
        return msgspec.structs.replace(pieces[0], finish_reason=finish_reason)
    routes = None
    if pieces[-1].routes is not None:
        parts, start, end = [], 0, prompt_length
        for piece in pieces:
            end += len(piece.token_ids)
            if piece.routes is not None:
                parts.append(piece.routes[start : end - 1])
                start = end - 1
        routes = np.concatenate(parts)
    return Completion(**_joined(pieces), finish_reason=finish_reason, routes=routes)


def _joined(pieces: Sequence[T]) -> dict[str, Any]:
    columns = {name: [getattr(piece, name) for piece in pieces] for name in _PER_TOKEN}
    return {
        name: None if any(part is None for part in parts) else np.concatenate(parts) for name, parts in columns.items()
    }


class News:
    """Pieces that wait to be told; at most those of one completion."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._some = asyncio.Event()

    def add(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._some.set()

    def wake(self) -> None:
        """Nothing more comes."""
        self._some.set()

    async def come(self) -> None:
        await self._some.wait()
        self._some.clear()

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces
