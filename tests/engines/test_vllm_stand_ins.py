"""VI-1, VI-2 and VR-2 with vLLM's own online quantisation, of a Llama without an engine; the kernel that would multiply
is left out, for it wants a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    run = subprocess.run([sys.executable, "-m", "tests.engines.quantised"], capture_output=True, text=True, timeout=170)
    assert run.returncode == 0, run.stderr[-3000:]
    facts = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {f["case"]: f for f in facts}


@pytest.mark.parametrize("kind", ["fp8_per_channel", "fp8_per_block"])
def test_quantised_layers_become_what_vllms_reload_makes_of_them_bit_for_bit_vr2(
    cases: dict[str, Any], kind: str
) -> None:
    facts = cases[kind]
    assert facts["differs"] == [[], [], []]  # after the first version, the second, and the first again
    assert facts["moved"] == []  # VR-1
    assert facts["quantised"] == facts["processed_layers"] == 8


@pytest.mark.parametrize("kind", ["fp8_per_channel", "fp8_per_block"])
def test_no_loader_of_the_model_is_called_for_them_and_steps_see_nothing_before_the_swap_vi1(
    cases: dict[str, Any], kind: str
) -> None:
    facts = cases[kind]
    assert (facts["shares"], facts["processed_by_loaders"], facts["loads"]) == (1, 0, 0)
    assert facts["touched"] == []


def test_a_layer_whose_stand_in_makes_something_else_goes_the_way_of_loaders_vi2(cases: dict[str, Any]) -> None:
    facts = cases["knows its layer"]
    assert facts["differs"] == [[], [], []]
    assert (facts["processed_layers"], facts["processed_by_loaders"], facts["shares"]) == (8, 8, 2)


def test_a_layer_that_keeps_a_number_of_its_own_is_held_vr2(cases: dict[str, Any]) -> None:
    facts = cases["keeps a float"]
    assert facts["differs"] == [[], [], []]
    assert facts["processed_layers"] == 0
    assert facts["floats"] == facts["expected_floats"]
