"""A training step on one GPU beside the inner step of TRL's GRPOTrainer: Qwen3-0.6B shapes, same weights and tokens.

    python -m benchmarks.gpu.train_trl [--out DIR] [--older FOLDER] [--works mixed long] [--tiny]

Sides: ours eager, ours compiled, TRL as it is installed, and an older TRL out of `--older`: 0.29.1 held full logits,
1.16.0 computes them in blocks, as ours. They load side by side and step in turn (`benchmarks/train.py`). What a work
said is printed and appended to DIR/train_trl.jsonl at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.table import Row, to_markdown
from benchmarks.train import Facts, measure, memory_row, speed_row

TITLES = {
    "mixed": "step of 64 sequences of 200 to 4096 tokens",
    "long": "step of 8 sequences of 4096 tokens, one a micro-batch",
}


def rows_of(work: str, found: dict[str, Facts]) -> list[Row]:
    """Goals stand where ours is as it is by default, and the peer as it is today."""
    rows = []
    for ours in ("ours", "compiled"):
        for peer in ("trl", "older"):
            if ours not in found or peer not in found:
                continue
            goals = (">= 1.3x", "<= 0.7x") if (ours, peer) == ("ours", "trl") else ("", "")
            name = f"{TITLES[work]}{', compiled' if ours == 'compiled' else ''}"
            rows.append(speed_row(name, found, goals[0], ours, peer))
            rows.append(memory_row("the same, peak memory", found, goals[1] if work == "long" else "", ours, peer))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.train_trl")
    parser.add_argument("--works", nargs="*", default=list(TITLES), choices=TITLES)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--older", default="", help="a folder with an older trl, to stand beside the installed one")
    parser.add_argument("--tiny", action="store_true", help="a dry run on CPU")
    options = parser.parse_args()
    rows, place = [], "tiny" if options.tiny else "gpu"
    sides = {"ours": "ours", "compiled": "compiled", "trl": "trl"} | ({"older": "trl"} if options.older else {})
    if options.tiny:
        del sides["compiled"]
    model = Path(tempfile.mkdtemp())  # one for all works
    for work in options.works:
        began = time.monotonic()
        found = measure(place, work, sides, model, older=options.older)
        with (options.out / "train_trl.jsonl").open("a") as record:
            for called, facts in found.items():
                line = json.dumps({"work": work, "side": called, **dataclasses.asdict(facts)})
                print(line, flush=True)
                record.write(line + "\n")
        print(f"{work}: {time.monotonic() - began:.0f} s", flush=True)
        rows += rows_of(work, found)
    shutil.rmtree(model)
    print(to_markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
