"""Slots, tickets and their accounts (AD-1 to AD-5)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from algorithms.admission import Admission, AdmissionState, Closed, Issue
from algorithms.bounds import Bounds
from algorithms.buffer import Buffer
from tests.algorithms.helpers import CountingPrompts, group, prompt


def lockstep(P: int = 2, S: float = 0.0, **options) -> tuple[Admission, Buffer]:
    admission = Admission(CountingPrompts(), groups_per_step=P, staleness=S, **options)
    return admission, Buffer(admission)


def admit_all(admission: Admission):
    tickets = []
    while (ticket := admission.admit_nowait()) is not None:
        tickets.append(ticket)
    return tickets


@pytest.mark.parametrize(
    ("S", "P", "slots", "age"),
    [(0, 4, 4, 0), (1, 4, 8, 1), (2, 4, 12, 2), (0.5, 4, 6, 1), (0.1, 4, 4, 0), (1.5, 2, 5, 2), (0.29, 100, 129, 1)],
)
def test_slots_and_the_age_bound_follow_from_staleness_and_step_size(S, P, slots, age):
    bounds = Bounds(staleness=S, groups_per_step=P)
    assert (bounds.slots, bounds.max_age, bounds.order_age) == (slots, age, age)


@pytest.mark.parametrize(("S", "P"), [(-1, 4), (float("nan"), 4), (float("inf"), 4), (1, 0)])
def test_impossible_sizes_are_refused_with_the_value(S, P):
    with pytest.raises(ValueError, match=r"expected .* got"):
        Admission(CountingPrompts(), groups_per_step=P, staleness=S)


def test_no_more_than_the_slots_are_admitted_and_unreleased():
    admission, buffer = lockstep(P=2, S=1)
    tickets = admit_all(admission)
    assert [t.prompt.position for t in tickets] == [0, 1, 2, 3]
    buffer.put(tickets[0], group(tickets[0], [0]))  # finishing frees nothing (AD-1)
    assert admission.admit_nowait() is None


def test_slot_stays_taken_until_the_fleet_commits():
    admission, buffer = lockstep()
    tickets = admit_all(admission)
    for ticket in tickets:
        buffer.put(ticket, group(ticket, [0]))
    assert buffer.take_nowait(2, version=0) is not None
    with pytest.raises(RuntimeError, match="trained on version 0, but the fleet is at version 0; publish and commit"):
        admission.release(tickets)
    assert admission.admit_nowait() is None
    admission.commit(1)
    assert admission.admit_nowait() is None
    admission.release(tickets)
    assert [(t.number, t.version) for t in admit_all(admission)] == [(2, 1), (3, 1)]


def test_a_failed_release_releases_nothing():
    admission, buffer = lockstep()
    first, second = admit_all(admission)
    buffer.put(first, group(first, [0]))
    assert buffer.take_nowait(1, version=0)
    admission.commit(1)
    for wrong in ([first, second], [first, first]):
        with pytest.raises(RuntimeError, match="release"):
            admission.release(wrong)
        assert admission.statistics().training == 1
    admission.release([first])


def test_dropped_slot_frees_at_once_and_its_prompt_comes_back_before_new_ones():
    admission, _ = lockstep()
    first, _second = admit_all(admission)
    dropped = admission.drop(first, "timeout", num_tokens=7)
    assert (dropped.position, dropped.reason, dropped.num_tokens) == (0, "timeout", 7)
    again = admission.admit_nowait()
    assert again is not None
    assert (again.number, again.prompt.position, again.attempt) == (2, 0, 1)
    s = admission.statistics()
    assert (s.issued, s.in_flight, s.dropped, s.dropped_tokens) == (3, 2, {"timeout": 1}, 7)
    admission.check()


@pytest.mark.parametrize("reason", ["unscored", "empty", "no_contrast"])
def test_prompt_that_is_to_blame_does_not_come_back(reason):
    admission, _ = lockstep()
    first, _second = admit_all(admission)
    admission.drop(first, reason)
    assert [t.prompt.position for t in admit_all(admission)] == [2]


def test_prompt_is_issued_at_most_max_attempts_times():
    admission, _ = lockstep(P=1, max_attempts=3)
    positions = []
    for _ in range(5):
        ticket = admission.admit_nowait()
        assert ticket is not None
        positions.append((ticket.prompt.position, ticket.attempt))
        admission.drop(ticket, "timeout")
        admission.check()
    assert positions == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_nothing_beyond_the_last_step_is_admitted():
    admission, buffer = lockstep(P=2, S=1, num_groups=3)
    tickets = admit_all(admission)
    assert len(tickets) == 3
    for ticket in tickets[:2]:
        buffer.put(ticket, group(ticket, [0]))
    buffer.take_nowait(2, version=0)
    admission.commit(1)
    admission.release(tickets[:2])
    assert admission.admit_nowait() is None
    admission.drop(tickets[2], "stale")  # its place has to be filled again
    assert [t.prompt.position for t in admit_all(admission)] == [2]


def test_a_ticket_ends_once():
    admission, buffer = lockstep()
    first, second = admit_all(admission)
    admission.drop(first, "aborted")
    with pytest.raises(RuntimeError, match="put: ticket 0 of prompt 0 ended before"):
        buffer.put(first, group(first, [0]))
    with pytest.raises(RuntimeError, match="drop: ticket 0 of prompt 0 ended before"):
        admission.drop(first, "aborted")
    buffer.put(second, group(second, [0]))
    with pytest.raises(RuntimeError, match="put: ticket 1 of prompt 1 is buffered, expected it to be in flight"):
        buffer.put(second, group(second, [0]))


def test_version_never_goes_back_but_may_be_published_anew():
    admission, _ = lockstep(version=4)
    admission.commit(4)
    with pytest.raises(RuntimeError, match=r"commit\(3\): the fleet is at version 4"):
        admission.commit(3)


def test_broken_conservation_is_reported_with_all_numbers():
    admission, _ = lockstep()
    admit_all(admission)
    del admission._book[0]  # white box: nothing public can do this
    with pytest.raises(RuntimeError, match=r"issued 2 != trained 0 \+ dropped 0 \{\} \+ buffered 0 .* in flight 1"):
        admission.check()


async def test_producer_waits_for_a_slot_and_close_wakes_it():
    admission, _ = lockstep(P=1)
    ticket = await admission.admit()
    waiting = asyncio.create_task(admission.admit())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert admission.statistics().producers_waiting == 1
    admission.drop(ticket, "aborted")
    assert (await waiting).attempt == 1
    other = asyncio.create_task(admission.admit())
    await asyncio.sleep(0)
    admission.close()
    with pytest.raises(Closed):
        await other
    with pytest.raises(Closed):
        await admission.admit()


async def test_cancelled_producer_took_no_prompt_and_no_slot():
    admission, _ = lockstep(P=1)
    ticket = await admission.admit()
    cancelled = asyncio.create_task(admission.admit())
    await asyncio.sleep(0)
    admission.drop(ticket, "unscored")  # wakes it ...
    cancelled.cancel()  # ... and it is cancelled before it runs
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    s = admission.statistics()
    assert (s.issued, s.in_flight, s.producers_waiting) == (1, 0, 0)
    assert (await admission.admit()).prompt.position == 1


def test_resumed_run_issues_the_same_prompts_first_in_the_same_order():
    admission, buffer = lockstep(P=2, S=1)
    tickets = admit_all(admission)
    for ticket in tickets[:3]:
        buffer.put(ticket, group(ticket, [0]))
    taken = buffer.take_nowait(2, version=0)
    assert taken
    admission.commit(1)
    admission.release(one.ticket for one in taken)
    late = admit_all(admission)  # 4 and 5
    admission.drop(late[0], "timeout")
    # 2 is buffered, 3 and 5 are in flight, 4 waits to be issued again.
    state = msgspec.json.decode(msgspec.json.encode(admission.state()), type=AdmissionState)
    wanted = [(2, 0), (3, 0), (5, 0), (4, 1)]
    assert [(issue.position, issue.attempt) for issue in state.outstanding] == wanted
    assert [issue.buffered for issue in state.outstanding] == [True, False, False, False]
    assert buffer.outstanding() == state.outstanding

    source = CountingPrompts()
    source.next = 6
    resumed = Admission(source, groups_per_step=2, staleness=1)
    resumed.restore(state, prompt)
    resumed.check()
    assert resumed.statistics().in_flight == 3  # their places are kept before anybody asks for them
    again = admit_all(resumed)
    assert [(t.prompt.position, t.attempt) for t in again] == wanted
    assert {t.version for t in again} == {1}
    resumed.check()
    assert resumed.statistics().trained == 2
    resumed.drop(again[0], "unscored")
    assert [t.prompt.position for t in admit_all(resumed)] == [6]
    with pytest.raises(RuntimeError, match="restore before that"):
        resumed.restore(state, prompt)


def test_slots_are_not_inflated_by_resuming():
    resumed, _ = lockstep(P=2, S=1)
    outstanding = [Issue(position=i, attempt=0, version=8) for i in range(4)]
    resumed.restore(AdmissionState(version=9, trained=18, dropped={"stale": 3}, outstanding=outstanding), prompt)
    assert len(admit_all(resumed)) == 4


def test_restored_groups_are_trained_as_they_were_in_their_old_places():
    admission, buffer = lockstep(P=2, S=1)
    tickets = admit_all(admission)
    groups = [group(tickets[1], [0]), group(tickets[2], [0, 0])]
    buffer.put(tickets[2], groups[1])
    buffer.put(tickets[1], groups[0])
    state, saved = admission.state(), admission.buffered()
    assert saved == groups  # in the order of the book, whatever came first

    resumed, taking = lockstep(P=2, S=1)
    resumed.restore(state, prompt, saved)
    resumed.check()
    assert (resumed.statistics().buffered, resumed.statistics().in_flight) == (2, 2)
    assert taking.take_nowait(2, version=0) is None  # 0 comes first and is in flight
    first, last = admit_all(resumed)
    assert (first.prompt.position, last.prompt.position) == (0, 3)
    taking.put(first, group(first, [0]))
    taken = taking.take_nowait(2, version=0)
    assert taken is not None
    assert [one.group.prompt.position for one in taken] == [0, 1]
    assert taken[1].group is groups[0]


def test_a_resumed_job_with_fewer_slots_issues_what_does_not_fit_again():
    admission, _ = lockstep(P=2, S=2)
    admit_all(admission)
    resumed, _ = lockstep(P=2, S=0)
    resumed.restore(admission.state(), prompt)
    resumed.check()
    assert [t.prompt.position for t in admit_all(resumed)] == [0, 1]
    assert resumed.statistics().to_reissue == 4


async def test_quiet_holds_admission_until_everything_in_flight_has_ended():
    admission, buffer = lockstep(P=2)
    first, second = admit_all(admission)
    buffer.put(first, group(first, [0]))
    waiting = asyncio.create_task(admission.quiet())
    await asyncio.sleep(0)
    assert not waiting.done()
    admission.drop(second, "timeout")
    await waiting
    assert admission.admit_nowait() is None  # a slot is free, and admission is on hold
    admission.go_on()
    assert admission.admit_nowait() is not None
    closed = asyncio.create_task(admission.quiet())
    await asyncio.sleep(0)
    admission.close()
    with pytest.raises(Closed):
        await closed


# --- windows and over-sampling ----------------------------------------------------------------------------------------


def test_over_sampling_adds_slots_and_reach_and_the_bound_stays():
    bounds = Bounds(groups_per_step=4, staleness=0, over_sampling=1.5)
    assert (bounds.extra, bounds.slots, bounds.reach, bounds.max_age, bounds.order_age) == (2, 6, 3, 0, 1)
    assert Bounds(groups_per_step=4, staleness=0, over_sampling=1.5, too_old="train").max_age == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": 0}, "window: expected at least 1, got 0"),
        ({"window": 2}, "window: expected at most 1, got 2: no more than 0 groups are ahead of a step"),
        ({"over_sampling": 0.5}, r"over_sampling: expected at least 1, got 0\.5"),
        ({"over_sampling": float("nan")}, "over_sampling: expected at least 1, got nan"),
    ],
)
def test_windows_that_can_never_be_used_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Bounds(groups_per_step=4, staleness=0, **options)
