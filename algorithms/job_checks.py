"""What is refused in a job: the settings that contradict each other, the model or the machine.

JC-1: each problem is one text in the words of the job file: the key, what it has, what to change. All of them are told,
      not the first alone.
JC-2: nothing is started, written or fetched to find them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorithms import catalog
from algorithms.grpo import GRPOConfig
from algorithms.halves import kept_files
from algorithms.model_facts import ModelFacts
from roles.prompts import check_data
from roles.reward import check_reward, check_time
from roles.sampling_check import check_sampling
from roles.trainer_config import check_model
from roles.vllm_compat import check_vllm, installed
from roles.vllm_transfer import transfer_problems
from runtime.trackers import check_trackers

if TYPE_CHECKING:
    from algorithms.job import Job

__all__ = ["attempt", "contradictions", "needs_reference"]


def contradictions(job: Job, model: ModelFacts | None, gpus: int) -> Iterator[str]:
    """Everything that is wrong with a job whose values are all there, one text each.

    Args:
        model: None when its folder can't be read, which is told elsewhere.
        gpus: those that torch sees on this host.
    """
    if not job.name or job.name in (".", "..") or "/" in job.name:
        yield f"name = {job.name!r}: expected a plain name, of a folder in run_dir = {job.run_dir!r}"
    if not gpus:
        yield from _without_gpus(job)
    yield from _of_roles(job, model)
    yield from _weight_transfer(job, gpus)
    yield from _environment_problems(job)
    yield from _sampling(job, model)
    yield from _algorithm(job)
    yield from _sides(job)
    yield from _lengths(job, model)


def _of_roles(job: Job, model: ModelFacts | None) -> list[str]:
    """What each room has to say of its own table."""
    problems: list[str] = []
    attempt(problems, check_data, job.data)
    attempt(problems, check_reward, job.reward)
    if job.data.file and job.reward.verifier == "task" and not job.reward.parts:
        attempt(problems, check_time, "[data]", job.data.verifier, {}, job.reward.timeout_s)
    attempt(problems, check_sampling, job.sampling)
    attempt(problems, check_trackers, job.trackers)
    if job.debug.groups:
        attempt(problems, kept_files, Path(job.debug.groups))
    if job.rollout.engine == "vllm":
        attempt(problems, check_vllm, job.rollout, job.model.path, 0 if model is None else model.parameters)
    attempt(problems, catalog.advantage, job.grpo.advantage)
    attempt(problems, lambda: catalog.check_objective(catalog.objective(job.grpo.loss, job.grpo.loss_options)))
    if model is not None:
        attempt(problems, check_model, job.trainer, job.model.path)
    return problems


def _sampling(job: Job, model: ModelFacts | None) -> Iterator[str]:
    sampling = job.sampling
    if sampling.temperature <= 0:
        yield (
            f"sampling.temperature = {sampling.temperature}: training samples must be drawn, expected more than 0; "
            "greedy answers are part of the evaluation"
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        yield (
            f"sampling.top_p = {sampling.top_p}, sampling.top_k = {sampling.top_k}: the trainer's logprobs are over "
            "the whole vocabulary, so importance weights would be wrong; use top_p = 1 and top_k = 0"
        )
    unknown = [token for token in sampling.stop_token_ids if model is not None and not 0 <= token < model.vocabulary]
    if unknown and model is not None:
        yield f"sampling.stop_token_ids: the model has tokens 0 to {model.vocabulary - 1}, got {unknown}"


def _algorithm(job: Job) -> Iterator[str]:
    """What the advantage, the critic and the sizes of a group ask of each other."""
    advantage = attempt([], catalog.advantage, job.grpo.advantage)
    least = 2 if advantage is None or advantage.contrast else 1
    if job.grpo.samples_per_prompt < least:
        yield (
            f"grpo.samples_per_prompt = {job.grpo.samples_per_prompt}: expected at least {least}, advantage "
            f"{job.grpo.advantage!r} compares the samples of one prompt"
            if least == 2
            else f"grpo.samples_per_prompt = {job.grpo.samples_per_prompt}: expected at least 1"
        )
    if job.grpo.prompts_per_step < 1:
        yield f"grpo.prompts_per_step = {job.grpo.prompts_per_step}: expected at least 1"
    if advantage is not None and not advantage.contrast and job.grpo.no_contrast != "keep":
        yield (
            f"grpo.no_contrast = {job.grpo.no_contrast!r}: with advantage {job.grpo.advantage!r} groups of equal "
            "rewards teach as well; use 'keep'"
        )
    if job.grpo.critic is not None and advantage is not None and (advantage.contrast or advantage.parts):
        yield (
            f"grpo.advantage = {job.grpo.advantage!r}: a critic is the baseline already, expected 'reinforce' or "
            "'reinforce++' besides [grpo.critic]"
        )
    if advantage is not None and advantage.parts and not job.reward.parts and ":" not in job.reward.verifier:
        yield (
            f"grpo.advantage = {job.grpo.advantage!r} looks at the parts of a reward, and [reward.parts] has none; "
            "give the reward parts, or choose another advantage"
        )
    if job.rollout.max_running < job.grpo.samples_per_prompt:
        yield (
            f"rollout.max_running = {job.rollout.max_running} is below grpo.samples_per_prompt = "
            f"{job.grpo.samples_per_prompt}: a group runs on one replica; raise max_running"
        )


def _sides(job: Job) -> Iterator[str]:
    """What the evaluation asks for, and what a run of one side alone leaves out."""
    if job.evaluation.part and job.evaluation.part not in job.reward.parts and ":" not in job.reward.verifier:
        yield (
            f"evaluation.part = {job.evaluation.part!r}: expected one of [reward.parts], which has "
            f"{', '.join(job.reward.parts) or 'none'}"
        )
    if not job.debug.train and (job.evaluation.ranks or job.grpo.critic is not None or needs_reference(job.grpo)):
        yield (
            "debug.train = false starts no trainer: it goes with neither evaluation.ranks, nor a critic, nor a "
            "reference policy; leave them out"
        )
    if job.evaluation.ranks and not job.evaluation.prompts:
        yield f"evaluation.ranks = {job.evaluation.ranks}, but evaluation.prompts = 0 asks for no evaluation"


def _without_gpus(job: Job) -> Iterator[str]:
    """What a host without GPUs can't do."""
    if job.trainer.backend == "megatron":
        yield "trainer.backend = 'megatron' computes on GPUs alone, and torch sees none; use 'fsdp'"
    for key, device in (("trainer.device", job.trainer.device), ("rollout.device", job.rollout.device)):
        if device == "cuda":
            yield f"{key} = 'cuda', and torch sees no GPU (--doctor says more); use 'auto' or 'cpu'"


def _weight_transfer(job: Job, gpus: int) -> Iterator[str]:
    """What vLLM's own ways to move weights can't keep."""
    way = job.rollout.vllm.weight_transfer
    if way == "sync":
        return
    named = f"rollout.vllm.weight_transfer = {way!r}"
    if job.rollout.engine != "vllm":
        yield f"{named} is of rollout.engine = 'vllm'; set it, or leave it out"
        return
    found = attempt([], installed)  # told by `check_vllm` where there is none: the trainer imports it too
    if not gpus or "cpu" in (job.trainer.device, job.rollout.device) or (found is not None and found.on_cpu):
        yield f"{named} moves weights between GPUs, and trainer or rollout are on the CPU; use 'sync'"
    if way == "ipc" and job.trainer.ranks > 1:
        yield (
            f"{named} is for one trainer rank whose GPU the engines share, got trainer.ranks = {job.trainer.ranks}; "
            "use 'nccl' or 'sync'"
        )
    if job.trainer.lora_rank and job.trainer.lora_send == "adapter":
        yield f"{named} sends whole weights; set trainer.lora_send = 'merged'"
    if job.sync.deadline_s >= job.rollout.stuck_seconds:
        yield (
            f"rollout.stuck_seconds = {job.rollout.stuck_seconds:g}: with {named} a replica that takes weights "
            f"answers nothing for up to sync.deadline_s = {job.sync.deadline_s:g}; raise the one or lower the other"
        )
    yield from transfer_problems(way, job.sync)


def _environment_problems(job: Job) -> Iterator[str]:
    """What doesn't go with episodes of several turns."""
    environment = job.environment
    if not environment.name:
        return
    if environment.tokens > job.rollout.max_len:
        yield (
            f"environment.tokens = {environment.tokens}: expected at most rollout.max_len = {job.rollout.max_len}; "
            "lower it, or leave it out"
        )
    if environment.tokens > job.trainer.token_budget:
        yield (
            f"environment.tokens = {environment.tokens} is above trainer.token_budget = {job.trainer.token_budget}: "
            "the longest episode must fit in a micro-batch; raise it, or lower environment.tokens"
        )
    for name in ("oversample", "sample_seconds"):
        if getattr(job.rollout, name):
            yield f"rollout.{name}: episodes of an environment are not stopped half way; leave it out"


def _lengths(job: Job, model: ModelFacts | None) -> Iterator[str]:
    """Prompts and answers that don't fit into what holds them."""
    if job.grpo.overlong_buffer > job.sampling.max_tokens:
        yield (
            f"grpo.overlong_buffer = {job.grpo.overlong_buffer}: expected at most sampling.max_tokens = "
            f"{job.sampling.max_tokens}"
        )
    longest = max(job.sampling.max_tokens, job.evaluation.max_tokens)
    if model is not None and longest >= model.max_positions:
        key = "evaluation.max_tokens" if longest > job.sampling.max_tokens else "sampling.max_tokens"
        yield (
            f"{key} = {longest} leaves no room for a prompt: the model has {model.max_positions} positions for prompt "
            "and answer; lower it"
        )
        return
    if model is not None and (needed := job.data.max_prompt_tokens + longest) > model.max_positions:
        yield (
            f"data.max_prompt_tokens = {job.data.max_prompt_tokens} and the longest answer of {longest} tokens need "
            f"{needed} positions, the model has {model.max_positions}; lower one of them"
        )
    if (longest_trained := job.data.max_prompt_tokens + job.sampling.max_tokens) > job.trainer.token_budget:
        yield (
            f"data.max_prompt_tokens + sampling.max_tokens = {longest_trained} is above trainer.token_budget = "
            f"{job.trainer.token_budget}: the longest sequence must fit in a micro-batch; raise it, or lower one"
        )
    if model is not None and job.rollout.max_len < job.data.max_prompt_tokens + longest:
        yield (
            f"rollout.max_len = {job.rollout.max_len} is below data.max_prompt_tokens + the longest answer = "
            f"{job.data.max_prompt_tokens + longest}; raise it, or leave it out"
        )


def needs_reference(grpo: GRPOConfig) -> bool:
    """Whether a frozen copy of the start model is asked for anything."""
    return grpo.kl_in_reward > 0 or (
        grpo.loss_options.get("kl_to") == "reference" and bool(grpo.loss_options.get("kl_weight"))
    )


def attempt(problems: list[str], check: Any, *args: Any) -> Any:
    """Call a check; a ValueError becomes one more problem, its words unchanged."""
    try:
        return check(*args)
    except ValueError as error:
        problems.append(str(error))
        return None
