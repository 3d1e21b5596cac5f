"""Each metric once: its unit, its formula, its healthy range, and the function that makes it.

ME-1: a metric is a ratio of sums over the whole step, all ranks and micro-batches, never a mean of means (A4).
ME-2: a metric whose denominator is 0 is absent, neither 0 nor NaN.
ME-3: the table in the documentation is printed from this registry: `python -m algorithms.metrics`.
ME-4: no torch: this runs on the controller.

`finish` turns the sums and maxima of a training step (`StepResult`) into metrics, `of_groups` does it for the groups
that the step consumed. Notation as in `algorithms.losses`: mu sampler, pi_old trainer at the start of the step, pi
current, rho = pi / pi_old, w = pi_old / mu, C the cap of w. Means are over trained tokens unless the formula says
otherwise.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roles.types import Group, Scored

SUMS = (
    "tokens",
    "sequences",
    "nonfinite_tokens",
    "signal_tokens",
    "loss_times_tokens",
    "entropy",
    "ratio",
    "clipped_low",
    "clipped_high",
    "policy_k3",
    "mismatch_k1",
    "mismatch_k3",
    "logprob_gap",
    "probability_gap",
    "weight",
    "weight_squared",
    "truncated_weight",
    "truncated_weight_squared",
    "truncated_tokens",
    "masked_tokens",
    "fresh_tokens",
    "fresh_gap",
    "fresh_trainer",
    "fresh_rollout",
    "fresh_trainer_squared",
    "fresh_rollout_squared",
    "fresh_product",
)
"""What an objective adds up over tokens (`LossOutput.sums`); one of your own may leave some out, or add some."""

MAXIMA = ("ratio", "weight", "logprob_gap")
"""What an objective takes the maximum of (`LossOutput.maxima`)."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over the groups of one step, made by one pass; the source of the group metrics."""

    groups: int
    completions: int
    scored: int
    reward: float
    """Sum over the scored completions."""
    judged_groups: int
    """Groups with at least one scored completion."""
    solved_all: int
    """Of them: every scored completion is solved."""
    solved_none: int
    no_contrast: int
    """Of them: all rewards exactly equal, so that no advantage differs from 0."""
    tokens: int
    longest: int
    cut: int
    """Completions ended by the length limit."""
    empty: int
    """Completions without a token."""
    ages: tuple[int, ...]


@dataclass(frozen=True)
class Metric:
    """One number of a step."""

    name: str
    unit: str
    formula: str
    healthy: str
    """In words."""
    value: Callable[[Any], float | None]
    """From `Step` or `Totals` to the number; None when its denominator is 0."""
    low: float = float("-inf")
    high: float = float("inf")
    """Values outside of [low, high] deserve a look; see `unhealthy`."""


@dataclass(frozen=True)
class Step:
    """The sums and maxima of a training step. A name that the objective did not report makes its metrics absent."""

    sums: Mapping[str, float]
    maxima: Mapping[str, float]

    def mean(self, name: str, over: str = "tokens") -> float | None:
        return ratio(self.sums.get(name), self.sums.get(over))

    def ess(self, total: str, squares: str) -> float | None:
        s, q, n = self.sums.get(total), self.sums.get(squares), self.sums.get("tokens")
        return None if s is None or q is None or n is None else ratio(s * s, n * q)

    def loss(self) -> float | None:
        # The loss keeps non-finite tokens in its denominator (LO-3).
        tokens = self.sums.get("tokens", 0.0) + self.sums.get("nonfinite_tokens", 0.0)
        return ratio(self.sums.get("loss_times_tokens"), tokens)

    def fresh_correlation(self) -> float | None:
        n = self.sums.get("fresh_tokens")
        if not n or "fresh_product" not in self.sums:
            return None
        x, y = self.sums["fresh_trainer"] / n, self.sums["fresh_rollout"] / n
        variances = (self.sums["fresh_trainer_squared"] / n - x * x) * (self.sums["fresh_rollout_squared"] / n - y * y)
        if variances <= 0:
            return None
        return float((self.sums["fresh_product"] / n - x * y) / math.sqrt(variances))

    def chi2(self) -> float | None:
        mean = self.mean("weight_squared")
        return None if mean is None else mean - 1


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator; None if either is missing or the denominator is 0 (ME-2)."""
    return None if numerator is None or not denominator else numerator / denominator


# fmt: off
STEP_METRICS: tuple[Metric, ...] = (
    Metric(
        "policy/loss", "-",
        "the objective, mean over the updates of the step weighted by tokens",
        "near 0 on policy; its size means nothing across settings",
        lambda s: s.loss(),
    ),
    Metric(
        "policy/entropy", "nat",
        "mean of -sum_a pi(a) log pi(a)",
        "falls slowly; a fast fall to 0 ends exploration",
        lambda s: s.mean("entropy"), low=0.01,
    ),
    Metric(
        "policy/ratio_mean", "-",
        "mean of rho",
        "1 in the first update of a step, near 1 later",
        lambda s: s.mean("ratio"), low=0.9, high=1.1,
    ),
    Metric(
        "policy/ratio_max", "-",
        "max of rho, before clamping",
        "below 10; more means too many updates a step or too high a learning rate",
        lambda s: s.maxima.get("ratio"), high=10.0,
    ),
    Metric(
        "policy/clip_low_fraction", "fraction",
        "tokens with A < 0 and rho < 1 - clip_low, over tokens",
        "below 0.1",
        lambda s: s.mean("clipped_low"), high=0.1,
    ),
    Metric(
        "policy/clip_high_fraction", "fraction",
        "tokens with A > 0 and rho > 1 + clip_high, over tokens",
        "below 0.1",
        lambda s: s.mean("clipped_high"), high=0.1,
    ),
    Metric(
        "policy/kl_k3", "nat",
        "mean of rho - 1 - log rho: KL(pi_old || pi) of the step so far",
        "below 0.05",
        lambda s: s.mean("policy_k3"), high=0.05,
    ),
    Metric(
        "policy/signal_fraction", "fraction",
        "tokens with A != 0, over tokens",
        "above 0.2; lower: the prompts are too easy or too hard",
        lambda s: s.mean("signal_tokens"), low=0.2,
    ),
    Metric(
        "mismatch/kl_k1", "nat",
        "mean of log mu - log pi_old: KL(mu || pi_old), may be negative",
        "within +-0.01 of 0 at age 0",
        lambda s: s.mean("mismatch_k1"), low=-0.05, high=0.05,
    ),
    Metric(
        "mismatch/kl_k3", "nat",
        "mean of w - 1 - log w: the same KL, never negative",
        "below 0.01 with bf16 engines, below 1e-6 in float32 at age 0; more is staleness or a bug",
        lambda s: s.mean("mismatch_k3"), high=0.01,
    ),
    Metric(
        "mismatch/logprob_gap_mean", "nat",
        "mean of |log pi_old - log mu|",
        "below 0.02 with bf16 engines, below 1e-4 in float32 at age 0",
        lambda s: s.mean("logprob_gap"), high=0.1,
    ),
    Metric(
        "mismatch/logprob_gap_max", "nat",
        "max of |log pi_old - log mu|",
        "no bound; a jump after a weight update means that an engine missed it",
        lambda s: s.maxima.get("logprob_gap"),
    ),
    Metric(
        "mismatch/probability_gap_mean", "probability",
        "mean of |pi_old - mu|",
        "below 0.005; above 0.01 at age 0 is a bug in precision",
        lambda s: s.mean("probability_gap"), high=0.01,
    ),
    Metric(
        "mismatch/ess_raw", "fraction",
        "(sum w)^2 / (n sum w^2) before truncation, n tokens",
        "above 0.8; 1 when both sides agree",
        lambda s: s.ess("weight", "weight_squared"), low=0.8,
    ),
    Metric(
        "mismatch/ess_truncated", "fraction",
        "the same of the weights that the loss used, such as min(w, C)",
        "above 0.9",
        lambda s: s.ess("truncated_weight", "truncated_weight_squared"), low=0.9,
    ),
    Metric(
        "mismatch/chi2", "-",
        "mean of w^2, minus 1",
        "below 0.25; ess_raw is about 1 / (1 + chi2)",
        lambda s: s.chi2(), high=0.25,
    ),
    Metric(
        "mismatch/truncated_fraction", "fraction",
        "tokens whose weight was truncated (w > C) or set to 0, over tokens",
        "below 0.02",
        lambda s: s.mean("truncated_tokens"), high=0.02,
    ),
    Metric(
        "mismatch/masked_fraction", "fraction",
        "tokens that a mask of the objective drops, over tokens",
        "below 0.05",
        lambda s: s.mean("masked_tokens"), high=0.05,
    ),
    Metric(
        "mismatch/fresh_correlation", "-",
        "Pearson's r of log mu and log pi_old over tokens of age 0 or 1",
        "above 0.99; less: the engine does not serve the weights that it should",
        lambda s: s.fresh_correlation(), low=0.95,
    ),
    Metric(
        "mismatch/fresh_gap_mean", "nat",
        "mean of |log pi_old - log mu| over tokens of age 0 or 1",
        "below 0.02; more: a large step, or an engine that does not serve what it should",
        lambda s: s.mean("fresh_gap", "fresh_tokens"), high=0.05,
    ),
    Metric(
        "mismatch/weight_mean", "-",
        "mean of w",
        "near 1, its expectation",
        lambda s: s.mean("weight"), low=0.9, high=1.1,
    ),
    Metric(
        "mismatch/weight_max", "-",
        "max of w, before truncation",
        "no bound; far above C is normal for rare tokens",
        lambda s: s.maxima.get("weight"),
    ),
    Metric(
        "mismatch/nonfinite_tokens", "tokens",
        "trained tokens whose logprob is not finite on any side; left out of the loss",
        "0",
        lambda s: s.sums.get("nonfinite_tokens"), high=0.0,
    ),
    Metric(
        "train/tokens", "tokens",
        "trained tokens of the step",
        "-",
        lambda s: s.sums.get("tokens"),
    ),
    Metric(
        "train/sequences", "sequences",
        "sequences with a trained token",
        "-",
        lambda s: s.sums.get("sequences"),
    ),
)

GROUP_METRICS: tuple[Metric, ...] = (
    Metric(
        "reward/mean", "reward",
        "mean over scored completions",
        "rises",
        lambda t: ratio(t.reward, t.scored),
    ),
    Metric(
        "reward/solved_all_fraction", "fraction",
        "groups whose scored completions are all solved, over judged groups",
        "below 0.5; more: the prompts are too easy",
        lambda t: ratio(t.solved_all, t.judged_groups), high=0.5,
    ),
    Metric(
        "reward/solved_none_fraction", "fraction",
        "groups without a solved completion, over judged groups",
        "below 0.5; more: the prompts are too hard",
        lambda t: ratio(t.solved_none, t.judged_groups), high=0.5,
    ),
    Metric(
        "reward/no_contrast_fraction", "fraction",
        "groups whose rewards are all equal and teach nothing, over judged groups",
        "below 0.7",
        lambda t: ratio(t.no_contrast, t.judged_groups), high=0.7,
    ),
    Metric(
        "reward/unscored_fraction", "fraction",
        "completions that the reward could not judge, over completions",
        "0; above 0.01 the verifier needs a look",
        lambda t: ratio(t.completions - t.scored, t.completions), high=0.01,
    ),
    Metric(
        "length/mean", "tokens",
        "sampled tokens over completions",
        "no jumps",
        lambda t: ratio(t.tokens, t.completions),
    ),
    Metric(
        "length/max", "tokens",
        "longest completion",
        "below the limit",
        lambda t: float(t.longest) if t.completions else None,
    ),
    Metric(
        "length/truncated_fraction", "fraction",
        "completions ended by the length limit, over completions",
        "below 0.1; more: raise the limit",
        lambda t: ratio(t.cut, t.completions), high=0.1,
    ),
    Metric(
        "length/empty_fraction", "fraction",
        "completions without a token, over completions; not trained",
        "0",
        lambda t: ratio(t.empty, t.completions), high=0.0,
    ),
    Metric(
        "age/mean", "versions",
        "mean over groups of version trained on - oldest version among the tokens",
        "at most the staleness S",
        lambda t: ratio(sum(t.ages), len(t.ages)),
    ),
    Metric(
        "age/max", "versions",
        "max of the same",
        "never above the bound ceil(slots / P) - 1",
        lambda t: float(max(t.ages)) if t.ages else None,
    ),
    Metric(
        "rollout/tokens", "tokens",
        "sampled tokens of the consumed groups",
        "-",
        lambda t: float(t.tokens),
    ),
)

# fmt: on
METRICS: dict[str, Metric] = {metric.name: metric for metric in (*STEP_METRICS, *GROUP_METRICS)}
"""By name, in the order of the table."""


def finish(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a training step. Sums and maxima that no metric knows pass through as "custom/<name>"."""
    step = Step(sums, maxima)
    record = _evaluate(STEP_METRICS, step)
    record.update(
        {f"custom/{name}": s / n for name, s in sums.items() if name not in SUMS and (n := sums.get("tokens"))}
    )
    record.update({f"custom/{name}_max": value for name, value in maxima.items() if name not in MAXIMA})
    return record


def of_groups(groups: Sequence[Group], ages: Sequence[int] = (), *, solved_at: float = 1.0) -> dict[str, float]:
    """The metrics of the groups that a step consumed; `ages` in versions, one per group, as `Buffer.take` told them."""
    return _evaluate(GROUP_METRICS, count(groups, ages, solved_at=solved_at))


def count(groups: Sequence[Group], ages: Sequence[int] = (), *, solved_at: float = 1.0) -> Totals:
    """One pass over the groups. A completion is solved when its reward is at least `solved_at`."""
    rewards = [[r.value for r in g.rewards if isinstance(r, Scored) and math.isfinite(r.value)] for g in groups]
    judged = [values for values in rewards if values]
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    return Totals(
        groups=len(groups),
        completions=len(completions),
        scored=sum(len(values) for values in judged),
        reward=sum(sum(values) for values in judged),
        judged_groups=len(judged),
        solved_all=sum(all(v >= solved_at for v in values) for values in judged),
        solved_none=sum(all(v < solved_at for v in values) for values in judged),
        no_contrast=sum(len(set(values)) == 1 for values in judged),
        tokens=sum(lengths),
        longest=max(lengths, default=0),
        cut=sum(completion.finish_reason == "length" for completion in completions),
        empty=lengths.count(0),
        ages=tuple(ages),
    )


def unhealthy(record: Mapping[str, float | None]) -> list[str]:
    """One sentence for each metric of a record that is outside of its healthy range."""
    known = [(metric, value) for name, metric in METRICS.items() if (value := record.get(name)) is not None]
    return [
        f"{metric.name} is {value:.4g} {metric.unit}: healthy is {metric.healthy}"
        for metric, value in known
        if not metric.low <= value <= metric.high
    ]


def markdown() -> str:
    """The table of the documentation."""
    cells = [(f"`{m.name}`", m.unit, m.formula, m.healthy) for m in METRICS.values()]
    rows = [("metric", "unit", "formula", "healthy"), ("---",) * 4, *cells]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |\n" for row in rows)


def _evaluate(metrics: Sequence[Metric], source: Step | Totals) -> dict[str, float]:
    values = ((metric.name, metric.value(source)) for metric in metrics)
    return {name: float(value) for name, value in values if value is not None}


if __name__ == "__main__":
    sys.stdout.write(markdown())
