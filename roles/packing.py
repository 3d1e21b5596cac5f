"""From a list of sequences to what each trainer rank computes, and back. Pure numpy, no framework, no randomness.

The way of a batch, here with 2 ranks, one update and a budget of 8 padded tokens:

    lengths of samples 0..4     3 8 2 4 3
    longest first               samples 1 3 0 4 2; the budget asks for 3 micro-batches, two ranks make it 4
    micro-batches               [1] = 8   [3] = 4   [0, 4] = 2 x 3   [2] = 2      smallest maximum for 4
    equal counts, balanced      rank 0: [1] [2] = 10      rank 1: [0, 4] [3] = 10

PK-1: every sequence with a trained token is in exactly one micro-batch of one rank; sequences without one are in none,
      because they would cost a forward pass and give no gradient. Tokens that a sample masks (what an environment said)
      are read by the model and trained by nobody.
PK-2: all ranks have equally many micro-batches in each update, so that every rank enters every collective. What is
      missing is filled with padding micro-batches: one row of length 0, mask all False.
PK-3: a micro-batch holds at most `token_budget` padded tokens (rows x longest row), unless it is one single sequence.
PK-4: column t is about *predicting* token t, in all arrays alike; column 0 is never trained.
PK-5: the denominators are counts over all ranks (A4); the layout is a function of the lengths alone, so that equal
      inputs give equal micro-batches in a resumed run.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from roles.types import MicroBatch, RankBatch, TrainSample


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Where each sequence goes. Indices point into the list of samples; an empty micro-batch is a padding one."""

    updates: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """`updates[u][rank][m]` is the tuple of sample indices of one micro-batch, longest sequence first."""
    padded_tokens: tuple[tuple[int, ...], ...]
    """`padded_tokens[u][rank]`: rows x longest row, summed over the micro-batches."""
    num_tokens: int
    """Tokens of all planned sequences, without padding; 1 - num_tokens / sum(padded_tokens) is what padding wastes."""


def plan(samples: Sequence[TrainSample], *, world: int, token_budget: int, updates: int) -> Plan:
    """Decide the micro-batches of a step.

    The list is cut in `updates` runs of (nearly) equal count, in its order: since the samples of a group stand next to
    each other, groups stay whole whenever the number of groups is a multiple of `updates`. Within an update the
    sequences are sorted by length, so that rows of one micro-batch need little padding.

    Raises:
        ValueError: a count is not positive, there is nothing to train, fewer samples than updates, or a sample is
            malformed (no prompt token, arrays of unequal length).
    """
    for name, value in (("world", world), ("token_budget", token_budget), ("updates", updates)):
        if value < 1:
            raise ValueError(f"packing: {name} must be at least 1, got {value}; set [trainer] {name}")
    if updates > len(samples):
        raise ValueError(
            f"packing: {updates} updates need at least as many sequences, got {len(samples)}; "
            "lower [trainer] updates_per_step or train on more prompts a step"
        )
    for index, sample in enumerate(samples):
        _check(index, sample)
    lengths = [len(sample.token_ids) for sample in samples]
    all_updates = []
    for update in range(updates):
        first, last = len(samples) * update // updates, len(samples) * (update + 1) // updates
        members = [i for i in range(first, last) if samples[i].num_trained > 0]
        members.sort(key=lambda i: (-lengths[i], i))
        chunks = _balanced_chunks(members, lengths, world, token_budget)
        all_updates.append(_assign(chunks, lengths, world))
    planned = [i for ranks in all_updates for chunks in ranks for chunk in chunks for i in chunk]
    if not planned:
        raise ValueError(
            f"packing: none of the {len(samples)} sequences has a token to train on; "
            "leave the step out, or check the stop token and max_tokens of the rollout"
        )
    return Plan(
        updates=tuple(all_updates),
        padded_tokens=tuple(
            tuple(sum(_cost(chunk, lengths) for chunk in chunks) for chunks in ranks) for ranks in all_updates
        ),
        num_tokens=sum(lengths[i] for i in planned),
    )


def fill(samples: Sequence[TrainSample], plan: Plan) -> list[RankBatch]:
    """Build the arrays of each rank (see `roles.types.MicroBatch` for shapes and types) for a plan of these samples."""
    num_tokens, num_sequences = [], []
    for ranks in plan.updates:
        members = [i for chunks in ranks for chunk in chunks for i in chunk]
        num_tokens.append(sum(samples[i].num_trained for i in members))
        num_sequences.append(len(members))
    with_reference = any(sample.reference_logprobs is not None for sample in samples)
    if with_reference and any(sample.reference_logprobs is None for sample in samples):
        raise ValueError("packing: some samples have reference_logprobs and some have none; give all of a batch theirs")

    def micro(chunk: Sequence[int]) -> MicroBatch:
        return _micro_batch([samples[i] for i in chunk], with_reference)

    return [
        RankBatch(
            updates=[[micro(chunk) for chunk in ranks[rank]] for ranks in plan.updates],
            num_tokens=num_tokens,
            num_sequences=num_sequences,
        )
        for rank in range(len(plan.updates[0]))
    ]


def pack(samples: Sequence[TrainSample], *, world: int, token_budget: int, updates: int = 1) -> list[RankBatch]:
    """`plan` and `fill` in one: the batch of each of `world` ranks. Raises as `plan` does."""
    return fill(samples, plan(samples, world=world, token_budget=token_budget, updates=updates))


def unpack(
    samples: Sequence[TrainSample], plan: Plan, values: Sequence[Sequence[Sequence[np.ndarray]]]
) -> list[np.ndarray]:
    """Undo `fill` for one value per token.

    Args:
        values: `values[rank][u][m]` is the [B, L] array of one micro-batch, in the layout of `MicroBatch`.

    Returns:
        One [C] array per sample, in the order of the samples, about its completion tokens.
    """
    result = [np.zeros(sample.completion_length, np.float32) for sample in samples]
    for update, ranks in enumerate(plan.updates):
        for rank, chunks in enumerate(ranks):
            for chunk, array in zip(chunks, values[rank][update], strict=True):
                for row, index in enumerate(chunk):
                    sample = samples[index]
                    result[index][:] = array[row, sample.prompt_length : len(sample.token_ids)]
    return result


def _check(index: int, sample: TrainSample) -> None:
    count = sample.completion_length
    if sample.prompt_length < 1:
        raise ValueError(
            f"packing: sample {index} has prompt_length {sample.prompt_length}, expected at least 1: "
            "its first token has nothing to be predicted from; put a begin-of-text token before it"
        )
    if len(sample.rollout_logprobs) != count or len(sample.advantages) != count:
        raise ValueError(
            f"packing: sample {index} has {count} completion tokens, {len(sample.rollout_logprobs)} rollout logprobs "
            f"and {len(sample.advantages)} advantages; give one of each per completion token"
        )
    optional = (("ages", sample.ages), ("reference_logprobs", sample.reference_logprobs), ("mask", sample.mask))
    for name, values in optional:
        if values is not None and len(values) != count:
            raise ValueError(
                f"packing: sample {index} has {count} completion tokens and {len(values)} {name}; give one per "
                "completion token, or None"
            )


def _cost(chunk: Sequence[int], lengths: Sequence[int]) -> int:
    """Padded tokens of a micro-batch; a padding one has a single position."""
    return len(chunk) * lengths[chunk[0]] if chunk else 1


def _greedy(members: Sequence[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Cut sequences sorted by falling length into runs of at most `budget` padded tokens, or one sequence."""
    chunks, start = [], 0
    while start < len(members):
        rows = max(1, budget // lengths[members[start]])
        chunks.append(tuple(members[start : start + rows]))
        start += rows
    return chunks


def _balanced_chunks(
    members: Sequence[int], lengths: Sequence[int], world: int, token_budget: int
) -> list[tuple[int, ...]]:
    """The fewest micro-batches that the budget allows, rounded up to a multiple of `world`, with the smallest maximum.

    Greedy filling leaves a nearly empty last micro-batch, for which the other ranks would wait. The same count with
    the smallest budget that still reaches it spreads the work evenly, at no extra collective.
    """
    if not members:
        return []
    fewest = len(_greedy(members, lengths, token_budget))
    allowed = -(-fewest // world) * world
    low, high = 1, token_budget
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(members, lengths, middle)) <= allowed:
            high = middle
        else:
            low = middle + 1
    return _greedy(members, lengths, low)


def _assign(
    chunks: Sequence[tuple[int, ...]], lengths: Sequence[int], world: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Longest first to the least loaded rank that has room; then padding micro-batches up to equal counts (PK-2).

    Each rank keeps its micro-batches in falling cost, so that what runs at the same time on two ranks is alike.
    """
    per_rank = -(-len(chunks) // world)
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(world)]
    loads = [0] * world
    for chunk in sorted(chunks, key=lambda chunk: (-_cost(chunk, lengths), chunk)):
        rank = min((r for r in range(world) if len(ranks[r]) < per_rank), key=lambda r: (loads[r], r))
        ranks[rank].append(chunk)
        loads[rank] += _cost(chunk, lengths)
    return tuple(tuple(chunks_ + [()] * (per_rank - len(chunks_))) for chunks_ in ranks)


def _micro_batch(rows: Sequence[TrainSample], with_reference: bool) -> MicroBatch:
    count = max(1, len(rows))
    width = max((len(sample.token_ids) for sample in rows), default=1)
    batch = MicroBatch(
        token_ids=np.zeros((count, width), np.int64),
        lengths=np.zeros(count, np.int64),
        mask=np.zeros((count, width), bool),
        rollout_logprobs=np.zeros((count, width), np.float32),
        advantages=np.zeros((count, width), np.float32),
        ages=np.zeros((count, width), np.int32),
        reference_logprobs=np.zeros((count, width), np.float32) if with_reference else None,
    )
    for row, sample in enumerate(rows):
        length, trained = len(sample.token_ids), slice(sample.prompt_length, len(sample.token_ids))
        batch.token_ids[row, :length] = sample.token_ids
        batch.lengths[row] = length
        batch.mask[row, trained] = True if sample.mask is None else sample.mask
        batch.rollout_logprobs[row, trained] = sample.rollout_logprobs
        batch.advantages[row, trained] = sample.advantages
        if sample.ages is not None:
            batch.ages[row, trained] = sample.ages
        if batch.reference_logprobs is not None:
            batch.reference_logprobs[row, trained] = sample.reference_logprobs
    for values in (batch.rollout_logprobs, batch.advantages, batch.ages, batch.reference_logprobs):
        if values is not None:
            values[~batch.mask] = 0
    return batch
