"""`benchmarks.table` and the command around it: BT-1 and BT-2 by name."""

from __future__ import annotations

import json
import re
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest

import benchmarks.__main__ as command
from benchmarks.table import Row, to_markdown


@pytest.mark.parametrize(
    ("row", "ratio", "met"),
    [
        (Row(name="a", ours=300.0, goal="<= 500"), None, True),
        (Row(name="a", ours=300.0, peer=100.0, goal="<= 0.5x"), 3.0, False),
        (Row(name="a", ours=5.0, peer=2.0, goal=">= 2.5x"), 2.5, True),
        (Row(name="a", ours=5.0, goal=">= 2x"), None, None),
        (Row(name="a", ours=5.0, peer=2.0), 2.5, None),
        (Row(name="a", goal="<= 1"), None, None),
    ],
)
def test_a_goal_is_about_ours_or_about_the_ratio(row: Row, ratio: float | None, met: bool | None):  # BT-1, BT-2
    assert (row.ratio, row.met) == (ratio, met)


def test_a_goal_that_can_not_be_read_is_refused():
    with pytest.raises(ValueError, match="goal 'fast': expected something like"):
        Row(name="a", goal="fast")


def test_a_table_reads_well_and_shows_absence():  # BT-2
    rows = [
        Row(name="call", ours=210.4, peer=420.0, unit="us", goal="<= 1x", note="Unix socket"),
        Row(name="copy", ours=1.2345, unit="GB/s"),
    ]
    assert to_markdown(rows).splitlines() == [
        "| what |      ours |   peer | ratio | goal  | met | note        |",
        "| ---- | --------: | -----: | ----: | ----- | --- | ----------- |",
        "| call |    210 us | 420 us | 0.501 | <= 1x | yes | Unix socket |",
        "| copy | 1.23 GB/s |      - |     - | -     | -   |             |",
    ]


def test_the_command_runs_what_it_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
):
    calls = types.ModuleType("benchmarks.calls")
    calls.__dict__.update(TITLE="Calls", run=lambda: [Row(name="call", ours=1.0, goal="<= 2")])
    monkeypatch.setitem(sys.modules, "benchmarks.calls", calls)
    monkeypatch.setattr(command, "available", lambda: ["calls"])
    assert command.main(["calls", "--json-dir", str(tmp_path)]) == 0
    assert "## Calls" in capsys.readouterr().out
    assert json.loads((tmp_path / "calls.json").read_text())["rows"][0]["met"] is True
    assert command.main(["cals"]) == 2
    assert "benchmark 'cals' does not exist; did you mean 'calls'? There are: calls" in capsys.readouterr().err


def test_every_benchmark_has_a_title():
    for name in command.available():
        assert "\nTITLE" in (Path(command.__file__).parent / f"{command.module_of(name)}.py").read_text(), name


def test_a_bar_in_a_name_does_not_end_its_cell() -> None:
    assert r"mean \|difference\|" in to_markdown([Row(name="mean |difference|", ours=0.1)])


RESULTS = sorted((Path(command.__file__).parent / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_what_is_published_says_how_and_where_it_was_made_and_hides_no_goal(path: Path):
    """The page is made of these files; ratio and "met" are arithmetic, which nobody may write by hand (BT-1)."""
    result = json.loads(path.read_text())
    assert {"title", "date", "machine", "rows"} <= result.keys()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", result["date"])
    made_by = result.get("command", f"python -m benchmarks {result['name']}").split()
    module = made_by[made_by.index("-m") + 1]
    assert find_spec(module) is not None
    assert module != "benchmarks" or path.stem in command.available()
    for row in result["rows"]:
        assert Row(**{key: row[key] for key in Row.__struct_fields__}).as_dict() == row
