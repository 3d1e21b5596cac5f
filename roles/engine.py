"""The contract of a rollout engine: what a rank calls, and what a new engine has to keep.

    1 check(request)              any thread   may this engine ever run it? Nothing changes.
    2 open(tasks, failed)         loop, once   start what runs beside the loop; `failed(error)` tells a final failure.
    3 submit(request, ended,      loop         it waits for room, behind those submitted before; `ended(finished)` is
             sampled)                          called on the loop for each sample, and `sampled(news)`, where given,
                                               for its tokens as they come.
    4 abort(request_id, sample)   loop         in any state, known or not: its samples, or that one, end with what they
                                               have.
    5 swap(weights, version)      awaited      between two steps: weights and version move together, nothing is dropped.
    6 score(sequences)            awaited      logprobs of given tokens, under the weights in service.
    7 probe()                     awaited      an answer from where the steps run: it hangs if they do.
    8 close()                     awaited      end what runs; nothing is left of it (R10).
    9 num_running, num_waiting, num_tokens, version   any thread   numbers to look at, a step old at most.

"loop": on the thread of the event loop. An engine whose steps are plain calls keeps the smaller contract `StepEngine`;
`roles.stepping.Stepper` makes a RolloutEngine of it.

RE-1: each sample of a submitted request ends exactly once, by itself or by `abort`, unless the engine fails.
RE-2: every token carries the version whose weights computed its logits, and its logprob under the distribution it was
      drawn from.
RE-3: a completion depends on its prompt, its seed and the weights, up to rounding of batched products; not on load.
RE-4: after `swap` a request admitted later sees nothing computed with older weights; one that runs keeps its keys and
      values and goes on (W4).
RE-5: an error while it steps or swaps is final for the engine: the rank reports it and is replaced.
RE-6: the pieces that `sampled` is told of a sample are, one after another, the tokens of its completion; the last comes
      before `ended`, and none waits for more to come.
RE-7: engines deal in tokens; `Sampling.stop` is not theirs. The rank reads the text of a sample as its tokens come, and
      ends it by `abort`, cutting what was sampled beyond (roles/rollout_call.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from roles.types import Completion, Piece, Sampling

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from runtime import TaskGroup
    from sync.layout import Layout


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its samples, admitted together so that the prompt is computed once."""

    id: int
    """Unique among the requests that the engine holds."""
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One 64-bit seed per sample (`roles.seeds.completion_seed`)."""
    sampling: Sampling
    first: int = 0
    """Index of the first sampled token in its completion: more than 0 when a completion goes on whose earlier tokens
    stand at the end of `prompt_ids`. Random numbers are drawn from this index on."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One sample that ended, by itself or by `abort`."""

    request_id: int
    sample: int
    """Index into the request's seeds."""
    completion: Completion
    """`text` is empty: engines deal in tokens."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one sample, since those told before."""

    request_id: int
    sample: int
    piece: Piece


Ended = Callable[[Finished], None]
Told = Callable[[Sampled], None]


class EngineFailed(RuntimeError):
    """The engine of a replica has ended, or must not serve. The replica must be started anew."""


class Behind(RuntimeError):
    """A replica that was started anew has not been sent the weights in service yet."""


class TooOld(Behind):
    """A replica was left out of so many versions that it must not serve before it has a newer one."""


class RolloutEngine(Protocol):
    """See the module's contract page. It is a `sync.ports.WeightSink` but for `swap`, which is awaited."""

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

    @property
    def busy_seconds(self) -> float:
        """Wall time in which it had something to do."""
        ...

    def check(self, request: Request) -> None:
        """Raise ValueError if the engine can never run it: field, limit, value and what to change."""
        ...

    def open(self, tasks: TaskGroup, failed: Callable[[Exception], None]) -> None:
        """Start its tasks in that group. `failed` is called once, with the error that ended the engine."""
        ...

    def submit(self, request: Request, ended: Ended, sampled: Told | None = None) -> None:
        """Queue it. Raises ValueError like `check`, or when its id is in use.

        Args:
            ended: told of each sample once.
            sampled: told of tokens as they come (RE-6). Left out where nobody reads along: it costs some time.
        """
        ...

    def abort(self, request_id: int, sample: int | None = None) -> None:
        """End its samples that have not ended, or one of them; `ended` is told of each, at the latest after the step
        under way."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Logprobs of the tokens of each sequence but its first, [T - 1] float32 each, natural log, untempered, under
        the weights in service. Raises ValueError for a sequence that is empty or too long."""
        ...

    async def probe(self) -> None:
        """Return once the place where steps run has answered; hang if it does not."""
        ...

    def weight_layout(self) -> Layout:
        """Every runtime tensor, in the dtype it wants, or named as derived or constant."""
        ...

    async def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor] | None:
        """Put them into service and move the version; returns what `sync.ports.WeightSink` says. Raises ValueError,
        with nothing changed, if a tensor is missing, unknown or of another shape. An engine whose weights lie in other
        processes is given none: they have them (`weight_workers` of `sync.ports.WeightSink`)."""
        ...

    async def close(self) -> None:
        """End it. Repeating it does nothing."""
        ...


class StepEngine(Protocol):
    """An engine whose steps are plain calls, all on one thread, one at a time. Same promises."""

    @property
    def version(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def check(self, request: Request) -> None:
        """From any thread."""
        ...

    def submit(self, request: Request, *, told: bool = False) -> None:
        """Args: told: `news` has its tokens."""
        ...

    def abort(self, request_id: int, sample: int | None = None) -> list[Finished]:
        """End its samples that have not ended, or one of them; empty when there are none. A sample that waits for room
        may end with its first step instead."""
        ...

    def step(self) -> list[Finished]:
        """Admit what fits, give each running completion one more token (or several), return those that ended. Does
        nothing and returns at once when no request is there."""
        ...

    def news(self) -> list[Sampled]:
        """Tokens of requests submitted with `told` since the last call, those of ended samples included."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]: ...

    def weight_layout(self) -> Layout:
        """From any thread."""
        ...

    def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor] | None: ...


def check_tokens(what: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for a token that the model does not have."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"rollout: expected {what} tokens in 0..{vocab_size - 1}, got {min(ids)} to {max(ids)}; use the tokenizer "
            "that belongs to the model"
        )
