"""`algorithms.model_facts`: MF-2 by the files that a folder may lack or hold in part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from algorithms.model_facts import read_model

POLICY = Path(__file__).parents[2] / "recipes" / "start_policy"


def shortened(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(1_000_000)


def other_header(file: Path) -> None:
    file.write_bytes((50).to_bytes(8, "little") + b"{not json".ljust(50))


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("model.safetensors", shortened, "model.safetensors has 1000000 bytes, its header says 2125368; fetch it again"),
    (
        "model.safetensors",
        lambda file: file.write_bytes(b""),
        "model.safetensors is no safetensors file, or its header is damaged",
    ),
    (
        "model.safetensors",
        lambda file: file.write_bytes(b"\xff" * 64),
        "is no safetensors file, or its header is damaged",
    ),
    ("model.safetensors", other_header, "is no safetensors file, or its header is damaged; fetch it again"),
    ("model.safetensors", Path.unlink, "has no *.safetensors"),
    ("config.json", lambda file: file.write_text("{"), "config.json is not valid JSON"),
    ("config.json", lambda file: file.write_text("[]"), "config.json holds a list, expected an object"),
    ("config.json", lambda file: file.write_text("{}"), "config.json has no 'num_attention_heads'"),
    ("config.json", Path.unlink, "has no config.json; give the folder of a Hugging Face model"),
    ("tokenizer.json", Path.unlink, "has no tokenizer (tokenizer.json, "),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES)
def test_a_damaged_folder_is_refused_by_the_name_of_the_file_mf2(tmp_path, name, damage, words):
    folder = shutil.copytree(POLICY, tmp_path / "model")
    damage(folder / name)
    with pytest.raises(ValueError, match=r"^model\.path: ") as caught:
        read_model(folder)
    assert words in str(caught.value)


def test_a_weight_file_that_the_index_names_and_nobody_fetched_is_named_mf2(tmp_path):
    folder = shutil.copytree(POLICY, tmp_path / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00002\.safetensors, which model\.safetensors\.index"):
        read_model(folder)


def test_the_policy_that_ships_is_whole():
    facts = read_model(POLICY)
    assert (facts.layers, facts.hidden_size, facts.max_positions) == (4, 144, 256)
