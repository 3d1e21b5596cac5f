"""What a running job shows: a quiet live picture on a terminal, one line a step anywhere else.

DI-1: on a terminal there is one picture, redrawn in place, which fits its width and height whatever they become; when
      the run ends it stays, with the summary below.
DI-2: elsewhere (pipe, file, CI) there is one line a step and one an event, plain text, columns aligned.
DI-3: colour is never the only carrier of a meaning; NO_COLOR and TERM=dumb are obeyed.
DI-4: memory is bounded: a curve is halved when it holds HISTORY points, only EVENTS events are kept.
DI-5: what others print while the picture stands appears above it: through `print` here, or sys.stdout and sys.stderr.

Knows labelled numbers and texts, not what they mean.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Self, TextIO

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

HISTORY = 512
"""Points kept of a curve; more are merged pairwise."""

EVENTS = 50
"""Events kept for the picture."""

SLOW_WAIT = 10.0
"""Seconds after which a waiting role is worth a look."""

WIDE = 100
"""Columns from which numbers and roles stand side by side."""

BLOCKS = "▁▂▃▄▅▆▇█"


class Column(msgspec.Struct, frozen=True):
    """A number worth watching."""

    key: str
    """Under which `Display.step` finds it."""
    label: str
    format: str = ".3f"
    """A format spec, or "si" (12.4k), or "duration" (1:05, seconds in)."""
    better: Literal["up", "down", ""] = ""
    """Which way is good; then the change since the first value is shown beside it."""
    unit: str = ""


class Display:
    """Shows a run. A context manager; `close` ends it.

    Args:
        title: what runs, such as the name of the run.
        total_steps: how many steps there will be, counted from 0; None when that is not known.
        columns: the numbers, in the order shown.
        subtitle: one more line of facts, such as model and placement.
        stream: where to write; stdout when left out.
        console: instead of `stream`, a console made by the caller.
        clock: seconds, going up.
    """

    def __init__(
        self,
        title: str,
        total_steps: int | None,
        columns: Sequence[Column],
        *,
        subtitle: str = "",
        stream: TextIO | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title, self.subtitle, self.total_steps = title, subtitle, total_steps
        self.columns = list(columns)
        self.console = console or Console(file=stream or sys.stdout, highlight=False)
        self.is_live = self.console.is_interactive and not self.console.is_dumb_terminal
        self._clock = clock
        self._started = clock()
        self._finished: float | None = None
        self._current: int | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=32)
        self._steady: set[str] | None = None
        """Columns that the first step had: in lines they keep their place, the others follow when there are any."""
        self._curves = {column.key: Curve() for column in self.columns}
        self._roles: dict[str, tuple[str, bool, float]] = {}
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> Self:
        """Show the first picture, or the heading line."""
        if not self.is_live:
            self._line(self.title + (f"  {self.subtitle}" if self.subtitle else ""))
        elif self._live is None and self._finished is None:
            self._live = Live(self, console=self.console, refresh_per_second=4, vertical_overflow="crop")
            self._live.start()
        return self

    # --- what a run tells ---------------------------------------------------------------------------------------------

    def step(self, step: int, values: Mapping[str, float | None]) -> None:
        """A step has ended with these numbers; keys without a column are passed over, absent ones stay as they were."""
        now = self._clock()
        if not self._recent or step > self._recent[-1][0]:
            # The first step only starts the clock of the rate: its own time holds the start of the run.
            self._recent.append((step, now))
        self._current = step
        if self._steady is None:
            self._steady = {column.key for column in self.columns if values.get(column.key) is not None}
        self.values(values)
        if not self.is_live:
            self._line(self._step_line(step, values))

    def values(self, values: Mapping[str, float | None]) -> None:
        """Numbers that do not end a step, such as those of an evaluation. On a terminal only; lines have `event`."""
        for column in self.columns:
            value = values.get(column.key)
            if value is not None and math.isfinite(value):
                self._curves[column.key].add(float(value))

    def status(self, role: str, text: str, *, waiting: bool = False) -> None:
        """What a role does now, or whom it waits for; shown on a terminal only. An empty text takes the role away."""
        if not text:
            self._roles.pop(role, None)
        elif self._roles.get(role, ("", False))[:2] != (text, waiting):
            self._roles[role] = (text, waiting, self._clock())

    def event(self, text: str) -> None:
        """Something worth telling once: an evaluation, a checkpoint, a restart."""
        self._events.append((self._clock() - self._started, text))
        if not self.is_live:
            self._line(f"  {text}")

    def print(self, text: str) -> None:
        """A line of somebody else's, such as a forwarded log line: above the picture, as it stands."""
        self.console.print(Text.from_ansi(text), soft_wrap=True)

    def close(self, summary: str | Sequence[str] = ()) -> None:
        """End the picture and leave the terminal as it was; then print the summary. A second call prints only that."""
        if self._finished is None:
            self._finished = self._clock()
            self._roles.clear()
            if self._live is not None:
                self._live.stop()
                self._live = None
        lines = [summary] if isinstance(summary, str) else list(summary)
        for line in ["", *lines] if self.is_live and any(lines) else filter(None, lines):
            self._line(f"  {line}" if self.is_live and line else line)

    # --- lines --------------------------------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _step_line(self, step: int, values: Mapping[str, float | None]) -> str:
        of = f"/{self.total_steps}" if self.total_steps is not None else ""
        left = f"{duration(self.seconds_left)} left" if self.seconds_left is not None else ""
        parts = [f"step {step:>{max(len(of) - 1, 1)}}{of}", left.rjust(12)]
        for column in sorted(self.columns, key=lambda column: column.key not in (self._steady or ())):
            value = values.get(column.key)
            if value is not None:
                width = max(len(show(each, column)) for each in (*self._curves[column.key].extremes, value))
                parts.append(f"{column.label} {show(value, column)}".ljust(len(column.label) + 1 + width))
            elif column.key in (self._steady or ()):
                parts.append(" " * len(column.label))
        return "  ".join(parts).rstrip()

    # --- the picture --------------------------------------------------------------------------------------------------

    @property
    def seconds_left(self) -> float | None:
        """From the rate of recent steps; None before there is one, or when the number of steps isn't known."""
        if self.total_steps is None or len(self._recent) < 2 or self._finished is not None:
            return None
        (first, begun), (last, ended) = self._recent[0], self._recent[-1]
        rate = (ended - begun) / (last - first)
        return max(0.0, (self.total_steps - last) * rate - (self._clock() - ended))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, height = options.max_width, console.size.height
        yield from self._heading(width)
        left = width if width < WIDE else width * 3 // 5
        numbers = self._numbers(left)
        roles = list(self._role_lines(width if width < WIDE else width - left))
        if width >= WIDE and roles:
            sides = Table.grid(padding=0)
            sides.add_column(width=left)
            sides.add_column(width=width - left)
            sides.add_row(numbers, Group(*roles))
            yield sides
            used = 5 + max(len(self.columns), len(roles))
        else:
            yield numbers
            used = 5 + len(self.columns)
            roles = roles[: max(0, height - used - 2)]
            if roles:
                yield Text()
                yield from roles
                used += 1 + len(roles)
        room = min(6, height - used - 2)
        if room > 0 and self._events:
            yield Text()
            for at, text in list(self._events)[-room:]:
                line = Text.assemble((f"  {duration(at):>7}  ", "dim"), text)
                line.truncate(width, overflow="ellipsis")
                yield line

    def _heading(self, width: int) -> Iterator[Text]:
        yield Text()
        line = Text.assemble("  ", (self.title, "bold"), (f"   {self.subtitle}" if self.subtitle else "", "dim"))
        line.truncate(width, overflow="ellipsis")
        yield line
        done = self._current or 0
        elapsed = (self._finished if self._finished is not None else self._clock()) - self._started
        facts = f"step {done}" + (f" of {self.total_steps}" if self.total_steps is not None else "")
        facts += f"   {duration(elapsed)}"
        if (left := self.seconds_left) is not None:
            facts += f"   {duration(left)} left"
        length = min(width - len(facts) - 7, 60)
        share = min(1.0, done / self.total_steps) if self.total_steps else 0.0
        if length < 8:
            bar = Text("  ")
        else:
            full = round(share * length)
            bar = Text.assemble("  ", ("━" * full, "cyan"), ("─" * (length - full), "bright_black"), "   ")
        bar.append(facts)
        bar.truncate(width, overflow="ellipsis")
        yield bar
        yield Text()

    def _numbers(self, width: int) -> Table:
        label = max((len(column.label) for column in self.columns), default=0)
        spark = max(0, min(40, width - label - 30))
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        for column in self.columns:
            curve = self._curves[column.key]
            value, change = Text("·", "dim"), Text("")
            if curve.last is not None:
                value = Text(show(curve.last, column) + (f" {column.unit}" if column.unit else ""), "bold")
                if column.better and curve.first is not None and curve.points > 1:
                    moved = curve.last - curve.first
                    good = moved > 0 if column.better == "up" else moved < 0
                    change = Text(show(moved, column, signed=True), "green" if good else "dim")
            line = sparkline(curve.values, spark) if spark >= 8 and self._has_blocks else ""
            table.add_row(Text(f"  {column.label}", "dim"), value, change, Text(line, "cyan"))
        return table

    def _role_lines(self, width: int) -> Iterator[Text]:
        name = max((len(role) for role in self._roles), default=0)
        for role, (text, waiting, since) in sorted(self._roles.items()):
            held = self._clock() - since
            late = waiting and held > SLOW_WAIT
            style = "yellow" if late else "dim" if waiting else ""
            mark = ("○" if waiting else "●") if self._has_blocks else ("-" if waiting else "*")
            line = Text.assemble("  ", (mark, style or "green"), " ", (role.ljust(name), "dim"), "  ", (text, style))
            if waiting and held >= 1:
                line.append(f"  {duration(held)}", style)
            line.truncate(width, overflow="ellipsis")
            yield line

    @property
    def _has_blocks(self) -> bool:
        return self.console.encoding.lower().startswith("utf")


class Curve:
    """The history of a number in bounded memory (DI-4)."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.points = 0
        self.extremes: tuple[float, ...] = ()
        """Smallest and largest value so far; empty before the first."""
        self._means: list[float] = []
        self._per_mean = 1
        self._open: list[float] = []

    def add(self, value: float) -> None:
        self.first = value if self.first is None else self.first
        self.last = value
        self.points += 1
        self.extremes = (min((value, *self.extremes)), max((value, *self.extremes)))
        self._open.append(value)
        if len(self._open) == self._per_mean:
            self._means.append(sum(self._open) / self._per_mean)
            self._open.clear()
        if len(self._means) == HISTORY:
            self._means = [(a + b) / 2 for a, b in zip(self._means[::2], self._means[1::2], strict=True)]
            self._per_mean *= 2

    @property
    def values(self) -> list[float]:
        """At most HISTORY values, oldest first; each the mean of equally many points, but the last."""
        return [*self._means, sum(self._open) / len(self._open)] if self._open else list(self._means)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks, squeezed into `width` by means of neighbours; a flat curve is a low line."""
    if not values or width <= 0:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[min(7, int((value - low) / (high - low) * 8))] for value in values)


def show(value: float, column: Column, *, signed: bool = False) -> str:
    """A number as its column wants it."""
    if not math.isfinite(value):
        return str(value)
    if column.format == "duration":
        return duration(value)
    if column.format == "si":
        for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= limit:
                return f"{value / limit:{'+' if signed else ''}.1f}{letter}"
        return f"{value:{'+' if signed else ''}.0f}"
    number: Any = int(value) if column.format.endswith("d") else value
    return format(number, ("+" if signed else "") + column.format)


def duration(seconds: float) -> str:
    """`7 s`, `1:05`, `2:10:00`: as short as it can be read."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
