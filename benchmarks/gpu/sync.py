"""Publishing a version from one GPU to another of the same host, verified and committed, beside a raw NCCL broadcast.

    python -m benchmarks.gpu.sync --json FILE [CASE...]

A trainer process on GPU 0 and a rollout process on the last GPU, random weights in the shapes of Qwen3-0.6B and
Qwen3-8B. Each case is a process of its own with a time limit, so that one which fails leaves the others; each row is
printed and written as it comes, a table ends the run. The raw broadcast moves the same bytes in pieces of 256 MiB with
no digest, no staging and no decision. "decoding" is a loop over the weights in service: matrix products of 64 rows.

    kernels            what packing reaches in each way that its kernels can be tuned, beside a copy inside the GPU
    raw                NCCL broadcast of as many bytes; run it first, the others take it for their peer
    0.6B-ipc ...       publish, pause, memory over 200 versions: SIZE-TRANSPORT, -fp8 for 128x128 blocks, -fp32 for a
                       trainer that holds float32
    0.6B-same, 8B-same trainer and rollout share GPU 0; -ring: with no second copy of the weights
    decoding           how fast the rollout decodes while versions arrive, one after the other or one a second
    dying-nccl ...     the rollout is killed while bytes are on their way; how long the trainer's side takes to know
    vllm               vLLM's own NCCL weight transfer between two processes, without its loaders, where vLLM is there
    checkpoint-engine  the same tensors from pinned host memory of two ranks, where the package is there
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.gpu.sync_peers import checkpoint_engine, vllm
from benchmarks.gpu.sync_ranks import SIZES, Raw, Report, RingRollout, Rollout, Trainer, bytes_of
from benchmarks.table import to_markdown
from runtime import ActorMesh, this_host
from sync.session import SyncConfig, WeightSession
from sync.transport import SyncError

GOALS = {("8B", "bf16"): "<= 0.055", ("8B", "fp8"): "<= 0.035", ("0.6B", "bf16"): "<= 0.012"}


def kernels(report: Report) -> None:
    """See `benchmarks.gpu.sync_kernels`, which needs triton."""
    from benchmarks.gpu.sync_kernels import kernels

    kernels(report)


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


class How(NamedTuple):
    """One way to publish."""

    size: str
    wire: str
    transport: str
    gpu: int = -1
    """Of the rollout rank; -1 is the last one."""
    bucket_bytes: int = 0
    ring: bool = False
    """Whether versions are written over those in service."""
    held: str = "bfloat16"
    """What the trainer holds."""

    def __str__(self) -> str:
        what = (
            f"{self.size} {'fp32' if self.held == 'float32' else 'bf16'} -> {self.wire}, {self.transport}, {self.where}"
        )
        if self.bucket_bytes:
            what += f", pieces of {self.bucket_bytes >> 20} MiB"
        return what + (", over the weights in service" if self.ring else "")

    @property
    def where(self) -> str:
        return "two GPUs" if self.gpu != 0 and torch.cuda.device_count() > 1 else "one GPU"


@contextlib.asynccontextmanager
async def session(how: How) -> AsyncIterator[tuple[WeightSession, ActorMesh]]:
    async with this_host() as host:
        procs = await host.spawn_procs(2, name="ranks", start="fresh")
        trainer = await procs.slice(rank=0).spawn("trainer", Trainer, how.size, how.held)
        rollout = await procs.slice(rank=1).spawn(
            "rollout", RingRollout if how.ring else Rollout, how.size, how.wire, how.gpu
        )
        config = SyncConfig(
            transport=how.transport,  # type: ignore[arg-type]
            deadline_s=30.0,
            bucket_bytes=how.bucket_bytes,
            shadow="ring" if how.ring else "full",
        )
        try:
            async with WeightSession(trainer, rollout, config) as opened:
                yield opened, rollout
        finally:
            await procs.stop()


async def publish(report: Report, how: How) -> None:
    """Times, pause and memory of one way."""
    async with session(how) as (opened, rollout):
        commits = [await opened.publish(version) for version in range(15)][3:]
        best = min(commits, key=lambda c: c.seconds)
        median, rate = statistics.median(c.seconds for c in commits), best.bytes / best.seconds / 1e9
        note = (
            f"median {median * 1e3:.1f} ms; pack {best.pack_seconds * 1e3:.1f}, stage {best.stage_seconds * 1e3:.1f}; "
            f"{best.bytes / 1e9:.2f} GB, {rate:.0f} GB/s"
        )
        goal = GOALS.get((how.size, how.wire), "") if how.where == "two GPUs" or how.size == "0.6B" else ""
        peer = report.seconds(f"{how.size}: raw")
        report.add(name=f"{how}: publish", ours=best.seconds, peer=peer, unit="s", goal=goal, note=note)
        pause = max(c.pause_seconds for c in commits)
        report.add(name=f"{how}: pause", ours=pause, unit="s", goal="<= 0.05", note="swap, the longest of 12")
        before, count = await rollout.used.call_one(), 200 if how.size == "0.6B" else 60
        for version in range(15, 15 + count):
            await opened.publish(version)
        grown = await rollout.used.call_one() - before
        report.add(name=f"{how}: memory grown over {count} versions", ours=grown, unit="GB", goal="<= 0.001")
        report.add(name=f"{how}: memory in use", ours=before, unit="GB", note="of the GPU: models, shadow, contexts")


async def decoding(report: Report) -> None:
    """Throughput of decoding alone, while versions are published one after the other, and with one a second."""
    async with session(How("8B", "bf16", "ipc")) as (opened, rollout):
        versions = iter(range(10**6))

        async def rate(how: str, until: asyncio.Event) -> float:
            passes, busy = 0, 0.0
            while not until.is_set():
                count, seconds = await rollout.decode.call_one(0.03, how)
                passes, busy = passes + count, busy + seconds
            return passes / busy

        async def during(how: str, seconds: float, gap: float | None) -> tuple[float, int]:
            """Passes a second; and versions, each begun `gap` seconds after the one before, or when it has come."""
            over = asyncio.Event()
            running = asyncio.ensure_future(rate(how, over))
            ends, count = time.perf_counter() + seconds, 0
            while (left := ends - time.perf_counter()) > 0:
                began = time.perf_counter()
                if gap is not None:
                    await opened.publish(next(versions))
                    count += 1
                await asyncio.sleep(left if gap is None else max(0.0, gap - (time.perf_counter() - began)))
            over.set()
            return await running, count

        for _ in range(4):  # both sets of weights are decoded with, nothing beside
            await opened.publish(next(versions))
            for how in ("launches", "graph"):
                await rollout.decode.call_one(0.03, how)
        for how, seconds, gap, goal in (
            ("graph", 1.5, 0.0, ""),
            ("graph", 4.0, 1.0, ">= 0.95x"),
            ("launches", 1.5, 0.0, ""),
        ):
            before, (found, count), after = (
                await during(how, 1.0, None),
                await during(how, seconds, gap),
                await during(how, 1.0, None),
            )
            alone = (before[0] + after[0]) / 2
            lost = (1 - found / alone) * seconds / count * 1e3
            what = "a version a second" if gap else "version after version"
            report.add(
                name=f"8B bf16 -> bf16, ipc: decoding by {how}, {what}",
                ours=found,
                peer=alone,
                unit="passes/s",
                goal=goal,
                note=f"{count} versions in {seconds:g} s; a version costs {lost:.1f} ms of decoding; peer: undisturbed",
            )


async def dying(report: Report, transport: str) -> None:
    """Kill the rollout while a version is on its way; how long until `publish` raises, and what it keeps."""
    async with session(How("8B", "bf16", transport)) as (opened, rollout):
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


CASES: dict[str, tuple[float, Callable[[Report], object]]] = {
    "raw": (40, raw),
    "kernels": (90, kernels),
    "8B-ipc-fp8": (60, lambda r: publish(r, How("8B", "fp8", "ipc"))),
    "8B-nccl": (60, lambda r: publish(r, How("8B", "bf16", "nccl"))),
    "8B-ipc": (60, lambda r: publish(r, How("8B", "bf16", "ipc"))),
    "0.6B-ipc": (40, lambda r: publish(r, How("0.6B", "bf16", "ipc"))),
    "8B-ipc-fp32": (60, lambda r: publish(r, How("8B", "bf16", "ipc", held="float32"))),
    "0.6B-ipc-fp32": (40, lambda r: publish(r, How("0.6B", "bf16", "ipc", held="float32"))),
    "decoding": (45, decoding),
    "8B-nccl-fp8": (60, lambda r: publish(r, How("8B", "fp8", "nccl"))),
    "0.6B-same": (40, lambda r: publish(r, How("0.6B", "bf16", "ipc", 0))),
    "8B-nccl-256": (60, lambda r: publish(r, How("8B", "bf16", "nccl", bucket_bytes=256 << 20))),
    "8B-same": (60, lambda r: publish(r, How("8B", "bf16", "ipc", 0))),
    "8B-same-ring": (60, lambda r: publish(r, How("8B", "bf16", "ipc", 0, ring=True))),
    "dying-nccl": (40, lambda r: dying(r, "nccl")),
    "0.6B-nccl": (40, lambda r: publish(r, How("0.6B", "bf16", "nccl"))),
    "0.6B-ipc-fp8": (40, lambda r: publish(r, How("0.6B", "fp8", "ipc"))),
    "dying-ipc": (40, lambda r: dying(r, "ipc")),
    "vllm": (120, vllm),
    "checkpoint-engine": (120, checkpoint_engine),
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
