"""Every pair of trainer and engine layouts on toy models: what the plan moves is what gathering, converting and slicing
the full tensors gives, byte for byte (ME-1 to ME-4, SV-1 to SV-3, DT-1 to DT-3, PL-1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from sync.coverage import check_coverage
from sync.layout import Box, Entry, Layout, LayoutError
from sync.layouts import dtensor, megatron, modules
from sync.layouts.held import Held, Live, Part
from sync.layouts.megatron import MegatronParallel
from sync.layouts.model import ModelShape
from sync.layouts.served import Serving, served
from sync.memory import allocate
from sync.pack import Packer
from sync.plan import Plan, make_plan
from sync.shadow import Shadow
from tests.sync.models import DENSE, LATENT, MODELS, full_weights, megatron_chunks

Weights = Callable[[str], Sequence[Tensor]]
Side = tuple[Layout, Weights]

TRAINERS: dict[str, dict[str, tuple[MegatronParallel | tuple[int, ...], int]]] = {
    "dense": {
        "tp1": (MegatronParallel(), 1),
        "tp2 pp2 vpp2": (MegatronParallel(tp=2, pp=2, vpp=2), 4),
        "tp4, more ranks than KV heads, TransformerEngine": (MegatronParallel(tp=4, spec="transformer_engine"), 4),
        "tp2 pp2 uneven, data parallel": (MegatronParallel(tp=2, pp=2, layers=(1, 3), vocab_divisor=1), 8),
        "fsdp 5": ((5,), 5),
        "hsdp 2x3": ((2, 3), 6),
    },
    "tied": {
        "tp2 pp2": (MegatronParallel(tp=2, pp=2, vocab_divisor=4), 4),
        "fsdp 64, empty shards": ((64,), 64),
    },
    "sparse": {
        "tp2 pp2 ep2 etp1": (MegatronParallel(tp=2, pp=2, ep=2, etp=1), 4),
        "tp2 ep2 etp2": (MegatronParallel(tp=2, ep=2, spec="transformer_engine"), 4),
        "ep4 pp2": (MegatronParallel(ep=4, pp=2), 8),
        "fsdp 3": ((3,), 3),
    },
    "latent": {
        "tp2 pp4 ep2 etp1": (MegatronParallel(tp=2, pp=4, ep=2, etp=1), 8),
        "tp2, TransformerEngine": (MegatronParallel(tp=2, spec="transformer_engine"), 2),
        "fsdp 4": ((4,), 4),
    },
}
ENGINES: dict[str, list[Serving]] = {
    "dense": [Serving(), Serving(tp=2), Serving(tp=4), Serving(tp=8, vocab_divisor=1)],
    "tied": [Serving(), Serving(tp=4)],
    "sparse": [Serving(tp=2), Serving(tp=4, expert_parallel=True)],
    "latent": [Serving(tp=4), Serving(tp=2, expert_parallel=True)],
}
PAIRS = [
    pytest.param(model, trainer, serving, id=f"{model}: {trainer} to tp{serving.tp}{' ep' * serving.expert_parallel}")
    for model, trainers in TRAINERS.items()
    for trainer in trainers
    for serving in ENGINES[model]
]


def trainer_sides(
    model: ModelShape, full: dict[str, Tensor], how: MegatronParallel | tuple[int, ...], world: int
) -> list[Side]:
    if isinstance(how, MegatronParallel):
        return [_megatron_side(model, full, how, rank, world) for rank in range(world)]
    mesh, placements = how, [*(Replicate() for _ in how[1:]), Shard(0)]
    coordinates = list(torch.cartesian_prod(*(torch.arange(n) for n in mesh)).reshape(-1, len(mesh)).tolist())
    return [_sharded_side(full, mesh, coordinate, placements) for coordinate in coordinates]


def _megatron_side(model: ModelShape, full: dict[str, Tensor], how: MegatronParallel, rank: int, world: int) -> Side:
    at = how.rank(rank, world)
    held = megatron.held(model, how, at)
    chunks = megatron_chunks(model, full, how, at)
    return held.layout, lambda name: held.views(name, chunks)


def _sharded_side(
    full: dict[str, Tensor], mesh: Sequence[int], at: Sequence[int], placements: Sequence[object]
) -> Side:
    parts: list[Part] = []
    local: dict[str, Tensor] = {}
    for name, tensor in full.items():
        for box, offset in dtensor.boxes_of(name, tensor.shape, mesh, at, placements):
            parts.append(Part.of_rows(name, tuple(tensor.shape), str(tensor.dtype)[6:], box, name, offset))
        local[name] = local_by_torch(tensor, mesh, at, placements)
    held = Held(parts)
    return held.layout, lambda name: held.views(name, [local])


def local_by_torch(tensor: Tensor, mesh: Sequence[int], at: Sequence[int], placements: Sequence[object]) -> Tensor:
    """A rank's local tensor, cut by torch's own placements, left to right."""
    for ranks, rank, placement in zip(mesh, at, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            shards, _ = placement._split_tensor(tensor, ranks, with_padding=False, contiguous=True)
            tensor = shards[rank]
    return tensor


def carry(plan: Plan, sources: Sequence[Side], sinks: Sequence[Layout]) -> list[dict[str, Tensor]]:
    """Pack every bucket at its owner and stage it at its sinks, without a transport."""
    shadows = [Shadow(sink, 1, f"rollout rank {rank}") for rank, sink in enumerate(sinks)]
    for bucket in plan.buckets:
        memory = allocate(bucket.num_bytes)
        layout, weight = sources[bucket.owner]
        packer = Packer(weight, layout.parts, "trainer")
        packer.pack(bucket, memory)
        for sink in bucket.sinks:
            assert tuple(shadows[sink].add(bucket, memory)) == packer.digests()[bucket.index]
    for shadow in shadows:
        shadow.check_complete()
    return [dict(shadow.weights()) for shadow in shadows]


@pytest.mark.parametrize(("model", "trainer", "serving"), PAIRS)
def test_every_pair_of_layouts_moves_exactly_the_slices_of_the_full_tensors(model, trainer, serving):
    shape = MODELS[model]
    full = full_weights(shape)
    how, world = TRAINERS[model][trainer]
    sources = trainer_sides(shape, full, how, world)
    sinks = [served(shape, serving, rank) for rank in range(serving.tp)] * 2  # two replicas
    plan = make_plan([layout for layout, _ in sources], sinks, bucket_bytes=1024)
    for sink, weights in zip(sinks, carry(plan, sources, sinks), strict=True):
        assert weights.keys() == sink.by_name.keys()
        for entry in sink.entries:
            origin = sink.derived.get(entry.name, entry.name)
            expected = full[origin][entry.box.slices_in(Box.whole(entry.shape))]
            assert torch.equal(weights[entry.name].view(torch.uint8), expected.contiguous().view(torch.uint8)), entry


@pytest.mark.parametrize("model", MODELS)
def test_trainer_ranks_of_every_layout_together_hold_every_element(model):
    shape = MODELS[model]
    whole = Layout(tuple(Entry.whole(w.name, w.shape, w.dtype) for w in shape.weights()))
    for how, world in TRAINERS[model].values():
        sources = trainer_sides(shape, full_weights(shape), how, world)
        check_coverage([layout for layout, _ in sources], [whole])


def test_names_and_shapes_are_those_of_transformers():
    from transformers import AutoConfig, AutoModelForCausalLM

    for config in (
        DENSE,
        DENSE | {"model_type": "qwen2", "tie_word_embeddings": True},
        DENSE | {"model_type": "llama"},
    ):
        shape = ModelShape.of(config)
        options = {key: value for key, value in config.items() if key != "model_type"}
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **options))
        expected = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
        assert {w.name: w.shape for w in shape.weights()} == expected


@given(
    rows=st.integers(0, 40),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_boxes_of_any_placements_are_what_torch_cuts(rows, mesh, data):
    """DT-1, with uneven division, empty and strided shards"""
    kinds = st.one_of(
        st.just(Replicate()),
        st.integers(0, 1).map(Shard),
        st.tuples(st.integers(0, 1), st.integers(2, 3)).map(lambda a: _StridedShard(a[0], split_factor=a[1])),
    )
    placements = [data.draw(kinds) for _ in mesh]
    at = [data.draw(st.integers(0, n - 1)) for n in mesh]
    full = torch.arange(rows * 6).view(rows, 6)
    local = local_by_torch(full, mesh, at, placements)
    covered = torch.zeros_like(local, dtype=torch.bool)
    for box, offset in dtensor.boxes_of("w", full.shape, mesh, at, placements):
        where = tuple(slice(a, a + n) for a, n in zip(offset, box.shape, strict=True))
        assert torch.equal(local[where], full[box.slices_in(Box.whole(full.shape))])
        covered[where] = True
    assert bool(covered.all())


def test_parameters_of_fsdp2_over_tensor_parallelism_are_described_as_they_lie():
    """DT-1 with torch's own FSDP2 and ColwiseParallel; the process group is torch's fake one: rank 1 of 4, no peers"""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["fsdp"])
        held = dtensor.held(model.named_parameters())
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            (part,) = (part for part in held.parts if part.entry.name == name)
            assert part.entry.box.shape == tuple(param.to_local().shape)
            assert held.views(name, [{name: param.to_local()}])[0].shape == part.entry.box.shape
        boxes = {part.entry.name: part.entry.box for part in held.parts}
        # FSDP rank 0, tensor-parallel rank 1. 10 rows: halves of 5, of which FSDP ranks hold 3 and 2
        assert boxes["0.weight"] == Box((5, 0), (8, 6))
        assert boxes["1.weight"] == Box((0, 5), (2, 10))
    finally:
        torch.distributed.destroy_process_group()


def test_partial_sum_is_refused_with_its_name():
    """DT-2"""
    with pytest.raises(LayoutError, match=r"model\.w: placement .* is not a part of a weight"):
        list(dtensor.boxes_of("model.w", (4, 4), (2,), (0,), [Partial()]))


def test_stacked_experts_are_told_apart_into_the_names_of_the_checkpoint():
    """DT-3: 3 experts of 4 rows; a rank with experts 1 and 2"""
    gate_up = torch.arange(3 * 8 * 2.0).view(3, 8, 2)
    down = torch.arange(3 * 2 * 4.0).view(3, 2, 4)
    name = "model.layers.0.mlp.experts"
    held = dtensor.held([(f"{name}.gate_up_proj", gate_up), (f"{name}.down_proj", down)], split_experts=True)
    local = {f"{name}.gate_up_proj": gate_up, f"{name}.down_proj": down}
    assert sorted(held.layout.parts) == sorted(
        f"{name}.{e}.{p}_proj.weight" for e in range(3) for p in ("gate", "up", "down")
    )
    for expert in range(3):
        (gate,) = held.views(f"{name}.{expert}.gate_proj.weight", [local])
        (up,) = held.views(f"{name}.{expert}.up_proj.weight", [local])
        (one_down,) = held.views(f"{name}.{expert}.down_proj.weight", [local])
        assert torch.equal(gate, gate_up[expert, :4])
        assert torch.equal(up, gate_up[expert, 4:])
        assert torch.equal(one_down, down[expert])
        assert gate.data_ptr() == gate_up[expert].data_ptr()  # HE-1


def test_tied_module_is_sent_once_and_derived_and_its_buffers_are_accounted_for():
    """MD-1, MD-2"""
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(5, 3)
    model.head = torch.nn.Linear(3, 5, bias=False)
    model.head.weight = model.embed.weight
    model.register_buffer("rotary", torch.zeros(4))
    model.register_buffer("router_bias", torch.zeros(2))
    receiver = modules.receiver_layout(model, sent_buffers=["router_bias"])
    assert receiver.derived == {"head.weight": "embed.weight"}
    assert receiver.constant == ("rotary",)
    sender = modules.sender_layout(model, sent_buffers=["router_bias"])
    assert [e.name for e in sender.entries] == ["embed.weight", "router_bias"]
    check_coverage([sender], [receiver])
    with pytest.raises(LayoutError, match="router_bias: rollout rank 0 needs it and no trainer rank has it"):
        check_coverage([modules.sender_layout(model)], [receiver])
    with pytest.raises(LayoutError, match=r"rotari: not a buffer of this module; it has \['rotary', 'router_bias'\]"):
        modules.receiver_layout(model, sent_buffers=["rotari"])


def test_experts_that_were_moved_are_wanted_where_they_live_now():
    """SV-2"""
    shape = MODELS["sparse"]
    serving = Serving(tp=2, expert_parallel=True)
    even = served(shape, serving, 0)
    moved = served(shape, serving, 0, placement=[(7, 1, 2, 3), (0, 4, 5, 6, 7)])
    expert = "model.layers.0.mlp.experts.{}.up_proj.weight".format
    assert expert(0) in even.by_name
    assert expert(0) not in moved.by_name
    assert expert(7) in moved.by_name
    assert even.digest != moved.digest  # so that the plan is made anew (W1)
    with pytest.raises(LayoutError, match=r"experts \[5\] are placed on no rank"):
        served(shape, serving, 0, placement=[(0, 1, 2, 3), (4, 6, 7)])


@pytest.mark.parametrize(
    ("parallel", "world", "text"),
    [
        (MegatronParallel(tp=2, pp=3), 6, r"4 layers don't divide by pp = 3"),
        (MegatronParallel(pp=2, layers=(1, 2)), 2, r"layers = \[1, 2\] add up to 3, the model has 4"),
        (
            MegatronParallel(tp=3),
            3,
            r"o_proj\.weight: axis 1 has 32 parts of 1, which 3 tensor-parallel ranks can't share",
        ),
        (MegatronParallel(tp=2), 3, r"megatron: 3 ranks don't divide by pp = 1 times tp = 2"),
    ],
)
def test_split_that_is_impossible_is_refused_with_what_does_not_divide(parallel, world, text):
    with pytest.raises(LayoutError, match=text):
        megatron.held(MODELS["dense"], parallel, parallel.rank(0, world))


def test_engine_with_a_number_of_ranks_that_cuts_heads_is_refused_by_tensor():
    with pytest.raises(
        LayoutError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight: axis 0 has 8 parts of 4, which 3"
    ):
        served(MODELS["dense"], Serving(tp=3), 0)


def test_model_type_that_is_not_described_is_refused_by_name():
    """MO-2"""
    with pytest.raises(LayoutError, match=r"model_type = 'deepseek_v4': its tensors are not described"):
        ModelShape.of(LATENT | {"model_type": "deepseek_v4"})


def test_weights_are_asked_for_without_a_walk_through_the_model(monkeypatch):
    """HE-3"""
    linear = torch.nn.Linear(2, 3)
    module = torch.nn.ModuleDict({"a": torch.nn.BatchNorm1d(2), "b": torch.nn.Sequential(linear)})
    live = Live(module)
    assert dict(live).keys() == {**dict(module.named_parameters()), **dict(module.named_buffers())}.keys()
    assert len(live) == 7
    names = list(live)
    monkeypatch.setattr(torch.nn.Module, "named_modules", lambda *_, **__: pytest.fail("it walks through all modules"))
    assert all(live[name] is not None for name in names)
    assert live["b.0.weight"] is linear.weight
    linear.weight = torch.nn.Parameter(torch.ones(3, 2))
    assert live["b.0.weight"] is linear.weight
    for missing in ("b.0.gain", "c.weight", "b.0", "weight"):
        assert missing not in live


def test_module_that_was_built_otherwise_is_refused_with_both_descriptions():
    held = megatron.held(MODELS["dense"], MegatronParallel(), MegatronParallel().rank(0, 1))
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(
        LayoutError, match=rf"{name}: expected in parameter 'decoder\.layers\.0\.mlp\.linear_fc1\.weight'"
    ):
        held.views(name, [{"decoder.layers.0.mlp.fc1": torch.zeros(1)}])
    with pytest.raises(LayoutError, match=r"expected at \[\(24, 48\), \(0, 16\)\] of .* shape \[24, 16\]"):
        held.views(name, [{"decoder.layers.0.mlp.linear_fc1.weight": torch.zeros(24, 16)}])
