"""What an engine of so many rows and positions could never run. Pure."""

from __future__ import annotations

from roles.engine import Request, check_tokens
from roles.sampling_check import check_sampling


def check_fits(request: Request, max_running: int, max_len: int, vocab_size: int) -> None:
    """Raise ValueError: field, limit, value and what to change."""
    check_sampling(request.sampling)
    if not 1 <= len(request.seeds) <= max_running:
        raise ValueError(
            f"rollout: expected 1 to {max_running} samples of a prompt (the rows of a rank), got "
            f"{len(request.seeds)}; raise max_running or ask for fewer samples"
        )
    length = len(request.prompt_ids)
    if length == 0:
        raise ValueError("rollout: expected a prompt of at least one token, got none; begin it with a start token")
    if length + request.sampling.max_tokens > max_len:
        raise ValueError(
            f"rollout: expected prompt and completion within max_len = {max_len} tokens, got {length} + "
            f"{request.sampling.max_tokens} (max_tokens); raise max_len, lower max_tokens or shorten the prompts"
        )
    check_tokens("prompt", request.prompt_ids, vocab_size)
    check_tokens("stop", request.sampling.stop_token_ids, vocab_size)
    if request.sampling.top_logprobs > vocab_size:
        raise ValueError(
            f"sampling.top_logprobs: expected at most the {vocab_size} tokens of the model, got "
            f"{request.sampling.top_logprobs}"
        )
