"""A training step on one GPU beside the inner step of TRL's GRPOTrainer: Qwen3-0.6B shapes, same weights and tokens.

    python -m benchmarks.gpu.train_trl [--out DIR] [--older FOLDER] [--works long mixed] [--limit SECONDS] [--tiny]

Sides: ours eager, ours compiled, TRL as it is installed, and an older TRL out of `--older`: 0.29.1 held full logits,
1.16.0 computes them in blocks, as ours. All load side by side, once for all works (`benchmarks/train.py`). Then ours
and TRL step in turn, after them ours compiled, whose first step takes half a minute, at last the older one. What a side
says is printed as it comes, with the seconds since the start, and appended to DIR/train_trl.jsonl; the table has what
came within the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.table import Row, to_markdown
from benchmarks.train import Facts, measure, memory_row, speed_row

TITLES = {
    "long": "step of 8 sequences of 4096 tokens, one a micro-batch",
    "mixed": "step of 64 sequences of 200 to 4096 tokens",
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
    parser.add_argument("--limit", type=float, default=110, help="seconds for all of it")
    parser.add_argument("--tiny", action="store_true", help="a dry run on CPU")
    options = parser.parse_args()
    began, place = time.monotonic(), "tiny" if options.tiny else "gpu"
    turns = [["ours", "trl"], ["compiled"], ["older"]]
    sides = {"ours": "ours", "trl": "trl", "compiled": "compiled", "older": "trl"}
    for called, wanted in (("compiled", not options.tiny), ("older", bool(options.older))):
        if not wanted:
            del sides[called]
            turns.remove([called])

    def heard(**said: object) -> None:
        line = json.dumps({"at_s": round(time.monotonic() - began, 1), **said})
        print(line, flush=True)
        with (options.out / "train_trl.jsonl").open("a") as record:
            record.write(line + "\n")

    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            place, options.works, sides, Path(folder), turns=turns, ends=began + options.limit, heard=heard,
            older=options.older,
        )  # fmt: skip
    for work, of in found.items():
        for called, facts in of.items():
            heard(work=work, side=called, tokens_per_s=facts.tokens_per_s, **dataclasses.asdict(facts))
    print(to_markdown([row for work, of in found.items() for row in rows_of(work, of)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
