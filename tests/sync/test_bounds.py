"""BO-1 to BO-3, on plans whose times are worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.bounds import Links, lower_bounds, simulate
from sync.layout import Entry, Layout
from sync.plan import Plan, make_plan

SLOW = Links(ranks_per_host=1, network=100.0, inside=1e6, cast=1e9, verify=1e9, transfer_seconds=0.0)
"""100 bytes a second between ranks; all else costs nothing that is seen."""


def plan_of(senders: int, sinks: int, tensors: int, *, spread: bool = False) -> Plan:
    """Every trainer rank holds all tensors of 640 bytes, every rollout rank wants them; one a bucket."""
    layout = Layout(tuple(Entry.whole(f"layers.{i}.w", (640,), "uint8") for i in range(tensors)))
    return make_plan([layout] * senders, [layout] * sinks, bucket_bytes=640, spread=spread)


def test_one_trainer_rank_sends_to_two_rollout_ranks_in_turn():
    # 3 buckets of 6.4 s; the trainer's link carries each twice
    plan = plan_of(1, 2, 3)
    bounds = lower_bounds(plan, SLOW)
    assert bounds.receive == pytest.approx(19.2)
    assert bounds.send == pytest.approx(38.4)
    assert bounds.send_relayed == pytest.approx(19.2)
    assert simulate(plan, SLOW).seconds == pytest.approx(38.4, rel=1e-4)


def test_relay_costs_one_bucket_more_than_the_time_to_send_once():
    assert simulate(plan_of(1, 2, 3), SLOW, relay=True).seconds == pytest.approx(19.2 + 6.4, rel=1e-4)


def test_replicas_spread_over_the_holders_are_served_at_once():
    plan = plan_of(2, 2, 4, spread=True)
    load = [sum(b.num_bytes for b in plan.sent_by(rank)) for rank in (0, 1)]
    assert load == [4 * 640, 4 * 640]
    assert simulate(plan, SLOW, depth=4).seconds == pytest.approx(25.6, rel=1e-3)  # what each rank has to read


def test_ranks_of_one_host_use_the_link_inside():
    plan = plan_of(1, 1, 1)
    inside = simulate(plan, Links(network=1.0, inside=640.0, cast=1e12, verify=1e12, one_host=True, transfer_seconds=0))
    assert inside.seconds == pytest.approx(1.0)
    assert inside.bound == pytest.approx(1.0)


def test_fixed_cost_of_a_transfer_is_paid_for_each_bucket():
    links = Links(ranks_per_host=1, network=100.0, cast=1e12, verify=1e12, transfer_seconds=2.0)
    assert simulate(plan_of(1, 1, 3), links).seconds == pytest.approx(3 * 8.4, rel=1e-6)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.booleans(), st.integers(1, 4))
def test_no_schedule_beats_the_bounds_and_every_bucket_arrives_once(senders, sinks, tensors, spread, relay, depth):
    """BO-1, BO-2"""
    plan = plan_of(senders, sinks, tensors, spread=spread)
    run = simulate(plan, SLOW, relay=relay, depth=depth)
    assert run.transfers == tensors * sinks
    assert run.seconds >= lower_bounds(plan, SLOW).of(relay=relay) * (1 - 1e-9)
