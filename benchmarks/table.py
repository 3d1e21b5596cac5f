"""What a benchmark says: rows of ours against a peer's, with the goal that was set before measuring.

BT-1: a ratio is ours / peer, so below 1 is faster for seconds, and above 1 for rates; the goal says which way.
BT-2: what was not measured is absent ("-"), never 0; a row without a goal, or without what the goal is about, is
      neither met nor missed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

GOAL = re.compile(r"\s*(<=|>=)\s*([0-9.eE+-]+)\s*(x?)\s*")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    name: str
    """What was measured, in words."""
    ours: float | None = None
    peer: float | None = None
    unit: str = ""
    """Of both numbers: "us", "GB/s", "tokens/s"."""
    goal: str = ""
    """`<= 500` or `>= 2.5` is about ours, `<= 0.5x` or `>= 2x` about the ratio; empty when there is none."""
    note: str = ""
    """How it was measured, or which peer."""

    def __post_init__(self) -> None:
        if self.goal and not GOAL.fullmatch(self.goal):
            raise ValueError(f"row {self.name!r}: goal {self.goal!r}: expected something like '<= 500' or '>= 2x'")

    @property
    def ratio(self) -> float | None:
        """ours / peer (BT-1)."""
        return self.ours / self.peer if self.ours is not None and self.peer else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one (BT-2)."""
        match = GOAL.fullmatch(self.goal)
        value = None if match is None else self.ratio if match[3] else self.ours
        if match is None or value is None:
            return None
        return value <= float(match[2]) if match[1] == "<=" else value >= float(match[2])

    def as_dict(self) -> dict[str, object]:
        """All fields, the derived ones too, for JSON."""
        return {**msgspec.structs.asdict(self), "ratio": self.ratio, "met": self.met}


def to_markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, columns aligned so that it also reads well in a terminal."""
    heading = ["what", "ours", "peer", "ratio", "goal", "met", "note"]
    cells = [
        [
            row.name.replace("|", r"\|"),
            number(row.ours, row.unit),
            number(row.peer, row.unit),
            number(row.ratio),
            row.goal or "-",
            {True: "yes", False: "no", None: "-"}[row.met],
            row.note.replace("|", r"\|"),
        ]
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [heading, *cells]) for i in range(len(heading))]
    right = (1, 2, 3)

    def line(parts: Sequence[str]) -> str:
        texts = [p.rjust(w) if i in right else p.ljust(w) for i, (p, w) in enumerate(zip(parts, widths, strict=True))]
        return f"| {' | '.join(texts)} |"

    rule = [("-" * (w - 1) + ":") if i in right else "-" * w for i, w in enumerate(widths)]
    return "\n".join([line(heading), line(rule), *(line(row) for row in cells)])


def number(value: float | None, unit: str = "") -> str:
    """Three significant digits and the unit; "-" for what was not measured."""
    if value is None:
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}" if unit else text
