"""One sample on its way through vLLM: what vLLM is asked, and what its outputs say.

VS-1: a logprob stands beside the token that it belongs to, or it is an error.
VS-2: versions come from the borders that swaps have noted, by the index of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from roles.engine import Ended, EngineFailed, Request, Told
from roles.types import Piece

__all__ = ["Sample", "packed_logprobs", "parameters_of", "piece_of"]


class Sample:
    """One sample on its way through vLLM."""

    def __init__(self, request: Request, index: int, ended: Ended, sampled: Told | None) -> None:
        self.request = request
        self.index = index
        self.ended = ended
        self.sampled = sampled
        self.num_told = 0
        self.attempt = 0
        self.internal = ""
        """vLLM's own id while it holds the request."""
        self.borders: list[tuple[int, int]] = []
        """(tokens sampled before, version) of each version that it ran under."""
        self.aborted = False
        self.again = False

    @property
    def name(self) -> str:
        """What vLLM is told; see `vllm_worker.external`."""
        return f"{self.request.id}.{self.index}.{self.attempt}"


def parameters_of(sample: Sample, stop_token_ids: Sequence[int], *, seeded: bool) -> Any:
    """SamplingParams of vLLM. `stop_token_ids` are the model's own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request, sampling = sample.request, sample.request.sampling
    seed = (request.seeds[sample.index] + request.first * 0x9E3779B97F4A7C15) % 2**63 if seeded else None
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_token_ids or stop_token_ids),
        ignore_eos=True,  # the stop tokens above are all there are
        seed=seed,
        logprobs=sampling.top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,  # made for this request alone: vLLM would deep-copy it
        # Deltas would lose their logprobs where an abort comes; what is cumulative is not copied.
        output_kind=RequestOutputKind.FINAL_ONLY if sample.sampled is None else RequestOutputKind.CUMULATIVE,
    )


def piece_of(sample: Sample, output: Any, start: int) -> Piece:
    """What an output has from a token on (VE-1, VE-3)."""
    (one,) = output.outputs
    top = sample.request.sampling.top_logprobs
    tokens = np.array(one.token_ids[start:], np.int32)
    if output.kv_transfer_params:
        ids, values = _unpacked(output.kv_transfer_params[_PACKED], top + 1)
    else:
        ids, values = _of_flat(one.logprobs, start, start + len(tokens), top)
    if not np.array_equal(ids[:, 0], tokens):
        raise EngineFailed("vLLM gave logprobs of other tokens than it sampled; report this with its version")
    logprobs = values[:, 0].copy()
    if sample.request.sampling.temperature == 0:
        logprobs[:] = 0.0  # drawn from a point mass
    versions = np.empty(start + len(tokens), np.int32)
    for border, version in sample.borders:
        versions[border:] = version
    piece = Piece(token_ids=tokens, logprobs=logprobs, versions=versions[start:])
    if top:
        piece.top_ids, piece.top_logprobs = ids[:, 1:].copy(), values[:, 1:].copy()
    return piece


# Of each token a row: the sampled one first, then the likeliest, likeliest first.

_PACKED = "tutti"
"""Under this name they travel in the only field of an output that vLLM hands on without looking into it."""


def packed_logprobs(ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """What our scheduler (vllm_scheduler.py) sends in place of vLLM's logprobs."""
    return {_PACKED: [ids.astype(np.int32).tobytes(), logprobs.astype(np.float32).tobytes()]}


def _unpacked(columns: Sequence[bytes], width: int) -> tuple[np.ndarray, np.ndarray]:
    ids, logprobs = columns
    return np.frombuffer(ids, np.int32).reshape(-1, width), np.frombuffer(logprobs, np.float32).reshape(-1, width)


def _of_flat(flat: Any, start: int, end: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """The same of vLLM's FlatLogprobs."""
    rows = [[flat.start_indices[at], *_likeliest(flat, at, top)] for at in range(start, end)]
    ids = np.array([[flat.token_ids[place] for place in row] for row in rows], np.int32)
    values = np.array([[flat.logprobs[place] for place in row] for row in rows], np.float32)
    return ids.reshape(-1, top + 1), values.reshape(-1, top + 1)


def _likeliest(flat: Any, position: int, count: int) -> list[int]:
    """Places of ranks 1 to `count`. The sampled token stands first, and once more among them."""
    if not count:
        return []
    places = {flat.ranks[place]: place for place in range(flat.start_indices[position], flat.end_indices[position])}
    return [places[rank] for rank in range(1, count + 1)]
