"""Watchdogs: a run that can't make progress, or learns from an engine that doesn't follow, ends and says why.

WD-1: no group arrived, no request of an evaluation was judged and no step ended for `stall_s`: `Stalled`, with the
      stage that everybody waits for. The clock starts again with every such event, so that the length of a run or of
      an evaluation, or the number of its groups, never matters.
WD-2: the weights moved, but the logprobs of the rollout no longer follow those of the trainer for the same tokens:
      `NotServed`. Judged over tokens at most one version old, where both must agree up to rounding and one update.
WD-3: a watchdog never touches anything; it raises in a task of the run's group, which then ends everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import msgspec
from msgspec import Meta

from algorithms import metrics
from runtime.errors import TuttiError

__all__ = ["NotServed", "Stalled", "WatchConfig", "Watchdog"]

FEWEST_TOKENS = 64
"""Below so many tokens a correlation says nothing."""

STEPS_IN_A_ROW = 3
"""One bad step may be chance; an engine that does not follow stays away."""


class WatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[watch]` table of a job."""

    stall_s: Annotated[float, Meta(ge=0)] = 3600.0
    """Seconds without a finished group, of training or evaluation, or step after which the run ends. 0: never."""
    min_correlation: Annotated[float, Meta(ge=0, le=1)] = 0.8
    """Least correlation of the logprobs that rollout and trainer give the same tokens. 0: not looked at."""
    max_gap: Annotated[float, Meta(gt=0)] = 0.1
    """Nats. A low correlation alone ends nothing: the mean difference must be above this as well."""


class Stalled(TuttiError):
    """Nothing has happened for too long (WD-1)."""


class NotServed(TuttiError):
    """The rollout ranks do not serve the weights that they were sent (WD-2)."""


class Watchdog:
    """Told what happens by the page.

    Args:
        who_waits: says who waits for whom, for the message.
    """

    def __init__(self, config: WatchConfig, who_waits: Callable[[], str]) -> None:
        self._config = config
        self._who_waits = who_waits
        self._parts: dict[str, float] = {}
        self._last = 0.0
        self._bad_steps = 0

    def beat(self) -> None:
        """Something got done."""
        self._last = asyncio.get_running_loop().time()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the loop is under way: what a stall is named by."""
        self._parts[name] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._parts[name]

    async def run(self) -> None:
        """Until something is wrong. With `stall_s` 0 there is nothing to wait for.

        Raises:
            Stalled: see WD-1.
        """
        loop, limit = asyncio.get_running_loop(), self._config.stall_s
        self.beat()
        if not limit:
            await asyncio.Event().wait()
        while (quiet := loop.time() - self._last) < limit:  # noqa: ASYNC110 (what does not come can only be timed)
            await asyncio.sleep(limit - quiet)
        parts = ", ".join(f"{name} for {loop.time() - began:.0f} s" for name, began in self._parts.items())
        raise Stalled(
            f"no group was finished and no step was trained for {quiet:.0f} s. Under way: {parts or 'nothing'}. "
            f"{self._who_waits() or 'Nobody waits for the other side'}. "
            "If a group or a step may take that long, raise [watch] stall_s"
        )

    def check(self, version: int, sums: Mapping[str, float]) -> None:
        """Look at what a training step measured.

        Args:
            version: what the step was trained on.

        Raises:
            NotServed: see WD-2.
        """
        correlation = metrics.Step(sums, {}).fresh_correlation()
        tokens = sums.get("fresh_tokens", 0.0)
        if correlation is None or tokens < FEWEST_TOKENS or version == 0:
            return
        gap = sums["fresh_gap"] / tokens
        bad = correlation < self._config.min_correlation and gap > self._config.max_gap
        self._bad_steps = self._bad_steps + 1 if bad else 0
        if self._bad_steps >= STEPS_IN_A_ROW:
            raise NotServed(
                f"the weights moved {version} times, but the rollout ranks answer as if they had not: over "
                f"{tokens:.0f} tokens sampled at most one version ago the logprobs of rollout and trainer correlate "
                f"with {correlation:.3f} (expected at least {self._config.min_correlation:g}) and differ by "
                f"{gap:.3f} nat on average (expected at most {self._config.max_gap:g}), for {STEPS_IN_A_ROW} steps. "
                "Look at what the engine does with the weights that it receives; [watch] min_correlation = 0 goes on"
            )
