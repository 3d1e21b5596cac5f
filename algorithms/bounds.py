"""How far rollouts may run ahead, and how old a sample can get: arithmetic of slots, order and age.

BO-1: `slots` = P + floor(S P) + extra groups are admitted and unreleased at most; extra = floor((over_sampling - 1) P).
BO-2: strict order (window 1) trains groups in the order of admission. With a window W a group may be passed by up to
      W - 1 younger ones while it is generated; over-sampling needs a window of at least extra + 1, and gets it.
BO-3: `order_age` = ceil((slots + W - 1) / P) - 1 versions is how old the order alone lets a group get.
BO-4: `max_age` is what is enforced where groups are consumed: ceil(S) (exactly: ceil((P + floor(S P)) / P) - 1) with
      too_old = "drop"; order_age with too_old = "train", where a correction has to do the rest.
BO-5: a fractional S bounds the mean age of a batch by S, and each sample by ceil(S).

Why BO-3. Let a group be admitted under version v. At most slots - 1 other groups are unreleased then, those in training
among them. Trained before it are at most these and the W - 1 younger ones that pass it, P a step, the first of them on
v. So it is trained at most ceil((slots - 1 + W - 1 + 1) / P) - 1 versions later. Drops only move a group forward.

In strict order without over-sampling order_age = max_age: nothing is ever dropped for its age, as long as replicas
serve the version that they should. With a window or over-sampling, groups older than max_age occur; "drop" issues them
again.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

TooOld = Literal["drop", "train"]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the pipeline. All in groups, ages in policy versions.

    Raises:
        ValueError: a number out of its range, or a window that can never be used.
    """

    groups_per_step: int
    """P."""
    staleness: float
    """S; 0 is synchronous; may be fractional."""
    window: int = 1
    """W: a group is passed by at most W - 1 younger ones. 1: strict order."""
    over_sampling: float = 1.0
    """How many groups are generated for each one that is trained, at least 1: stragglers are left behind."""
    too_old: TooOld = "drop"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.staleness) and self.staleness >= 0):
            raise ValueError(
                f"staleness: expected a number of policy versions >= 0, got {self.staleness}; 0 is synchronous"
            )
        if self.groups_per_step < 1:
            raise ValueError(
                f"groups_per_step: expected at least 1, got {self.groups_per_step}; set the prompts of one step"
            )
        if self.window < 1:
            raise ValueError(f"window: expected at least 1, got {self.window}; 1 is strict order")
        if not (math.isfinite(self.over_sampling) and self.over_sampling >= 1):
            raise ValueError(
                f"over_sampling: expected at least 1, got {self.over_sampling}; 1 generates what is trained"
            )
        if self.window > 1 and self.window > self.slots - self.groups_per_step + 1:
            most = self.slots - self.groups_per_step + 1
            raise ValueError(
                f"window: expected at most {most}, got {self.window}: no more than {most - 1} groups are ahead of a "
                f"step with staleness {self.staleness:g}; lower the window or raise staleness"
            )

    @property
    def extra(self) -> int:
        """Groups beyond those that staleness allows, of over-sampling."""
        return _floor((self.over_sampling - 1) * self.groups_per_step)

    @property
    def slots(self) -> int:
        """Groups that may be admitted and unreleased (BO-1).

        >>> [Bounds(groups_per_step=4, staleness=s).slots for s in (0, 0.5, 1, 0.1)]
        [4, 6, 8, 4]
        >>> Bounds(groups_per_step=4, staleness=1, over_sampling=1.5).slots
        10
        """
        return self.groups_per_step + _floor(self.staleness * self.groups_per_step) + self.extra

    @property
    def reach(self) -> int:
        """W, or what over-sampling needs, whichever is larger (BO-2)."""
        return max(self.window, self.extra + 1)

    @property
    def order_age(self) -> int:
        """Worst age that the order allows (BO-3).

        >>> [Bounds(groups_per_step=4, staleness=1, window=w).order_age for w in (1, 2, 5)]
        [1, 2, 2]
        """
        return -(-(self.slots + self.reach - 1) // self.groups_per_step) - 1

    @property
    def max_age(self) -> int:
        """The bound that is enforced, in versions (BO-4).

        >>> [Bounds(groups_per_step=4, staleness=s).max_age for s in (0, 0.5, 1, 0.1)]
        [0, 1, 1, 0]
        >>> Bounds(groups_per_step=4, staleness=1, window=4, too_old="train").max_age
        2
        """
        if self.too_old == "train":
            return self.order_age
        return -(-(self.slots - self.extra) // self.groups_per_step) - 1


def _floor(value: float) -> int:
    # The small term keeps 0.29 * 100 = 28.999999999999996 from losing a slot.
    return math.floor(value + 1e-9)
