"""One call of a rollout rank: its samples, as far as they have come, and where they end. No engine, no tasks.

RC-1: a sample that reaches a stop string ends with the token that completes it, wherever the engine stands by then and
      over whatever updates: what was sampled beyond is cut off.
RC-2: who reads along is told exactly the tokens that the completion has, in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from roles.engine import Request
from roles.pieces import cut, joined
from roles.text_stream import TextStream
from roles.types import Completion, FinishReason, Piece

Reads = Callable[[Piece], None]
"""Who reads along."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When a call of `generate` is content with less."""

    enough: int = 0
    """Return when so many samples have ended; the others are stopped and come back with finish_reason `abort`. 0: wait
    for all."""
    seconds: float = 0.0
    """Stop what has not ended by then. 0: no limit."""


class Call:
    """Samples that somebody waits for.

    Args:
        request: as it was asked.
        enough: set the event of that name when so many samples have ended.
        texts: of each sample, where the request has stop strings.
        reads: is told the tokens of the only sample as they come.
    """

    def __init__(
        self, request: Request, enough: int, texts: list[TextStream] | None = None, reads: Reads | None = None
    ) -> None:
        self.request = request
        self.pieces: list[list[Completion]] = [[] for _ in request.seeds]
        self.done: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self.enough = asyncio.Event()
        self.stopped = False
        """Its samples are to end: an abort is no longer answered by going on."""
        self.ids: set[int] = set()
        """Requests of the engine that may still run for it."""
        self._texts = texts
        self._reads = reads
        self._missing = enough
        self._ended = 0

    @property
    def told(self) -> bool:
        """Whether it wants to know tokens before their sample ends."""
        return self._texts is not None or self._reads is not None

    def go_on(self, had: Completion) -> None:
        """The only sample has tokens already, which are not told again."""
        self.pieces[0].append(had)
        if self._texts is not None:
            for token in had.token_ids.tolist():
                self._texts[0].push(token)

    def ended_with(self, stop_token_ids: Sequence[int]) -> FinishReason | None:
        """Why the only sample has ended, where the tokens that it has already are all of it."""
        had, sampling = self.pieces[0][0].token_ids, self.request.sampling
        stops = () if sampling.ignore_eos else sampling.stop_token_ids or stop_token_ids
        if (self._texts and self._texts[0].stopped) or (len(had) and int(had[-1]) in stops):
            return "stop"
        return "length" if len(had) >= sampling.max_tokens else None

    def took(self, sample: int, piece: Piece) -> bool:
        """New tokens of a sample. True when it ends with them: it has reached a stop string."""
        text, ends = self._texts[sample] if self._texts else None, False
        if text is not None:
            if text.stopped:
                return False
            count = 0
            while count < len(piece.token_ids) and not text.stopped:
                text.push(int(piece.token_ids[count]))
                count += 1
            piece, ends = cut(piece, count), text.stopped
        if self._reads is not None:
            self._reads(piece)
        return ends

    def ended(self, sample: int, piece: Completion) -> bool:
        """The engine has ended a sample. False when it was interrupted and is to go on."""
        text = self._texts[sample] if self._texts else None
        if text is not None and text.stopped:
            had = sum(len(earlier.token_ids) for earlier in self.pieces[sample])
            piece = self._cut(piece, text.num_tokens - had, had)
        self.pieces[sample].append(piece)
        if piece.finish_reason == "abort" and not self.stopped:
            return False
        self.end(sample)
        return True

    def end(self, sample: int) -> None:
        """Nothing more comes of a sample."""
        self._ended += 1
        if self._ended >= self._missing:
            self.enough.set()
        if self._ended == len(self.pieces) and not self.done.done():
            self.done.set_result([joined(pieces, len(self.request.prompt_ids)) for pieces in self.pieces])

    def rest(self, sample: int, number: int) -> Request:
        """What is left of a sample, as a request of its own."""
        had = [int(token) for piece in self.pieces[sample] for token in piece.token_ids]
        sampling = self.request.sampling
        return Request(
            id=number,
            prompt_ids=(*self.request.prompt_ids, *had),
            seeds=(self.request.seeds[sample],),
            sampling=msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - len(had)),
            first=len(had),
        )

    def _cut(self, piece: Completion, count: int, had: int) -> Completion:
        """A sample that ends with a stop string: its tokens up to there, and their experts."""
        length = len(self.request.prompt_ids) + had + count - 1
        routes = None if piece.routes is None else piece.routes[:length]
        return msgspec.structs.replace(cut(piece, count), finish_reason="stop", routes=routes)
