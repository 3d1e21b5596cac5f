"""SH-4 of roles/sharding.py, on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from roles.sharding import local_rows, mesh_of, shard
from tests.roles.fsdp_help import config, on_ranks


class Routed(nn.Module):
    """A layer of two experts; all tokens of a rank go to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x + self.experts[dist.get_rank()](x), "and what else a layer says"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Routed()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


@pytest.mark.parametrize("frozen", [False, True])
def test_expert_that_has_tokens_on_one_rank_alone_has_a_gradient_on_all_sh4(frozen: bool) -> None:
    on_ranks(2, _routed, frozen)


def _routed(frozen: bool) -> None:
    torch.manual_seed(0)
    model = Layers()
    if frozen:
        model.layers.requires_grad_(False)
    settings = config(ranks=2, strategy="fsdp2")
    shard(model, list(model.layers), settings, mesh_of(settings, torch.device("cpu"), 2), offload=False)
    x = torch.full((3, 4), float(dist.get_rank() + 1), requires_grad=True)
    for _ in range(2):  # micro-batches
        model(x).sum().backward()
    for number, weight in enumerate(model.parameters()):
        assert (weight.grad is None) == frozen
        if weight.grad is not None:
            expected = torch.full((2, 4), 2 * 3.0 * (number + 1))  # of the two rows that this rank has
            torch.testing.assert_close(local_rows(weight.grad), expected)
