"""SH-1 to SH-3 of runtime/shape.py."""

from __future__ import annotations

import pytest

from runtime import OutOfRange, ShapeError, UnknownDimension
from runtime.shape import Point, Shape, ValueMesh

GRID = Shape({"replica": 2, "tp": 3})


def test_last_dimension_varies_fastest():
    assert [tuple(GRID.coordinates(r).values()) for r in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert GRID.rank(replica=1, tp=2) == 5


def test_int_selects_and_removes_a_dimension():
    assert GRID.select(replica=1) == (Shape({"tp": 3}), [3, 4, 5])
    assert GRID.select(tp=-1) == (Shape({"replica": 2}), [2, 5])
    assert GRID.select(replica=0, tp=1) == (Shape({}), [1])


def test_slice_selects_and_keeps_a_dimension():
    assert GRID.select(tp=slice(1, None)) == (Shape({"replica": 2, "tp": 2}), [1, 2, 4, 5])
    assert GRID.select(tp=slice(None, None, 2)) == (Shape({"replica": 2, "tp": 2}), [0, 2, 3, 5])


@pytest.mark.parametrize(
    ("selectors", "error", "text"),
    [
        ({"dp": 0}, UnknownDimension, "no dimension 'dp'; it has replica, tp"),
        ({"tp": 3}, OutOfRange, "tp has 3 entries, got index 3"),
        ({"tp": slice(3, 9)}, OutOfRange, "tp has 3 entries, tp=3:9 selects nothing"),
        ({"tp": "0"}, TypeError, "expected an index or a slice for tp, got '0'"),
    ],
)
def test_wrong_selections_say_what_there_is(selectors, error, text):
    with pytest.raises(error, match=text):
        GRID.select(**selectors)


@pytest.mark.parametrize("sizes", [{"a": 0}, {"a": -1}, {"a": 1.5}, {"not a name": 1}])
def test_shapes_that_can_not_be_are_refused(sizes):
    with pytest.raises(ValueError, match="shape"):
        Shape(sizes)


def test_split_derives_an_open_part():
    assert Shape({"rank": 6}).split("rank", dp=-1, tp=3) == Shape({"dp": 2, "tp": 3})
    assert GRID.split("tp", a=3, b=1) == Shape({"replica": 2, "a": 3, "b": 1})
    with pytest.raises(ValueError, match="the product must be 3"):
        GRID.split("tp", a=2, b=2)


def test_flatten_and_rename_keep_the_order():
    assert GRID.flatten("rank") == Shape({"rank": 6})
    assert GRID.rename(tp="x") == Shape({"replica": 2, "x": 3})
    with pytest.raises(ValueError, match="two dimensions of one name"):
        GRID.rename(tp="replica")


def test_errors_of_shapes_are_named_and_of_the_usual_classes():
    for change in (lambda: GRID.size("x"), lambda: GRID.split("x", a=1), lambda: GRID.rename(x="y")):
        with pytest.raises(UnknownDimension, match="no dimension 'x'; it has replica, tp"):
            change()
    with pytest.raises(OutOfRange, match="expected a rank of 0 to 5, got 6"):
        GRID.coordinates(6)
    assert issubclass(UnknownDimension, ShapeError)
    assert issubclass(ShapeError, ValueError)
    assert issubclass(OutOfRange, IndexError)


def test_values_can_be_laid_out_anew():
    mesh = ValueMesh(Shape({"rank": 6}), list("abcdef")).split("rank", dp=-1, tp=3).rename(dp="replica")
    assert mesh.sizes == {"replica": 2, "tp": 3}
    assert mesh.item(replica=1, tp=1) == "e"
    assert mesh.flatten("rank")[5] == "f"


def test_point_is_a_mapping_with_a_rank():
    point = Point(4, GRID)
    assert dict(point) == {"replica": 1, "tp": 1}
    assert point.rank == 4


def test_values_are_found_by_rank_and_by_coordinates():
    mesh = ValueMesh(GRID, list("abcdef"))
    assert mesh[4] == "e"
    assert mesh.item(replica=1, tp=0) == "d"
    assert mesh.slice(tp=0).values() == ["a", "d"]
    assert [(dict(p)["tp"], v) for p, v in mesh.slice(replica=1).items()] == [(0, "d"), (1, "e"), (2, "f")]
    with pytest.raises(ValueError, match="selects 3 values"):
        mesh.item(replica=1)
    with pytest.raises(ValueError, match="6 ranks, got 1"):
        ValueMesh(GRID, ["a"])
