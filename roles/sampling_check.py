"""Which sampling parameters mean something. Known without torch, before a process starts."""

from __future__ import annotations

from roles.types import Sampling

TEMPERATURES = (1e-6, 1e6)
"""Least and most besides 0. Far beyond, logits divided by it are no numbers, which would end the engine."""

MAX_TOP_LOGPROBS = 20
"""What the OpenAI API allows, and vLLM by default."""

MAX_STOPS = 16
"""Stop strings of a request; each is looked for after every token."""


def check_sampling(sampling: Sampling) -> None:
    """Refuse parameters that mean nothing.

    Raises:
        ValueError: a field is out of range; the text names field, value and range.
    """
    low, high = TEMPERATURES
    if sampling.temperature != 0 and not low <= sampling.temperature <= high:
        raise ValueError(
            f"sampling.temperature: expected 0 or {low:g} to {high:g}, got {sampling.temperature}; use 0 for greedy "
            "decoding"
        )
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"sampling.top_p: expected a number in (0, 1], got {sampling.top_p}; use 1 to keep all tokens")
    if not 0 <= sampling.top_k < 2**31:
        raise ValueError(
            f"sampling.top_k: expected an integer from 0 to 2**31 - 1, got {sampling.top_k}; use 0 to keep all tokens"
        )
    if sampling.max_tokens < 1:
        raise ValueError(f"sampling.max_tokens: expected at least 1, got {sampling.max_tokens}; set it to 1 or more")
    if not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
        raise ValueError(f"sampling.top_logprobs: expected 0 to {MAX_TOP_LOGPROBS}, got {sampling.top_logprobs}")
    if len(sampling.stop) > MAX_STOPS or "" in sampling.stop:
        raise ValueError(
            f"sampling.stop: expected at most {MAX_STOPS} strings, none of them empty, got {list(sampling.stop)!r}"
        )
    if sampling.stop and sampling.ignore_eos:
        raise ValueError("sampling.stop: ignore_eos goes on whatever is sampled; leave one of them out")
