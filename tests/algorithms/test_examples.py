"""The examples in the docstrings of this room run as written."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["admission", "advantages", "bounds", "buffer", "catalog"])
def test_examples_of_the_module_are_true(name):
    result = doctest.testmod(importlib.import_module(f"algorithms.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
