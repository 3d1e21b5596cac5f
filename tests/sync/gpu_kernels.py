"""Cases of the kernels against the torch definitions, each a program of its own:

    python -m tests.sync.gpu_kernels [--cpu] [CASE...]

A compiler that crashes, or a kernel that reads what it must not, ends the process; the other cases go on. What differs
is told by its first places, with both values and the count of the rest. `--cpu` runs a case in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from sync.digest import mix64
from sync.formats import Scaling
from sync.layout import Box, Entry, Layout
from sync.quantise import Cast, largest, quantised, scales_of

DEVICE = "cpu" if "--cpu" in sys.argv else "cuda"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

SHAPE = (512, 768)
BOXES: tuple[Box, ...] = (
    Box((0, 0), SHAPE),
    Box((100, 130), (500, 700)),
    Box((128, 0), (129, 3)),
    Box((256, 128), (512, 384)),
)
if DEVICE == "cpu":
    BOXES = (Box((200, 130), (300, 200)), *BOXES[2:])  # an interpreter takes its time


class Differs(Exception):
    """What a kernel made is not what the definition says."""


def same(what: str, found: Tensor, expected: Tensor) -> None:
    """Raises Differs with the first place where two tensors differ, bit for bit."""
    found, expected = found.cpu(), expected.cpu()
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Differs(f"{what}: found {found.dtype} {list(found.shape)}, expected {expected.dtype} {expected.shape}")
    as_ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    bad = (found.contiguous().view(as_ints) != expected.contiguous().view(as_ints)).nonzero()
    if not len(bad):
        return
    places = [tuple(place.tolist()) for place in bad[:: max(1, len(bad) // 5)][:6]]
    told = "; ".join(f"{list(at)}: {_one(found, at)}, expected {_one(expected, at)}" for at in places)
    raise Differs(f"{what}: {len(bad)} of {found.numel()} elements differ: {told}")


def _one(tensor: Tensor, at: tuple[int, ...]) -> str:
    value = tensor[at]
    if tensor.element_size() == 1:
        return f"{value.view(torch.uint8).item():#04x} ({value.float().item():g})"
    return f"{value.item():#x}" if not tensor.is_floating_point() else f"{value.item()!r}"


def weight(dtype: torch.dtype) -> Tensor:
    """Blocks of many sizes: zeros, ties of the rounding, values too small for their scale."""
    made = torch.randn(SHAPE, generator=torch.Generator().manual_seed(7)).mul(0.02)
    made[0, :128] = 0
    made[128:256, 128:256] = 0
    made[256:384, :128] *= torch.logspace(-6, 3, 128)
    made[384:, 128:256] = torch.arange(128 * 128).view(128, 128) / 4096 - 2  # halves, quarters: many ties
    return made.to(dtype)


def copy() -> None:
    """Whole copies of any length, and their digests."""
    from sync.kernels import copy_mixed, mixed

    sizes = [0, 1, 3, 4, 5, 64, 8192 * 4, 8192 * 4 + 1, 300_001]
    for size in sizes + [600_000_004] * (DEVICE == "cuda"):
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE)
        target = torch.zeros_like(source)
        digest = copy_mixed(target, source)
        same(f"copy of {size} bytes", target, source)
        same(f"digest of {size} bytes", digest, mix64(source))
        same(f"digest of {size} bytes where they lie", mixed(source), mix64(source))


def copy_strided() -> None:
    """Copies of views, and between dtypes."""
    from sync.kernels import copy_mixed

    wide = torch.randn(64, 96, device=DEVICE)
    for source, dtype in ((wide.to(torch.bfloat16)[:, 10:50], torch.bfloat16), (wide.t(), torch.bfloat16)):
        target = torch.zeros(source.shape, dtype=dtype, device=DEVICE)
        digest = copy_mixed(target, source)
        same("strided copy", target, source.to(dtype))
        same("its digest", digest, mix64(target.view(torch.uint8).view(-1)))


def copy_many() -> None:
    """A bucket of jobs of unequal sizes and alignments in one kernel, twice."""
    from sync.kernels import copies

    generator = torch.Generator().manual_seed(3)
    sizes = [8, 16, 1000, 32768, 32776, 4096, 131072, 64, 8 * 12345, 0, 7, 32768 + 5, 2_000_000]
    room = torch.randint(0, 256, (sum(sizes) + 64 * len(sizes),), dtype=torch.uint8, generator=generator).to(DEVICE)
    target = torch.zeros_like(room)
    at, starts = 0, []
    for size in sizes:
        starts.append(at)
        at += -(-size // 64) * 64 if size % 3 else -(-size // 8) * 8 + 8  # some begin at multiples of 8 only
    jobs = [(room.data_ptr() + a, target.data_ptr() + a, n) for a, n in zip(starts, sizes, strict=True)]
    ready = copies(jobs, room.device)
    for _ in range(2):
        target.zero_()
        digests = ready.run()
        for job, (a, n) in enumerate(zip(starts, sizes, strict=True)):
            same(f"job {job}, {n} bytes", target[a : a + n], room[a : a + n])
            same(f"digest of job {job}, {n} bytes", digests[job], mix64(room[a : a + n].clone()))


def scaled(kind: str, dtype: torch.dtype, scale: str, code: str) -> Callable[[], None]:
    """Codes and scales of whole weights and of boxes that cut blocks, with largest values found here or given."""

    def case() -> None:
        from sync.kernels_fp8 import Casts

        scaling = Scaling(kind, "s", (128, 128), scale)  # type: ignore[arg-type]
        full, kind_of_code = weight(dtype), getattr(torch, code)
        on_device = full.to(DEVICE)
        casts, expected = [], []
        for box in BOXES:
            cut = box.slices_in(Box.whole(SHAPE))
            most = largest(full[cut], box, SHAPE, scaling)
            for given in (None, most * 1.5):
                scales = scales_of(most if given is None else given, code, scaling)
                expected.append((scales, quantised(full[cut], scales, box, SHAPE, code, scaling)))
                out = torch.zeros(box.shape, dtype=kind_of_code, device=DEVICE)
                room = torch.zeros(scales.shape, device=DEVICE)
                known = None if given is None else given.to(DEVICE)
                casts.append(Cast(on_device[cut], out, room, box, SHAPE, scaling, known))
        ready = Casts(casts)
        for _ in range(2):
            digests, broken = ready.run()
            for place, (cast, (scales, codes)) in enumerate(zip(casts, expected, strict=True)):
                what = f"box {cast.box}, largest values {'found' if cast.most is None else 'given'}"
                same(f"scales, {what}", cast.scales, scales)
                same(f"codes, {what}", cast.codes, codes)
                if place in digests:
                    found = digests[place].block[digests[place].place]
                    same(f"digest, {what}", found, mix64(codes.view(torch.uint8).view(-1)))
                elif not (cast.box.shape[1] % 8 or cast.box.lo[1] % 8):
                    raise Differs(f"{what}: the kernel did not hash")
                cast.codes.view(torch.uint8).zero_()
            same("count of broken tiles", broken, torch.zeros(len(casts), dtype=torch.int32))
        for poison in ("nan", "inf", "-inf"):
            on_device.copy_(full)
            on_device[257, 131] = float(poison)
            told = [bool(n) for n in ready.run()[1].tolist()]
            holds = [a <= 257 < z and b <= 131 < y for cast in casts for (a, b), (z, y) in [(cast.box.lo, cast.box.hi)]]
            if told != holds:
                raise Differs(f"{poison} at [257, 131]: found in boxes {told}, lies in boxes {holds}")

    return case


def cast(source: torch.dtype, target: torch.dtype) -> Callable[[], None]:
    """Tensors of any length, with numbers beyond the range of the target; what is not finite is counted."""

    def case() -> None:
        from sync.kernels_cast import PlainCasts, fits

        limit = torch.finfo(target).max
        generator = torch.Generator().manual_seed(5)
        sizes = [0, 1, 3, 4, 7, 64, 8191, 8192, 8193, 40_001] + [50_000_003] * (DEVICE == "cuda")
        bits = {4: torch.int32, 2: torch.int16}[source.itemsize]
        least, most = torch.iinfo(bits).min, torch.iinfo(bits).max
        made, casts = [], []
        for place, size in enumerate(sizes):
            numbers = torch.randint(least, most, (size + place % 2,), dtype=bits, generator=generator).view(source)
            numbers = torch.where(numbers.isfinite(), numbers, 0.5)[place % 2 :]  # every second one at an odd address
            made.append(numbers)
            room = torch.zeros(size + 8, dtype=target, device=DEVICE)
            there = torch.empty(size + 1, dtype=source, device=DEVICE)[place % 2 : place % 2 + size]
            casts.append((there.copy_(numbers), room[8 - place % 8 :][:size]))
        if not all(fits(*one) for one in casts) or fits(casts[-1][0][::2], casts[-1][1][::2]):
            raise Differs("fits() is wrong")
        ready = PlainCasts(casts)
        for _ in range(2):
            digests, broken = ready.run()
            for place, numbers in enumerate(made):
                expected = numbers.float().clamp(-limit, limit).to(target)
                what = f"{len(numbers)} of {source} to {target}"
                same(what, casts[place][1], expected)
                same(f"digest, {what}", digests[place], mix64(expected.view(torch.uint8)))
            same("count of broken tiles", broken, torch.zeros(len(casts), dtype=torch.int32))
        for poison in ("nan", "inf", "-inf"):
            casts[6][0][8190] = float(poison)
            told = ready.run()[1].tolist()
            if told != [int(place == 6) for place in range(len(casts))]:
                raise Differs(f"{poison} in tensor 6: found {told}")

    return case


def _as_on_a_device(value: bool) -> None:
    """Let packing go by kernels, or not, wherever memory lies."""
    import sync.batch
    import sync.pack

    for module in (sync.batch, sync.pack):
        vars(module)["by_kernels"] = lambda memory: value


def packer_of_floats() -> None:
    """As `packer`, of float32 weights: some cast, some quantised, some sent as they are."""
    packer("float32")


def packer(held: str = "bfloat16") -> None:
    """Buckets of several versions: packed, repeated, packed anew where a weight has moved; digests as on the host."""
    import sync.pack
    from sync.explain import quantised as in_blocks
    from sync.kernels import as_signed
    from sync.plan import make_plan
    from sync.repeat import Repeats
    from sync.shadow import Shadow

    shapes = {
        "a.weight": (256, 384),
        "b.weight": (130, 72),
        "norm.weight": (513,),
        "odd.weight": (3, 5),
        "c.weight": (64, 64),
    }
    source = Layout(tuple(Entry.whole(name, shape, held) for name, shape in shapes.items()))
    wanted = Layout(
        tuple(Entry.whole(n, shape, held if n == "c.weight" else "bfloat16") for n, shape in shapes.items())
    )
    scaling = Scaling("block", "weight_scale_inv")
    sink = in_blocks(wanted, ["a.weight", "b.weight"], "float8_e4m3fn", scaling)
    plan = make_plan([source], [sink], bucket_bytes=1 << 16)
    ring = torch.zeros(len(plan.buckets), plan.largest_bucket, dtype=torch.uint8, device=DEVICE)
    weights: dict[str, Tensor] = {}
    repeats, again, spare, kind = Repeats(), Repeats(), None, getattr(torch, held)
    for version in range(4):
        made = {name: torch.randn(shape).mul(version + 1).to(kind) for name, shape in shapes.items()}
        for name, tensor in made.items():
            if version == 2 or name not in weights:
                weights[name] = tensor.to(DEVICE, copy=True)
            weights[name].copy_(tensor)
        _as_on_a_device(True)
        here = sync.pack.Packer(weights.__getitem__, source.parts, "here", repeats=repeats)
        shadow = Shadow(sink, version, "rollout rank 0", spare, repeats=again)
        stored = {}
        for bucket in plan.buckets:
            here.pack(bucket, ring[bucket.index][: bucket.num_bytes])
            stored[bucket.index] = shadow.add(bucket, ring[bucket.index][: bucket.num_bytes])
        digests = here.digests()
        if digests != sync.pack.to_ints(stored):
            raise Differs(f"version {version}: digests where buckets were packed and where they were stored")
        spare = shadow.weights()
        _as_on_a_device(False)
        there = sync.pack.Packer(made.__getitem__, source.parts, "there")
        for bucket in plan.buckets:
            truth = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            there.pack(bucket, truth)
            for segment, digest in zip(bucket.segments, digests[bucket.index], strict=True):
                cut = slice(segment.offset, segment.offset + segment.num_bytes)
                what = f"version {version}, {segment.name} {segment.box}"
                same(what, ring[bucket.index][cut], truth[cut])
                same(f"digest, {what}", torch.tensor(as_signed(digest)), mix64(truth[cut].clone()).cpu())
    for bucket in plan.buckets:
        if not repeats.run(bucket, ring[bucket.index][: bucket.num_bytes], weights.__getitem__):
            raise Differs(f"bucket {bucket.index} was not repeated")


CASES: dict[str, Callable[[], None]] = {
    "copy": copy,
    "copy-strided": copy_strided,
    "copy-many": copy_many,
    "packer": packer,
    "packer-fp32": packer_of_floats,
    "cast-fp32-bf16": cast(torch.float32, torch.bfloat16),
    "cast-fp32-fp16": cast(torch.float32, torch.float16),
    "cast-bf16-fp16": cast(torch.bfloat16, torch.float16),
    "cast-fp16-bf16": cast(torch.float16, torch.bfloat16),
    "cast-bf16-fp32": cast(torch.bfloat16, torch.float32),
    **{
        f"{kind}-{name}-{scale}-{code}": scaled(kind, dtype, scale, f"float8_{code}")
        for kind in ("block", "channel", "tensor")
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        for scale in ("float32", "ue8m0")
        for code in ("e4m3fn", "e4m3fnuz")
        if kind == "block" or (name, scale) == ("bf16", "float32")
    },
}


def apart(case: str, *flags: str) -> tuple[int, str]:
    """Run a case in a process of its own; its exit status and what it said."""
    command = [sys.executable, "-m", "tests.sync.gpu_kernels", case, *flags]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return 124, f"{case}: not done in 120 s"
    told = run.stdout if run.returncode in (0, 1) and run.stdout else f"{run.stdout}{run.stderr}"
    return run.returncode, told[-3000:].strip()


def here(case: str) -> int:
    """Run a case in this process and print how it went; returns an exit status."""
    try:
        CASES[case]()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    except Differs as error:
        print(f"{case}: {error}", flush=True)
        return 1
    print(f"{case}: equal", flush=True)
    return 0


def main(arguments: list[str]) -> int:
    """Run one case here, several with `--here`, or all of them apart; returns an exit status."""
    names = [a for a in arguments if not a.startswith("-")]
    if len(names) == 1 or "--here" in arguments:
        return max([here(case) for case in names])
    flags = [a for a in arguments if a.startswith("-")]
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(apart, case, *flags) for case in names or CASES]
        results = [future.result() for future in running]
    for status, told in results:
        print(f"[{status}] {told}", flush=True)
    return int(any(status for status, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
