"""`runtime.curves`: CU-1 to CU-3 by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.curves import Panel, Series, draw, smoothed
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
