"""Publishing a version from one GPU to another of the same host, verified and committed, beside a raw NCCL broadcast.

    python -m benchmarks.gpu.sync --json FILE [CASE...]

A trainer process on GPU 0 and a rollout process on the last GPU, random weights in the shapes of Qwen3-0.6B and
Qwen3-8B. Each case is a process of its own with a time limit, so that one which fails leaves the others; each row is
printed and written as it comes, a table ends the run. The raw broadcast moves the same bytes in pieces of 256 MiB with
no digest, no staging and no decision. "decoding" is a loop over the weights in service: matrix products of 64 rows.

    kernels            what the kernels of packing reach, beside a copy inside the GPU
    raw                NCCL broadcast of as many bytes; run it first, the others take it for their peer
    0.6B-ipc ...       publish, pause, memory over 200 versions: SIZE-TRANSPORT, and -fp8 for 128x128 blocks
    0.6B-same, 8B-same trainer and rollout share GPU 0
    decoding           how fast the rollout decodes while versions arrive, one after the other
    dying-nccl ...     the rollout is killed while bytes are on their way; how long the trainer's side takes to know
    vllm               vLLM's own NCCL weight transfer between two processes, without its loaders, where vLLM is there
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.table import Row, to_markdown
from runtime import Actor, ActorMesh, endpoint, this_host
from sync.explain import quantised
from sync.formats import Scaling
from sync.layout import Entry, Layout
from sync.layouts.model import ModelShape
from sync.layouts.served import Serving, served
from sync.plan import Plan
from sync.ports import ReceiverPort, SenderPort
from sync.session import SyncConfig, WeightSession
from sync.transport import SyncError

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "dtype": "bfloat16"}
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3
    | {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "8B": QWEN3
    | {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
}
GOALS = {("8B", "bf16"): "<= 0.055", ("8B", "fp8"): "<= 0.035", ("0.6B", "bf16"): "<= 0.012"}


def layouts(size: str, wire: str) -> tuple[Layout, Layout]:
    """Of the trainer and of the rollout."""
    model = ModelShape.of(SIZES[size])
    trainer = Layout(tuple(Entry.whole(w.name, w.shape, w.dtype) for w in model.weights()))
    rollout = served(model, Serving(), 0)
    if wire == "fp8":
        matrices = [w.name for w in model.weights() if w.role == "matrix"]
        rollout = quantised(rollout, matrices, "float8_e4m3fn", Scaling("block", "weight_scale_inv"))
    return trainer, rollout


class Trainer(SenderPort, Actor):
    """Random weights on GPU 0."""

    def __init__(self, size: str) -> None:
        torch.cuda.set_device(0)
        self.layout, _ = layouts(size, "bf16")
        self.weights = {e.name: torch.randn(e.shape, device="cuda").to(torch.bfloat16) for e in self.layout.entries}
        self.weight_source = self

    def weight_layout(self) -> Layout:
        return self.layout

    def weight(self, name: str) -> Tensor:
        return self.weights[name]


class Rollout(ReceiverPort, Actor):
    """Weights on one GPU: keeps what it is given and hands back what it had."""

    def __init__(self, size: str, wire: str, gpu: int = -1) -> None:
        last = gpu % torch.cuda.device_count()
        torch.cuda.set_device(last)
        self.weight_device = f"cuda:{last}"
        _, self.layout = layouts(size, wire)
        self.weights: Mapping[str, Tensor] = {
            e.name: torch.zeros(e.box.shape, dtype=getattr(torch, e.dtype), device="cuda")
            for e in self.layout.entries
            if e.name not in self.layout.derived
        }
        self.rows = {n: torch.randn(64, n, device="cuda").to(torch.bfloat16) for n in (1024, 2048, 3072, 4096, 12288)}
        self.weight_sink = self

    def weight_layout(self) -> Layout:
        return self.layout

    def swap(self, weights: Mapping[str, Tensor], version: int) -> Mapping[str, Tensor]:
        self.weights, before = dict(weights), self.weights
        return before

    @endpoint
    def decode(self, seconds: float) -> tuple[int, float]:
        """Products of 64 rows with every matrix in service; how many passes in how many seconds."""
        began, passes = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for weight in self.weights.values():
                if weight.ndim == 2 and weight.dtype == torch.bfloat16 and weight.shape[1] in self.rows:
                    torch.matmul(self.rows[weight.shape[1]], weight.t())
            torch.cuda.synchronize()
            passes += 1
        return passes, time.perf_counter() - began

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def used(self) -> float:
        """GB in use on this GPU."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e9


class Raw(Actor):
    """A bare broadcast of as many bytes."""

    def __init__(self, rank: int) -> None:
        torch.cuda.set_device(min(rank, torch.cuda.device_count() - 1))
        self.piece = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    @endpoint
    def broadcast(self, num_bytes: int, rounds: int) -> float:
        """Best time of all bytes, in seconds."""
        best = float("inf")
        for _ in range(rounds + 2):
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for start in range(0, num_bytes, len(self.piece)):
                dist.broadcast(self.piece[: min(len(self.piece), num_bytes - start)], src=0)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    @endpoint
    def copy(self, num_bytes: int, rounds: int) -> float:
        """Best time of copying as many bytes inside this GPU, in seconds."""
        other = torch.empty_like(self.piece)
        best = float("inf")
        for _ in range(rounds + 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for start in range(0, num_bytes, len(self.piece)):
                size = min(len(self.piece), num_bytes - start)
                other[:size].copy_(self.piece[:size])
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return best

    @endpoint
    def gpus(self) -> int:
        return torch.cuda.device_count()


class Report:
    """Rows as they come, also into a file: a later case finds what an earlier one has measured."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, **fields: Any) -> None:
        row = Row(**fields)
        print(json.dumps(row.as_dict()), flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row.as_dict()) + "\n")

    @property
    def rows(self) -> list[Row]:
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        return [Row(**{k: v for k, v in json.loads(line).items() if k not in ("ratio", "met")}) for line in lines]

    def seconds(self, name: str) -> float | None:
        """What a row says, if it is there."""
        return next((row.ours for row in self.rows if row.name == name), None)


def bytes_of(size: str) -> int:
    return sum(entry.num_bytes for entry in layouts(size, "bf16")[0].entries)


async def raw(report: Report) -> None:
    """Raw NCCL broadcast of each size between two GPUs; with one GPU a copy inside it."""
    async with this_host() as host:
        procs = await host.spawn_procs(2, name="raw", start="fresh")
        parts = [await procs.slice(rank=r).spawn(f"raw{r}", Raw, r) for r in range(2)]
        both = await parts[0].gpus.call_one() > 1
        if both:
            await procs.init_process_group("nccl")
        for size in SIZES:
            if both:
                calls = (part.broadcast.call_one(bytes_of(size), 5) for part in parts)
                seconds = max(await asyncio.gather(*calls))
            else:
                seconds = await parts[0].copy.call_one(bytes_of(size), 5)
            note = (
                f"{'raw NCCL broadcast' if both else 'copy inside the GPU'}, {bytes_of(size) / seconds / 1e9:.0f} GB/s"
            )
            report.add(name=f"{size}: raw", ours=seconds, unit="s", note=note)
        await procs.stop()


@contextlib.asynccontextmanager
async def session(
    size: str, wire: str, transport: str, gpu: int = -1, bucket_bytes: int = 0
) -> AsyncIterator[tuple[WeightSession, ActorMesh]]:
    async with this_host() as host:
        procs = await host.spawn_procs(2, name="ranks", start="fresh")
        trainer = await procs.slice(rank=0).spawn("trainer", Trainer, size)
        rollout = await procs.slice(rank=1).spawn("rollout", Rollout, size, wire, gpu)
        config = SyncConfig(transport=transport, deadline_s=30.0, bucket_bytes=bucket_bytes)  # type: ignore[arg-type]
        try:
            async with WeightSession(trainer, rollout, config) as opened:
                yield opened, rollout
        finally:
            await procs.stop()


async def publish(report: Report, size: str, wire: str, transport: str, gpu: int = -1, bucket_bytes: int = 0) -> None:
    """Times, pause and memory of one size, wire format and transport."""
    where = "one GPU" if gpu == 0 else "two GPUs" if torch.cuda.device_count() > 1 else "one GPU"
    what = f"{size} bf16 -> {wire}, {transport}, {where}"
    if bucket_bytes:
        what += f", pieces of {bucket_bytes >> 20} MiB"
    async with session(size, wire, transport, gpu, bucket_bytes) as (opened, rollout):
        commits = [await opened.publish(version) for version in range(15)][3:]
        best = min(commits, key=lambda c: c.seconds)
        median, rate = statistics.median(c.seconds for c in commits), best.bytes / best.seconds / 1e9
        note = (
            f"median {median * 1e3:.1f} ms; pack {best.pack_seconds * 1e3:.1f}, stage {best.stage_seconds * 1e3:.1f}; "
            f"{best.bytes / 1e9:.2f} GB, {rate:.0f} GB/s"
        )
        goal = GOALS.get((size, wire), "") if where == "two GPUs" or size == "0.6B" else ""
        peer = report.seconds(f"{size}: raw")
        report.add(name=f"{what}: publish", ours=best.seconds, peer=peer, unit="s", goal=goal, note=note)
        pause = max(c.pause_seconds for c in commits)
        report.add(name=f"{what}: pause", ours=pause, unit="s", goal="<= 0.05", note="swap, the longest of 12")
        before, count = await rollout.used.call_one(), 200 if size == "0.6B" else 60
        for version in range(15, 15 + count):
            await opened.publish(version)
        grown = await rollout.used.call_one() - before
        report.add(name=f"{what}: memory grown over {count} versions", ours=grown, unit="GB", goal="<= 0.001")
        report.add(name=f"{what}: memory in use", ours=before, unit="GB", note="of the GPU: models, shadow, contexts")


async def decoding(report: Report) -> None:
    """Throughput of decoding alone, and while versions are published one after the other."""
    transport = "ipc"
    async with session("8B", "bf16", transport) as (opened, rollout):
        version = 0

        async def rate(until: asyncio.Event) -> float:
            passes, busy = 0, 0.0
            while not until.is_set():
                count, seconds = await rollout.decode.call_one(0.03)
                passes, busy = passes + count, busy + seconds
            return passes / busy

        async def publish_for(seconds: float) -> int:
            nonlocal version
            count, ends = 0, time.perf_counter() + seconds
            while time.perf_counter() < ends:
                await opened.publish(version)
                version, count = version + 1, count + 1
            return count

        async def alone() -> float:
            over = asyncio.Event()
            asyncio.get_running_loop().call_later(2.0, over.set)
            return await rate(over)

        async def beside() -> tuple[float, int]:
            over = asyncio.Event()
            running = asyncio.ensure_future(rate(over))
            count = await publish_for(2.0)
            over.set()
            return await running, count

        await publish_for(0.3)
        await alone()
        before, (found, count), after = await alone(), await beside(), await alone()
        report.add(
            name=f"8B bf16 -> bf16, {transport}: decoding during transfers",
            ours=found,
            peer=(before + after) / 2,
            unit="passes/s",
            goal=">= 0.95x",
            note=f"{count} versions in 2 s, one after the other: what one in flight all the time costs",
        )


async def dying(report: Report, transport: str) -> None:
    """Kill the rollout while a version is on its way; how long until `publish` raises, and what it keeps."""
    async with session("8B", "bf16", transport) as (opened, rollout):
        for version in range(3):
            took = (await opened.publish(version)).seconds
        pid = await rollout.pid.call_one()
        running = asyncio.ensure_future(opened.publish(3))
        await asyncio.sleep(took / 3)
        assert not running.done()
        os.kill(pid, signal.SIGKILL)
        began = time.perf_counter()
        try:
            await asyncio.wait_for(running, 20)
            told = "published all the same"
        except SyncError as error:
            told = str(error).partition("\n")[0]
        seconds = time.perf_counter() - began
        report.add(
            name=f"8B, {transport}: rollout killed in flight, until publish raises",
            ours=seconds,
            unit="s",
            goal="<= 1",
            note=f"version {opened.version} stays; {told}"[:300],
        )


def kernels(report: Report) -> None:
    """What packing reaches inside one GPU: bytes read of bf16 weights per second."""
    from sync.pack import Packer
    from sync.plan import make_plan
    from sync.repeat import Repeats

    def best(run: Callable[[], object]) -> float:
        found = float("inf")
        for _ in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            found = min(found, time.perf_counter() - began)
        return found

    for size in SIZES:
        trainer, _ = layouts(size, "bf16")
        weights = {e.name: torch.randn(e.shape, device="cuda").to(torch.bfloat16) for e in trainer.entries}
        one, other = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
        copy = best(lambda a=one, b=other: a.copy_(b)) / len(one) * bytes_of(size)  # type: ignore[misc]
        for wire in ("bf16", "fp8"):
            plan = make_plan([trainer], [layouts(size, wire)[1]], bucket_bytes=128 << 20)
            repeats = Repeats()
            ring = torch.empty(4 * plan.largest_bucket, dtype=torch.uint8, device="cuda").view(4, -1)

            packing = partial(Packer, weights.__getitem__, trainer.parts, "trainer rank 0", repeats=repeats)

            def pack(plan: Plan = plan, ring: Tensor = ring, packing: Callable[[], Packer] = packing) -> None:
                packer = packing()
                for bucket in plan.buckets:
                    packer.pack(bucket, ring[bucket.index % 4][: bucket.num_bytes])
                packer.digests()

            seconds = best(pack)
            note = f"{bytes_of(size) / seconds / 1e9:.0f} GB/s of bf16 read; peer: a copy of as many bytes"
            report.add(name=f"{size} -> {wire}: pack, cast and hash", ours=seconds, peer=copy, unit="s", note=note)


TRAINER_OF_VLLM = """
import sys, time, torch
torch.cuda.set_device(0)
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs as A, NCCLWeightTransferEngine as E
items = [(n, torch.zeros(s, dtype=torch.bfloat16, device="cuda")) for n, s in eval(sys.stdin.readline())]
group = E.trainer_init(dict(master_address="127.0.0.1", master_port=int(sys.argv[1]), world_size=2))
for _ in range(int(sys.argv[2])):
    sys.stdin.readline()
    E.trainer_send_weights(iter(items), A(group=group, packed=True))
    torch.cuda.synchronize()
"""


def vllm(report: Report) -> None:
    """vLLM's NCCL engine moves the same tensors; each is copied to its place, and nothing is loaded or verified."""
    if importlib.util.find_spec("vllm") is None or torch.cuda.device_count() < 2:
        print("vllm: it or a second GPU is not there", flush=True)
        return
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    torch.cuda.set_device(1)
    for size in SIZES:
        entries = layouts(size, "bf16")[0].entries
        command = [sys.executable, "-c", TRAINER_OF_VLLM, str(port), "6"]
        sender = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert sender.stdin is not None
        print([(e.name, e.shape) for e in entries], file=sender.stdin, flush=True)
        held = {e.name: torch.zeros(e.shape, dtype=torch.bfloat16, device="cuda") for e in entries}
        peers = StatelessProcessGroup.create(host="127.0.0.1", port=port, rank=1, world_size=2)
        group = PyNcclCommunicator(peers, device=torch.device("cuda:1"))

        def load(weights: Any, held: Any = held) -> None:
            for name, tensor in weights:
                held[name].copy_(tensor)

        found = []
        for _ in range(6):
            torch.cuda.synchronize()
            began = time.perf_counter()
            print(file=sender.stdin, flush=True)
            packed_nccl_broadcast_consumer(
                iterator=iter([(e.name, (list(e.shape), torch.bfloat16)) for e in entries]),
                group=group,
                src=0,
                post_unpack_func=load,
                buffer_size_bytes=1 << 30,
                num_buffers=2,
            )
            torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        sender.wait(20)
        note = f"median {statistics.median(found[1:]) * 1e3:.0f} ms; no loaders, no digest"
        ours = report.seconds(f"{size} bf16 -> bf16, nccl, two GPUs: publish")
        report.add(name=f"{size}: vLLM's NCCL engine", ours=ours, peer=min(found[1:]), unit="s", note=note)
        del held
        port += 1


CASES: dict[str, tuple[float, Callable[[Report], object]]] = {
    "raw": (40, raw),
    "kernels": (50, kernels),
    "8B-ipc-fp8": (60, lambda r: publish(r, "8B", "fp8", "ipc")),
    "8B-nccl": (60, lambda r: publish(r, "8B", "bf16", "nccl")),
    "8B-ipc": (60, lambda r: publish(r, "8B", "bf16", "ipc")),
    "0.6B-ipc": (40, lambda r: publish(r, "0.6B", "bf16", "ipc")),
    "decoding": (45, decoding),
    "8B-nccl-fp8": (60, lambda r: publish(r, "8B", "fp8", "nccl")),
    "0.6B-same": (40, lambda r: publish(r, "0.6B", "bf16", "ipc", 0)),
    "8B-nccl-256": (60, lambda r: publish(r, "8B", "bf16", "nccl", bucket_bytes=256 << 20)),
    "8B-same": (60, lambda r: publish(r, "8B", "bf16", "ipc", 0)),
    "dying-nccl": (40, lambda r: dying(r, "nccl")),
    "0.6B-nccl": (40, lambda r: publish(r, "0.6B", "bf16", "nccl")),
    "0.6B-ipc-fp8": (40, lambda r: publish(r, "0.6B", "fp8", "ipc")),
    "dying-ipc": (40, lambda r: dying(r, "ipc")),
    "vllm": (120, vllm),
}
"""Name -> time limit in seconds, and what to run; in order of importance."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases, each in a process of its own; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file that rows are appended to, a line each")
    parser.add_argument("--seconds", type=float, default=190, help="no case is begun after so long")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: {' '.join(CASES)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    report = Report(options.json)
    if options.here:
        found = CASES[options.cases[0]][1](report)
        if asyncio.iscoroutine(found):
            asyncio.run(found)
        return 0
    ends = time.perf_counter() + options.seconds
    for case in options.cases or CASES:
        began = time.perf_counter()
        if began > ends:
            print(f"{case}: left out, the time is over", flush=True)
            continue
        log = options.json.with_suffix(f".{case}.log")
        code = _run_apart(case, options.json, log)
        print(f"{case}: status {code}, {time.perf_counter() - began:.0f} s", flush=True)
        if code:
            print(log.read_text(encoding="utf-8", errors="replace")[-2000:], flush=True)
    print(to_markdown(report.rows))
    return 0


def _run_apart(case: str, path: Path, log: Path) -> int | str:
    command = [sys.executable, "-m", "benchmarks.gpu.sync", "--json", str(path), "--here", case]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            return process.wait(CASES[case][0])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            return f"more than {CASES[case][0]:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
