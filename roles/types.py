"""The records that cross the borders between roles.

TY-1: every sampled token carries the logprob under the distribution it was sampled from and the policy version that
      produced it; `token_ids`, `logprobs` and `versions` of a completion always have one length.
TY-2: absence is typed, never a legal value: a completion without a reward is `Unscored`, a group that left the pipeline
      early is `Dropped` with a reason.
TY-3: arrays are numpy, so that a controller never needs torch to hold them; they travel out of band (R8).
TY-4: what the environment said in an episode stands in the completion, masked: `mask` is False there, its logprobs are
      0, and its versions repeat those of its neighbours, so that they never change an age.
TY-5: a completion has all tokens that were sampled, also where a stop string ends inside of its last one.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "abort"]
DropReason = Literal["stale", "timeout", "unscored", "empty", "no_contrast", "aborted"]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One question, as the model reads it and as the verifier knows it."""

    position: int
    """Place in the endless prompt stream of the run; unique, starts at 0. Order and resume are told in positions."""
    text: str
    token_ids: tuple[int, ...]
    """The ids that the policy is conditioned on: `text` through the tokenizer (and chat template, if any)."""
    task: str
    """Name of the task family, the key of the verifier."""
    entry: dict[str, Any]
    """What the verifier needs besides the text: reasoning-gym's entry (question, answer, metadata)."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How completions are sampled."""

    temperature: float = 1.0
    """Divides the logits; 0 means greedy (argmax)."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens whose probability reaches this. 1 keeps all."""
    top_k: int = 0
    """Only the k likeliest tokens. 0 keeps all."""
    max_tokens: int = 64
    """Upper limit of sampled tokens; the stop token counts."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends with the first of these; it is part of the completion. Empty: the model's end-of-text token."""
    stop: tuple[str, ...] = ()
    """Sampling ends with the first token after which the text of the completion holds one of these strings; it is part
    of the completion. A special token may be given by its text."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever is sampled; for measurements."""
    top_logprobs: int = 0
    """Record so many of the likeliest tokens beside each sampled one."""


class Completion(msgspec.Struct, kw_only=True):
    """One sampled answer, or all turns of one episode. T counts its tokens: all that follow the prompt."""

    token_ids: np.ndarray
    """[T] int32."""
    logprobs: np.ndarray
    """[T] float32, natural log, under the sampling distribution (after temperature, top-k and top-p)."""
    versions: np.ndarray
    """[T] int32, the policy version that produced each token."""
    finish_reason: FinishReason
    text: str = ""
    """The decoded tokens without special tokens."""
    top_ids: np.ndarray | None = None
    """[T, k] int32, the likeliest tokens at each place, likeliest first. None: not asked for."""
    top_logprobs: np.ndarray | None = None
    """[T, k] float32, natural log, of `top_ids`, under the sampling distribution; where that is greedy, which is sure
    of its token, under the distribution at temperature 1. -inf: cut off by top-k or top-p."""
    mask: np.ndarray | None = None
    """[T] bool, True where the policy sampled the token; None: everywhere. Only such tokens are trained (TY-4)."""
    routes: np.ndarray | None = None
    """[P + T - 1, L, K] uint8 (uint16 for more than 256 experts): the K experts that each of the L mixture-of-experts
    layers chose for each token of prompt (P) and completion. The last token was never computed and has none. None: not
    recorded."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among its tokens; None when it has none."""
        return int(self.versions.min()) if self.versions.size else None


class Piece(msgspec.Struct, kw_only=True):
    """Tokens of a completion under way; one after another, its pieces are its tokens (TY-5). The arrays are those of
    `Completion`."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    completion: Completion | None = None
    """All of it, with the last piece only, which may have no tokens."""


class Scored(msgspec.Struct, frozen=True, tag=True):
    """A verdict of the reward."""

    value: float
    parts: dict[str, float] = {}
    """The parts of a weighted sum by name, before weighting; empty when there is one verifier."""


class Unscored(msgspec.Struct, frozen=True, tag=True):
    """The reward could not judge (time limit, error in the verifier): excluded from baseline and loss, never 0."""

    reason: str


Reward = Scored | Unscored


def finite(reward: float) -> float:
    """The reward of an environment or agent. Raises ValueError: it is no finite number."""
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"a reward of {value}, expected a finite number")
    return value


class Group(msgspec.Struct, kw_only=True):
    """A prompt and its G completions, with one reward each once scored (`rewards` is empty before)."""

    prompt: Prompt
    completions: list[Completion]
    rewards: list[Reward] = []
    replica: int = 0
    """Rank of the rollout replica that generated it."""

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that produced any token of the group (A1); None when no completion has a token."""
        versions = [v for c in self.completions if (v := c.oldest_version) is not None]
        return min(versions, default=None)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens over all completions."""
        return sum(len(c.token_ids) if c.mask is None else int(c.mask.sum()) for c in self.completions)


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A group that leaves the pipeline untrained. A value of the pipeline, not an error (A2 counts it)."""

    position: int
    reason: DropReason
    num_tokens: int = 0
    """Sampled tokens that were thrown away with it."""


class TrainSample(msgspec.Struct, kw_only=True):
    """One sequence as the trainer sees it: prompt and completion joined. T = prompt_length + C."""

    token_ids: np.ndarray
    """[T] int32."""
    prompt_length: int
    rollout_logprobs: np.ndarray
    """[C] float32, natural log, under the sampling distribution of the rollout (mu)."""
    advantages: np.ndarray
    """[C] float32."""
    ages: np.ndarray | None = None
    """[C] int32, the version it is trained on minus the version that sampled each token. None: 0 everywhere."""
    reference_logprobs: np.ndarray | None = None
    """[C] float32 under a frozen reference policy, for objectives that stay near it. All samples of a batch or none."""
    mask: np.ndarray | None = None
    """[C] bool, as in `Completion`: tokens that are trained. None: all."""
    routes: np.ndarray | None = None
    """[T - 1, L, K], as in `Completion`: experts to replay."""
    values: np.ndarray | None = None
    """[C] float32: of a critic, when the samples were drawn (the state before each token)."""
    returns: np.ndarray | None = None
    """[C] float32: what a critic shall learn to predict."""

    @property
    def completion_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def num_trained(self) -> int:
        """Tokens that are trained."""
        return self.completion_length if self.mask is None else int(self.mask.sum())


class MicroBatch(msgspec.Struct, kw_only=True):
    """Right-padded sequences. Column t of the [B, L] arrays is about *predicting* token_ids[:, t] (t = 0 is never
    trained), so that masks and logprobs line up with the tokens they belong to."""

    token_ids: np.ndarray
    """[B, L] int64, padded with 0."""
    lengths: np.ndarray
    """[B] int64, true length of each sequence; 0 for a padding row."""
    mask: np.ndarray
    """[B, L] bool, True on the trained (sampled) tokens."""
    rollout_logprobs: np.ndarray
    """[B, L] float32, 0 outside the mask."""
    advantages: np.ndarray
    """[B, L] float32, 0 outside the mask."""
    ages: np.ndarray
    """[B, L] int32, in versions, 0 outside the mask."""
    reference_logprobs: np.ndarray | None = None
    """[B, L] float32, 0 outside the mask; None when the batch has none."""
    routes: np.ndarray | None = None
    """[sum(lengths - 1), MoE layers, experts per token]: the routes of the rows, one after the other."""
    values: np.ndarray | None = None
    """[B, L] float32, 0 outside the mask; None when the samples have none."""
    returns: np.ndarray | None = None
    """[B, L] float32, likewise."""


class RankBatch(msgspec.Struct, kw_only=True):
    """What one trainer rank gets for one step. Ranks of a mesh get equally many micro-batches for each update."""

    updates: list[list[MicroBatch]]
    """One list of micro-batches per optimizer update of this step."""
    num_tokens: list[int]
    """Global count of trained tokens of each update, over all micro-batches of all ranks (A4)."""
    num_sequences: list[int]
    """Global count of sequences with at least one trained token of each update (A4)."""


class StepResult(msgspec.Struct, kw_only=True):
    """What a training step says; equal on all ranks."""

    version: int
    """The policy version after the step."""
    sums: dict[str, float]
    """Sums over all trained tokens or sequences of all ranks; `algorithms.metrics` divides them."""
    maxima: dict[str, float]
    grad_norm: float
    """Norm of the whole gradient before clipping, mean over the updates of the step."""
    learning_rate: float
    skipped: list[str] = []
    """One text per update that was left out because a loss or gradient was not finite: which tensor, which rank."""
    seconds: float
    """Wall-clock seconds of the slowest rank."""
