"""`runtime.curves`: CU-1 to CU-3 by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from runtime.curves import LINE, Panel, Series, _draw_panel, draw, smoothed
from runtime.journal import Journal

PANELS = (
    Panel("held-out", (Series("accuracy", "avg@8", "low", "high"), Series("greedy", "greedy")), smooth=False),
    Panel("reward", (Series("reward"),)),
    Panel("KL", (Series("kl"),), log=True, bottom=1e-6),
    Panel("never there", (Series("nothing"),)),
)

PNG = b"\x89PNG\r\n\x1a\n"


def make_run(root: Path, steps: int) -> Path:
    with Journal.create(root, "try") as journal:
        for step in range(steps):
            values = {"reward": step / 100, "kl": 1e-3 * (1 + step % 3), "note": "text"}
            if step % 10 == 0:
                values |= {"accuracy": step / 50, "low": step / 60, "high": step / 40, "greedy": None}
            journal.metrics(step, values)
    return journal.folder


@pytest.mark.parametrize("steps", [1, 2, 50])
def test_a_run_is_drawn_whatever_it_has(tmp_path: Path, steps: int):  # CU-2
    folder = make_run(tmp_path, steps)
    assert draw(folder, PANELS, title="a run") == folder / "curves.png"
    assert (folder / "curves.png").read_bytes().startswith(PNG)


def test_a_run_without_values_has_no_picture(tmp_path: Path):  # CU-2
    assert draw(make_run(tmp_path, 3), PANELS[3:]) is None
    assert draw(tmp_path / "no such run", PANELS) is None


def test_a_picture_is_replaced_whole(tmp_path: Path):  # CU-1
    folder = make_run(tmp_path, 3)
    draw(folder, PANELS)
    draw(folder, PANELS)
    assert sorted(path.name for path in folder.glob("*.png")) == ["curves.png"]
    assert not list(folder.glob(".*"))


def test_matplotlib_is_imported_only_to_draw():  # CU-3
    program = "import runtime.curves, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_running_mean_keeps_straight_lines_and_does_not_lag():
    line = [0.5 * n for n in range(60)]
    assert smoothed(line) == pytest.approx(line)
    # 40 points look back and ahead by 2: windows of 5 over a jump from 0 to 1
    assert smoothed([0.0] * 20 + [1.0] * 20)[18:22] == pytest.approx([0.2, 0.4, 0.6, 0.8])


@pytest.mark.parametrize(("values", "shown"), [([0.2, 0.4], (0, 1)), ([-1.0, 0.5], (-1, 1)), ([0.5, 7.0], (0, 7))])
def test_an_axis_reaches_as_far_as_the_panel_asks_and_as_every_value(values: list[float], shown: tuple[float, float]):
    axes = drawn(Panel("reward", (Series("reward"),), bottom=0.0, top=1.0), "reward", values)
    low, high = axes.get_ylim()
    assert low <= shown[0]
    assert high >= shown[1]
    assert high - low <= 1.2 * (shown[1] - shown[0])


def test_one_tiny_value_does_not_flatten_a_logarithmic_axis_and_zeros_are_drawn():
    low, high = drawn(Panel("KL", (Series("kl"),), log=True), "kl", [1e-14, 2e-4, 1e-4, 0.0]).get_ylim()
    assert 1e-10 < low < high < 1e-3
    assert drawn(Panel("KL", (Series("kl"),), log=True), "kl", [0.0, 0.0]).get_ylim()[0] > 0


def test_the_names_of_lines_that_end_together_do_not_cover_each_other():
    panel = Panel("length", (Series("a", "max"), Series("b", "mean")), bottom=0.0)
    axes = figure_of(panel, [{"step": 1, "a": 29.0, "b": 28.9}, {"step": 2, "a": 30.0, "b": 29.9}])
    (mean, maximum) = [text.xyann[1] for text in axes.texts if isinstance(text, Annotation)]
    assert maximum - mean >= LINE - 2  # the ends themselves are a little apart
    assert [text.get_text() for text in axes.texts] == ["mean 29.9", "max 30"]


def figure_of(panel: Panel, rows: list[dict[str, float]]) -> Axes:
    axes = Figure(figsize=(11, 4)).add_subplot()
    _draw_panel(axes, panel, rows)
    return axes


def drawn(panel: Panel, key: str, values: list[float]) -> Axes:
    return figure_of(panel, [{"step": step, key: value} for step, value in enumerate(values)])
