"""The contract of a rollout engine: what a rank's driver calls, and what a new engine has to keep.

    1 check(request)           any thread   may this engine ever run it? Nothing changes.
    2 submit(request)          engine       it waits for room, behind those submitted before.
    3 step()                   engine       admit what fits, give each running completion one more token (or several),
                                            return those that ended.
    4 abort(request_id)        engine       in any state, known or not: its completions end here, with what they have.
    5 swap(weights, version)   engine       between two steps: weights and version move together, nothing is dropped.
    6 num_running, num_waiting, num_tokens, version   any thread   numbers to look at, a step old at most.

"engine": on one thread, one call at a time: the driver (`roles/rollout.py`) sees to that.

RE-1: each sample of a submitted request comes out of `step` or `abort` exactly once.
RE-2: every token carries the version whose weights computed its logits, and its logprob under the distribution it was
      drawn from.
RE-3: a completion depends on its prompt, its seed and the weights, up to rounding of batched products; not on load.
RE-4: after `swap` a request admitted later sees nothing computed with older weights; one that runs keeps its keys and
      values and goes on (W4).
RE-5: an error out of `step` or `swap` is final for the engine: the rank reports it and is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec

from roles.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from sync.layout import Layout


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its samples, admitted together so that the prompt is computed once."""

    id: int
    """Unique among the requests that the engine holds."""
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One 64-bit seed per sample (`roles.seeds.completion_seed`)."""
    sampling: Sampling


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One sample that ended, by itself or by `abort`."""

    request_id: int
    sample: int
    """Index into the request's seeds."""
    completion: Completion
    """`text` is empty: engines deal in tokens."""


class RolloutEngine(Protocol):
    """See the module's contract page. It is a `sync.ports.WeightSink` as well."""

    @property
    def version(self) -> int:
        """Policy version of the weights in service."""
        ...

    @property
    def num_running(self) -> int:
        """Completions that get a token in each step."""
        ...

    @property
    def num_waiting(self) -> int:
        """Completions that wait for room."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since start."""
        ...

    def check(self, request: Request) -> None:
        """Raise ValueError if the engine can never run it: field, limit, value and what to change."""
        ...

    def submit(self, request: Request) -> None:
        """Queue it. Raises ValueError like `check`, or when its id is in use."""
        ...

    def abort(self, request_id: int) -> list[Finished]:
        """End its samples that have not ended; empty when there are none."""
        ...

    def step(self) -> list[Finished]:
        """Does nothing and returns at once when no request is there."""
        ...

    def weight_layout(self) -> Layout:
        """Every runtime tensor, in the dtype it wants, or named as derived or constant."""
        ...

    def swap(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy into the live tensors and move the version. Raises ValueError, with nothing changed, if a tensor is
        missing, unknown or of another shape."""
        ...
