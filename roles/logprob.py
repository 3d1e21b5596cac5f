"""Logprob of chosen tokens and entropy of the distribution, without ever holding the logits of a long sequence.

    hidden [N, H] --blocks of rows and tokens--> logits [n, v] --folded--> sum e^z, sum z e^z [N] --> logprob, entropy

LP-1: at most `LOGITS_AT_ONCE` logits are computed at a time. Of a forward pass with gradient the last ones stay for the
      backward pass, which begins with them and turns them into their gradient in place; the rest is computed again
      there. `LOGITS_KEPT` bounds them, and on a GPU the number of the head's weights.
      Rows of logits begin at multiples of `ALIGNED` elements, whatever the vocabulary and the number of positions: GPUs
      multiply matrices with other rows five times slower.
LP-2: softmax, logprob and entropy are float32 whatever the compute type, and so are the sums of products over blocks:
      the gradient of a hidden state is a small difference of large parts, which a rounded part would drown. A block of
      the head's gradient is one product over all rows, or a float32 sum over blocks of rows: no second copy of the head
      in float32. A head with a sum of its own (`roles.sums`) gets it there.
LP-3: with the vocabulary split over a group, values and gradients equal those of the whole head. Two collectives a
      block of rows: one maximum, one sum of three numbers a row.
LP-4: the entropy is ln sum e^z - sum(z e^z) / sum e^z with z = logit - max: exact at probability 0, never NaN there.

Gradients, p = softmax, H = entropy: d logprob(c) / d logit_j = [j = c] - p_j;  d H / d logit_j = -p_j (ln p_j + H).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roles import kernels, kernels_torch
from roles.sums import add_product, sum_of

LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**27}
"""Logits held at a time, in elements: 64 MiB of float32 on the CPU, where more would leave its caches; 256 MiB of bf16
on a GPU, where smaller products would leave it idle."""

LOGITS_KEPT = {"cpu": 2**27, "cuda": 2**30}
"""Logits that wait for the backward pass, in elements: 512 MiB of float32, 2 GiB of bf16. A quarter of the head's work
is saved on those, and they wait while all activations are held: of a narrow model, whose products are cheap, fewer
do."""

ALIGNED = 64
"""128 bytes of bf16."""

ROWS_AT_ONCE = 8192
"""Positions of one block: enough to fill a GPU, and blocks of the vocabulary stay wide."""


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
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    run: Any = _ChosenLogprobs.apply
    logprobs, entropy = run(hidden, weight, bias, targets, temperature, entropy_gradient, shard, learns)
    return logprobs, entropy if entropy_gradient else entropy.detach()


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
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        count = weight.shape[0] if shard is None else shard.count
        local = targets if shard is None else targets - shard.start
        ctx.blocks = _Blocks(len(hidden), count, hidden.device)
        ctx.temperature, ctx.entropy_gradient, ctx.sum = temperature, entropy_gradient, sum_of(weight)
        ctx.kept = _Kept(ctx.blocks, weight if learns else None)
        measured = []
        for rows in ctx.blocks.rows:
            state = kernels_torch.empty_fold(hidden[rows])
            chosen = torch.zeros_like(state[0])
            for tokens in ctx.blocks.tokens:
                logits = _logits(hidden[rows], weight, bias, tokens)
                at, inside = _within(local[rows], tokens)
                chosen = torch.where(inside, logits.gather(1, at[:, None]).squeeze(1).float() / temperature, chosen)
                kernels.softmax_fold(state, logits, temperature)
                ctx.kept.offer(rows, tokens, logits)
                del logits  # before the next ones
            measured.append(_finish(state, chosen, shard))
        parts = [torch.cat(part) for part in zip(*measured, strict=True)] or [hidden.new_zeros(0).float()] * 3
        logsum, logprob, entropy = parts
        ctx.save_for_backward(hidden, weight, bias, local, logsum, entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, local, logsum, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        total = None if ctx.sum is None or not need_weight else ctx.sum.begun()
        need_weight = need_weight and total is None
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        for tokens in reversed(ctx.blocks.tokens):
            products: Tensor | None = None
            for rows in reversed(ctx.blocks.rows):
                logits = ctx.kept.take(rows, tokens)
                if logits is None:
                    logits = _logits(hidden[rows], weight, bias, tokens)
                at, inside = _within(local[rows], tokens)
                slope = kernels.softmax_slope(
                    logits,
                    ctx.temperature,
                    logsum[rows],
                    torch.where(inside, at, -1),
                    grads[0][rows],
                    grads[1][rows] if ctx.entropy_gradient else None,
                    entropy[rows],
                )
                if grad_hidden is not None:
                    add_product(grad_hidden[rows], slope, weight[tokens])
                if total is not None:
                    add_product(total[tokens], slope.T, hidden[rows])
                if grad_weight is not None:
                    if len(ctx.blocks.rows) == 1:
                        products = slope.T @ hidden
                    else:
                        if products is None:
                            products = hidden.new_zeros(slope.shape[1], hidden.shape[1], dtype=torch.float32)
                        add_product(products, slope.T, hidden[rows])
                if grad_bias is not None:
                    grad_bias[tokens] += slope.sum(0, dtype=torch.float32).to(grad_bias.dtype)
                del logits, slope
            if grad_weight is not None and products is not None:
                grad_weight[tokens] = products.to(weight.dtype)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, *[None] * 5


class _Blocks:
    """How rows and tokens are cut (LP-1)."""

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        limit = LOGITS_AT_ONCE.get(device.type, LOGITS_AT_ONCE["cuda"])
        height = max(1, min(rows, ROWS_AT_ONCE, limit))
        width = limit // height
        width = max(1, min(tokens, width - width % ALIGNED if width > ALIGNED else width))
        self.rows = [slice(at, min(at + height, rows)) for at in range(0, rows, height)]
        self.tokens = [slice(at, min(at + width, tokens)) for at in range(0, tokens, width)]


class _Kept:
    """Blocks of logits that wait for the backward pass: the last ones (LP-1)."""

    def __init__(self, blocks: _Blocks, weight: Tensor | None) -> None:
        """Without a weight, of a forward pass that learns nothing, none is kept."""
        self._wanted: set[tuple[int, int]] = set()
        self._blocks: dict[tuple[int, int], Tensor] = {}
        room = 0
        if weight is not None:
            room = LOGITS_KEPT.get(weight.device.type, LOGITS_KEPT["cuda"])
            room = room if weight.device.type == "cpu" else min(room, weight.numel())
        for rows in reversed(blocks.rows):
            for tokens in reversed(blocks.tokens):
                room -= (rows.stop - rows.start) * (tokens.stop - tokens.start)
                if room < 0:
                    return
                self._wanted.add((rows.start, tokens.start))

    def offer(self, rows: slice, tokens: slice, logits: Tensor) -> None:
        if (rows.start, tokens.start) in self._wanted:
            self._blocks[rows.start, tokens.start] = logits

    def take(self, rows: slice, tokens: slice) -> Tensor | None:
        return self._blocks.pop((rows.start, tokens.start), None)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: slice) -> Tensor:
    """[n, v] in the compute type, memory of its own; the rows may be longer in memory (LP-1)."""
    rows, width = len(hidden), tokens.stop - tokens.start
    memory = torch.empty(rows, width + -width % ALIGNED, dtype=hidden.dtype, device=hidden.device)
    logits = torch.mm(hidden, weight[tokens].T, out=memory[:, :width])
    return logits if bias is None else logits.add_(bias[tokens])


def _finish(state: Tensor, chosen: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor, Tensor]:
    """ln sum e^logit, logprob of the target and entropy, [n] each (LP-3, LP-4)."""
    top, total, weighted = state
    if shard is not None:
        highest = top.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
        shift = top - highest
        scale = shift.exp()
        # a target that is elsewhere has chosen = 0 here: it adds nothing to the sum
        sums = torch.stack([total * scale, scale * (weighted + shift * total), chosen])
        dist.all_reduce(sums, group=shard.group)
        top, (total, weighted, chosen) = highest, sums
    log_total = total.log()
    return top + log_total, chosen - top - log_total, log_total - weighted / total


def _within(targets: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
    """Column of each target in a block of tokens (0 where it is elsewhere), and whether it is there."""
    at = targets - tokens.start
    inside = (at >= 0) & (at < tokens.stop - tokens.start)
    return torch.where(inside, at, 0), inside
