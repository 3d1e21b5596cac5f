"""Other ways of moving weights beside ours in the same run: vLLM's NCCL engine, and checkpoint-engine."""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.sync_ranks import SIZES, Report, layouts

__all__ = ["checkpoint_engine", "vllm"]

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


SERVER_OF_CHECKPOINT_ENGINE = """
import os, sys, threading, time, torch
import torch.multiprocessing as mp

def worker(gpu, calls, items):
    import zmq
    from checkpoint_engine.worker import update_weights_from_ipc
    torch.cuda.set_device(gpu)
    held = {n: torch.zeros(s, dtype=torch.bfloat16, device="cuda") for n, s in items}
    def load(weights):
        for name, tensor in weights:
            held[name].copy_(tensor)
    context = zmq.Context()
    calls.send("ready")
    while (path := calls.recv()) is not None:
        update_weights_from_ipc(context, path, gpu, run=load)
        calls.send("done")
    calls.send(all(bool((t == 1).all()) for t in held.values()))

if __name__ == "__main__":
    rank, rounds = int(os.environ["RANK"]), int(sys.argv[1])
    items = eval(sys.stdin.readline())
    torch.cuda.set_device(rank)
    from checkpoint_engine.ps import ParameterServer
    here, there = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=worker, args=(rank, there, items), daemon=True)
    process.start()
    assert here.recv() == "ready"
    server = ParameterServer(auto_pg=False)
    server.init_process_group()
    def ask(paths):
        here.send(paths[rank][1])
        assert here.recv() == "done"
    share = {n: torch.ones(s, dtype=torch.bfloat16, device="cuda") for i, (n, s) in enumerate(items) if i % 2 == rank}
    for _ in range(rounds):
        began = time.perf_counter()
        server.register_checkpoint("weights", named_tensors=share, use_shared_memory_pool=True)
        server.gather_metas("weights")
        registered = time.perf_counter()
        server.update("weights", ask)
        ended = time.perf_counter()
        server.unregister_checkpoint("weights")
        if rank == 0:
            print("took", registered - began, ended - registered, flush=True)
    here.send(None)
    assert here.recv(), "not all has come"
"""


def checkpoint_engine(report: Report) -> None:
    """checkpoint-engine brings the same tensors from pinned host memory of two ranks to a worker on each GPU.

    Favourable to it: each of its two ranks holds a half, and what is loaded is one copy into place.
    """
    if importlib.util.find_spec("checkpoint_engine") is None or torch.cuda.device_count() < 2:
        print("checkpoint-engine: it or a second GPU is not there", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "server.py"
        program.write_text(SERVER_OF_CHECKPOINT_ENGINE, encoding="utf-8")
        for count, size in enumerate(SIZES):
            items = [(e.name, e.shape) for e in layouts(size, "bf16")[0].entries]
            env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29650 + 10 * count)}
            both = [
                subprocess.Popen(
                    [sys.executable, str(program), "4"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
                for rank in range(2)
            ]
            for process in both:
                assert process.stdin is not None
                print(items, file=process.stdin, flush=True)
            told = both[0].communicate(timeout=60)[0]
            both[1].communicate(timeout=20)
            took = [tuple(map(float, line.split()[1:])) for line in told.splitlines() if line.startswith("took")]
            registered, updated = min(r for r, _ in took[1:]), min(u for _, u in took[1:])
            note = f"its update alone; bringing weights to pinned memory before it took {registered:.3f} s; no digest"
            ours = report.seconds(f"{size} bf16 -> bf16, ipc, two GPUs: publish")
            report.add(name=f"{size}: checkpoint-engine", ours=ours, peer=updated, unit="s", note=note)
