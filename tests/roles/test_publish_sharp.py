"""PU-1 with models whose logits are large, as those of a policy that has been trained for long: rounding to 8 bits
moves unlikely tokens by whole nats, which is no fault; and what is one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roles.publish import QUANTISED_THRESHOLD, SameWeights, WeightsDiffer
from roles.types import TrainSample
from tests.roles.tiny import tiny_model

FIXED = [[7 * i % 61 for i in range(1, 50)], [11 * i % 61 for i in range(3, 40)]]
SHARP = [1.0, 4.0, 12.0]
"""Factors of all logits."""
LAYERS = 4


def policy(sharpness: float, seed: int = 0) -> Any:
    model: Any = tiny_model(seed, num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128)
    with torch.no_grad():
        model.model.norm.weight.mul_(sharpness)
    return model


def in_eight_bits(x: Tensor) -> Tensor:
    """With a scale for each row."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def quantised(model: Any) -> Any:
    """As an engine with FP8 per channel computes: weights once, activations at each layer."""
    model = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.data = in_eight_bits(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, args: (in_eight_bits(args[0]),))
    return model


class Models:
    """A trainer and one replica, in this process."""

    def __init__(self, trainer: Any, engine: Any) -> None:
        self.trainer, self.engine = trainer, engine

    async def logprobs(self, samples: Sequence[TrainSample], temperature: float = 1.0) -> list[np.ndarray]:
        return [logprobs_of(self.trainer, s.token_ids.tolist()) for s in samples]

    async def score(
        self, sequences: Sequence[Sequence[int]], left_out: Collection[int] = ()
    ) -> dict[int, list[np.ndarray]]:
        return {0: [logprobs_of(self.engine, ids) for ids in sequences]}


@torch.no_grad()
def logprobs_of(model: Any, ids: Sequence[int]) -> np.ndarray:
    row = torch.tensor([list(ids)])
    found: Tensor = model(input_ids=row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
    return found.numpy()


async def proved(trainer: Any, engine: Any) -> None:
    both: Any = Models(trainer, engine)
    await SameWeights(both, both, FIXED, QUANTISED_THRESHOLD).check(1)


@pytest.mark.parametrize("sharpness", SHARP)
async def test_an_engine_in_eight_bits_passes_however_sharp_the_policy_pu1(sharpness: float) -> None:
    model = policy(sharpness)
    await proved(model, quantised(model))
    if sharpness == SHARP[-1]:  # farther apart than a flat policy is under the worst fault
        gaps = [np.abs(logprobs_of(model, ids) - logprobs_of(quantised(model), ids)) for ids in FIXED]
        assert np.concatenate(gaps).mean() > 0.8


@torch.no_grad()
def shuffled(model: Any) -> None:
    """As experts in the wrong layout are: every number is there, in another place."""
    for layer in model.model.layers:
        for matrix in (layer.mlp.gate_proj.weight, layer.mlp.down_proj.weight):
            matrix.copy_(matrix[:, torch.arange(matrix.shape[1]).view(2, -1).T.flatten()])


@torch.no_grad()
def half_loaded(model: Any) -> None:
    others = policy(1.0, seed=9).model.layers
    for layer, other in zip(model.model.layers[LAYERS // 2 :], others[LAYERS // 2 :], strict=True):
        layer.load_state_dict(other.state_dict())


@torch.no_grad()
def head_of_before(model: Any) -> None:
    """A tied head that keeps its own copy."""
    model.lm_head.weight = torch.nn.Parameter(policy(1.0, seed=9).lm_head.weight.clone())


@torch.no_grad()
def not_scaled(model: Any) -> None:
    """Codes without their scales."""
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(448 / layer.mlp.down_proj.weight.abs().amax(1, keepdim=True))


@pytest.mark.parametrize("sharpness", SHARP)
@pytest.mark.parametrize("fault", [shuffled, half_loaded, head_of_before, not_scaled])
async def test_faults_of_a_reload_are_found_at_once_however_sharp_the_policy_pu1(
    fault: Callable[[Any], None], sharpness: float
) -> None:
    model = policy(sharpness)
    engine = quantised(model)
    fault(engine)
    with pytest.raises(WeightsDiffer, match="nat from the trainer's on average"):
        await proved(model, engine)


@pytest.mark.parametrize("sharpness", SHARP)
async def test_an_engine_in_eight_bits_that_kept_its_weights_is_found_and_one_that_follows_is_not_pu1(
    sharpness: float,
) -> None:
    before, after = policy(sharpness), policy(sharpness)
    with torch.no_grad():
        for number, parameter in enumerate(after.parameters()):
            torch.manual_seed(number)
            parameter.add_(torch.randn_like(parameter) * 0.05 * parameter.std())
    for engine in (quantised(after), quantised(before)):
        both: Any = Models(before, quantised(before))
        same = SameWeights(both, both, FIXED, QUANTISED_THRESHOLD)
        await same.check(1)
        both.trainer, both.engine = after, engine
        if engine.model.norm.weight.equal(after.model.norm.weight):
            await same.check(2)
        else:
            with pytest.raises(WeightsDiffer, match="rollout rank 0 still answers with the old ones"):
                await same.check(2)
