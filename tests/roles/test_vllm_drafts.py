"""What a draft may change (roles.vllm_drafts), without vLLM: which tokens are kept, and the noise of a GPU in Triton's
interpreter. With vLLM: tests/engines/test_vllm_drafts.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roles.vllm_drafts import kept

SITE = Path(sys.prefix) / "megatron"


def test_drafts_are_kept_up_to_the_first_that_was_not_drawn_dr1() -> None:
    owner = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3])
    place = torch.tensor([0, 1, 2, 0, 0, 1, 0, 1, 2])
    drafted = torch.tensor([[5, 6], [-1, -1], [7, -1], [8, 9]])
    drawn = torch.tensor([5, 6, 1, 2, 7, 3, 4, 9, 9])  # both right; none there; right; the first wrong
    expected = [[5, 6, 1], [2, -1, -1], [7, 3, -1], [4, -1, -1]]
    assert kept(drawn, owner, place, drafted).tolist() == expected


def test_without_drafts_each_request_has_one_token() -> None:
    drawn = torch.tensor([4, 2, 3])
    nothing = torch.empty(3, 0, dtype=torch.int64)
    assert kept(drawn, torch.arange(3), torch.zeros(3, dtype=torch.int64), nothing).tolist() == [[4], [2], [3]]


PROGRAM = """
import random
from types import SimpleNamespace
import numpy as np, torch
from roles.vllm_drafts import _KeyedNoise, _Places, kept

V, N, LENGTH, PROMPT = 5, 4, 10, 5


class Generator:
    def __init__(self, seed):
        self.seed, self.offset = seed, 0

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset


def logits_of(request, tokens):  # a policy
    return torch.randn(V, generator=torch.Generator().manual_seed(hash((request, *tokens)) % 2**40))


def generate(draft):
    generators = {i: Generator(100 + i) for i in range(N)}
    batch = SimpleNamespace(num_tokens_no_spec=np.full(9, PROMPT), num_prompt_tokens=np.full(9, PROMPT))
    runner = SimpleNamespace(input_batch=batch, discard_request_mask=SimpleNamespace(np=np.zeros(9, bool)))
    sampling = SimpleNamespace(all_greedy=False, generators=generators, temperature=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    noise, done, looked_at, right = _KeyedNoise(runner), [[] for _ in range(N)], 0, 0
    said = [[] for _ in range(N)]
    while min(map(len, done)) < LENGTH:
        rows = torch.stack([logits_of(i, done[i] + said[i][:j]) for i in range(N) for j in range(len(said[i]) + 1)])
        drafts = SimpleNamespace(
            num_draft_tokens=[len(one) for one in said],
            draft_token_ids=torch.tensor([t for one in said for t in one], dtype=torch.int32),
        )
        places = _Places.of(N, drafts, torch.device("cpu"))
        tokens = kept(noise.draw(rows, sampling, places), places.owner, places.place, places.drafted)
        noise.settle(tokens)
        for i, line in enumerate(tokens.tolist()):
            new = [t for t in line if t >= 0]
            done[i] += new
            batch.num_tokens_no_spec[i] += len(new)
            right += len(new) - 1
        looked_at += places.num_drafted
        said = draft(noise, done)
    return [one[:LENGTH] for one in done], looked_at, right


def nothing(noise, done):
    return [[] for _ in done]


def anything(noise, done):
    return [[random.randrange(V) for _ in range(random.randrange(4))] for _ in done]


def knowing(noise, done):  # the policy itself, by the noise of what comes (DR-3)
    said = [[] for _ in done]
    for _ in range(3):
        rows = torch.stack([logits_of(i, one + said[i]) for i, one in enumerate(done)])
        drawn = torch.where(torch.arange(N) == 3, rows.argmax(-1), noise.foresee(rows))
        for i, token in enumerate(drawn.tolist()):
            said[i].append(token)
    return said


random.seed(0)
plain, _, _ = generate(nothing)
assert len({tuple(one) for one in plain}) == N
guessed, looked_at, right = generate(anything)
assert guessed == plain and 0 < right < looked_at  # DR-1, DR-2
known, looked_at, right = generate(knowing)
assert known == plain and right == looked_at > 0  # DR-3

# vLLM takes a draw of a prompt that came in part back: there must be one
generator = Generator(1)
runner = SimpleNamespace(discard_request_mask=SimpleNamespace(np=np.array([True, False])))
_KeyedNoise(runner)._keep_offsets({0: generator}, 2)
assert generator.offset == 4
print("right")
"""


@pytest.mark.skipif(not SITE.exists(), reason="triton is not here; `make test` installs it")
@pytest.mark.timeout(120)
def test_noise_of_a_gpu_gives_one_completion_whatever_was_drafted_dr1_dr2_dr3() -> None:
    path = os.pathsep.join([str(Path.cwd()), str(SITE)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]
