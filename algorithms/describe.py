"""A resolved job in words: what `--dry-run` prints and a run says at its start."""

from __future__ import annotations

from collections.abc import Sequence

from algorithms.job import Resolved
from algorithms.placement import GpuIndices
from runtime.config import render

__all__ = ["describe", "headline"]

OPTIMIZER_BYTES = 16
"""Of the trainer, per parameter: float32 weights, gradients and two moments of Adam."""


ACTIVATIONS = 20
"""Float32 numbers that a decoder layer keeps of a token for the backward pass, per unit of its width. Fitted to the
peak resident size of the embedded job: 385, 426, 461 and 562 MiB for token_budget 512, 1024, 2048 and 4096 are 49 KiB a
token (50 by this constant) above 360 MiB."""

BASE_BYTES = 340 << 20
"""Of a process that has computed with torch, models left out; from the same runs."""


def describe(resolved: Resolved, *, cores: int, gpus: int, overrides: Sequence[str] = ()) -> str:
    """The job as TOML with the reason of each derived value, then its sizes, placement and memory as comments, so that
    the whole text is a job file again."""
    text = render(resolved.job, derived=resolved.derived, overrides=overrides)
    sections = (
        ("sizes", sizes(resolved)),
        ("placement", placement(resolved, cores=cores, gpus=gpus)),
        ("memory, estimated", memory(resolved)),
    )
    for title, rows in sections:
        width = max(len(label) for label, _ in rows)
        text += f"\n# {title}\n" + "".join(f"#   {label:<{width}}  {value}\n" for label, value in rows)
    return text


def headline(resolved: Resolved) -> str:
    """One line: what is trained on what."""
    job, model = resolved.job, resolved.model
    tasks = ", ".join(family.name for family in job.data.families) or job.data.file
    return (
        f"{model.architecture} {_count(model.parameters)} on {tasks}; {job.grpo.prompts_per_step} x "
        f"{job.grpo.samples_per_prompt} samples a step, staleness {job.staleness:g}; "
        f"{_plural(job.trainer.ranks, 'trainer')}, {_plural(job.rollout.ranks, 'rollout')}"
    )


def sizes(resolved: Resolved) -> list[tuple[str, str]]:
    job, model = resolved.job, resolved.model
    prompts, samples = job.grpo.prompts_per_step, job.grpo.samples_per_prompt
    return [
        ("model", f"{model.architecture}, {_count(model.parameters)} parameters, {model.layers} layers"),
        ("samples a step", f"{prompts} prompts x {samples} = {prompts * samples}"),
        ("groups at once", f"{resolved.slots} = floor((staleness + 1) * {prompts})"),
        ("oldest trained sample", f"{_plural(resolved.max_age, 'version')} behind"),
        ("weights per update", _bytes(4 * model.parameters)),
    ]


def placement(resolved: Resolved, *, cores: int, gpus: int) -> list[tuple[str, str]]:
    job = resolved.job
    device = _plural(gpus, "GPU") if gpus else "no GPU"
    own = _ranks(job.evaluation.ranks, job.rollout.threads, resolved.placement.evaluation)
    return [
        ("host", f"{_plural(cores, 'core')}, {device}"),
        ("controller", "1 process"),
        ("trainer", _ranks(job.trainer.ranks, job.trainer.threads, resolved.placement.trainer)),
        ("rollout", _ranks(job.rollout.ranks, job.rollout.threads, resolved.placement.rollout)),
        *([("evaluation", own)] if job.evaluation.ranks else []),
        ("reward", _plural(job.reward.workers, "worker")),
    ]


def memory(resolved: Resolved) -> list[tuple[str, str]]:
    job, model = resolved.job, resolved.model
    tokens = job.rollout.max_running * job.rollout.max_len
    per_token = 4 * (ACTIVATIONS * model.layers * model.hidden_size + 2 * model.vocabulary)
    activations = job.trainer.token_budget * per_token
    return [
        ("every process", f"{_bytes(BASE_BYTES)} of Python and libraries, most of it shared between forked ones"),
        (
            "a trainer rank",
            f"{_bytes(OPTIMIZER_BYTES * model.parameters)} of state, {_bytes(activations)} of activations",
        ),
        (
            "a rollout rank",
            f"{_bytes(8 * model.parameters)} of weights, {_bytes(tokens * model.kv_bytes_per_token)} of KV cache",
        ),
    ]


def _ranks(count: int, threads: int, gpus: GpuIndices) -> str:
    where = "; ".join(f"rank {rank} on GPU {', '.join(map(str, own))}" for rank, own in enumerate(gpus))
    return f"{_plural(count, 'rank')}, {_plural(threads, 'thread')} each" + (f"; {where}" if where else "")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _count(number: float) -> str:
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{letter}"
    return f"{number:.0f}"


def _bytes(number: float) -> str:
    for limit, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f} B"
