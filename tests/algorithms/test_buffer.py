"""Order and age (BU-1 to BU-5): by hand, by random interleavings, and with coroutines shaped like the page."""

from __future__ import annotations

import asyncio
import random
from fractions import Fraction

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from algorithms.admission import Admission, Closed, Ticket
from algorithms.bounds import Bounds
from algorithms.buffer import Buffer, age
from tests.algorithms.helpers import CountingPrompts, group, prompt
from tests.algorithms.test_admission import admit_all, lockstep

# --- by hand ----------------------------------------------------------------------------------------------------------


def test_later_group_waits_for_an_earlier_one():
    admission, buffer = lockstep(P=2)
    first, second = admit_all(admission)
    buffer.put(second, group(second, [0]))
    assert buffer.take_nowait(1, version=0) is None
    assert buffer.statistics().head is not None
    buffer.put(first, group(first, [0]))
    taken = buffer.take_nowait(2, version=0)
    assert taken is not None
    assert [one.ticket for one in taken] == [first, second]
    ticket, its_group, its_age = taken[0]
    assert (ticket, its_group.prompt, its_age) == (first, first.prompt, 0)


def test_age_counts_from_the_oldest_token_of_the_group():
    ticket = Ticket(number=0, prompt=prompt(0), version=3, attempt=0)
    assert age(ticket, group(ticket, [5, 5, 6], [4, 6]), 7) == 3
    assert age(ticket, group(ticket, [], []), 7) == 4  # no token: from its admission


def test_stale_group_is_dropped_at_consumption_and_its_prompt_comes_back():
    admission, buffer = lockstep(P=1, S=1, version=5)
    late, fresh = admit_all(admission)
    buffer.put(late, group(late, [3, 5]))  # a replica still served version 3: age 2 > 1
    buffer.put(fresh, group(fresh, [4]))  # age 1, the bound
    taken = buffer.take_nowait(1, version=5)
    assert taken is not None
    assert [(one.ticket.number, one.age) for one in taken] == [(1, 1)]
    s = admission.statistics()
    assert (s.dropped, s.dropped_tokens, s.to_reissue) == ({"stale": 1}, 2, 1)
    assert [(t.prompt.position, t.attempt) for t in admit_all(admission)] == [(0, 1)]
    assert (buffer.statistics().age_mean, buffer.statistics().age_max) == (1.0, 1)  # over consumed groups only
    buffer.check()


def test_stale_group_behind_a_straggler_is_dropped_without_waiting_for_it():
    admission, buffer = lockstep(P=1, S=1, version=5)
    _straggler, late = admit_all(admission)
    buffer.put(late, group(late, [2]))
    assert buffer.take_nowait(1, version=5) is None
    assert admission.statistics().dropped == {"stale": 1}


def test_token_from_the_future_is_an_error_that_names_the_prompt():
    admission, buffer = lockstep(P=1)
    (ticket,) = admit_all(admission)
    buffer.put(ticket, group(ticket, [1]))
    with pytest.raises(RuntimeError, match="prompt 0 has tokens of version 1, training is on 0"):
        buffer.take_nowait(1, version=0)


def test_impossible_requests_are_refused():
    admission, buffer = lockstep(P=2, version=1)
    with pytest.raises(ValueError, match=r"expected 1 to 2 groups .* got 3"):
        buffer.take_nowait(3, version=1)
    with pytest.raises(ValueError, match="got 0"):
        buffer.take_nowait(0, version=1)
    with pytest.raises(RuntimeError, match="training on version 0, but the fleet serves 1"):
        buffer.take_nowait(1, version=0)
    first, _ = admit_all(admission)
    with pytest.raises(RuntimeError, match="ticket 0 was issued for prompt 0, the group is of prompt 7"):
        buffer.put(first, group(Ticket(number=0, prompt=prompt(7), version=1, attempt=0), [1]))


async def test_taker_wakes_when_the_straggler_is_dropped():
    admission, buffer = lockstep(P=1, S=1)
    straggler, done = admit_all(admission)
    taker = asyncio.create_task(buffer.take(1, version=0))
    buffer.put(done, group(done, [0]))
    await asyncio.sleep(0)
    assert not taker.done()
    assert buffer.who_waits() == "training waits for prompt 0, in flight since version 0"
    admission.drop(straggler, "timeout")
    assert [one.ticket for one in await taker] == [done]


async def test_cancelled_taker_took_nothing():
    admission, buffer = lockstep(P=1)
    (ticket,) = admit_all(admission)
    taker = asyncio.create_task(buffer.take(1, version=0))
    await asyncio.sleep(0)
    buffer.put(ticket, group(ticket, [0]))  # wakes it ...
    taker.cancel()  # ... and it is cancelled before it runs
    with pytest.raises(asyncio.CancelledError):
        await taker
    s = buffer.statistics()
    assert (s.consumed, s.takers_waiting, admission.statistics().buffered) == (0, 0, 1)
    assert [one.ticket for one in await buffer.take(1, version=0)] == [ticket]


async def test_close_wakes_takers_and_producers_and_the_book_stays_open():
    admission, buffer = lockstep(P=1)
    (ticket,) = admit_all(admission)
    taker, producer = asyncio.create_task(buffer.take(1, version=0)), asyncio.create_task(admission.admit())
    await asyncio.sleep(0)
    assert buffer.who_waits() == (
        "training waits for prompt 0, in flight since version 0; generation waits for a slot: 1 of 1 held, 0 buffered"
    )
    buffer.close()
    results = await asyncio.gather(taker, producer, return_exceptions=True)
    assert [type(result) for result in results] == [Closed, Closed]
    with pytest.raises(Closed):
        await buffer.take(1, version=0)
    buffer.put(ticket, group(ticket, [0]))  # what was in flight still arrives and is accounted for
    buffer.check()
    assert buffer.who_waits() == ""


async def test_nobody_waits_for_a_slot_once_the_run_has_all_its_groups():
    admission = Admission(CountingPrompts(), groups_per_step=2, staleness=0, num_groups=2)
    buffer = Buffer(admission)
    tickets = [await admission.admit(), await admission.admit()]
    producer = asyncio.create_task(admission.admit())
    await asyncio.sleep(0)
    assert buffer.who_waits() == ""
    admission.drop(tickets[0], "timeout")  # now it needs one more, which the producer takes
    assert (await producer).prompt.position == 0
    admission.close()


def test_a_straggler_is_passed_by_the_window_and_then_waited_for():
    admission, buffer = lockstep(P=1, S=3, window=3)
    tickets = admit_all(admission)  # 0 is the straggler
    for ticket in tickets[1:]:
        buffer.put(ticket, group(ticket, [0]))
    for version, number in ((0, 1), (1, 2)):
        taken = buffer.take_nowait(1, version=version)
        assert taken is not None
        assert [one.ticket.number for one in taken] == [number]
        admission.commit(version + 1)
        admission.release(one.ticket for one in taken)
    assert buffer.take_nowait(1, version=2) is None  # two have passed it
    buffer.put(tickets[0], group(tickets[0], [0]))
    taken = buffer.take_nowait(1, version=2)
    assert taken is not None
    assert (taken[0].ticket.number, taken[0].age) == (0, 2)
    buffer.check()


def test_a_straggler_that_can_only_be_too_old_is_told_to_stop_and_comes_back():
    admission, buffer = lockstep(P=1, S=1, window=2)
    straggler, _other = admit_all(admission)
    admission.commit(1)
    assert buffer.expire(1) == []
    admission.commit(2)
    assert buffer.expire(2) == [straggler, _other]
    assert admission.statistics().dropped == {"stale": 2}
    again = admission.admit_nowait()
    assert again is not None
    assert (again.prompt.position, again.attempt, again.version) == (0, 1, 2)


def test_too_old_work_is_trained_when_the_job_says_so_up_to_the_worst_age_of_the_order():
    admission, buffer = lockstep(P=1, S=1, window=2, too_old="train")
    assert admission.max_age == 2
    straggler, other = admit_all(admission)
    for version, ticket in ((0, other), (1, None)):
        ticket = ticket or admit_all(admission)[0]
        buffer.put(ticket, group(ticket, [version]))
        taken = buffer.take_nowait(1, version=version)
        if version == 0:
            assert taken is not None
            admission.commit(1)
            admission.release(one.ticket for one in taken)
    assert taken is None  # it was passed once, as the window says
    buffer.put(straggler, group(straggler, [0]))
    late = buffer.take_nowait(1, version=2)
    assert late is not None
    assert [(one.ticket.number, one.age) for one in late] == [(0, 2)]
    buffer.check()


# --- every interleaving -----------------------------------------------------------------------------------------------


class Pipeline(RuleBasedStateMachine):
    """Producers, a taker and a fleet, in any order. The model is a few plain lists."""

    @initialize(
        S=st.sampled_from([0, 0.5, 1, 2]),
        P=st.integers(1, 3),
        window=st.integers(1, 4),
        over_sampling=st.sampled_from([1, 1, 1, 1.5, 2]),
        too_old=st.sampled_from(["drop", "train"]),
    )
    def start(self, S: float, P: int, window: int, over_sampling: float, too_old) -> None:
        self.S, self.P = S, P
        window = min(window, Bounds(groups_per_step=P, staleness=S, over_sampling=over_sampling).slots - P + 1)
        self.sizes = Bounds(groups_per_step=P, staleness=S, window=window, over_sampling=over_sampling, too_old=too_old)
        self.admission = self.make(CountingPrompts())
        self.buffer = Buffer(self.admission)
        self.version = 0  # of the trainer
        self.flying: list[Ticket] = []
        self.training: list[Ticket] = []
        self.last_number = -1
        self.honest = True  # no replica served old weights so far: nothing may be dropped as stale

    def make(self, prompts) -> Admission:
        return Admission(prompts, **msgspec.structs.asdict(self.sizes))

    @property
    def strict(self) -> bool:
        return self.sizes.reach == 1

    @rule()
    def admit(self) -> None:
        ticket = self.admission.admit_nowait()
        if ticket is not None:
            assert ticket.version == self.admission.version
            self.flying.append(ticket)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1), label="which"))
        version = st.integers(ticket.version, self.admission.version)
        versions = data.draw(st.lists(st.lists(version, max_size=3), min_size=1, max_size=2), label="token versions")
        self.buffer.put(ticket, group(ticket, *(sorted(v) for v in versions)))

    @precondition(lambda self: self.flying and self.version > 0)
    @rule(data=st.data())
    def finish_on_a_replica_that_missed_updates(self, data: st.DataObject) -> None:
        self.honest = False
        ticket = self.flying.pop(0)
        self.buffer.put(ticket, group(ticket, [data.draw(st.integers(0, self.admission.version))]))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), reason=st.sampled_from(["timeout", "unscored", "aborted", "empty"]))
    def drop(self, data: st.DataObject, reason) -> None:
        ticket = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1), label="which"))
        self.admission.drop(ticket, reason, num_tokens=1)

    @precondition(lambda self: not self.training)
    @rule()
    def take(self) -> None:
        taken = self.buffer.take_nowait(self.P, version=self.version)
        if taken is None:
            return
        assert len(taken) == self.P
        for one in taken:
            assert not self.strict or one.ticket.number > self.last_number  # FIFO, across steps too
            self.last_number = one.ticket.number
            assert one.age == age(one.ticket, one.group, self.version)
            assert 0 <= one.age <= self.sizes.max_age
            assert self.sizes.too_old == "train" or one.age <= -(-self.S // 1)
        if self.honest and self.strict:
            # A fractional S bounds the mean age of a batch.
            assert Fraction(sum(one.age for one in taken), self.P) <= Fraction(self.S)
        self.training = [one.ticket for one in taken]

    @precondition(lambda self: self.training)
    @rule()
    def finish_step(self) -> None:
        self.version += 1
        with pytest.raises(RuntimeError):
            self.admission.release(self.training)
        self.admission.commit(self.version)
        self.admission.release(self.training)
        self.training = []
        expired = {ticket.number for ticket in self.buffer.expire(self.version)}
        assert not (expired and self.strict)
        self.flying = [ticket for ticket in self.flying if ticket.number not in expired]

    @rule(with_groups=st.booleans())
    def resume(self, with_groups: bool) -> None:
        """The process dies between two steps and continues from what it saved."""
        if self.training:
            return
        state, groups, prompts = self.admission.state(), self.admission.buffered(), self.admission._prompts
        self.admission = self.make(prompts)
        self.admission.restore(state, prompt, groups if with_groups else None)
        self.buffer = Buffer(self.admission)
        outstanding = self.admission.state().outstanding
        assert [(i.position, i.attempt) for i in outstanding] == [(i.position, i.attempt) for i in state.outstanding]
        assert self.admission.statistics().buffered == (len(groups) if with_groups else 0)
        again = [self.admission.admit_nowait() for _ in range(self.admission.statistics().in_flight)]
        self.flying, self.last_number = [ticket for ticket in again if ticket is not None], -1
        assert len(self.flying) == len(again)

    @invariant()
    def bounded_and_conserved(self) -> None:
        if not hasattr(self, "admission"):
            return
        self.buffer.check()
        s = self.admission.statistics()
        assert s.in_flight == len(self.flying)
        assert s.training == len(self.training)
        assert s.in_flight + s.buffered + s.training + s.to_reissue <= s.slots
        if self.honest and (self.strict or self.sizes.too_old == "train"):
            assert "stale" not in s.dropped  # order and slots alone keep the bound

    def teardown(self) -> None:
        """Progress is possible from wherever the run got to: three more steps, if everybody does their part."""
        if not hasattr(self, "admission"):
            return
        for _ in range(3):
            if self.training:
                self.finish_step()
            for _ in range(2):  # a stale group is dropped by the first attempt and generated anew for the second
                self.flying += admit_all(self.admission)
                for ticket in self.flying:
                    self.buffer.put(ticket, group(ticket, [self.admission.version]))
                self.flying = []
                if not self.training:
                    self.take()
            assert self.training
        self.bounded_and_conserved()


Pipeline.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPipeline = Pipeline.TestCase


# --- shaped like the page ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("S", [0, 0.5, 1, 2])
async def test_age_bound_holds_with_simulated_engine(S):
    """1,000 groups of random length and fate through `admit`, `put`, `take`, `release`: 250 steps of 4, no deadlock."""
    rng = random.Random(S)
    P, steps = 4, 250
    admission = Admission(CountingPrompts(), groups_per_step=P, staleness=S, num_groups=P * steps)
    buffer = Buffer(admission)
    running: set[asyncio.Task[None]] = set()

    async def one_group(ticket: Ticket) -> None:
        versions = []
        for _ in range(1 + int(rng.lognormvariate(1, 1))):
            versions.append(admission.version)
            await asyncio.sleep(0)
        if (fate := rng.random()) < 0.05:
            admission.drop(ticket, "timeout" if fate < 0.03 else "unscored")
        else:
            buffer.put(ticket, group(ticket, versions))

    async def produce() -> None:
        while True:
            task = asyncio.create_task(one_group(await admission.admit()))
            running.add(task)
            task.add_done_callback(running.discard)

    producer = asyncio.create_task(produce())
    order: list[int] = []
    for version in range(steps):
        taken = await buffer.take(P, version=version)
        order += [one.ticket.number for one in taken]
        assert max(one.age for one in taken) <= admission.max_age
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        admission.commit(version + 1)
        admission.release(one.ticket for one in taken)
        buffer.check()
    assert order == sorted(order)
    s = admission.statistics()
    assert (s.trained, s.in_flight, s.buffered) == (P * steps, 0, 0)  # nothing was admitted in vain
    assert "stale" not in s.dropped
    assert S == 0 or buffer.statistics().age_max == admission.max_age  # the bound is reached, so the test tests it
    assert not running
    producer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await producer
