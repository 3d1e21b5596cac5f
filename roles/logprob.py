"""Logprob of chosen tokens and entropy of the distribution, without ever holding the logits of a long sequence.

    hidden [N, H] --rows in chunks--> logits [n, V / tp] --sums over the vocabulary's ranks--> logprob [N], entropy [N]

LP-1: at most `rows_at_once` rows of logits exist at a time, in forward and in backward, where they are computed again.
      When one chunk holds all rows, its log-softmax is kept instead.
LP-2: softmax, logprob and entropy are float32 whatever the compute type; gradients of the head are summed in float32.
LP-3: with the vocabulary split over a group, values and gradients equal those of the whole head. Two collectives a
      chunk: one maximum, one sum of three numbers a row.
LP-4: the entropy is ln sum e^z - sum(z e^z) / sum e^z with z = logit - max: exact at probability 0, never NaN there.

Gradients, p = softmax, H = entropy: d logprob(c) / d logit_j = [j = c] - p_j;  d H / d logit_j = -p_j (ln p_j + H).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**28}
"""Logits held at a time, in elements: 64 MiB of float32 on the CPU, where more would leave its caches; 1 GiB on a GPU,
where fewer rows would leave it idle."""

UNDERFLOW = -200.0
"""exp of this is 0 in float32: a bound for logits of probability 0, so that 0 * -inf can't arise (LP-4)."""


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The rows of the head on this rank: tokens `start : start + count` of the vocabulary.

    The gradient of `hidden` is left as this shard's part; whoever gathered `hidden` over the group adds the parts up.
    """

    group: dist.ProcessGroup
    start: int
    count: int
    """Rows that are tokens. Rows of the weight after them are padding: they get no probability and no gradient."""


def chosen_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    entropy_gradient: bool = False,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target under softmax(head(hidden) / temperature), and the entropy of that distribution.

    Args:
        hidden: [N, H], the compute type. Under a vocabulary shard: equal on all ranks of its group.
        weight: [V, H], same type; V rows of this rank's shard if there is one.
        targets: [N] int64, tokens of the whole vocabulary.
        temperature: divides the logits.
        bias: [V], if the head has one.
        entropy_gradient: whether the entropy may be part of a loss.
        shard: None when the head is whole.

    Returns:
        logprobs and entropy in nats, [N] float32 each.
    """
    run: Any = _ChosenLogprobs.apply
    logprobs, entropy = run(hidden, weight, bias, targets, temperature, entropy_gradient, shard)
    return logprobs, entropy if entropy_gradient else entropy.detach()


def rows_at_once(vocabulary: int, device: torch.device) -> int:
    """Rows of logits in one chunk."""
    return max(1, LOGITS_AT_ONCE.get(device.type, LOGITS_AT_ONCE["cuda"]) // max(1, vocabulary))


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy_gradient: bool,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.entropy_gradient = entropy_gradient
        count = weight.shape[0] if shard is None else shard.count
        ctx.rows, ctx.temperature, ctx.shard, ctx.count = rows_at_once(count, hidden.device), temperature, shard, count
        ctx.kept = None
        logsums, logprobs, entropies = [], [], []
        for start in range(0, len(hidden), ctx.rows) or [0]:
            part = slice(start, start + ctx.rows)
            logits = _logits(hidden[part], weight, bias, temperature, count)
            logsum, logprob, entropy = _measure(logits, targets[part], shard)
            if len(hidden) <= ctx.rows and any(ctx.needs_input_grad[:3]):
                ctx.kept = logits.sub_(logsum[:, None])
            logsums.append(logsum)
            logprobs.append(logprob)
            entropies.append(entropy)
        entropy = torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(logsums), entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, targets, logsum, entropy = ctx.saved_tensors
        of_logprob, of_entropy = grads[0], grads[1] if ctx.entropy_gradient else None
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            log_p = ctx.kept
            if log_p is None:
                log_p = _logits(hidden[part], weight, bias, ctx.temperature, ctx.count).sub_(logsum[part, None])
            slope = _slope(
                log_p,
                targets[part],
                of_logprob[part],
                None if of_entropy is None else of_entropy[part],
                entropy[part],
                ctx.shard,
            )
            slope.div_(ctx.temperature)
            low = slope.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(low, weight[: ctx.count], out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight[: ctx.count], low, hidden[part])
            if grad_bias is not None:
                grad_bias[: ctx.count] += slope.sum(0)
        ctx.kept = None
        cast_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, cast_weight, None if grad_bias is None else grad_bias.to(bias.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, count: int) -> Tensor:
    """[n, count] float32, memory of its own."""
    logits = (hidden @ weight[:count].T).float()
    if bias is not None:
        logits += bias[:count]
    return logits.div_(temperature) if temperature != 1.0 else logits


def _measure(logits: Tensor, targets: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor, Tensor]:
    """ln sum e^logit, logprob of the target and entropy, [n] each (LP-3, LP-4)."""
    if logits.shape[0] == 0:  # no trained token: no rows, on no rank of the group
        empty = logits.new_zeros(0)
        return empty, empty.clone(), empty.clone()
    top = logits.max(-1).values
    if shard is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
    local, inside = _local(targets, shard)
    chosen = logits.gather(1, local[:, None]).squeeze(1) - top
    z = (logits - top[:, None]).clamp_min_(UNDERFLOW)
    e = z.exp()
    sums = torch.stack([e.sum(-1), torch.where(inside, chosen, 0.0), torch.linalg.vecdot(e, z)])
    if shard is not None:
        dist.all_reduce(sums, group=shard.group)
    total, chosen, weighted = sums
    return top + total.log(), chosen - total.log(), total.log() - weighted / total


def _slope(
    log_p: Tensor,
    targets: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    entropy: Tensor,
    shard: VocabShard | None,
) -> Tensor:
    """[n, count] gradient by the scaled logits; see the formulas at the top."""
    p = log_p.exp()
    weights = of_logprob[:, None]
    if of_entropy is not None:
        weights = weights + of_entropy[:, None] * (log_p.clamp_min(UNDERFLOW) + entropy[:, None])
    slope = p.mul_(-weights)
    local, inside = _local(targets, shard)
    return slope.scatter_add_(1, local[:, None], torch.where(inside, of_logprob, 0.0)[:, None])


def _local(targets: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Row of each target in this shard (0 where it is elsewhere), and whether it is here."""
    if shard is None:
        return targets, torch.ones_like(targets, dtype=torch.bool)
    local = targets - shard.start
    inside = (local >= 0) & (local < shard.count)
    return torch.where(inside, local, 0), inside


def _add_product(into: Tensor, slope: Tensor, hidden: Tensor) -> None:
    if slope.dtype == into.dtype:
        into.addmm_(slope.T, hidden)
    else:
        into += slope.T @ hidden
