"""The running completions of the small engine as rows 0..B-1 of a few tensors: what a step costs no Python for.

RO-1: `draw` gives each row a token, its logprob and the version that stands then, in one go, and returns the rows that
      ended with it.
RO-2: what a row is does not depend on where it stands: `move` takes all of it along.
RO-3: a token is drawn by a number that its seed and index alone give, as roles/sampling.py has it (SA-2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from roles.engine import Request
from roles.sampling import RowParameters, draw, seed_tensor, uniforms
from roles.types import Sampling

_AHEAD = 32
"""Steps for which the random numbers of a row are drawn at once: each is a function of seed and index alone."""

# Columns of the integer state of a row. native_cpu/draw.cpp has the same.
TOKEN, LENGTH, COUNT, LIMIT, SEED, FIRST = range(6)


class Kind(NamedTuple):
    """What drawing a row takes."""

    greedy: bool
    filtered: bool
    tempered: bool

    @classmethod
    def of(cls, sampling: Sampling) -> Kind:
        filtered = sampling.top_k > 0 or sampling.top_p < 1
        return cls(sampling.temperature == 0, filtered, sampling.temperature not in (0, 1))


class Rows:
    """State of up to `capacity` rows, on any device.

    Args:
        capacity: rows that there is room for.
        device: where they stand.
        version: of the weights that the next tokens come from.
    """

    def __init__(self, capacity: int, device: torch.device, version: int) -> None:
        self.count = 0
        self.longest = 0
        """The largest number of cached tokens of a row."""
        self._capacity, self._device = capacity, device
        self._kinds: list[Kind] = []
        self._counts: Counter[Kind] = Counter()
        self._column = 0  # of `_numbers`, for this step
        self.ints = torch.zeros((capacity, 6), dtype=torch.int64, device=device)
        self.temperature = torch.ones(capacity, device=device)
        self._top_p = torch.ones(capacity, device=device)
        self._top_k = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.stops = torch.full((capacity, 1), -1, dtype=torch.int64, device=device)
        self._numbers = torch.zeros((capacity, _AHEAD), dtype=torch.float64, device=device)
        self._stamp = torch.full((capacity,), version, dtype=torch.int32, device=device)
        # Token, bits of the logprob, version: one write a step.
        self.output = torch.zeros((capacity, 0, 3), dtype=torch.int32, device=device)
        self._lines = torch.zeros(capacity, dtype=torch.int64, device=device)  # of output, as [.., 3]

    def stamp(self, version: int) -> None:
        """Tokens drawn from now on are of this version."""
        self._stamp.fill_(version)

    def reserve(self, tokens: int, stops: int) -> None:
        """Room for completions of so many tokens and for so many stop tokens; what rows hold stays."""
        if tokens > self.output.shape[1]:
            self.output = _widened(self.output, tokens, 0)
            self._lines = torch.arange(self._capacity, device=self._device) * self.output.shape[1]
        if stops > self.stops.shape[1]:
            self.stops = _widened(self.stops, stops, -1)

    def add(self, requests: Sequence[Request], seeds: Sequence[int], stops: Sequence[tuple[int, ...]]) -> None:
        """New rows behind the others, one for each seed, whose prompts are in the cache."""
        rows = slice(self.count, self.count + len(requests))
        parameters = RowParameters.of([r.sampling for r in requests], self._device)
        self.temperature[rows], self._top_p[rows] = parameters.temperature, parameters.top_p
        self._top_k[rows] = parameters.top_k
        width = self.stops.shape[1]
        self.stops[rows] = self._tensor([ids + (-1,) * (width - len(ids)) for ids in stops])
        state = self.ints[rows]
        state[:, LENGTH] = self._tensor([len(r.prompt_ids) for r in requests])
        state[:, COUNT] = 0
        state[:, LIMIT] = self._tensor([r.sampling.max_tokens for r in requests])
        state[:, SEED] = seed_tensor(seeds, self._device)
        state[:, FIRST] = self._tensor([r.first for r in requests])
        kinds = [Kind.of(r.sampling) for r in requests]
        self._kinds += kinds
        self._counts.update(kinds)
        self.longest = max(self.longest, *(len(r.prompt_ids) for r in requests))
        self._added(self.count, self.count + len(requests))
        self.count += len(requests)

    def draw(self, first: int, logits: Tensor, owner: Sequence[int] | None = None) -> list[tuple[int, bool]]:
        """One token for each row from `first` on.

        Args:
            first: 0 for a step of all rows.
            logits: [B, V] of these rows.
            owner: of each row, which of `logits` is its own; None where they are one to one.

        Returns:
            The rows that ended with it, ascending, and whether a stop token ended them.

        Raises:
            FloatingPointError: logits are no distribution (SA-3).
        """
        state = self.ints[first : self.count]
        if owner is None:
            numbers = self._next_numbers()
        else:
            logits = logits[self._tensor(owner)]
            numbers = uniforms(state[:, SEED], state[:, FIRST] + state[:, COUNT])
        return self._draw(first, logits, numbers)

    def advance(self) -> None:
        """The newest token of each row is in the cache."""
        self.ints[: self.count, LENGTH] += 1
        self.longest += 1

    def counts(self, rows: Sequence[int]) -> list[int]:
        """How many tokens they have drawn."""
        counts: list[int] = self.ints[self._tensor(rows), COUNT].tolist()
        return counts

    def drawn(self, row: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, logprobs and versions of its tokens from `start` to `stop`."""
        tokens, bits, versions = self.output[row, start:stop].cpu().numpy().T.copy()  # the row will be another's
        return tokens, bits.view(np.float32), versions

    def remove(self, rows: Sequence[int], source: Sequence[int], target: Sequence[int]) -> None:
        """Take rows out; `source`, the last ones that stay, have moved into the holes `target`."""
        self._counts.subtract(self._kinds[row] for row in rows)
        for old, new in zip(source, target, strict=True):
            self._kinds[new] = self._kinds[old]
        if source:
            self._move(source, target)
        self.count -= len(rows)
        del self._kinds[self.count :]
        self.longest = int(self.ints[: self.count, LENGTH].max()) if self.count else 0

    def _move(self, source: Sequence[int], target: Sequence[int]) -> None:
        old, new = self._tensor(source), self._tensor(target)
        for state in self._states():
            state[new] = state[old]

    def _states(self) -> tuple[Tensor, ...]:
        return (self.ints, self.temperature, self._top_p, self._top_k, self.stops, self._numbers, self.output)

    def _any(self, field: str) -> bool:
        return any(count and getattr(kind, field) for kind, count in self._counts.items())

    def _draw(self, first: int, logits: Tensor, numbers: Tensor) -> list[tuple[int, bool]]:
        rows = slice(first, self.count)
        parameters = RowParameters(
            temperature=self.temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            any_greedy=self._any("greedy"),
            any_filter=self._any("filtered"),
            any_tempered=self._any("tempered"),
        )
        state = self.ints[rows]
        count = state[:, COUNT]
        tokens, logprobs = draw(logits, parameters, numbers)
        record = torch.stack((tokens.int(), logprobs.view(torch.int32), self._stamp[rows]), dim=1)
        self.output.view(-1, 3).index_copy_(0, self._lines[rows] + count, record)
        state[:, TOKEN] = tokens
        count += 1
        stopped = (tokens[:, None] == self.stops[rows]).any(dim=1)
        ended = torch.nonzero(stopped | (count >= state[:, LIMIT])).squeeze(1)
        if not ended.numel():
            return []
        return list(zip((ended + first).tolist(), stopped[ended].tolist(), strict=True))

    def _next_numbers(self) -> Tensor:
        """Of all rows, for this step."""
        if self._column == _AHEAD:
            self._column = 0
            self._draw_ahead(0, self.count, 0)
        numbers = self._numbers[: self.count, self._column]
        self._column += 1
        return numbers

    def _added(self, start: int, stop: int) -> None:
        self._draw_ahead(start, stop, 1)

    def _draw_ahead(self, start: int, stop: int, skip: int) -> None:
        """Random numbers of rows for this step and the next ones, beginning `skip` tokens from where they stand."""
        state = self.ints[start:stop]
        ahead = _AHEAD - self._column
        index = (state[:, COUNT] + state[:, FIRST])[:, None] + torch.arange(skip, skip + ahead, device=self._device)
        seeds = state[:, SEED, None].expand(-1, ahead)
        numbers = uniforms(seeds.reshape(-1), index.view(-1))
        self._numbers[start:stop, self._column :] = numbers.view(stop - start, ahead)

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _widened(tensor: Tensor, width: int, value: int) -> Tensor:
    """A copy with dimension 1 at least doubled to `width`, the new part filled with `value`."""
    width = max(width, 2 * tensor.shape[1])
    wider = tensor.new_full((tensor.shape[0], width, *tensor.shape[2:]), value)
    wider[:, : tensor.shape[1]] = tensor
    return wider
