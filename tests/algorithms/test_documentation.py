"""The pages about this room name what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from algorithms import catalog
from algorithms.losses import DEFAULTS
from roles.verify import BY_NAME

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("algorithms.md", [*catalog.ADVANTAGES, *catalog.OBJECTIVES, *DEFAULTS]),
        ("rewards.md", ["task", *BY_NAME]),
        ("examples.md", [p.stem for p in (DOCS.parent / "examples").glob("[!_]*.py") if p.stem != "started"]),
    ],
)
def test_every_name_stands_on_its_page(page, names):
    text = (DOCS / page).read_text()
    assert [name for name in names if f"`{name}`" not in text] == []
