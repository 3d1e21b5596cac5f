"""Offloaded moments on CPU, where they are copied as on a GPU but without streams: MO-1, MO-2, AW-1 to AW-3."""

from __future__ import annotations

import pytest
import torch

from roles import moments
from roles.adamw import AdamW
from roles.moments import Travelling
from roles.trainer_config import TrainerConfig

SHAPES = {"a": (70, 3), "b": (5,), "c": (400,), "d": (2, 2)}


def params() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def grads(seed: int, names: str = "abcd") -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES.items() if name in names}


@pytest.mark.parametrize("bucket", [64, 210, 1000])
@pytest.mark.parametrize("prefetched", [0, 1, 100])
def test_offloaded_steps_give_the_same_bits_whatever_the_buckets_aw1(
    bucket: int, prefetched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Travelling.__init__, "__kwdefaults__", {"bucket": bucket})
    config = TrainerConfig(lr=1e-2, weight_decay=0.1)
    plain, offloaded = AdamW(params(), config), AdamW(params(), config, offload=True)
    for seed, names in enumerate(["abd", "abcd", "bc", "abcd"]):
        for one in (plain, offloaded):
            one.prefetch(prefetched * 8 * bucket)
            if seed == 2:
                one.skip()
            one.step(grads(seed, names), 1e-2)
        for name in SHAPES:
            assert torch.equal(plain.params[name], offloaded.params[name])
            assert plain.moments(name).keys() == offloaded.moments(name).keys()
            for part, moment in plain.moments(name).items():
                assert torch.equal(moment, offloaded.moments(name)[part])


def test_moments_that_were_read_continue_in_another_optimizer() -> None:
    config = TrainerConfig(lr=1e-2)
    first = AdamW(params(), config, offload=True)
    first.step(grads(0), 1e-2)
    for offload in (False, True):
        second = AdamW({name: param.clone() for name, param in first.params.items()}, config, offload=offload)
        second.updates = first.updates
        second.reserve(SHAPES)
        for name in SHAPES:
            second.set_moments(name, first.moments(name))
        other = AdamW({name: param.clone() for name, param in first.params.items()}, config)
        other.updates = 1
        other.reserve(SHAPES)
        for name in SHAPES:
            other.set_moments(name, first.moments(name))
        for one in (second, other):
            one.step(grads(1), 1e-2)
        assert all(torch.equal(second.params[name], other.params[name]) for name in SHAPES)


@pytest.mark.parametrize(("room", "most"), [(0, moments.SLOTS), (5, 5), (100, 8)])
def test_no_more_buckets_are_here_than_there_is_room_for_mo2(
    room: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = moments._Slot.__init__

    def counted(slot: moments._Slot, size: int, device: torch.device) -> None:
        made.append(size)
        real(slot, size, device)

    monkeypatch.setattr(moments._Slot, "__init__", counted)
    travelling = Travelling({"a": torch.zeros(8, 64)}, bucket=64)
    travelling.reserve("a")
    travelling.prefetch(room * 8 * 64)
    assert sum(len(pieces) for pieces in travelling.in_turn()) == 8
    assert made == [64] * most


def test_parameter_without_rows_on_this_rank_has_empty_moments_mo1() -> None:
    """A value head has one row: of two ranks one has none of it."""
    empty, full = torch.zeros(0, 4), torch.zeros(2, 4)
    offloaded = AdamW({"score": empty, "norm": full}, TrainerConfig(lr=1e-2), offload=True)
    offloaded.step({"score": empty.clone(), "norm": torch.ones(2, 4)}, 1e-2)
    assert {part: moment.shape for part, moment in offloaded.moments("score").items()} == {
        "exp_avg": (0, 4),
        "exp_avg_sq": (0, 4),
    }
    offloaded.set_moments("score", offloaded.moments("score"))
    assert offloaded.moments("norm")["exp_avg"].all()
