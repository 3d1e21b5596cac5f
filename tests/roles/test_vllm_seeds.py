"""The noise of seeded requests (roles.vllm_seeds), in Triton's interpreter: there is no GPU here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(sys.prefix) / "megatron"

PROGRAM = """
import numpy as np, torch
from roles.vllm_seeds import exponential, install


def philox(key, counter):
    # Philox-4x32-10 (Salmon et al., SC'11): key two 32-bit words, counter four; the first word of the result.
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    c = list(counter)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c[0]


assert philox(0, (0, 0, 0, 0)) == 0x6627E8D5  # a published vector of Random123
seed, width = -5, 1500
q = torch.full((4, width), -1.0)
exponential(q, np.array([2, 0]), np.array([(seed, 3), (7, 70000)]))
assert (q[1] == -1).all() and (q[3] == -1).all()  # rows that were not named
for row, key, draw in ((2, seed % 2**64, 3), (0, 7, 70000)):
    for token in (0, 1, 1023, 1024, 1499):
        w = (philox(key, (token, draw, 0, 0)) + 0.5) / 2**32
        np.testing.assert_allclose(float(q[row, token]), -np.log1p(-w), rtol=2e-6)

# VD-1: alone or in company, in whatever row
alone = torch.empty(1, width)
exponential(alone, np.array([0]), np.array([(seed, 3)]))
assert torch.equal(alone[0], q[2])

# Exp(1): mean, variance, and the share below 1e-3, over 60,000 numbers; never 0
many = torch.empty(40, width)
exponential(many, np.arange(40), np.array([(seed, draw) for draw in range(40)]))
assert abs(float(many.mean()) - 1) < 0.02 and abs(float(many.var()) - 1) < 0.05
assert 30 < int((many < 1e-3).sum()) < 95 and float(many.min()) > 0 and bool(many.isfinite().all())


# what vLLM calls: a draw is that of the token's index, whatever row it stands in, also when it is made again (VD-3);
# no GPU, so generators and the batch are imitated
class Generator:
    def __init__(self, seed):
        self.seed, self.offset = seed, 0

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset >= 0
        self.offset = offset


class Cuda(torch.Tensor):
    is_cuda = True


class sampler:
    calls = 0

    @staticmethod
    def random_sample(probs, generators, wide=False):
        sampler.calls += 1
        return probs.argmax(-1)

    @staticmethod
    def sample_with_exponential_noise(probs, q):
        return torch.div(probs, q).argmax(-1)


class runner:
    class input_batch:
        num_prompt_tokens = np.array([9, 5, 7, 0], np.int32)
        num_tokens_no_spec = num_prompt_tokens.copy()

    class discard_request_mask:
        np = np.zeros(4, bool)


torch.Tensor.pin_memory = lambda self: self
install(sampler, runner)
install(sampler, runner)
probs = torch.full((3, 400), 1 / 400).as_subclass(Cuda)
first, second, third = (Generator(s) for s in (1, 2, 2**63 + 9))
drawn = []
for _ in range(3):
    drawn.append(sampler.random_sample(probs, {0: first, 1: second, 2: third}).tolist())
    runner.input_batch.num_tokens_no_spec[:3] += 1
assert len({tuple(one) for one in drawn}) == 3
runner.input_batch.num_tokens_no_spec[:3] = (7, 11, 9)  # rows 0 and 1 change places, two tokens each
runner.input_batch.num_prompt_tokens[:2] = (5, 9)
assert sampler.random_sample(probs, {1: first, 0: second, 2: third}).tolist() == [drawn[2][i] for i in (1, 0, 2)]

# what vLLM takes back of a prompt that came in part leaves no negative offset, and the draw is made again
runner.discard_request_mask.np[1] = True
assert sampler.random_sample(probs, {1: first, 0: second, 2: third}).tolist() == [drawn[2][i] for i in (1, 0, 2)]
first.set_offset(first.get_offset() - 4)
assert [one.offset for one in (first, second, third)] == [0, 0, 0]
assert sampler.calls == 0
sampler.random_sample(probs, {})
sampler.random_sample(probs.as_subclass(torch.Tensor), {0: first})
assert sampler.calls == 2  # VD-4
print("right")
"""


@pytest.mark.skipif(not SITE.exists(), reason="triton is not here; `make test` installs it")
@pytest.mark.timeout(120)
def test_noise_of_seeded_requests_in_tritons_interpreter_with_imitated_generators() -> None:
    path = os.pathsep.join([str(Path.cwd()), str(SITE)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]
