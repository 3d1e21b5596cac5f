"""LO-1 to LO-4, VL-1 to VL-3 with the loaders of a real vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cases() -> dict[tuple[str, int, bool], dict[str, Any]]:
    run = subprocess.run([sys.executable, "-m", "tests.engines.layouts"], capture_output=True, text=True, timeout=170)
    assert run.returncode == 0, run.stderr[-3000:]
    facts = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {(f["kind"], f["ranks"], f["in_blocks"]): f for f in facts}


@pytest.mark.parametrize(
    ("kind", "ranks"), [("qwen3", 1), ("qwen3", 4), ("llama", 2), ("qwen3_moe", 1), ("qwen3_moe", 2)]
)
def test_what_is_recorded_planned_and_applied_leaves_the_bytes_of_vllms_own_loaders(cases, kind, ranks):
    """LO-1; 4 ranks share 2 KV heads, and the vocabulary is padded"""
    facts = cases[kind, ranks, False]
    assert facts["differs"] == []
    assert len(facts["copies"]) == ranks
    assert list(facts["filled"]) in (["model.embed_tokens.weight"], ["model.embed_tokens.weight", "lm_head.weight"])


def test_codes_and_scales_of_blocks_go_where_the_loaders_put_them(cases):
    """Quantised on the trainer, blocks of 128x128, two ranks"""
    assert cases["qwen3", 2, True]["differs"] == []
