"""LA-1 to LA-4."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.layout import Box, Entry, Layout, LayoutError


def boxes(dims: int, limit: int = 6) -> st.SearchStrategy[Box]:
    interval = st.tuples(st.integers(0, limit), st.integers(0, limit)).map(sorted)
    return st.lists(interval, min_size=dims, max_size=dims).map(
        lambda pairs: Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
    )


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.lo, box.hi, strict=True))))


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(boxes(n), boxes(n))))
def test_intersection_and_difference_are_those_of_the_sets_of_indices(pair):
    a, b = pair
    common = a.intersect(b)
    assert (points(common) if common else set()) == points(a) & points(b)
    rest = a.minus(b)
    assert len(rest) <= max(2 * len(a.lo), 1)
    assert sum(box.numel for box in rest) == len(points(a) - points(b))
    assert set().union(*map(points, rest)) == points(a) - points(b)


def test_slices_are_relative_to_the_outer_box():
    # rows 4:6 of a shard that holds rows 3:9 are its rows 1:3
    assert Box((4, 0), (6, 2)).slices_in(Box((3, 0), (9, 5))) == (slice(1, 3), slice(0, 2))


def test_layouts_are_equal_by_content_whatever_the_order():
    a, b = Entry.whole("a", (2, 3), "float32"), Entry.rows("b", (7,), "bfloat16", 2, 2)
    first = Layout((a, b), derived={"x": "a", "y": "b"}, constant=("c", "d"))
    second = Layout((b, a), derived={"y": "b", "x": "a"}, constant=("d", "c"))
    assert first == second
    assert hash(first) == hash(second)
    assert first.digest == second.digest


@pytest.mark.parametrize(
    "other",
    [
        Layout((Entry.whole("b", (2, 3), "float32"),)),
        Layout((Entry.whole("a", (3, 2), "float32"),)),
        Layout((Entry.whole("a", (2, 3), "bfloat16"),)),
        Layout((Entry.rows("a", (2, 3), "float32", 0, 1),)),
        Layout((Entry.whole("a", (2, 3), "float32"),), derived={"b": "a"}),
        Layout((Entry.whole("a", (2, 3), "float32"),), constant=("b",)),
    ],
    ids=["name", "shape", "dtype", "box", "derived", "constant"],
)
def test_digest_moves_with_every_part_of_the_content(other):
    layout = Layout((Entry.whole("a", (2, 3), "float32"),))
    assert layout != other
    assert layout.digest != other.digest


def test_scalar_and_empty_boxes_are_boxes():
    assert Entry.whole("scale", (), "float32").num_bytes == 4
    assert Entry.rows("w", (3, 5), "float32", 3, 3).num_bytes == 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Entry.whole("w", (2,), "fp32"), r"w: dtype 'fp32' is unknown; expected torch's name"),
        (
            lambda: Entry.rows("w", (2, 2), "float32", 1, 3),
            r"w: box \[1:3, 0:2\] is not inside the full shape \[2, 2\]",
        ),
        (lambda: Layout((Entry.whole("w", (2,), "int8"),) * 2), "w: declared twice by one rank"),
        (lambda: Layout((), derived={"w": "v"}, constant=("w",)), "w: declared both derived and constant"),
        (lambda: Box((2,), (1,)), "expected 0 <= lo <= hi"),
    ],
    ids=["dtype", "outside", "twice", "both", "reversed"],
)
def test_contradictions_are_refused_by_name(make, text):
    with pytest.raises(LayoutError, match=text):
        make()


def test_import_sync_and_making_a_plan_load_no_torch():
    code = (
        "import sys, sync; from sync import Entry, Layout, make_plan\n"
        "layout = [Layout((Entry.whole('w', (4, 4), 'float32'),))]\n"
        "make_plan(layout, layout, bucket_bytes=64)\n"
        "import sync.transport, sync.commit, sync.digest\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
