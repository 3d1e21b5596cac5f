"""A tiny policy and its tokenizer with a chat template, for modules that have none of their own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.roles.tiny import CHAT, save_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def tokenizer(policy: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = CHAT
    return tokenizer
