"""GPUs of ranks, worked out without any."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms import placement
from algorithms.placement import Placement, place


def test_the_reference_job_fills_24_gpus_without_sharing():  # PL-1
    placed = place(24, trainers=16, rollouts=1, gpus_per_rollout=8)
    assert placed.trainer == tuple((gpu,) for gpu in range(16))
    assert placed.rollout == (tuple(range(16, 24)),)
    assert not placed.shared


def test_one_gpu_is_shared_by_a_trainer_and_a_rollout():  # PL-2
    placed = place(1, trainers=1, rollouts=1, gpus_per_rollout=1)
    assert placed == Placement(trainer=((0,),), rollout=((0,),))
    assert placed.shared


def test_a_cpu_trainer_leaves_all_gpus_to_the_rollouts():
    assert place(2, trainers=0, rollouts=2, gpus_per_rollout=1) == Placement(trainer=(), rollout=((0,), (1,)))


def test_what_does_not_fit_is_refused_with_the_numbers():  # PL-3
    with pytest.raises(ValueError, match=r"rollout.ranks = 2 with 4 each need 8, this host has 4; lower .* to 4"):
        place(4, trainers=1, rollouts=2, gpus_per_rollout=4)


@given(gpus=st.integers(0, 16), trainers=st.integers(0, 8), rollouts=st.integers(0, 4), per=st.integers(1, 4))
def test_no_gpu_holds_two_ranks_of_a_kind(gpus, trainers, rollouts, per):  # PL-1, PL-2
    if max(trainers, rollouts * per) > gpus:
        return
    placed = place(gpus, trainers=trainers, rollouts=rollouts, gpus_per_rollout=per)
    for ranks, number, size in ((placed.trainer, trainers, 1), (placed.rollout, rollouts, per)):
        used = [gpu for rank in ranks for gpu in rank]
        assert [len(rank) for rank in ranks] == [size] * (number if gpus else 0)
        assert len(set(used)) == len(used)
        assert all(0 <= gpu < gpus for gpu in used)
    assert placed.shared == (trainers + rollouts * per > gpus and trainers > 0 and rollouts > 0)


def test_the_examples_are_true():
    assert doctest.testmod(placement).failed == 0
