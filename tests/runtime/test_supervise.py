"""SU-1 of runtime/supervise.py: what is handled while an owner still thinks about it stays handled."""

from __future__ import annotations

import asyncio

import pytest

from runtime.errors import Death, ProcessDied
from runtime.supervise import Failure, Supervisor

DEATH = Death(exit_code=1)
FAILURE = Failure("mesh", ProcessDied("mesh", 0, "host", "", DEATH))


class Slow:
    """Does not handle it, and says so when it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def __supervise__(self, failure: Failure) -> bool:
        self.asked.set()
        await self.may_answer.wait()
        return False


async def test_a_call_that_raises_a_death_while_the_owner_is_asked_handles_it():
    owner, host = Slow(), Supervisor()
    mesh = Supervisor(owner, host)
    reporting = asyncio.create_task(mesh.report(FAILURE))
    await owner.asked.wait()
    mesh.seen(DEATH)
    owner.may_answer.set()
    await reporting
    assert host.unhandled() == []


async def test_what_was_raised_by_watch_while_the_next_owner_is_asked_stays_handled():
    owner = Slow()
    host = Supervisor(owner)
    mesh = Supervisor(None, host)
    reporting = asyncio.create_task(mesh.report(FAILURE))
    await owner.asked.wait()
    with pytest.raises(ProcessDied):
        await mesh.watch()
    owner.may_answer.set()
    await reporting
    assert host.unhandled() == []


async def test_what_was_handled_is_not_kept_for_as_long_as_the_host_lives():
    host = Supervisor()
    mesh = Supervisor(None, host)
    for code in range(5):
        death = Death(exit_code=code)
        await mesh.report(Failure("mesh", ProcessDied("mesh", 0, "host", "", death)))
        mesh.seen(death)
    assert len(mesh._entries) == len(host._entries) == 1
