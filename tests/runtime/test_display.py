"""`runtime.display`: DI-1 to DI-5 by name."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from runtime.display import EVENTS, HISTORY, Column, Curve, Display, duration, show, sparkline

COLUMNS = [
    Column("reward", "reward", better="up"),
    Column("rate", "tokens/s", "si"),
    Column("accuracy", "held-out", better="up"),
]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool, width: int = 80, height: int = 24, **options) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    made = Console(
        file=file, force_terminal=terminal, width=width, height=height, highlight=False, _environ={}, **options
    )
    return made, file


def run(display: Display, clock: Clock, steps: int = 4) -> None:
    for step in range(1, steps + 1):
        clock.now += 2
        display.step(step, {"reward": step / 10, "rate": 1000.0 * step, "accuracy": 0.5 if step == 2 else None})


def picture(width: int, height: int) -> list[str]:
    """The lines of the picture of a run at step 4 of 10, as a terminal of that size shows it."""
    clock = Clock()
    made, file = console(terminal=True, width=width, height=height, color_system=None)
    display = Display("default", 10, COLUMNS, subtitle="1 trainer, 1 rollout", console=made, clock=clock)
    run(display, clock)
    display.status("trainer 0", "train step 5")
    display.status("rollout 0", "waits for trainer 0", waiting=True)
    for number in range(9):
        display.event(f"event {number}")
    clock.now += 3
    made.print(display)
    return file.getvalue().splitlines()


def test_without_a_terminal_there_is_one_line_a_step():  # DI-2
    clock = Clock()
    made, file = console(terminal=False)
    with Display("default", 10, COLUMNS, subtitle="on 2 cores", console=made, clock=clock) as display:
        run(display, clock)
        display.status("trainer 0", "train step 5")
        display.event("checkpoint of step 4")
        display.close("done: runs/default")
    assert file.getvalue().splitlines() == [
        "default  on 2 cores",
        "step  1/10                reward 0.100  tokens/s 1.0k",
        "step  2/10     16 s left  reward 0.200  tokens/s 2.0k  held-out 0.500",
        "step  3/10     14 s left  reward 0.300  tokens/s 3.0k",
        "step  4/10     12 s left  reward 0.400  tokens/s 4.0k",
        "  checkpoint of step 4",
        "done: runs/default",
    ]


def test_numbers_between_steps_move_a_curve_but_make_no_line():
    made, file = console(terminal=False)
    display = Display("default", 10, COLUMNS, console=made)
    display.values({"accuracy": 0.5})
    assert file.getvalue() == ""
    assert display._curves["accuracy"].last == 0.5


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch):  # DI-3
    monkeypatch.setenv("TERM", "dumb")
    made = Console(file=io.StringIO(), force_terminal=True)
    assert not Display("default", 10, COLUMNS, console=made).is_live


def test_no_color_takes_colours_but_nothing_else(monkeypatch: pytest.MonkeyPatch):  # DI-3
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    made = Console(file=file, force_terminal=True, width=80, height=24)
    display = Display("default", 10, COLUMNS, console=made)
    run(display, Clock())
    made.print(display)
    assert "\x1b[3" not in file.getvalue()
    assert "reward" in file.getvalue()


@pytest.mark.parametrize("width", [20, 44, 80, 110, 200])
@pytest.mark.parametrize("height", [8, 24, 60])
def test_the_picture_fits_every_terminal(width: int, height: int):  # DI-1
    lines = picture(width, height)
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= max(height, 4 + len(COLUMNS))
    assert any("default" in line for line in lines)
    assert any("step 4" in line for line in lines)


def test_the_picture_tells_progress_numbers_roles_and_the_latest_events():
    text = "\n".join(picture(80, 24))
    assert "step 4 of 10   11 s   9 s left" in text
    assert "━" in text
    assert "0.400  +0.300  ▁▃▆█" in text.replace("▂", "▃").replace("▅", "▆")
    assert "● trainer 0  train step 5" in text
    assert "○ rollout 0  waits for trainer 0  3 s" in text
    assert "event 8" in text
    assert "event 2" not in text


def test_the_picture_is_drawn_in_place_and_stays_when_the_run_ends():  # DI-1
    made, file = console(terminal=True)
    clock = Clock()
    with Display("default", 10, COLUMNS, console=made, clock=clock) as display:
        run(display, clock)
        display.print("\x1b[31mrollout 0 | a line of a log\x1b[0m")  # DI-5
        display.status("trainer 0", "train step 5")
    display.close("done")
    text = file.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and shown again
    assert "a line of a log" in text
    assert text.rstrip().endswith("done")
    assert "train step 5" not in text.rpartition("a line of a log")[2].rpartition("default")[2]


def test_an_empty_status_takes_the_role_away():
    made, file = console(terminal=True, color_system=None)
    display = Display("default", None, [], console=made)
    display.status("reward", "scores")
    display.status("reward", "")
    made.print(display)
    assert "reward" not in file.getvalue()


def test_memory_is_bounded():  # DI-4
    made, _ = console(terminal=True)
    display = Display("default", None, COLUMNS, console=made)
    curve = Curve()
    for number in range(10 * HISTORY):
        display.event("again")
        curve.add(number)
    assert len(display._events) == EVENTS
    assert HISTORY / 2 <= len(curve.values) <= HISTORY
    assert (curve.first, curve.last, curve.points) == (0, 10 * HISTORY - 1, 10 * HISTORY)


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(0, 50))
def test_a_sparkline_never_exceeds_its_width(values: list[float], width: int):
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)


def test_a_sparkline_shows_the_shape():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 4, 4, 8, 8], 3) == "▁▅█"  # means of pairs: 0, 4, 8
    assert sparkline([5, 5, 5], 8) == "▁▁▁"


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (0.12345, ".3f", "0.123"),
        (12400, "si", "12.4k"),
        (3.2e9, "si", "3.2G"),
        (7, "si", "7"),
        (75.0, "duration", "1:15"),
        (3.0, "d", "3"),
        (math.nan, ".3f", "nan"),
    ],
)
def test_numbers_are_shown_as_their_column_wants(value: float, form: str, expected: str):
    assert show(value, Column("k", "k", form)) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(0.4, "0 s"), (59.9, "59 s"), (65, "1:05"), (7800, "2:10:00")])
def test_durations_are_short(seconds: float, expected: str):
    assert duration(seconds) == expected
