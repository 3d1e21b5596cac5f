"""LO-1 to LO-4: weight loaders recorded on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from sync.layout import Box, Entry, LayoutError
from sync.layouts.loaders import Recorded, record

SOURCES = {"q": (8, 6), "k": (4, 6), "down": (6, 10), "experts": (2, 5, 6), "scale": (), "norm": (6,), "other": (3,)}


class Model(nn.Module):
    """Rank 1 of 2, with the habits of real loaders: fused, sliced, transposed, padded, cast, and one scalar."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"qk": (6, 6), "down": (6, 5), "experts": (2, 6, 5), "scale": (1,), "norm": (6,), "padded": (4, 6)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 9.0), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            match name:
                case "q":
                    own["qk"].data.narrow(0, 0, 4).copy_(tensor.narrow(0, 4, 4))
                case "k":
                    own["qk"].data[4:].copy_(tensor.chunk(2)[1].to(torch.float64))
                    own["padded"].data[:3].copy_(tensor[1:])
                    own["padded"].data[3:].fill_(0)
                case "down":
                    own["down"].data.copy_(tensor[:, 5:])
                case "experts":
                    for i, expert in enumerate(tensor.unbind()):
                        own["experts"].data[i].copy_(expert.t())
                case "scale":
                    own["scale"].data.fill_(tensor.item())
                case "norm":
                    own["norm"].data.copy_(tensor.contiguous().view(-1))


def entries(**changed: tuple[int, ...]) -> list[Entry]:
    return [Entry.whole(name, shape, "float32") for name, shape in {**SOURCES, **changed}.items()]


def boxes(recorded: Recorded, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {e.name: weights[e.name][tuple(map(slice, e.box.lo, e.box.hi))].clone() for e in recorded.wanted}


def test_applying_a_recording_leaves_the_bytes_of_loading():
    weights = {name: torch.randn(shape) for name, shape in SOURCES.items()}
    model = Model()
    recorded = record(model, entries())
    assert all(bool((p == 9).all()) for p in model.parameters())  # nothing was written
    recorded.apply(dict(model.named_parameters()), boxes(recorded, weights))
    loaded = Model()
    loaded.load_weights(iter(weights.items()))
    for name, parameter in loaded.named_parameters():
        found = model.get_parameter(name)
        assert torch.equal(found, parameter) or name == "padded"
    assert torch.equal(model.get_parameter("padded")[:3], loaded.get_parameter("padded")[:3])
    assert recorded.filled == {"padded": (Box((3, 0), (4, 6)),)}


def test_a_rank_asks_only_for_what_it_takes():
    """LO-4"""
    layout = record(Model(), entries()).layout()
    assert {e.name: str(e.box) for e in layout.entries} == {
        "q": "[4:8, 0:6]",
        "k": "[1:4, 0:6]",
        "down": "[0:6, 5:10]",
        "experts": "[0:2, 0:5, 0:6]",
        "scale": "[]",
        "norm": "[0:6]",
    }


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p, w: p.data.copy_(torch.cat([w[:3], w[3:]])), "norm: computed from norm"),
        (lambda p, w: p.data.add_(w), "norm: computed from norm"),
        (lambda p, w: p.data.copy_(-torch.exp(w.float())), "norm: computed from norm"),
        (lambda p, w: p.data.copy_(w.flip(0)), "norm: computed from norm"),
        (lambda p, w: p.data.copy_(w.to(torch.bfloat16)), "norm: computed from norm"),
        (lambda p, w: p.data[:4].copy_(w[:4]), "norm: not all of it is loaded"),
        (lambda p, w: None, "norm: not all of it is loaded"),
    ],
)
def test_what_is_computed_or_not_loaded_is_named(change, told):
    """LO-2, LO-3"""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Parameter(torch.zeros(6), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for _, tensor in weights:
                change(self.norm, tensor)

    recorded = record(Odd(), [Entry.whole("norm", (6,), "float32")])
    with pytest.raises(LayoutError, match=told):
        recorded.layout()
    if "not all" in told:
        assert recorded.layout(constant=["norm"]).constant == ("norm",)


def test_a_loader_that_refuses_a_tensor_or_asks_for_its_values_is_told_with_the_name():
    with pytest.raises(LayoutError, match=r"down: Model\.load_weights refused it"):
        record(Model(), entries(down=(7, 10)))

    class Asks(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for _, tensor in weights:
                assert tensor.isfinite().all(), "not finite"

    with pytest.raises(LayoutError, match=r"q: Asks\.load_weights refused it"):
        record(Asks(), entries())
