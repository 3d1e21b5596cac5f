"""From a resolved job to what runs: its roles, started, and the page of its algorithm over them.

AS-1: roles start side by side while questions are read; each has the GPUs that its placement says.
AS-2: what runs beside the page (the watch over replicas) belongs to the task group of the caller, as does its failure.
AS-3: `connect` joins roles that run already, in whatever combination: another trainer takes over a rollout that has
      served, or another rollout a trainer, once what they were connected to before is closed.
AS-4: nothing here trains or decides: the order of things is `algorithms.grpo`'s, the settings are the job's.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from algorithms import catalog
from algorithms.admission import Admission
from algorithms.advisors import Advisors
from algorithms.buffer import Buffer
from algorithms.grpo import GRPO
from algorithms.halves import AlreadyScored, FixedWeights, KeptGroups, KeptPrompts, Unsent, Untrained, read_kept
from algorithms.job import Job, Resolved, advantage_of
from algorithms.job_checks import needs_reference
from algorithms.played import played
from algorithms.report import Report
from algorithms.resume import Checkpoints, RunState
from algorithms.watchdog import Watchdog
from roles import checkpoint
from roles.evaluator import Evaluator
from roles.prompts import PromptEncoder, PromptSource, check_stream, held_out
from roles.publish import Delivery, Publisher, SameWeights, delivery, threshold_of
from roles.reward_model import start_reward
from roles.rollout import Rollout
from roles.trainer import Trainer
from roles.types import Prompt
from runtime.errors import TuttiError

if TYPE_CHECKING:
    from algorithms.grpo import Scores
    from algorithms.played import Played
    from runtime.display import Display
    from runtime.journal import Journal
    from runtime.mesh import HostMesh
    from runtime.tasks import TaskGroup

PRELOAD = ["roles.rollout", "roles.reward", "roles.trainer_fsdp", "roles.engine_torch"]
"""What a fork server imports once for all roles."""


@dataclass(kw_only=True)
class Roles:
    """The roles of one job, running. What stands in for a side that is left out is of `algorithms.halves`."""

    trainer: Trainer | Untrained
    rollout: Played | FixedWeights | KeptGroups
    reward: Scores
    publisher: Publisher | Unsent
    prompts: PromptSource | KeptPrompts
    held_out: list[Prompt]
    advisors: Advisors | None = None
    fleet: Rollout | None = None
    """The replicas of training, whoever plays on them."""
    weights: Delivery | None = None
    evaluation: Played | None = None
    """The replicas that evaluate: those of training, or of their own."""
    snapshot: Callable[[], Awaitable[None]] | None = None
    """Brings the weights of now to replicas of their own."""
    losses: Callable[[], int] = lambda: 0
    """How often one of the replicas that evaluate was lost."""
    watches: Sequence[asyncio.Task[Any]] = ()
    """Over the replicas."""

    async def close(self) -> None:
        """End what the page no longer needs. The processes end with their host, or are connected anew (AS-3)."""
        self.prompts.close()
        for watch in self.watches:
            watch.cancel()
        if self.watches:
            await asyncio.wait(self.watches)
        if self.weights is not None:
            await self.weights.close()


async def start_roles(resolved: Resolved, host: HostMesh, tasks: TaskGroup) -> Roles:
    """Start the roles of the job.

    Raises:
        TuttiError: a role could not start.
        ValueError: a setting doesn't fit the model or the questions (`NoQuestions`).
    """
    if resolved.job.debug.groups:
        return await start_training(resolved, host)
    if not resolved.job.debug.train:
        return await start_generation(resolved, host, tasks)
    return await start_all(resolved, host, tasks)


async def start_training(resolved: Resolved, host: HostMesh) -> Roles:
    """A trainer and kept groups."""
    job = resolved.job
    groups = read_kept(Path(job.debug.groups))
    trainer = await Trainer.start(host, job.trainer, job.model.path, gpus=resolved.placement.trainer)
    return Roles(
        trainer=trainer,
        rollout=KeptGroups(groups),
        reward=AlreadyScored(),
        publisher=Unsent(),
        prompts=KeptPrompts(groups),
        held_out=[],
        advisors=await _advisors(resolved, host),
    )


async def start_generation(resolved: Resolved, host: HostMesh, tasks: TaskGroup) -> Roles:
    """Rollout and reward with the weights of the model folder."""
    job = resolved.job
    starting = tasks.start(
        Rollout.start(host, job.rollout, job.model.path, gpus=resolved.placement.rollout), name="start rollout"
    )
    reward = await start_reward(host, job.reward)
    prompts, kept_out = await asyncio.to_thread(make_prompts, job)
    rollout = await starting
    watch = tasks.forever(rollout.watch(), name="replicas")
    playing, judging = await played(job, rollout, reward, host, tasks)
    fixed = FixedWeights(playing)
    return Roles(
        trainer=Untrained(),
        rollout=fixed,
        reward=judging,
        publisher=fixed,
        prompts=prompts,
        held_out=kept_out,
        fleet=rollout,
        evaluation=playing,
        watches=[watch],
    )


async def start_all(resolved: Resolved, host: HostMesh, tasks: TaskGroup) -> Roles:
    """Start every role on `host` and open the way of the weights (AS-1).

    Raises:
        TuttiError: a role could not start.
        ValueError: a setting doesn't fit the model or the questions (`NoQuestions`).
    """
    job, model, placement = resolved.job, resolved.job.model.path, resolved.placement
    starting_trainer = tasks.start(
        Trainer.start(host, job.trainer, model, gpus=placement.trainer), name="start trainer"
    )
    starting_rollout = tasks.start(
        Rollout.start(host, job.rollout, model, gpus=placement.rollout), name="start rollout"
    )
    starting_evaluation = tasks.start(_evaluation_ranks(host, resolved), name="start evaluation")
    starting_reward = tasks.start(start_reward(host, job.reward), name="start reward")
    questions = await asyncio.to_thread(make_prompts, job)
    trainer, rollout, reward = await starting_trainer, await starting_rollout, await starting_reward
    advisors = await _advisors(resolved, host)
    own = await starting_evaluation
    return await connect(resolved, host, tasks, trainer, rollout, reward, questions, own=own, advisors=advisors)


async def connect(
    resolved: Resolved,
    host: HostMesh,
    tasks: TaskGroup,
    trainer: Trainer,
    rollout: Rollout,
    reward: Scores,
    questions: tuple[PromptSource, list[Prompt]],
    *,
    own: Rollout | None = None,
    advisors: Advisors | None = None,
) -> Roles:
    """Open the way of the weights between a trainer and a rollout that run, and watch over the replicas (AS-3).

    Args:
        reward: what scores groups.
        questions: what `make_prompts` gives.
        own: replicas that evaluate; None: those of training do.
        advisors: reference and critic, where the job has them.

    Raises:
        LayoutError: trainer and rollout hold different models.
        TuttiError: a role that the job has besides could not start.
    """
    job = resolved.job
    prompts, kept_out = questions
    weights = delivery(trainer, rollout, job.sync)
    await weights.open()
    publisher = _publisher(job, weights, trainer, rollout, kept_out)
    watches = [tasks.forever(rollout.watch(publisher.resend), name="replicas")]
    playing, judging = await played(job, rollout, reward, host, tasks)
    snapshot, evaluating = None, playing
    if own is not None:
        evaluating, _ = await played(job, own, reward, host, tasks, name="evaluation_environment")
        same = _proof(job, trainer, own, kept_out) if job.rollout.prove_every else None
        snapshot = functools.partial(publisher.snapshot, own, same)
        resend = functools.partial(publisher.resend, others=own)
        watches.append(tasks.forever(own.watch(resend), name="replicas that evaluate"))
    return Roles(
        trainer=trainer,
        rollout=playing,
        reward=judging,
        advisors=advisors,
        fleet=rollout,
        weights=weights,
        publisher=publisher,
        evaluation=evaluating,
        snapshot=snapshot,
        prompts=prompts,
        held_out=kept_out,
        losses=lambda: (own or rollout).losses,
        watches=watches,
    )


async def _advisors(resolved: Resolved, host: HostMesh) -> Advisors:
    job = resolved.job
    return await Advisors.start(
        host,
        job.trainer,
        job.model.path,
        reference=needs_reference(job.grpo),
        critic=job.grpo.critic,
        kl_weight=job.grpo.kl_in_reward,
        gpus=resolved.placement.trainer,
    )


def assemble(resolved: Resolved, roles: Roles, journal: Journal, display: Display) -> tuple[GRPO, Checkpoints]:
    """The page of the job's algorithm, and what saves and restores it."""
    job = resolved.job
    admission = Admission(
        roles.prompts,
        groups_per_step=job.grpo.prompts_per_step,
        staleness=job.staleness,
        window=job.grpo.window,
        over_sampling=job.grpo.over_sampling,
        too_old=job.grpo.too_old,
        num_groups=job.steps * job.grpo.prompts_per_step,
    )
    buffer = Buffer(admission)
    checkpoints = Checkpoints(
        run=journal.folder,
        every=job.checkpoint.every,
        keep=job.checkpoint.keep,
        trainer=roles.trainer,
        admission=admission,
        prompts=roles.prompts,
        background=job.checkpoint.background,
        exact=job.checkpoint.exact,
        advisors=roles.advisors,
    )
    evaluator = None
    if roles.held_out and roles.evaluation is not None:
        evaluator = Evaluator(
            roles.held_out, roles.evaluation, roles.reward, job.evaluation, job.sampling, roles.losses
        )
    page = GRPO(
        rollout=roles.rollout,
        reward=roles.reward,
        trainer=roles.trainer,
        weights=roles.publisher,
        evaluator=evaluator,
        snapshot=roles.snapshot,
        admission=admission,
        buffer=buffer,
        checkpoints=checkpoints if job.debug.train else None,
        report=Report(journal, display, admission, buffer, keep_groups=job.debug.keep_groups),
        watchdog=Watchdog(job.watch, buffer.who_waits),
        advisors=roles.advisors,
        config=job.grpo,
        sampling=job.sampling,
        advantage=advantage_of(job),
        objective=catalog.objective(job.grpo.loss, job.grpo.loss_options),
        evaluate_every=job.evaluation.every,
        seed=job.seed,
    )
    return page, checkpoints


class NoQuestions(TuttiError, ValueError):
    """The questions of a job don't do: too few, too long, or not for its tokenizer."""


def check_resume(job: Job, saved: Path) -> None:
    """What can be said against going on from a checkpoint before anything starts.

    Raises:
        ValueError: it is incomplete, of another format, or of a prompt stream with other settings.
    """
    state: RunState = checkpoint.read_state(saved, RunState)
    if job.debug.groups:  # kept groups stand in for the stream
        return
    encoder = PromptEncoder(job.model.path, job.data)
    check_stream(job.data, held_out(job.data, job.evaluation.prompts, job.evaluation.seed, encoder), state.prompts)


def make_prompts(job: Job) -> tuple[PromptSource, list[Prompt]]:
    """The training stream and the held-out set. Slow imports: call it in a thread.

    Raises:
        NoQuestions: see there.
    """
    try:
        encoder = PromptEncoder(job.model.path, job.data)
        kept_out = held_out(job.data, job.evaluation.prompts, job.evaluation.seed, encoder)
        return PromptSource(job.data, encoder, kept_out), kept_out
    except ValueError as error:
        raise NoQuestions(str(error)) from error


def _publisher(job: Job, weights: Delivery, trainer: Trainer, rollout: Rollout, kept_out: list[Prompt]) -> Publisher:
    """What brings weights into service, with the proof that they are served."""
    same = _proof(job, trainer, rollout, kept_out)
    return Publisher(weights, trainer, rollout, same, every=job.rollout.prove_every)


def _proof(job: Job, trainer: Trainer, rollout: Rollout, kept_out: list[Prompt]) -> SameWeights | None:
    fixed = [prompt.token_ids[:64] for prompt in kept_out[:2] if len(prompt.token_ids) > 1]
    return SameWeights(trainer, rollout, fixed, threshold_of(job.trainer, job.rollout)) if fixed else None


async def _evaluation_ranks(host: HostMesh, resolved: Resolved) -> Rollout | None:
    """Engines like those of training."""
    job = resolved.job
    if not job.evaluation.ranks:
        return None
    config = replace(job.rollout, ranks=job.evaluation.ranks, record_routes=False, oversample=0)
    return await Rollout.start(host, config, job.model.path, gpus=resolved.placement.evaluation, name="evaluation")
