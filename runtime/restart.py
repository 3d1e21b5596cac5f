"""When a dead process is started again: a number in a window of time, with growing pauses.

RS-1: at most `max_restarts` within any `window` seconds, for each rank on its own.
RS-2: the pause before the n-th of them is `backoff * 2**(n-1)` seconds, at most `max_backoff`; a rank that has lived
      for a window begins anew.
"""

from __future__ import annotations

from collections import deque

import msgspec


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """The restart policy of a mesh of processes."""

    max_restarts: int = 3
    """Within `window`, for each rank."""
    window: float = 600.0
    """Seconds."""
    backoff: float = 0.5
    """Seconds before the first restart; doubled for each further one."""
    max_backoff: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_restarts", "window", "backoff", "max_backoff"):
            value = getattr(self, name)
            if value < 0 or (name == "max_restarts" and value == 0):
                least = "at least 1" if name == "max_restarts" else "0 or more"
                raise ValueError(f"Restart({name}={value}): expected {least}. Without restarts, leave the policy out")


class History:
    """The restarts of one rank."""

    def __init__(self, policy: Restart) -> None:
        self.policy = policy
        self._times: deque[float] = deque()

    @property
    def num_recent(self) -> int:
        """Restarts in the window that ended with the last one."""
        return len(self._times)

    def next_pause(self, now: float) -> float | None:
        """Take note of a restart at `now` and return the pause before it; None when there were too many (RS-1)."""
        policy = self.policy
        while self._times and self._times[0] <= now - policy.window:
            self._times.popleft()
        if len(self._times) >= policy.max_restarts:
            return None
        pause = min(policy.max_backoff, policy.backoff * 2.0 ** len(self._times))
        self._times.append(now)
        return pause
