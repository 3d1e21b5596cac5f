"""8-bit floats from every trainer layout: codes and scales are those of the full tensors, whoever holds parts of a
block (ME-1, DT-1, QU-1, PL-8)."""

from __future__ import annotations

import pytest
import torch

from sync.agree import agreed
from sync.explain import quantised
from sync.formats import Scaling
from sync.layouts.served import Serving, served
from sync.memory import allocate
from sync.messages import Largest
from sync.pack import Packer, measure
from sync.plan import make_plan
from sync.shadow import Shadow
from tests.sync.models import MODELS, full_weights
from tests.sync.test_layouts import TRAINERS, trainer_sides
from tests.sync.test_quantise import whole

FORMATS = {
    "block": Scaling("block", "weight_scale_inv", (4, 8)),
    "powers of two": Scaling("block", "weight_scale_inv", (8, 4), "ue8m0"),
    "channel": Scaling("channel", "weight_scale"),
    "tensor": Scaling("tensor", "weight_scale"),
}
CASES = [
    pytest.param(model, trainer, kind, id=f"{model}: {trainer}, {kind}")
    for place, (model, trainer) in enumerate((model, trainer) for model in TRAINERS for trainer in TRAINERS[model])
    for kind in (list(FORMATS)[place % 4], list(FORMATS)[(place + 1) % 4])
]


@pytest.mark.parametrize(("model", "trainer", "kind"), CASES)
def test_codes_and_scales_from_every_trainer_layout_are_those_of_the_full_tensors(model, trainer, kind):
    shape, scaling = MODELS[model], FORMATS[kind]
    full = full_weights(shape)
    sources = trainer_sides(shape, full, *TRAINERS[model][trainer])
    matrices = [w.name for w in shape.weights() if w.role == "matrix"]
    sink = quantised(served(shape, Serving(), 0), matrices, "float8_e4m3fn", scaling)
    plan = make_plan([layout for layout, _ in sources], [sink], bucket_bytes=1024)
    common = {
        name: (item.blocks, torch.frombuffer(bytearray(item.values), dtype=torch.float32).view(item.blocks.shape))
        for name, item in agreed(
            Largest(name=name, blocks=blocks, values=most.numpy().tobytes())
            for rank, (layout, weight) in enumerate(sources)
            for name, parts in measure(plan.sent_by(rank), weight, layout.parts, "trainer").items()
            for blocks, most in parts
        ).items()
    }
    shadow = Shadow(sink, 1, "rollout")
    for bucket in plan.buckets:
        memory = allocate(bucket.num_bytes)
        layout, weight = sources[bucket.owner]
        packer = Packer(weight, layout.parts, "trainer", common)
        packer.pack(bucket, memory)
        assert tuple(shadow.add(bucket, memory)) == packer.digests()[bucket.index]
    shadow.check_complete()
    got = shadow.weights()
    for entry in sink.entries:
        if entry.scaling is not None:
            codes, scales = whole(full[entry.name], entry.scaling)
            assert torch.equal(got[entry.name].view(torch.uint8), codes.view(torch.uint8)), entry
            assert torch.equal(got[entry.scaling.scale_name], scales), entry
