"""vLLM's own way of moving weights, beside ours in the same run."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.gpu.sync_ranks import SIZES, Report, layouts

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
