"""CM-1 to CM-4, over random orders of facts, without processes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.commit import Abort, Applied, Apply, CommitMachine, Expired, Fact, Failed, Fence, Packed, Staged
from sync.layout import Box
from sync.plan import Bucket, Segment

WANTED = {0: frozenset({0, 1}), 1: frozenset({1, 2}), 2: frozenset({0, 1, 2})}
DIGEST = {0: (10, 20), 1: (11,), 2: (12, 22)}


def bucket(index: int, *names: str) -> Bucket:
    segments = [Segment(name, Box((0,), (4,)), "float32", "float32", 64 * i, (4,)) for i, name in enumerate(names)]
    return Bucket(index, 7, (0, 1, 2), index, 128, tuple(segments))


BUCKETS = {0: bucket(0, "embed", "head"), 1: bucket(1, "mlp"), 2: bucket(2, "norm", "bias")}


def happy_facts(version: int = 5) -> list[Fact]:
    packed: list[Fact] = [Packed(version, shard, digest) for shard, digest in DIGEST.items()]
    staged = [Staged(version, sink, shard, DIGEST[shard]) for sink, want in WANTED.items() for shard in want]
    return [*packed, *staged]


def machine() -> CommitMachine:
    return CommitMachine(5, WANTED, BUCKETS)


def test_apply_comes_with_the_last_staged_shard_and_not_before():
    m = machine()
    *before, last = happy_facts()
    assert [action for fact in before for action in m.on(fact)] == []
    assert m.on(last) == [Apply(5)]
    assert m.phase == "committing"


@given(st.permutations(happy_facts()), st.data())
def test_any_order_with_repeats_and_late_facts_commits_once(order, data):
    late = [Staged(4, 0, 0, (99,)), Packed(4, 1, (98,)), Failed(4, "rollout", 1, "old"), Expired(4), Applied(4, 2)]
    noise = data.draw(st.lists(st.sampled_from(late), max_size=6))
    again = data.draw(st.lists(st.sampled_from(order), max_size=6))
    m = machine()
    actions = []
    for fact in order:
        for extra in data.draw(st.lists(st.sampled_from([fact, *noise]), max_size=2)):
            actions += m.on(extra)
        actions += m.on(fact)
    actions += [action for fact in again for action in m.on(fact)]
    assert actions == [Apply(5)]


@given(st.permutations(happy_facts()), st.integers(0, 8), st.sampled_from(["corrupt", "fail", "expire", "contradict"]))
def test_one_bad_fact_before_the_decision_aborts_everybody_and_nothing_is_applied(order, position, kind):
    position = min(position, len(order) - 1)  # always before the last fact, so before any decision
    victim = order[position]
    bad: list[Fact]
    if kind == "corrupt":
        digest = (victim.digests[0] ^ 1, *victim.digests[1:])
        changed = type(victim)(5, *(getattr(victim, f) for f in victim.__struct_fields__[1:-1]), digest)
        bad = [changed]
    elif kind == "fail":
        bad = [Failed(5, "trainer", 1, "killed by signal 9")]
    elif kind == "expire":
        bad = [Expired(5)]
    else:
        changed = type(victim)(
            5, *(getattr(victim, f) for f in victim.__struct_fields__[1:-1]), (victim.digests[0] ^ 2,)
        )
        bad = [victim, changed]
    m = machine()
    actions = [action for fact in [*order[:position], *bad, *order[position + 1 :]] for action in m.on(fact)]
    assert len(actions) == 1
    assert isinstance(actions[0], Abort)
    assert m.phase == "aborted"
    assert m.on(order[position]) == []


def test_lost_shard_never_commits_and_is_named_at_the_deadline():
    m = machine()
    for fact in happy_facts():
        if fact != Staged(5, 1, 2, DIGEST[2]):
            assert m.on(fact) == []
    (abort,) = m.on(Expired(5))
    assert isinstance(abort, Abort)
    assert abort.reason == "deadline passed: rollout rank 1 has not staged bucket 2 (norm to bias)"


def test_corrupted_shard_is_named_with_rank_and_both_digests():
    m = machine()
    m.on(Packed(5, 2, (12, 22)))
    (abort,) = m.on(Staged(5, 2, 2, (12, 23)))
    assert isinstance(abort, Abort)
    assert abort.reason.startswith(
        "rollout rank 2: bias, box [0:4], arrived with digest 0000000000000017, trainer rank 7 packed 0000000000000016"
    )


@pytest.mark.parametrize("fact", [Applied(5, 0), Staged(5, 0, 2, (12, 22))])
def test_facts_that_break_the_protocol_abort(fact):
    assert isinstance(machine().on(fact)[0], Abort)


def test_failure_after_the_decision_fences_that_sink_and_the_others_finish():
    m = machine()
    for fact in happy_facts():
        m.on(fact)
    assert m.on(Applied(5, 0)) == []
    assert m.on(Failed(5, "rollout", 1, "died")) == [Fence(5, 1, "died")]
    assert m.on(Failed(5, "rollout", 1, "died")) == []
    assert m.phase == "committing"
    m.on(Applied(5, 2))
    assert m.phase == "done"
    assert m.serving == {0, 2}


class World:
    """Sinks that obey actions in any order the test likes, and report what happened to them."""

    def __init__(self) -> None:
        self.versions = [4, 4, 4]
        self.fenced: set[int] = set()
        self.orders: list[tuple[int, str]] = []

    def take(self, actions) -> None:
        for action in actions:
            match action:
                case Apply():
                    self.orders += [(sink, "apply") for sink in range(3)]
                case Fence(sink=sink):
                    self.fenced.add(sink)
                case Abort():
                    self.orders += [(sink, "abort") for sink in range(3)]


@settings(max_examples=300)
@given(st.data())
def test_after_the_decision_sinks_that_may_serve_never_differ(data):
    """Random interleavings of shards, failures, deadline, and of the moments at which sinks obey (CM-1, CM-2)."""
    m, world = machine(), World()
    pending: list[Fact] = list(happy_facts())
    trouble: list[Fact] = [
        Failed(5, "trainer", 0, "died"),
        Failed(5, "rollout", 1, "died"),
        Staged(5, 2, 1, (77,)),
        Expired(5),
        Staged(4, 0, 0, (1,)),
    ]
    pending += data.draw(st.lists(st.sampled_from(trouble), max_size=2))
    decided_abort = False
    while pending or world.orders:
        choice = data.draw(st.integers(0, len(pending) + len(world.orders) - 1))
        if choice < len(pending):
            actions = m.on(pending.pop(choice))
            decided_abort |= any(isinstance(action, Abort) for action in actions)
            world.take(actions)
        else:
            sink, order = world.orders.pop(choice - len(pending))
            if order == "apply" and sink not in world.fenced:
                world.versions[sink] = 5
                pending.append(Applied(5, sink))
        if decided_abort:
            assert world.versions == [4, 4, 4]
    if m.phase == "staging":
        world.take(m.on(Expired(5)))
    serving = {world.versions[sink] for sink in range(3) if sink not in world.fenced}
    assert len(serving) <= 1
    assert m.phase in {"done", "aborted"}
