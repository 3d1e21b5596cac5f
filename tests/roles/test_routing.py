"""Promises of roles/routing.py."""

from __future__ import annotations

import random

import pytest

from roles.routing import SLACK_TOKENS, Member, NoReplica, Router, request_tokens


def test_a_request_counts_its_prompt_once_and_each_sample_in_full() -> None:
    assert request_tokens(prompt_length=10, num_samples=8, max_tokens=32) == 10 + 8 * 32


def test_ties_go_to_the_lowest_rank_ro1() -> None:
    router = Router(3)
    assert [router.place(5) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded_replica_is_chosen_ro1() -> None:
    router = Router(3)
    # loads after each: 90,0,0 / 90,20,0 / 90,20,30 / 90,30,30 / 90,31,30
    assert [router.place(tokens) for tokens in (90, 20, 30, 10, 1)] == [0, 1, 2, 1, 1]
    assert router.place(1) == 2
    router.release(0, 90)
    assert router.place(1) == 0


def test_with_nothing_in_flight_every_load_is_zero_ro2() -> None:
    router, rng = Router(4), random.Random(0)
    placed: list[tuple[int, int]] = []
    for _ in range(2000):
        if placed and rng.random() < 0.5:
            router.release(*placed.pop(rng.randrange(len(placed))))
        else:
            tokens = rng.randrange(1, 500)
            rank = router.place(tokens)
            placed.append((rank, tokens))
            assert router.outstanding[rank] - tokens == min(
                load - tokens if index == rank else load for index, load in enumerate(router.outstanding)
            )
    for rank, tokens in placed:
        router.release(rank, tokens)
    assert router.outstanding == (0, 0, 0, 0)


def test_releasing_more_than_was_placed_is_an_error() -> None:
    router = Router(1)
    router.place(5)
    with pytest.raises(RuntimeError, match="replica 0 has 5 outstanding tokens, asked to release 6"):
        router.release(0, 6)


def test_no_replica_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        Router(0)


def test_a_session_stays_on_its_replica_until_that_is_much_busier_or_gone_ro3() -> None:
    router = Router(2)
    assert router.place(100, session="a") == 0
    assert router.place(500) == 1
    router.release(1, 500)
    assert router.place(50, session="a") == 0  # though replica 1 is idle
    router.place(SLACK_TOKENS)  # on 1
    router.place(2 * SLACK_TOKENS)  # on 0
    assert router.place(1, session="a") == 1  # balance is worth more than the cache
    assert router.place(1, session="a") == 1
    router.serve(1, False)
    assert router.place(1, session="a") == 0  # RO-4
    router.forget("a")
    router.serve(1, True)
    assert router.place(1, session="a") == 1


def test_episodes_of_one_group_begin_where_their_beginning_is_cached_ro3() -> None:
    router = Router(2)
    assert [router.place(1000, session=Member("group", name)) for name in range(5)] == [0] * 5
    assert router.place(1000, session=Member("group", 5)) == 1  # that one has become much busier
    assert router.place(1, session=Member("group", 6)) == 1  # and so the group has moved
    assert router.place(1, session=Member("other", 2)) == 1
    for name in range(7):
        router.forget(Member("group", name))
    router.forget("group")
    assert list(router._sessions) == ["other", Member("other", 2)]


def test_no_replica_in_service_is_an_error_ro4() -> None:
    router = Router(1)
    router.serve(0, False)
    with pytest.raises(NoReplica):
        router.place(1)


def test_the_longest_unused_sessions_are_forgotten_ro5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roles.routing.MAX_SESSIONS", 3)
    router = Router(2)
    for session in "abcd":
        router.place(0, session=session)
    assert list(router._sessions) == ["b", "c", "d"]
