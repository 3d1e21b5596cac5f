"""Which GPU each rank of a job gets, decided before any process starts.

PL-1: with enough GPUs every rank has its own: trainers the first ones, rollouts those behind them.
PL-2: with fewer, trainers and rollouts share: both kinds start at the first GPU. A GPU never holds two ranks of a kind.
PL-3: replicas of the evaluation come last and share with nobody.
PL-4: what fits in no way is refused with the numbers. Without GPUs nobody is placed.
"""

from __future__ import annotations

import msgspec

GpuIndices = tuple[tuple[int, ...], ...]
"""The GPUs of each rank."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    trainer: GpuIndices = ()
    """Empty: on the CPU."""
    rollout: GpuIndices = ()
    evaluation: GpuIndices = ()

    @property
    def shared(self) -> bool:
        """Whether a GPU has a trainer and a rollout."""
        return not {gpu for rank in self.trainer for gpu in rank}.isdisjoint(
            gpu for rank in self.rollout for gpu in rank
        )


def place(num_gpus: int, *, trainers: int, rollouts: int, gpus_per_rollout: int, evaluations: int = 0) -> Placement:
    """GPUs for `trainers` ranks of one GPU each, `rollouts` replicas, and those of the evaluation.

    Args:
        num_gpus: of this host.
        trainers: 0 when they compute on the CPU.
        rollouts, evaluations: 0 when they compute on the CPU.

    >>> place(4, trainers=1, rollouts=1, gpus_per_rollout=2)
    Placement(trainer=((0,),), rollout=((1, 2),), evaluation=())
    >>> place(3, trainers=1, rollouts=1, gpus_per_rollout=1, evaluations=1)
    Placement(trainer=((0,),), rollout=((1,),), evaluation=((2,),))
    >>> place(1, trainers=1, rollouts=1, gpus_per_rollout=1).shared
    True

    Raises:
        ValueError: too few GPUs, in the words of the job file.
    """
    if not num_gpus:
        return Placement()
    wanted, own = rollouts * gpus_per_rollout, evaluations * gpus_per_rollout
    num_gpus -= own
    if own and max(trainers, wanted) > num_gpus:
        raise ValueError(
            f"evaluation.ranks = {evaluations} with {gpus_per_rollout} GPUs each need {own} of their own, which leaves "
            f"{max(num_gpus, 0)} of this host's {num_gpus + own} to {trainers} trainer ranks and {rollouts} rollout "
            "ranks; lower it, or leave it out to evaluate on the rollout ranks"
        )
    if max(trainers, wanted) > num_gpus:
        raise ValueError(
            f"trainer.ranks = {trainers} need {trainers} GPUs and rollout.ranks = {rollouts} with "
            f"{gpus_per_rollout} each need {wanted}, this host has {num_gpus}; lower the larger of them to {num_gpus} "
            "(trainers and rollouts may share GPUs)"
        )
    first = trainers if trainers + wanted <= num_gpus else 0

    def replicas(begin: int, count: int) -> GpuIndices:
        starts = range(begin, begin + count, gpus_per_rollout)
        return tuple(tuple(range(start, start + gpus_per_rollout)) for start in starts)

    return Placement(
        trainer=tuple((gpu,) for gpu in range(trainers)),
        rollout=replicas(first, wanted),
        evaluation=replicas(max(trainers, first + wanted), own),
    )
