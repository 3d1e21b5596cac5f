"""The `[reward]` tables of a job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class RewardModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[reward.model]` table of a job."""

    path: str
    """Folder of a Hugging Face sequence classification model with its tokenizer; relative to the job file."""
    ranks: Annotated[int, Meta(ge=1)] = 1
    """Processes; each has the whole model and takes the groups in turn."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch: Annotated[int, Meta(ge=1)] = 16
    """Completions in one forward pass."""
    sigmoid: bool = False
    """Map the logit to (0, 1)."""
    timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Seconds for one group."""


class PartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a weighted sum: a `[reward.parts.NAME]` table."""

    verifier: str = "task"
    """As `[reward] verifier`."""
    weight: float = 1.0
    """May be negative."""
    options: dict[str, Any] = {}
    """Keyword arguments of the verifier."""


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How completions are judged."""

    verifier: str = "task"
    """"task": what the source of each prompt names. "exact", "boxed", "number", "math", "code", "judge",
    "reasoning_gym", or your own as "module:function", called as function(prompt, text) -> float."""
    options: dict[str, Any] = {}
    """Keyword arguments of the verifier, such as url and model of a judge."""
    parts: dict[str, PartConfig] = {}
    """Several verifiers by name; the reward is the weighted sum of their verdicts, and unscored if any of them has
    none. Takes the place of `verifier`."""
    model: RewardModelConfig | None = None
    """A reward model on ranks of its own. Takes the place of all the above."""
    workers: Annotated[int, Meta(ge=1)] = 1
    """Processes that judge; each takes one group at a time."""
    timeout_s: Annotated[float, Meta(gt=0)] = 2.0
    """Wall-clock seconds for one completion."""
    max_unscored: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of the last `window` completions that may be without a verdict; above it the run stops. 1: never."""
    window: Annotated[int, Meta(ge=1)] = 256
    """How many completions that share is taken over. It is first looked at when so many have been judged."""
