"""CA-1 and CA-2, and the public names of the room."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import algorithms
from algorithms import advantages, catalog, losses
from algorithms.advantages import Advantage
from roles.objective import LossInputs
from tests.algorithms.loss_help import random_inputs

CUSTOM = Advantage(group=advantages.dr_grpo, whiten="tokens")


def test_every_objective_resolves_and_accepts_its_options():
    for name in catalog.OBJECTIVES:
        options = {} if name == "value" else {"tis_cap": 2.0, "max_length": 8}
        catalog.check_objective(catalog.objective(name, options))


def test_every_name_stands_for_a_function_that_runs_with_its_arguments():
    x = random_inputs()
    x = LossInputs(**{**x.__dict__, "ages": torch.ones_like(x.mask, dtype=torch.int32)})
    for name in catalog.OBJECTIVES.keys() - {"value"}:
        out = catalog.objective(name, {"max_length": 8}).resolve()(x)
        assert out.loss.isfinite()


def test_constant_denominator_without_its_length_is_refused_before_a_run():
    with pytest.raises(ValueError, match="divides by max_length, which is not given"):
        catalog.check_objective(catalog.objective("dr_grpo"))


def test_unknown_name_gives_the_nearest_valid_one():
    with pytest.raises(ValueError, match="no objective is called 'gpro'; did you mean 'grpo'"):
        catalog.objective("gpro")
    with pytest.raises(
        ValueError, match=r"no advantage is called 'dr-grpo'; did you mean 'dr_grpo'\? \(known: dr_grpo, gdpo, "
    ):
        catalog.advantage("dr-grpo")


def test_unknown_option_gives_the_nearest_valid_one():
    with pytest.raises(ValueError, match="no option is called 'clip_hi'; did you mean 'clip_high'"):
        catalog.check_objective(catalog.objective("grpo", {"clip_hi": 0.3}))
    with pytest.raises(ValueError, match="advantage 'grpo': no option is called 'epsilon'"):
        catalog.advantage("grpo", {"epsilon": 0.3})


def test_function_of_ones_own_by_module_and_name():
    assert catalog.advantage("algorithms.advantages:rloo") == Advantage(group=advantages.rloo)
    assert catalog.objective("my.module:loss", {"a": 1}).function == "my.module:loss"
    with pytest.raises(ValueError, match="module 'no_such_module' can't be imported"):
        catalog.advantage("no_such_module:f")
    with pytest.raises(ValueError, match="did you mean 'rloo'"):
        catalog.advantage("algorithms.advantages:rlo")
    with pytest.raises(ValueError, match="expected 'module:function'"):
        catalog.advantage(":f")


def test_an_objective_may_be_the_function_itself_if_ranks_can_import_it():
    assert catalog.objective(losses.ppo) == catalog.objective("grpo")
    with pytest.raises(ValueError, match="can't be imported by the trainer ranks; put it into a module"):
        catalog.objective(lambda inputs: None)


def test_advantage_of_ones_own_may_say_what_is_done_over_the_batch():
    assert catalog.advantage("tests.algorithms.test_catalog:CUSTOM") == CUSTOM


def test_options_are_bound():
    function = catalog.advantage("grpo", {"ddof": 0}).group
    np.testing.assert_allclose(
        function(np.array([1.0, 0, 0, 0])), [1.732047, -0.577349, -0.577349, -0.577349], atol=1e-5
    )


def test_public_names_are_exactly_all():
    assert sorted(algorithms.__all__) == dir(algorithms)
    for name in algorithms.__all__:
        assert getattr(algorithms, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Bufer'"):
        algorithms.Bufer  # noqa: B018


def test_controller_side_loads_no_torch():
    code = (
        "import sys, algorithms; algorithms.Buffer, algorithms.objective('grpo'), algorithms.to_samples; "
        "import algorithms.metrics; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
