"""Requests that wait for rows of an engine: admitted whole, in the order of submission (engine_torch.py, EN-2)."""

from __future__ import annotations

from collections import deque

from roles.engine import Request

PREFILL_TOKENS = 4096
"""Padded prompt tokens of one prefill: bounds how long running rows wait for newcomers, and memory."""


class RequestQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self.num_samples = 0
        """Of all that wait."""
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self.num_samples += len(request.seeds)

    def find(self, request_id: int) -> Request | None:
        return next((request for request in self._requests if request.id == request_id), None)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
        self.num_samples -= len(request.seeds)

    def take(self, room: int) -> list[Request]:
        """The next ones that fit into so many rows and, but for the first, into one prefill."""
        batch: list[Request] = []
        rows = width = 0
        while self._requests:
            request = self._requests[0]
            rows, width = rows + len(request.seeds), max(width, len(request.prompt_ids))
            if rows > room or (batch and width * (len(batch) + 1) > PREFILL_TOKENS):
                break
            batch.append(self._requests.popleft())
            self.num_samples -= len(request.seeds)
        return batch
