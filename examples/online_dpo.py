"""Direct preference optimisation (arXiv:2305.18290) on fresh pairs, generation beside training.

The loss of a pair is -log sigmoid(h), h = beta (log pi(w) - log ref(w) - log pi(l) + log ref(l)). Its gradient is
-beta sigmoid(-h) times the gradient of log pi(w) - log pi(l): a policy gradient whose advantages are +beta sigmoid(-h)
for the better answer and the same with a minus for the worse one. So it needs no objective of its own: h is computed
from the logprobs of trainer and reference, and REINFORCE does the rest.

Asynchrony is that of the library: admission bounds how far generation runs ahead, the buffer orders and checks ages.

    python -m examples.online_dpo
"""

from __future__ import annotations

import asyncio
import math

import msgspec
import numpy as np

from algorithms.admission import Admission, Ticket
from algorithms.advantages import Advantage
from algorithms.advantages import reward as as_it_is
from algorithms.buffer import Buffer
from algorithms.catalog import objective
from algorithms.samples import to_samples
from examples.started import POLICY, SAMPLING, Roles, started
from roles.trainer import Trainer, TrainerConfig
from roles.types import Group, Scored, TrainSample
from runtime import TaskGroup

BETA = 0.1
PAIRWISE = objective("reinforce", {"tis_cap": None, "aggregate": "sequence-sum"})


def pair(group: Group) -> Group | None:
    """The best and the worst answer of a group, in this order; None when they are equally good."""
    judged = [(v.value, i) for i, v in enumerate(group.rewards) if isinstance(v, Scored)]
    if not judged or min(judged)[0] == max(judged)[0]:
        return None
    chosen = [max(judged)[1], min(judged)[1]]
    return msgspec.structs.replace(
        group, completions=[group.completions[i] for i in chosen], rewards=[Scored(1.0), Scored(-1.0)]
    )


async def weigh(samples: list[TrainSample], trainer: Trainer, reference: Trainer) -> float:
    """Turn the signs of the pairs into the advantages of DPO, in place; returns the mean loss."""
    now, before = await trainer.logprobs(samples), await reference.logprobs(samples)
    gains = [float((a - b).sum()) for a, b in zip(now, before, strict=True)]
    losses = []
    for index in range(0, len(samples), 2):
        h = BETA * (gains[index] - gains[index + 1])
        for sample in samples[index : index + 2]:
            sample.advantages = (sample.advantages * BETA / (1 + math.exp(h))).astype(np.float32)
        losses.append(math.log1p(math.exp(-h)))
    return sum(losses) / len(losses)


async def train(roles: Roles, steps: int, pairs_per_step: int = 4, n: int = 4, staleness: float = 1.0) -> list[float]:
    """Returns the loss of each step."""
    reference = await Trainer.start(roles.host, TrainerConfig(threads=1), POLICY, name="reference")
    admission = Admission(
        roles.prompts, groups_per_step=pairs_per_step, staleness=staleness, num_groups=steps * pairs_per_step
    )
    buffer = Buffer(admission)

    async def one_pair(ticket: Ticket) -> None:
        group = await roles.rollout.generate(ticket.prompt, n, SAMPLING, 0, attempt=ticket.attempt)
        chosen = pair(await roles.reward.score(group))
        if chosen is None:
            admission.drop(ticket, "no_contrast", num_tokens=group.num_tokens)
        else:
            buffer.put(ticket, chosen)

    async def generate() -> None:
        async with TaskGroup("pairs") as tasks:
            while True:
                ticket = await admission.admit()
                tasks.start(one_pair(ticket), name=f"prompt {ticket.prompt.position}")

    losses: list[float] = []
    commit = await roles.weights.publish(roles.trainer.version)
    admission.commit(commit.version)
    async with TaskGroup("dpo") as tasks:
        tasks.forever(generate(), name="generate")
        for _ in range(steps):
            taken = await buffer.take(pairs_per_step, version=roles.trainer.version)
            samples = to_samples([one.group for one in taken], Advantage(group=as_it_is, contrast=False))
            losses.append(await weigh(samples, roles.trainer, reference))
            result = await roles.trainer.train_step(samples, PAIRWISE)
            commit = await roles.weights.publish(result.version)
            admission.commit(commit.version)
            admission.release(one.ticket for one in taken)
            buffer.check()
    return losses


async def main() -> None:
    async with started() as roles:
        for step, loss in enumerate(await train(roles, steps=10), 1):
            print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    asyncio.run(main())
