"""The job: one tree of settings for all rooms, and what follows from it before any process starts.

JO-1: `resolve` is the only place where a missing value is derived; each derived value is listed with its reason, and
      nothing downstream fills in a default of its own.
JO-2: contradictions are refused by `resolve`, all of them in one error, in the words of the job file. Nothing has been
      started then and no file has been written.
JO-3: a resolved job resolves to itself: the `job.toml` of a run folder starts the same run again.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from algorithms import catalog
from algorithms.advantages import Advantage
from algorithms.bounds import Bounds
from algorithms.grpo import GRPOConfig
from algorithms.halves import DebugConfig
from algorithms.job_checks import attempt, contradictions
from algorithms.model_facts import ModelFacts, read_model
from algorithms.placement import Placement, place
from algorithms.watchdog import WatchConfig
from roles.environment_config import EnvironmentConfig, tools_of
from roles.evaluator import EvalConfig
from roles.prompts import DataConfig
from roles.reward import RewardConfig
from roles.rollout import RolloutConfig
from roles.trainer import TrainerConfig
from roles.types import Sampling
from runtime.config import ConfigError
from runtime.trackers import TrackerConfig
from sync.session import SyncConfig

__all__ = ["CheckpointConfig", "Job", "ModelConfig", "Resolved", "resolve", "resolve_here"]

T = TypeVar("T")

PROMPTS_PER_STEP = 32
PROMPTS_PER_STEP_CPU = 16
"""A laptop core trains about a hundred short sequences a second: half of the reference batch keeps a step near that."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    """Folder of a Hugging Face causal language model with its tokenizer; relative to the job file."""


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    every: Annotated[int, Meta(ge=0)] = 25
    """Steps between two checkpoints. 0: only at the end and at Ctrl+C."""
    keep: Annotated[int, Meta(ge=1)] = 2
    """How many of the newest complete checkpoints stay on disk."""
    background: bool = True
    """Write while training goes on: it waits only until a copy is in CPU memory (12 bytes a parameter, of all ranks
    together). false: it waits until everything is on disk."""
    exact: bool = False
    """Let the groups in flight finish before saving, so that a resumed run trains the same tokens. Costs the time of
    the longest completion at each checkpoint; without it, prompts in flight are sampled anew after a resume."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a run is told. The tables of the job file are the fields of this tree."""

    name: str
    """The run folder is `<run_dir>/<name>`."""
    run_dir: str = "runs"
    """Where run folders are made; relative to the current folder."""
    seed: int = 0
    """Root of all randomness of training: prompts, sampling, trainer. The held-out set has a seed of its own."""
    steps: Annotated[int, Meta(ge=1)] = 100
    """Training steps in all, counted over resumes."""
    minutes: Annotated[float, Meta(ge=0)] = 0.0
    """Wall-clock limit of this launch; the run then ends as at Ctrl+C, with a checkpoint. 0: none."""
    staleness: Annotated[float, Meta(ge=0)] = 1.0
    """S: how many policy versions old a sample may be when it is trained. 0 is synchronous, 1 overlaps generation with
    training; fractions are allowed."""
    model: ModelConfig
    data: DataConfig
    sampling: Sampling = Sampling()
    environment: EnvironmentConfig = EnvironmentConfig()
    grpo: GRPOConfig = GRPOConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvalConfig = EvalConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trackers: TrackerConfig = TrackerConfig()
    watch: WatchConfig = WatchConfig()
    debug: DebugConfig = DebugConfig()


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A job with nothing left to derive, and what is known about it."""

    job: Job
    derived: dict[str, str]
    """Key of the job file -> why it has the value it has."""
    model: ModelFacts
    slots: int
    """Groups that may be admitted and unreleased (AD-1)."""
    max_age: int
    """In versions: the oldest sample that can be trained."""
    placement: Placement
    """GPUs of the ranks."""


def resolve(job: Job, *, folder: Path, source: str, gpus: int, cores: int) -> Resolved:
    """Derive what is missing and refuse what can't work.

    Args:
        folder: what relative paths of the job are relative to.
        source: what errors call the job.
        gpus: GPUs that torch sees on this host.
        cores: CPU cores that this process may use.

    Raises:
        ConfigError: with every problem found.
    """
    derived: dict[str, str] = {}
    problems: list[str] = []

    def derive(key: str, given: T, value: T, reason: str) -> T:
        if given:
            return given
        derived[key] = reason
        return value

    def locate(key: str, given: str) -> str:
        if not given or Path(given).is_absolute():
            return given
        derived[key] = f"{given}, relative to the job file"
        return str((folder / given).resolve())

    path = locate("model.path", job.model.path)
    model = attempt(problems, read_model, Path(path))
    positions = model.max_positions if model is not None else 0
    prompts = derive("grpo.prompts_per_step", job.grpo.prompts_per_step, *_prompts_per_step(gpus, cores))
    sampled = max(0, job.sampling.max_tokens)  # what is below is told of its own key
    answer = derive("evaluation.max_tokens", job.evaluation.max_tokens, sampled, "sampling.max_tokens")
    longest = max(answer, job.sampling.max_tokens)
    room = min(positions, job.trainer.token_budget)
    limit = "trainer.token_budget" if room < positions else "positions of the model"
    # What is evaluated must fit in the model, what is trained in a micro-batch as well.
    in_model, in_budget = positions - longest, job.trainer.token_budget - job.sampling.max_tokens
    max_prompt_tokens = derive(
        "data.max_prompt_tokens",
        job.data.max_prompt_tokens,
        max(1, min(in_model, in_budget)),
        f"{positions} (positions of the model) - the longest answer"
        if in_model <= in_budget
        else f"{job.trainer.token_budget} (trainer.token_budget) - sampling.max_tokens",
    )
    environment, needed = job.environment, max_prompt_tokens + longest
    max_len = derive(
        "rollout.max_len",
        job.rollout.max_len,
        max(room, needed) if environment.name else needed,
        limit if environment.name and room >= needed else "data.max_prompt_tokens + the longest answer",
    )
    if environment.name:
        most, why = min((max_len, "rollout.max_len"), (job.trainer.token_budget, "trainer.token_budget"))
        environment = replace(environment, tokens=derive("environment.tokens", environment.tokens, most, why))
    template_options = dict(job.data.chat_template_options)
    if "tools" not in template_options and (tools := attempt(problems, tools_of, job.environment)):
        derived["data.chat_template_options"] = "tools: those of the environment"
        template_options["tools"] = tools
    # Ranks that compute at the same time share the cores; in a synchronous run the two sides take turns.
    others = (job.trainer.ranks + job.rollout.ranks,) * 2 if job.staleness else (job.trainer.ranks, job.rollout.ranks)
    why = f"{cores} cores, trainer and rollout {'at the same time' if job.staleness else 'in turn'}"
    job = replace(
        job,
        model=replace(job.model, path=path),
        data=replace(
            job.data,
            seed=derive("data.seed", job.data.seed, job.seed, "the seed of the job"),
            max_prompt_tokens=max_prompt_tokens,
            file=locate("data.file", job.data.file),
            held_out_file=locate("data.held_out_file", job.data.held_out_file),
            chat_template_options=template_options,
        ),
        environment=environment,
        grpo=replace(job.grpo, prompts_per_step=prompts, loss_options=_loss_options(job, derived)),
        trainer=replace(
            job.trainer,
            seed=derive("trainer.seed", job.trainer.seed, job.seed, "the seed of the job"),
            threads=derive("trainer.threads", job.trainer.threads, max(1, cores // others[0]), why),
        ),
        rollout=replace(
            job.rollout,
            max_len=max_len,
            threads=derive("rollout.threads", job.rollout.threads, max(1, cores // others[1]), why),
        ),
        reward=_located(job.reward, locate),
        evaluation=replace(job.evaluation, max_tokens=answer),
    )
    problems += contradictions(job, model, gpus)
    bounds = attempt(problems, bounds_of, job) if prompts > 0 else None
    placement = attempt(problems, placement_of, job, gpus)
    if problems or model is None or bounds is None or placement is None:
        raise ConfigError(source, problems)
    return Resolved(
        job=job,
        derived=derived,
        model=model,
        slots=bounds.slots,
        max_age=bounds.max_age,
        placement=placement,
    )


def _located(reward: RewardConfig, locate: Callable[[str, str], str]) -> RewardConfig:
    if reward.model is None:
        return reward
    return replace(reward, model=replace(reward.model, path=locate("reward.model.path", reward.model.path)))


def placement_of(job: Job, gpus: int) -> Placement:
    """Raises ValueError: the host has too few GPUs, or not where vLLM's own way to move weights wants them."""
    placed = place(
        gpus,
        trainers=0 if job.trainer.device == "cpu" else job.trainer.ranks,
        rollouts=0 if job.rollout.device == "cpu" else job.rollout.ranks,
        evaluations=0 if job.rollout.device == "cpu" else job.evaluation.ranks,
        gpus_per_rollout=job.rollout.vllm.tensor_parallel if job.rollout.engine == "vllm" else 1,
    )
    _check_transfer(job.rollout.vllm.weight_transfer, placed)
    return placed


def _check_transfer(way: Literal["sync", "nccl", "ipc"], placed: Placement) -> None:
    """ipc wants the engines on the sender's GPU, nccl all of its ranks on GPUs of their own."""
    sender = set(placed.trainer[0] if placed.trainer else ())
    engines = {gpu for rank in (*placed.rollout, *placed.evaluation) for gpu in rank}
    if way == "ipc" and not engines <= sender:
        raise ValueError(
            f"rollout.vllm.weight_transfer = 'ipc': the engines are on GPUs {sorted(engines)}, the trainer on "
            f"{sorted(sender)}, and this way is for one GPU; use 'nccl' or 'sync', or show the job one GPU alone"
        )
    if way == "nccl" and engines & sender:
        raise ValueError(
            f"rollout.vllm.weight_transfer = 'nccl': trainer and engines share GPUs {sorted(engines & sender)}, which "
            "NCCL refuses; use 'ipc' or 'sync', or fewer ranks"
        )


def advantage_of(job: Job) -> Advantage:
    """The advantage of a job. One that reads the parts of a sum and takes `weights` gets those of the sum."""
    how = catalog.advantage(job.grpo.advantage)
    parts = job.reward.parts
    if how.parts and parts and "weights" in inspect.signature(how.group).parameters:
        return catalog.advantage(job.grpo.advantage, {"weights": [parts[name].weight for name in sorted(parts)]})
    return how


def bounds_of(job: Job) -> Bounds:
    """Slots and ages of the pipeline of a resolved job.

    Raises:
        ValueError: a size out of its range.
    """
    grpo = job.grpo
    return Bounds(
        groups_per_step=grpo.prompts_per_step,
        staleness=job.staleness,
        window=grpo.window,
        over_sampling=grpo.over_sampling,
        too_old=grpo.too_old,
    )


def _loss_options(job: Job, derived: dict[str, str]) -> dict[str, Any]:
    """A constant denominator needs the limit of sampled tokens, which the job knows."""
    options = job.grpo.loss_options
    preset = catalog.OBJECTIVES.get(job.grpo.loss, ("", {}))[1]
    if {**preset, **options}.get("aggregate") != "constant" or options.get("max_length"):
        return options
    derived["grpo.loss_options"] = "max_length is sampling.max_tokens"
    return {**options, "max_length": job.sampling.max_tokens}


def _prompts_per_step(gpus: int, cores: int) -> tuple[int, str]:
    if gpus:
        return PROMPTS_PER_STEP, "the reference batch"
    return PROMPTS_PER_STEP_CPU, f"{PROMPTS_PER_STEP} scaled down for {cores} CPU cores"


def resolve_here(job: Job, path: Path) -> Resolved:
    """`resolve` for this machine; `path` is the file that the job was read from. Raises as `resolve`."""
    return resolve(job, folder=path.resolve().parent, source=str(path), gpus=count_gpus(), cores=count_cores())


def count_gpus() -> int:
    """GPUs of this host that torch can use; torch is imported only where there is one."""
    from runtime.devices import find_gpus

    found = len(find_gpus(os.environ).names)
    if not found:
        return 0
    import torch

    return min(found, torch.cuda.device_count())


def count_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
