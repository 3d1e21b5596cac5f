"""Promises of roles/vllm_reload.py, on layers of vLLM without an engine: which are copied, processed or held, and that
each way brings exactly what vLLM's own reload would."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sync.layout import Entry


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """tests/engines/layers.py, in a world of one rank. Imported here: vLLM warns."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    from tests.engines import layers

    with set_current_vllm_config(VllmConfig()):
        store = tmp_path_factory.mktemp("store") / "file"
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1)
        yield layers
    destroy_model_parallel()
    destroy_distributed_environment()


def put(reloader: Any, weights: dict[str, torch.Tensor]) -> None:
    while not reloader.process(weights):
        pass
    reloader.swap(weights)


@pytest.mark.parametrize(("kind", "held", "shares"), [("plain", 0, 0), ("transposed", 0, 1), ("cached", 1, 0)])
def test_each_kind_of_layer_gets_exactly_the_new_weights_at_its_old_address_vr1(
    kit: Any, kind: str, held: int, shares: int
) -> None:
    model, reloader = kit.started(kind)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    reloader.prove()
    for seed in (1, 2, 1):
        weights = kit.numbers(seed)
        put(reloader, weights)
        assert torch.equal(model.embed.weight[:60], weights["embed"])
        assert not model.embed.weight[60:].any()
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.norm.weight, weights["norm"])
        if kind == "transposed":
            scale = kit.qkv(weights).abs().max()
            assert float(model.qkv.scale) == float(scale)
            assert torch.equal(model.qkv.weight.float(), (kit.qkv(weights).t() / scale).to(torch.float8_e4m3fn).float())
        else:
            assert torch.equal(model.qkv.weight, kit.qkv(weights))
        if kind == "cached":
            assert torch.equal(model.qkv.kernel(), 2 * kit.qkv(weights))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    assert (reloader.facts()["held_layers"], reloader.facts()["shares"]) == (held, shares)


def test_processing_touches_nothing_that_steps_read_vr3(kit: Any) -> None:
    model, reloader = kit.started("transposed")
    reloader.prove()
    put(reloader, kit.numbers(1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    while not reloader.process(kit.numbers(2)):
        pass
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.float(), before[name].float()), name
    reloader.swap(kit.numbers(2))
    assert not torch.equal(model.qkv.weight.float(), before["qkv.weight"].float())


def test_recording_leaves_the_live_model_as_it_is_vl1(kit: Any) -> None:
    model, reloader = kit.started("transposed")
    before = {name: (p.data_ptr(), p.detach().float().clone()) for name, p in model.named_parameters()}
    again = type(reloader)(model, reloader._vllm_config, torch.device("cpu"), reloader.weight_layout().entries)
    assert again.weight_layout() == reloader.weight_layout()
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0], name
        assert torch.equal(parameter.float(), before[name][1]), name


def test_tensors_are_read_where_they_lie_also_when_the_next_version_lies_elsewhere(kit: Any) -> None:
    model, reloader = kit.started("plain")
    reloader.prove()
    first = kit.numbers(1)
    put(reloader, first)
    first["q"].fill_(7)  # staged in the same memory
    put(reloader, first)
    assert bool((model.qkv.weight[:32] == 7).all())
    put(reloader, kit.numbers(2))
    assert torch.equal(model.qkv.weight, kit.qkv(kit.numbers(2)))


def test_copies_that_are_wrong_are_found_and_their_layers_held_vr2(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roles.vllm_copies.Copies.run", lambda self, copies, weights: None)  # nothing arrives
    model, reloader = kit.started("plain")
    reloader.prove()
    assert reloader.facts()["copied_tensors"] == 0
    put(reloader, kit.numbers(3))
    assert torch.equal(model.qkv.weight, kit.qkv(kit.numbers(3)))
    assert torch.equal(model.head.weight[:60], kit.numbers(3)["embed"])


def test_loaders_that_look_at_values_get_whole_tensors_in_the_pause_vr6(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = kit.Model.load_weights

    def looking(self: Any, weights: Any) -> None:
        load(self, ((name, weight) for name, weight in weights if weight.isfinite().all()))

    monkeypatch.setattr(kit.Model, "load_weights", looking)
    model, reloader = kit.started("plain")
    assert {e.name: e.box.shape for e in reloader.weight_layout().entries} == kit.SHAPES
    reloader.prove()
    for seed in (1, 2):
        put(reloader, kit.numbers(seed))
        assert torch.equal(model.qkv.weight, kit.qkv(kit.numbers(seed)))
        assert torch.equal(model.embed.weight[:60], kit.numbers(seed)["embed"])
    assert reloader.facts()["copied_tensors"] == 0
    monkeypatch.setattr(kit.Model, "load_weights", load)
    with pytest.raises(ValueError, match=r"k: Model\.load_weights refused it"):
        type(reloader)(model, reloader._vllm_config, torch.device("cpu"), [Entry.whole("k", (7, 7), "float32")])


def test_a_layer_that_nothing_is_loaded_into_is_named_vr5(kit: Any) -> None:
    with pytest.raises(ValueError, match="the new weights hold nothing for qkv"):
        kit.started("plain", ["embed", "norm"])


@pytest.mark.parametrize("tied", [True, False])
def test_a_wide_head_gives_logits_in_float32_of_bfloat16_weights(kit: Any, tied: bool) -> None:
    from roles.vllm_head import widen_heads

    model, _ = kit.started("plain")
    model.to(torch.bfloat16)
    model.lm_head = model.embed if tied else model.head  # 0.25 ties by sharing the layer
    x = torch.randn(3, 32).bfloat16()
    assert widen_heads(model) == 1
    logits = model.lm_head.quant_method.apply(model.lm_head, x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, x.float() @ model.embed.weight.float().T)
    del model.lm_head
    with pytest.raises(ValueError, match="no head of its own"):
        widen_heads(model)


def test_our_transfer_engine_stands_beside_those_of_vllm(kit: Any) -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from roles.vllm_worker import DirectEngine, register

    register()
    register()
    registry = WeightTransferEngineFactory._registry
    assert registry["tutti"]() is DirectEngine
    assert {"nccl", "ipc"} <= registry.keys()


def test_a_version_that_was_given_up_half_processed_leaves_nothing_in_the_next_vw4(kit: Any) -> None:
    from roles.vllm_worker import DirectEngine, Version

    class Staging:
        """A receiver in which everything is staged at once."""

        shadow: Any = None

        def take(self, version: int) -> Any:
            taken, self.shadow = self.shadow, None
            assert taken.version == version
            return taken.weights

        def applied(self, *_: object) -> None:
            pass

    model, reloader = kit.started("transposed")
    engine: Any = DirectEngine.__new__(DirectEngine)
    engine._reloader, engine._receiver, engine._version = reloader, Staging(), None
    engine.is_updating = engine.is_filled = False

    def stage(version: int, seed: int) -> None:
        engine._receiver.shadow = SimpleNamespace(version=version, weights=kit.numbers(seed))

    def holds(seed: int) -> bool:
        scale = kit.qkv(kit.numbers(seed)).abs().max()
        codes = (kit.qkv(kit.numbers(seed)).t() / scale).to(torch.float8_e4m3fn)
        return torch.equal(model.qkv.weight.float(), codes.float())

    stage(1, 1)
    engine.choose(1)
    engine.finish_weight_update()
    assert holds(1)
    for version, seed in ((2, 2), (3, 3), (3, 4)):  # one after the other is given up, the last under the same number
        stage(version, seed)
        engine.receive_weights(Version(version=version))
    engine.choose(3)
    engine.finish_weight_update()
    assert holds(4)
    stage(4, 5)
    engine.choose(4)
    engine.finish_weight_update()  # nobody has asked for its shares
    assert holds(5)
