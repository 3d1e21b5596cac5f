"""What a weight transfer would move and cost, without starting anything.

    python -m sync.explain job.toml
    python -m sync.explain --model path/to/config.json --trainer 256 --megatron tp=8,pp=8,ep=32,etp=1 --engine tp=16 \\
        --replicas 8 --network 50e9

EX-1: it makes the very plan that a session makes, from `config.json` and the parallel sizes alone; the tables
      `[trainer]`, `[rollout]` and `[sync]` of the job say how many ranks there are and how they split the model. A
      rollout rank of a job is a whole replica; `--engine` describes engines whose ranks are reached one by one.
EX-2: every tensor of a rollout rank is told as sent, scales, derived or constant, in bytes (W2).
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sync.bounds import Links, lower_bounds, simulate
from sync.coverage import sent_entries
from sync.formats import Scaling
from sync.layout import Entry, Layout, LayoutError
from sync.layouts import dtensor, megatron
from sync.layouts.held import Held, Part
from sync.layouts.megatron import MegatronParallel
from sync.layouts.model import ModelShape
from sync.layouts.served import Serving, served
from sync.plan import Plan, make_plan

__all__ = ["coverage", "explain", "main", "quantised"]


def explain(plan: Plan, sinks: Sequence[Layout], links: Links, *, relay: bool = False) -> str:
    """Bytes, segments, load of each link, coverage, lower bounds and the simulated time of a plan.

    Args:
        sinks: the layouts of the rollout ranks that the plan was made for.
    """
    sent = [sum(b.num_bytes * len(b.sinks) for b in plan.sent_by(r)) for r in range(plan.num_senders)]
    read = [sum(b.num_bytes for b in plan.received_by(r)) for r in range(plan.num_sinks)]
    segments = sum(len(b.segments) for b in plan.buckets)
    bounds = lower_bounds(plan, links)
    run = simulate(plan, links, relay=relay)
    lines = [
        f"plan {plan.key[:12]}: {_gb(plan.payload_bytes)} packed once, {_gb(sum(sent))} delivered",
        f"  {segments} segments in {len(plan.buckets)} buckets of at most {_gb(plan.bucket_bytes)}",
        f"  {plan.num_senders} trainer ranks send    {_spread(sent)}",
        f"  {plan.num_sinks} rollout ranks read    {_spread(read)}",
        *(f"  {what}: {text}" for what, text in coverage(sinks).items()),
        f"  at least {_ms(bounds.receive)} to read, {_ms(bounds.cast)} to cast",
        f"  at least {_ms(bounds.send)} to send, {_ms(bounds.send_relayed)} where rollout ranks relay",
        f"  simulated {_ms(run.seconds)}: {100 * run.efficiency:.0f} % of the bound that binds, {_ms(run.bound)}",
    ]
    return "\n".join(lines)


def coverage(sinks: Sequence[Layout]) -> dict[str, str]:
    """Tensors and bytes of one rollout rank by where they come from (EX-2), over all ranks."""
    count = dict.fromkeys(("sent", "scales", "derived", "constant"), 0)
    size = dict(count)
    for layout in sinks:
        sent = {entry.name for entry in sent_entries(layout)}
        for entry in layout.entries:
            kind = (
                "sent"
                if entry.name in sent
                else "derived"
                if entry.name in layout.derived
                else "constant"
                if entry.name in layout.constant
                else "scales"
            )
            count[kind] += 1
            size[kind] += entry.num_bytes
    return {kind: f"{count[kind]} tensors, {_gb(size[kind])}" for kind in count if count[kind]}


def quantised(layout: Layout, matrices: Iterable[str], dtype: str, scaling: Scaling) -> Layout:
    """A layout with some of its matrices in 8-bit floats, the scales listed behind each.

    Args:
        matrices: names of the weights to quantise; the others stay as they are.
        scaling: the format; its `scale_name` is put behind `<name without .weight>.`.
    """
    chosen = set(matrices)
    entries: list[Entry] = []
    for entry in layout.entries:
        if entry.name not in chosen:
            entries.append(entry)
            continue
        name = f"{entry.name.removesuffix('.weight')}.{scaling.scale_name}"
        own = msgspec.structs.replace(scaling, scale_name=name)
        weight = msgspec.structs.replace(entry, dtype=dtype, scaling=own)
        entries += [weight, weight.scales()]
    return Layout(tuple(entries), layout.derived, layout.constant)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the explanation of a job, or of sizes given on the command line."""
    options = _parser().parse_args(arguments)
    try:
        job = tomllib.loads(options.job.read_text(encoding="utf-8")) if options.job else {}
        print(_explained(job, options))  # noqa: T201
    except OSError as error:
        told = f"{error.filename}: can't be read: {error.strerror}"
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        told = f"{options.job or options.model}: can't be parsed: {error}"
    except LayoutError as error:
        told = str(error)
    else:
        return 0
    print(f"error: {told}", file=sys.stderr)  # noqa: T201
    return 2


def _explained(job: Mapping[str, Any], options: argparse.Namespace) -> str:
    model = ModelShape.of(json.loads(_config_path(job, options).read_text(encoding="utf-8")))
    trainer, rollout = job.get("trainer", {}), job.get("rollout", {})
    ranks = options.trainer or int(trainer.get("ranks", 1))
    # Trainers of a job keep float32 weights to train, and its engines are float32 unless it says otherwise.
    held = msgspec.structs.replace(model, dtype="float32") if job else model
    sources = _sources(held, trainer, options.megatron, ranks)
    serving = _serving(rollout, options.engine, "float32" if job else "")
    replicas = options.replicas or int(rollout.get("ranks", 1))
    one = [served(model, serving, rank) for rank in range(serving.tp)]
    if options.quantise:
        matrices = [w.name for w in model.weights() if w.role == "matrix"]
        format_ = Scaling("block", "weight_scale_inv")
        one = [quantised(layout, matrices, "float8_e4m3fn", format_) for layout in one]
    bucket = options.bucket_bytes or int(job.get("sync", {}).get("bucket_bytes", 256 << 20))
    sinks = one * replicas
    plan = make_plan(sources, sinks, bucket_bytes=bucket, spread=not options.relay)
    links = Links(network=options.network, inside=options.inside, one_host=options.one_host)
    return explain(plan, sinks, links, relay=options.relay)


def _config_path(job: Mapping[str, Any], options: argparse.Namespace) -> Path:
    if options.model:
        path: Path = options.model
    elif "path" in job.get("model", {}):
        path = options.job.parent / job["model"]["path"]
    else:
        raise LayoutError("no model is named: give --model, or [model] path in the job file")
    return path / "config.json" if path.is_dir() else path


def _sources(model: ModelShape, table: Mapping[str, Any], sizes: str, ranks: int) -> list[Layout]:
    if sizes or table.get("backend") == "megatron":
        parallel = _parallel(table, sizes)
        made: dict[megatron.MegatronRank, Layout] = {}
        for rank in range(ranks):
            at = parallel.rank(rank, ranks)
            if at not in made:
                made[at] = megatron.held(model, parallel, at).layout
        return [made[parallel.rank(rank, ranks)] for rank in range(ranks)]
    if table.get("strategy", "fsdp2") == "ddp":
        whole = Layout(tuple(Entry.whole(w.name, w.shape, w.dtype) for w in model.weights()))
        return [whole] * ranks
    return [_fsdp(model, rank, ranks) for rank in range(ranks)]


def _fsdp(model: ModelShape, rank: int, ranks: int) -> Layout:
    from torch.distributed.tensor import Shard

    parts = [
        Part.of_rows(w.name, w.shape, w.dtype, box, w.name, at)
        for w in model.weights()
        for box, at in dtensor.boxes_of(w.name, w.shape, (ranks,), (rank,), [Shard(0)])
    ]
    return Held(parts).layout


def _parallel(table: Mapping[str, Any], sizes: str) -> MegatronParallel:
    given = _sizes(sizes, MegatronParallel.__struct_fields__)
    return MegatronParallel(
        tp=given.get("tp", table.get("tensor_parallel", 1)),
        pp=given.get("pp", table.get("pipeline_parallel", 1)),
        vpp=given.get("vpp", table.get("pipeline_chunks", 1)),
        ep=given.get("ep", table.get("expert_parallel", 1)),
        etp=given.get("etp", table.get("expert_tensor_parallel", 1)),
        layers=tuple(given["layers"] if "layers" in given else table.get("pipeline_layers", ())),
    )


def _serving(table: Mapping[str, Any], sizes: str, dtype: str) -> Serving:
    given = _sizes(sizes, ("tp", "ep"))
    return Serving(
        tp=given.get("tp", 1),
        expert_parallel=bool(given.get("ep", False)),
        dtype=str(table.get("dtype", dtype)),
    )


def _sizes(text: str, known: Iterable[str]) -> dict[str, Any]:
    """`tp=8,layers=11:11:11:10` as numbers and tuples of numbers."""
    found: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in known or not value.replace(":", "").isdecimal():
            raise LayoutError(f"{item!r}: expected name=number with a name of {', '.join(known)}")
        found[name] = tuple(map(int, value.split(":"))) if ":" in value else int(value)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sync.explain", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("job", nargs="?", type=Path, help="a job file; options below override it")
    parser.add_argument("--model", type=Path, help="config.json of the model, or its folder")
    parser.add_argument("--trainer", type=int, default=0, metavar="RANKS")
    parser.add_argument("--megatron", default="", metavar="SIZES", help="tp=4,pp=4,ep=4,etp=1,layers=11:11:11:10")
    parser.add_argument("--engine", default="", metavar="SIZES", help="tp=8, or tp=16,ep=1 for whole experts on ranks")
    parser.add_argument("--replicas", type=int, default=0, help="engines that each hold the whole model")
    parser.add_argument("--quantise", action="store_true", help="matrices as 8-bit floats with 128x128 blocks")
    parser.add_argument("--relay", action="store_true", help="rollout ranks pass on what replicas want alike")
    parser.add_argument("--bucket-bytes", type=int, default=0)
    parser.add_argument("--network", type=float, default=50e9, help="bytes/s of a rank between hosts")
    parser.add_argument("--inside", type=float, default=367e9, help="bytes/s of a rank inside its host")
    parser.add_argument("--one-host", action="store_true", help="all ranks share a host")
    return parser


def _spread(values: Sequence[int]) -> str:
    mean = sum(values) / max(1, len(values))
    return f"{_gb(min(values))} to {_gb(max(values))} each, mean {_gb(mean)}"


def _gb(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


if __name__ == "__main__":
    sys.exit(main())
