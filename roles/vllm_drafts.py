"""Speculative decoding whose completions are those without it. Runs in vLLM's worker, in place of its decision.

A draft proposes tokens, and the model computes the logits after each of them in one pass. vLLM decides by rejection
sampling, with numbers of their own for acceptance, replacement and what comes after. Here the token of each place is
drawn as it would be without a draft, the argmax of p / q with q the noise of (seed, index of the token), and a draft
is kept as far as it says what was drawn ("drafter-invariant" decoding: Daliri et al., arXiv:2408.07978). For a draft
that is certain of its tokens, both keep as many.

vLLM's own would be wrong on a CPU (0.32.0): its kernel `expand` writes temperature, top_k and top_p of drafted places
into a copy, so that they are whatever the memory held before.

DR-1: drafts decide how many tokens a step gives, never which: a completion is the one without drafts, up to rounding of
      batched products. So a token's distribution is the one that its logprob is of, temperature, top-k and top-p
      included.
DR-2: a request draws once for each token that it keeps: what was drawn after a draft that was wrong is drawn again.
DR-3: a model that drafts draws by the same noise from its own distribution: it is right as often as that is near.
DR-4: what is counted as kept are drafted tokens that became part of a completion or of a place beyond its end.
DR-5: every tensor of a draft is the policy's, or declared constant: `explain` tells how many bytes never change (W2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from sync.layout import Entry

__all__ = ["Drafts", "constants_of", "install", "kept"]

_GREEDY = 1e-5
"""Temperatures below are greedy to vLLM."""

_DRAW = 4
"""How far vLLM takes a CUDA generator back for one draw."""


def install(runner: Any) -> Drafts | None:
    """Decide for this runner; None where nothing drafts.

    Raises:
        ValueError: it runs ahead of its own results: the count of tokens at a swap would be a guess (VW-2).
    """
    if getattr(runner, "speculative_config", None) is None:
        return None
    if runner.use_async_scheduling:
        raise ValueError("rollout.vllm.draft: vLLM's async_scheduling must be off; leave it out of the arguments")
    drafts = Drafts(runner)
    runner._sample = drafts.sample
    drafter: Any = getattr(runner, "drafter", None)
    # A drafter with a way of its own (Gemma 4) keeps it: it is right less often, and nothing else changes (DR-1).
    own = "_greedy_sample" in vars(type(drafter)) or getattr(drafter, "vocab_mapping", None) is not None
    own = own or getattr(drafter, "use_local_argmax_reduction", False)
    if hasattr(drafter, "_greedy_sample") and not own:
        drafts.greedy = drafter._greedy_sample
        drafter._greedy_sample = drafts.propose
    return drafts


def constants_of(runner: Any) -> list[Entry]:
    """Tensors that only its draft has, as they lie here: no trainer sends them, and they stay as they are (DR-5). What
    it shares with the policy, such as embedding and head of an MTP layer, follows the policy."""
    model = getattr(getattr(runner, "drafter", None), "model", None)
    if not isinstance(model, nn.Module):
        return []
    policy = {id(tensor) for tensor in (*runner.model.parameters(), *runner.model.buffers())}
    named = [*model.named_parameters(), *model.named_buffers()]
    own = [(name, tensor) for name, tensor in named if id(tensor) not in policy]
    return [
        Entry.whole(f"draft.{name}", tensor.shape, str(tensor.dtype).removeprefix("torch.")) for name, tensor in own
    ]


def kept(drawn: Tensor, owner: Tensor, place: Tensor, drafted: Tensor) -> Tensor:
    """Tokens of each request, -1 behind the first that its draft did not say.

    Args:
        drawn: [R] tokens, those of a request one after another.
        owner, place: [R] which request, and which of its places.
        drafted: [B, S], -1 where a request has fewer drafts.

    Returns:
        [B, S + 1]
    """
    count, width = drafted.shape
    table = drawn.new_full((count, width + 1), -1)
    table[owner, place] = drawn
    right = (table[:, :width] == drafted) & (drafted >= 0)
    num_right = right.int().cumprod(dim=1).sum(dim=1, keepdim=True)
    return torch.where(torch.arange(width + 1, device=drawn.device) <= num_right, table, -1)


class Drafts:
    """Of one runner (V1 of vLLM, without async scheduling)."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._noise: _Noise = _SerialNoise(runner) if runner.device.type == "cpu" else _KeyedNoise(runner)
        self._sampling: Any = None
        self._num_proposed = 0
        self._num_kept = torch.zeros((), dtype=torch.int64, device=runner.device)
        self.greedy: Any = None
        """The drafter's own choice."""

    def counts(self) -> tuple[int, int]:
        """(drafted tokens that were looked at, those that were kept) since start; waits for the device."""
        return self._num_proposed, int(self._num_kept)

    def sample(self, logits: Tensor, metadata: Any) -> Any:
        """In place of the runner's `_sample`: as many tokens of each request as its draft allows."""
        from vllm.v1.outputs import SamplerOutput

        sampling = self._runner.input_batch.sampling_metadata
        places = _Places.of(self._runner.input_batch.num_reqs, metadata, logits.device)
        processed = _processed(logits, sampling, places.owner)
        drawn = self._noise.draw(processed, sampling, places)
        tokens = kept(drawn, places.owner, places.place, places.drafted)
        self._noise.settle(tokens)
        self._sampling = sampling
        self._count(places, tokens)
        told = None
        if sampling.max_num_logprobs is not None:
            told = _told(processed, drawn, places.cell, tokens.numel(), sampling.max_num_logprobs)
        return SamplerOutput(sampled_token_ids=tokens.int(), logprobs_tensors=told)

    def propose(self, hidden_states: Tensor) -> Tensor:
        """In place of the drafter's choice (DR-3): a token for the next place of each request."""
        sampling = self._sampling
        if sampling is None or sampling.all_greedy or len(hidden_states) != len(sampling.temperature):
            return self.greedy(hidden_states)  # type: ignore[no-any-return]
        logits = self._runner.drafter.model.compute_logits(hidden_states)
        everyone = torch.arange(len(logits), device=logits.device)
        processed = _processed(logits, sampling, everyone)
        best = processed.argmax(-1)
        return torch.where(sampling.temperature < _GREEDY, best, self._noise.foresee(processed))

    def _count(self, places: _Places, tokens: Tensor) -> None:
        self._num_proposed += places.num_drafted
        if places.num_drafted:
            self._num_kept += (tokens >= 0).sum() - len(tokens)


@dataclass
class _Places:
    """The rows of one step's logits: of each request the places of its drafted tokens, and one more."""

    owner: Tensor
    """[R] the request of each row."""
    place: Tensor
    """[R] which of its places."""
    drafted: Tensor
    """[B, S] tokens that a draft says, -1 where there are fewer."""
    host: np.ndarray
    """[2, R] owner and place."""
    num_drafted: int

    @classmethod
    def of(cls, num_requests: int, metadata: Any, device: torch.device) -> _Places:
        """By vLLM's SpecDecodeMetadata; None where no request has a draft (0.25)."""
        counts = np.zeros(num_requests, np.int64) if metadata is None else np.array(metadata.num_draft_tokens, np.int64)
        owner = np.repeat(np.arange(num_requests), counts + 1)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts + 1) - counts - 1, counts + 1)
        host = np.stack([owner, place])
        both = _on(device, host)
        drafted = torch.full((num_requests, int(counts.max(initial=0))), -1, dtype=torch.int64, device=device)
        if num_drafted := int(counts.sum()):
            cells = _on(device, (owner * drafted.shape[1] + place)[place < counts[owner]])
            drafted.view(-1)[cells] = metadata.draft_token_ids.long()
        return cls(both[0], both[1], drafted, host, num_drafted)

    @property
    def cell(self) -> Tensor:
        """[R] where each row stands in [B, S + 1]."""
        return self.owner * (self.drafted.shape[1] + 1) + self.place


def _processed(logits: Tensor, sampling: Any, owner: Tensor) -> Tensor:
    """[R, V] after temperature, top-k and top-p of each row's request. May overwrite `logits`, as vLLM's own does."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = logits.float()
    if sampling.all_greedy:
        return logits
    temperature = torch.where(sampling.temperature < _GREEDY, 1.0, sampling.temperature)
    top_k = None if sampling.top_k is None else sampling.top_k[owner]
    top_p = None if sampling.top_p is None else sampling.top_p[owner]
    return apply_top_k_top_p(logits.div_(temperature[owner, None]), top_k, top_p)  # type: ignore[no-any-return]


def _told(processed: Tensor, drawn: Tensor, cells: Tensor, num_cells: int, count: int) -> Any:
    """vLLM's LogprobsTensors of all cells; those of no row are never looked at."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.sampler import Sampler

    found = Sampler.gather_logprobs(processed.log_softmax(-1), count, drawn)
    columns = (found.logprob_token_ids, found.logprobs, found.selected_token_ranks)
    return LogprobsTensors(*[c.new_zeros((num_cells, *c.shape[1:])).index_copy_(0, cells, c) for c in columns])


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


# --- noise ------------------------------------------------------------------------------------------------------------


class _Noise(Protocol):
    def draw(self, processed: Tensor, sampling: Any, places: _Places) -> Tensor:
        """[R] tokens; those behind a draft that was wrong say nothing."""
        ...

    def settle(self, tokens: Tensor) -> None:
        """[B, S + 1] that were kept: what is drawn next follows them."""
        ...

    def foresee(self, logits: Tensor) -> Tensor:
        """[B] tokens by the noise of the next place, which stays to be drawn."""
        ...


class _SerialNoise:
    """By the generators of requests, as vLLM draws on a CPU: one place of all requests after another."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._ahead: dict[int, torch.Generator] = {}

    def draw(self, processed: Tensor, sampling: Any, places: _Places) -> Tensor:
        drawn = processed.argmax(-1)
        if sampling.all_greedy:
            return drawn
        owner, place = places.host
        is_greedy = (sampling.temperature < _GREEDY).numpy()[owner]
        for turn in range(places.drafted.shape[1] + 1):
            rows = [int(row) for row in np.flatnonzero(place == turn) if _goes_on(drawn, int(row), turn, places)]
            rows = [row for row in rows if not is_greedy[row]]
            if rows:
                drawn[rows] = self._choose(processed[rows], owner[rows].tolist(), sampling.generators)
        return drawn

    def settle(self, tokens: Tensor) -> None:
        self._ahead = {}

    def foresee(self, logits: Tensor) -> Tensor:
        if not self._ahead:
            generators = self._runner.input_batch.sampling_metadata.generators
            self._ahead = {row: generator.clone_state() for row, generator in generators.items()}
        return self._choose(logits, range(len(logits)), self._ahead)

    def _choose(self, logits: Tensor, requests: Sequence[int], generators: Mapping[int, torch.Generator]) -> Tensor:
        own = {at: generators[request] for at, request in enumerate(requests) if request in generators}
        return self._runner.sampler.topk_topp_sampler(logits, own, None, None)[0].long()  # type: ignore[no-any-return]


class _KeyedNoise:
    """By (seed, index of the token), as `vllm_seeds` draws on a GPU: all places at once, without waiting for it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._next = torch.zeros(0, 2, dtype=torch.int64)

    def draw(self, processed: Tensor, sampling: Any, places: _Places) -> Tensor:
        best = processed.argmax(-1)
        if sampling.all_greedy:
            return best
        batch = self._runner.input_batch
        num_requests = len(places.drafted)
        self._keep_offsets(sampling.generators, num_requests)
        seeds = np.zeros(num_requests, np.int64)  # without a seed are scores, whose token nobody wants
        for row, generator in sampling.generators.items():
            seeds[row] = generator.initial_seed()
        begins = (batch.num_tokens_no_spec - batch.num_prompt_tokens)[:num_requests]
        self._next = _on(best.device, np.stack([seeds, begins], axis=1))
        keys = self._next[places.owner]
        keys[:, 1] += places.place
        drawn = self._by(processed, keys)
        return torch.where((sampling.temperature < _GREEDY)[places.owner], best, drawn)

    def settle(self, tokens: Tensor) -> None:
        if len(self._next) == len(tokens):
            self._next[:, 1] += (tokens >= 0).sum(1)

    def foresee(self, logits: Tensor) -> Tensor:
        drawn = self._by(logits, self._next)
        self._next[:, 1] += 1
        return drawn

    def _by(self, logits: Tensor, keys: Tensor) -> Tensor:
        from roles.vllm_seeds import fill

        noise = torch.empty_like(logits)
        fill(noise, torch.arange(len(noise), device=noise.device), keys)
        return logits.softmax(-1).div_(noise).argmax(-1)

    def _keep_offsets(self, generators: Mapping[int, torch.Generator], num_requests: int) -> None:
        """vLLM takes a draw back from each prompt that came in part; none was made here."""
        for row in np.flatnonzero(self._runner.discard_request_mask.np[:num_requests]):
            if (generator := generators.get(int(row))) is not None:
                generator.set_offset(generator.get_offset() + _DRAW)


def _goes_on(drawn: Tensor, row: int, turn: int, places: _Places) -> bool:
    """Whether all that was drafted before this row is what was drawn."""
    said = places.drafted[int(places.host[0, row]), :turn]
    return drawn[row - turn : row].tolist() == said.tolist()
