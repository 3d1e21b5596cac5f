"""Rows that stand in CPU memory, drawn by our C++ (roles/native.py); the same promises as roles/rows.py.

RC-1: a row's token and logprob have the same bits whatever rows are drawn with it, and whatever those ask for.
RC-2: top-k and top-p are torch's: tokens that they leave out are made impossible before our C++ draws.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roles.rows import COUNT, FIRST, LENGTH, SEED, Rows
from roles.sampling import RowParameters, sampling_logits, uniforms

_LANES = 16
"""Logits are read in vectors of up to so many rows."""


class _State(ctypes.Structure):
    """native_cpu/draw.cpp's Rows."""

    _fields_ = [
        ("ints", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("stops", ctypes.c_void_p),
        ("num_stops", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("most", ctypes.c_int64),
    ]


class CpuRows(Rows):
    """A `Rows`; `library` is `roles.native.library()`."""

    def __init__(self, capacity: int, version: int, library: ctypes.CDLL) -> None:
        super().__init__(capacity, torch.device("cpu"), version)
        self._draw_rows = library.tutti_draw
        self._draw_rows.restype = ctypes.c_int64
        self._version = version
        self._ended, self._reason = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
        self._refer()

    def stamp(self, version: int) -> None:
        super().stamp(version)
        self._version = version

    def reserve(self, tokens: int, stops: int) -> None:
        super().reserve(tokens, stops)
        self._refer()

    def draw(self, first: int, logits: Tensor, owner: Sequence[int] | None = None) -> list[tuple[int, bool]]:
        if owner is not None:
            logits = _taken(logits, owner)
        found = self._draw_fast(first, self._cut(first, logits) if self._any("filtered") else logits)
        if found is None:  # torch is asked as well: it says which row
            state = self.ints[first : self.count]
            return self._draw(first, logits, uniforms(state[:, SEED], state[:, FIRST] + state[:, COUNT]))
        return found

    def _cut(self, first: int, logits: Tensor) -> Tensor:
        """A copy of the logits, -inf where top-k or top-p cut (RC-2)."""
        rows = torch.arange(first, self.count)
        rows = rows[(self._top_k[rows] > 0) | (self._top_p[rows] < 1)]
        chosen = rows - first
        kept = sampling_logits(
            logits[chosen],
            RowParameters(temperature=self.temperature[rows], top_k=self._top_k[rows], top_p=self._top_p[rows]),
        )
        logits = _taken(logits, range(len(logits)))
        logits[chosen] = logits[chosen].masked_fill(torch.isneginf(kept), -torch.inf)
        return logits

    def _draw_fast(self, first: int, logits: Tensor) -> list[tuple[int, bool]] | None:
        """As `draw`; None, with nothing changed, where logits give no distribution."""
        found: int = self._draw_rows(
            ctypes.byref(self._state),
            ctypes.c_int64(first),
            ctypes.c_int64(self.count - first),
            ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_int64(logits.stride(1)),
            ctypes.c_int64(logits.shape[1]),
            ctypes.c_int64(self._version),
            ctypes.c_void_p(self._ended.ctypes.data),
            ctypes.c_void_p(self._reason.ctypes.data),
        )
        if found < 0:
            return None
        return list(zip(self._ended[:found].tolist(), (self._reason[:found] == 1).tolist(), strict=True))

    def advance(self) -> None:
        self._arrays[0][: self.count, LENGTH] += 1
        self.longest += 1

    def counts(self, rows: Sequence[int]) -> list[int]:
        counts: list[int] = self._arrays[0][rows, COUNT].tolist()
        return counts

    def _move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for state in self._arrays:
            state[target] = state[source]

    def _added(self, start: int, stop: int) -> None:
        """Numbers are made where they are used."""

    def _refer(self) -> None:
        """Pointers and views of the tensors as they are now."""
        self._state = _State(
            ints=self.ints.data_ptr(),
            temperature=self.temperature.data_ptr(),
            stops=self.stops.data_ptr(),
            num_stops=self.stops.shape[1],
            output=self.output.data_ptr(),
            most=self.output.shape[1],
        )
        self._arrays = [state.numpy() for state in self._states() if state is not self._numbers]


def _taken(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """A copy of these rows, each in a lane of its own, in whole vectors."""
    whole = [*rows, *[0] * (-len(rows) % _LANES)]
    return logits.t().index_select(1, torch.tensor(whole)).t()[: len(rows)]
