"""Room in vLLM's cache, answered by roles/vllm_slots.py and by vLLM alone: the same requests, the same blocks."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's imports
    pytest.importorskip("vllm", reason="vLLM is not installed here; `make engines` runs these")
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.request import Request, RequestStatus

    from roles import vllm_slots

BLOCK, BLOCKS = 4, 40
SHAPE: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}


def manager(*specs: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(config, max_model_len=64, scheduler_block_size=BLOCK, hash_block_size=BLOCK)


class Side:
    """One cache, and requests that take a token each step; `behind` of them are not known yet, as in a scheduler that
    runs ahead of the device."""

    def __init__(self, behind: int, ours: bool) -> None:
        self.cache = manager(FullAttentionSpec(**SHAPE))
        self.asked = 0
        before = self.cache.allocate_slots

        def ask(*args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            return before(*args, **kwargs)

        self.cache.allocate_slots = ask
        assert not ours or vllm_slots.install(self.cache)
        self.behind = behind
        self.requests: dict[str, Any] = {}

    def start(self, name: str, prompt: list[int]) -> None:
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, prompt, SamplingParams(max_tokens=40), None, block_hasher=hasher)
        found, hits, *_ = self.cache.get_computed_blocks(request)
        new = self.cache.allocate_slots(
            request, len(prompt) - hits, num_new_computed_tokens=hits, new_computed_blocks=found
        )
        assert new is not None
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, len(prompt)
        self.requests[name] = request
        self.learn(request)

    def step(self) -> list[Any]:
        """What each is answered."""
        answers = []
        for request in self.requests.values():
            answer = self.cache.allocate_slots(request, 1, num_lookahead_tokens=0)
            answers.append(None if answer is None else answer.get_block_ids())
            request.num_computed_tokens += 1
            self.learn(request)
        return answers

    def learn(self, request: Any) -> None:
        """The next token is known, as far as the scheduler is not behind."""
        if request.num_computed_tokens + 1 - request.num_tokens > self.behind:
            request.append_output_token_ids(request.num_computed_tokens % 7)
            if self.behind:  # as AsyncScheduler
                self.cache.cache_blocks(request, request.num_computed_tokens - self.behind)

    def end(self, name: str) -> None:
        self.cache.free(self.requests.pop(name))

    def state(self) -> Any:
        pool = self.cache.block_pool
        hashes = sorted((block.block_id, str(block.block_hash)) for block in pool.blocks if block.block_hash)
        return hashes, pool.get_num_free_blocks(), [self.cache.get_block_ids(name) for name in self.requests]


@pytest.mark.parametrize("behind", [0, 1])
def test_answers_and_cache_are_those_of_vllm_vo1(behind: int) -> None:
    init_none_hash(sha256)
    draw = random.Random(0)
    ours, theirs = Side(behind, ours=True), Side(behind, ours=False)
    for step in range(60):
        if step % 9 == 0:
            prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9][: draw.randint(1, 9)]
            for side in (ours, theirs):
                side.start(str(step), prompt)
        if step % 9 == 8 and len(ours.requests) > 2:
            name = draw.choice(sorted(ours.requests))
            for side in (ours, theirs):
                side.end(name)
        assert ours.step() == theirs.step()
        assert ours.state() == theirs.state()
    assert ours.asked < 0.6 * theirs.asked  # of four tokens the first and the last of a block


def test_other_kinds_of_layers_are_left_to_vllm_vo2() -> None:
    assert not vllm_slots.install(manager(SlidingWindowSpec(**SHAPE, sliding_window=8)))
