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

__all__ = ["Sample", "parameters_of", "piece_of"]


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
    flat, count = one.logprobs, sample.request.sampling.top_logprobs
    tokens = np.array(one.token_ids[start:], np.int32)
    first = flat.start_indices[start : start + len(tokens)]
    if [flat.token_ids[place] for place in first] != tokens.tolist():
        raise EngineFailed("vLLM gave logprobs of other tokens than it sampled; report this with its version")
    logprobs = np.array([flat.logprobs[place] for place in first], np.float32)
    if sample.request.sampling.temperature == 0:
        logprobs[:] = 0.0  # drawn from a point mass
    versions = np.empty(start + len(tokens), np.int32)
    for border, version in sample.borders:
        versions[border:] = version
    piece = Piece(token_ids=tokens, logprobs=logprobs, versions=versions[start:])
    if count:
        best = [_likeliest(flat, place, count) for place in range(start, start + len(tokens))]
        piece.top_ids = np.array([[token for token, _ in row] for row in best], np.int32).reshape(-1, count)
        piece.top_logprobs = np.array([[value for _, value in row] for row in best], np.float32).reshape(-1, count)
    return piece


def _likeliest(flat: Any, position: int, count: int) -> list[tuple[int, float]]:
    """Tokens and logprobs of ranks 1 to `count`. The sampled token stands first, and once more among them."""
    found: dict[int, tuple[int, float]] = {}
    for place in range(flat.start_indices[position], flat.end_indices[position]):
        found[flat.ranks[place]] = (flat.token_ids[place], flat.logprobs[place])
    return [found[rank] for rank in range(1, count + 1)]
