"""From a list of sequences to what each trainer rank computes, and back. Pure numpy, no framework, no randomness.

The way of a batch, here with 2 ranks, one update and a budget of 8 tokens:

    lengths of samples 0..4     3 8 2 4 3
    longest first               samples 1 3 0 4 2; the budget asks for 3 micro-batches, two ranks make it 4
    micro-batches               [1] = 8   [3] = 4   [0] = 3   [4, 2] = 3 + 2      smallest maximum for 4
    equal counts, balanced      rank 0: [1] [0] = 11      rank 1: [4, 2] [3] = 9

PK-1: every sequence with a trained token is in exactly one micro-batch of one rank; sequences without one are in none,
      because they would cost a forward pass and give no gradient. Tokens that a sample masks (what an environment said)
      are read by the model and trained by nobody.
PK-2: all ranks have equally many micro-batches in each update, so that every rank enters every collective. What is
      missing is filled with padding micro-batches: one row of length 0, mask all False. The count is a multiple of
      `multiple`, which an interleaved pipeline asks for.
PK-3: a micro-batch holds at most `token_budget` tokens. A longer sequence is refused: memory for it was never planned.
PK-4: column t is about *predicting* token t, in all arrays alike; column 0 is never trained.
PK-5: the denominators are counts over all ranks (A4); the layout is a function of the lengths alone, so that equal
      inputs give equal micro-batches in a resumed run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from roles.types import MicroBatch, RankBatch, TrainSample

WHOLE_BATCH = ("reference_logprobs", "values", "returns")
"""Per-token fields of a sample that all samples of a batch have, or none."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Where each sequence goes. Indices point into the list of samples; an empty micro-batch is a padding one."""

    updates: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    """`updates[u][rank][m]` is the tuple of sample indices of one micro-batch, longest sequence first."""
    tokens: tuple[tuple[int, ...], ...]
    """`tokens[u][rank]`: of all its sequences. How even these are says how long ranks wait for each other."""


def plan(samples: Sequence[TrainSample], *, world: int, token_budget: int, updates: int, multiple: int = 1) -> Plan:
    """Decide the micro-batches of a step.

    The list is cut in `updates` runs of (nearly) equal count, in its order: since the samples of a group stand next to
    each other, groups stay whole whenever the number of groups is a multiple of `updates`. Within an update the
    sequences are sorted by length, so that those of one micro-batch are alike.

    Args:
        world: ranks with data of their own (the data-parallel size).
        multiple: what the number of micro-batches of a rank must be a multiple of.

    Raises:
        ValueError: a count is not positive, there is nothing to train, fewer samples than updates, a sample is longer
            than the budget or malformed (no prompt token, arrays of unequal length, routes of some samples only).
    """
    for name, value in (("world", world), ("token_budget", token_budget), ("updates", updates), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"packing: {name} must be at least 1, got {value}; set [trainer] {name}")
    if updates > len(samples):
        raise ValueError(
            f"packing: {updates} updates need at least as many sequences, got {len(samples)}; "
            "lower [trainer] updates_per_step or train on more prompts a step"
        )
    for index, sample in enumerate(samples):
        _check(index, sample, token_budget)
    _check_routes(samples)
    lengths = [len(sample.token_ids) for sample in samples]
    all_updates = []
    for update in range(updates):
        first, last = len(samples) * update // updates, len(samples) * (update + 1) // updates
        members = [i for i in range(first, last) if samples[i].num_trained > 0]
        members.sort(key=lambda i: (-lengths[i], i))
        chunks = _balanced_chunks(members, lengths, world * multiple, token_budget)
        all_updates.append(_assign(chunks, lengths, world, multiple))
    planned = [i for ranks in all_updates for chunks in ranks for chunk in chunks for i in chunk]
    if not planned:
        raise ValueError(
            f"packing: none of the {len(samples)} sequences has a token to train on; "
            "leave the step out, or check the stop token and max_tokens of the rollout"
        )
    return Plan(
        updates=tuple(all_updates),
        tokens=tuple(tuple(sum(_cost(c, lengths) for c in chunks) for chunks in ranks) for ranks in all_updates),
    )


def fill(samples: Sequence[TrainSample], plan: Plan) -> list[RankBatch]:
    """Build the arrays of each rank (see `roles.types.MicroBatch` for shapes and types) for a plan of these samples."""
    num_tokens, num_sequences = [], []
    for ranks in plan.updates:
        members = [i for chunks in ranks for chunk in chunks for i in chunk]
        num_tokens.append(sum(samples[i].num_trained for i in members))
        num_sequences.append(len(members))
    fields = _Fields.of(samples)

    def micro(chunk: Sequence[int]) -> MicroBatch:
        return _micro_batch([samples[i] for i in chunk], fields)

    return [
        RankBatch(
            updates=[[micro(chunk) for chunk in ranks[rank]] for ranks in plan.updates],
            num_tokens=num_tokens,
            num_sequences=num_sequences,
        )
        for rank in range(len(plan.updates[0]))
    ]


def pack(
    samples: Sequence[TrainSample], *, world: int, token_budget: int, updates: int = 1, multiple: int = 1
) -> list[RankBatch]:
    """`plan` and `fill` in one: the batch of each of `world` ranks. Raises as `plan` does."""
    layout = plan(samples, world=world, token_budget=token_budget, updates=updates, multiple=multiple)
    return fill(samples, layout)


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


def _check(index: int, sample: TrainSample, token_budget: int) -> None:
    count = sample.completion_length
    if count > 0 and len(sample.token_ids) > token_budget:
        raise ValueError(
            f"packing: sample {index} has {len(sample.token_ids)} tokens, [trainer] token_budget is {token_budget}; "
            "raise it to the longest prompt plus the longest answer, or lower sampling.max_tokens"
        )
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
    for name in ("ages", "mask", *WHOLE_BATCH):
        values = getattr(sample, name)
        if values is not None and len(values) != count:
            raise ValueError(
                f"packing: sample {index} has {count} completion tokens and {len(values)} {name}; give one per "
                "completion token, or None"
            )


def _check_routes(samples: Sequence[TrainSample]) -> None:
    """Every sequence that is trained has routes, of one shape, or none has (replaying a part would be silent noise)."""
    with_routes = {i: sample.routes.shape for i, sample in enumerate(samples) if sample.routes is not None}
    trained = [i for i, sample in enumerate(samples) if sample.completion_length > 0]
    if not with_routes:
        return
    if missing := sorted(set(trained) - set(with_routes)):
        raise ValueError(
            f"packing: samples {missing[:5]} have no recorded routes, sample {min(with_routes)} has; record the "
            "experts of every completion in the rollout, or of none"
        )
    kind = with_routes[min(with_routes)][1:]
    for i, shape in with_routes.items():
        expected = (len(samples[i].token_ids) - 1, *kind)
        if len(kind) != 2 or shape != expected:
            raise ValueError(
                f"packing: the routes of sample {i} have shape {list(shape)}, expected [tokens - 1, MoE layers, "
                f"experts per token] = {list(expected)}; the last token has no route, nothing is predicted from it"
            )


def _cost(chunk: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of a micro-batch; a padding one has a single position."""
    return sum(lengths[i] for i in chunk) if chunk else 1


def _greedy(members: Sequence[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Cut sequences sorted by falling length into runs of at most `budget` tokens, or one sequence."""
    chunks: list[tuple[int, ...]] = []
    run: list[int] = []
    tokens = 0
    for i in members:
        if run and tokens + lengths[i] > budget:
            chunks.append(tuple(run))
            run, tokens = [], 0
        run.append(i)
        tokens += lengths[i]
    return [*chunks, tuple(run)] if run else chunks


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
    chunks: Sequence[tuple[int, ...]], lengths: Sequence[int], world: int, multiple: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Longest first to the least loaded rank that has room; then padding micro-batches up to equal counts (PK-2).

    Each rank keeps its micro-batches in falling cost, so that what runs at the same time on two ranks is alike.
    """
    per_rank = -(-len(chunks) // (world * multiple)) * multiple
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(world)]
    loads = [0] * world
    for chunk in sorted(chunks, key=lambda chunk: (-_cost(chunk, lengths), chunk)):
        rank = min((r for r in range(world) if len(ranks[r]) < per_rank), key=lambda r: (loads[r], r))
        ranks[rank].append(chunk)
        loads[rank] += _cost(chunk, lengths)
    return tuple(tuple(chunks_ + [()] * (per_rank - len(chunks_))) for chunks_ in ranks)


class _Fields(msgspec.Struct, frozen=True):
    """What the samples of a batch have beyond the common: all its micro-batches have it then, padding ones too."""

    per_token: tuple[str, ...]
    """Names among `WHOLE_BATCH`."""
    routes: tuple[tuple[int, int], np.dtype[Any]] | None
    """(MoE layers, experts per token) and the type."""

    @classmethod
    def of(cls, samples: Sequence[TrainSample]) -> _Fields:
        names = [name for name in WHOLE_BATCH if any(getattr(sample, name) is not None for sample in samples)]
        for name in names:
            if any(getattr(sample, name) is None for sample in samples):
                raise ValueError(f"packing: some samples have {name} and some have none; give all of a batch theirs")
        routes = next((sample.routes for sample in samples if sample.routes is not None), None)
        return cls(tuple(names), None if routes is None else ((routes.shape[1], routes.shape[2]), routes.dtype))


def _micro_batch(rows: Sequence[TrainSample], fields: _Fields) -> MicroBatch:
    count = max(1, len(rows))
    width = max((len(sample.token_ids) for sample in rows), default=1)
    token_ids, mask = np.zeros((count, width), np.int64), np.zeros((count, width), bool)
    for row, sample in enumerate(rows):
        token_ids[row, : len(sample.token_ids)] = sample.token_ids
        mask[row, sample.prompt_length : len(sample.token_ids)] = True if sample.mask is None else sample.mask

    def per_token(name: str, dtype: type[np.generic] = np.float32) -> np.ndarray:
        array = np.zeros((count, width), dtype)
        for row, sample in enumerate(rows):
            if (values := getattr(sample, name)) is not None:
                array[row, sample.prompt_length : len(sample.token_ids)] = values
        array[~mask] = 0
        return array

    routes = None
    if fields.routes is not None:
        shape, dtype = fields.routes
        known = [sample.routes for sample in rows if sample.routes is not None]
        routes = np.concatenate([np.zeros((0, *shape), dtype), *known])
    return MicroBatch(
        token_ids=token_ids,
        lengths=np.array([len(sample.token_ids) for sample in rows] or [0], np.int64),
        mask=mask,
        rollout_logprobs=per_token("rollout_logprobs"),
        advantages=per_token("advantages"),
        ages=per_token("ages", np.int32),
        routes=routes,
        **{name: per_token(name) for name in fields.per_token},
    )
