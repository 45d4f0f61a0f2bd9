"""Collectives agree with closed forms, on one tier and on several, and are monotone in speed and latency."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.cluster import Cluster, HostGroup, LinkTier
from gemini.cluster.cluster_file import find_device_class
from gemini.cluster.collectives import (
    ALL_REDUCES,
    all_gather,
    all_reduce,
    all_to_all,
    hierarchical_all_reduce,
    reduce_scatter,
    ring_all_reduce,
    send,
    tree_all_reduce,
)
from gemini.cluster.rank_group import group_on
from gemini.errors import ConfigError

DEVICE = find_device_class("h100")
INSIDE = LinkTier("inside", 400, latency_us=2, efficiency=1)
BETWEEN = LinkTier("between", 50, latency_us=10, efficiency=1)
SPINE = LinkTier("spine", 25, latency_us=20, efficiency=1)
SIZE = 1e9


def cluster(hosts: int = 4, per_host: int = 8, tiers: tuple[LinkTier, ...] = (INSIDE, BETWEEN)) -> Cluster:
    return Cluster("test", (HostGroup(DEVICE, hosts, per_host),), tiers)


def test_a_ring_in_a_host():
    group = group_on(cluster(), 8)
    assert ring_all_reduce(group, SIZE) == pytest.approx(2 * 7 / 8 * SIZE / 400e9 + 14 * 2e-6)
    assert all_gather(group, SIZE) == pytest.approx(7 / 8 * SIZE / 400e9 + 7 * 2e-6)
    assert reduce_scatter(group, SIZE) == all_gather(group, SIZE)


def test_a_tree_has_logarithmic_latency():
    group = group_on(cluster(), 8)
    assert tree_all_reduce(group, SIZE) == pytest.approx(2 * SIZE / 400e9 + 2 * 3 * 2e-6)
    assert tree_all_reduce(group, 1.0) < ring_all_reduce(group, 1.0)
    assert all_reduce(group, 1.0) == tree_all_reduce(group, 1.0)


def test_ranks_of_a_ring_on_one_host_share_its_links():
    """With one rank per host a ring has one link; with k ranks on a host, all k links of theirs."""
    spread = group_on(cluster(), 4, stride=8)
    packed = group_on(cluster(), 8, stride=4)
    whole = group_on(cluster(), 32)
    assert (spread.fanout, packed.fanout, whole.fanout) == ((1, 4), (2, 4), (8, 4))
    assert (spread.ring_bandwidth, packed.ring_bandwidth, whole.ring_bandwidth) == (50e9, 100e9, 400e9)


def test_a_hierarchical_all_reduce_sends_a_part_outside():
    group = group_on(cluster(), 32)
    inside = 2 * (7 / 8 * SIZE / 400e9 + 7 * 2e-6)
    outside = 2 * (3 / 4 * SIZE / 8 / 50e9 + 3 * 10e-6)
    assert hierarchical_all_reduce(group, SIZE) == pytest.approx(inside + outside)


def test_three_tiers():
    tiers = (INSIDE, replace(BETWEEN, units=2), SPINE)
    group = group_on(cluster(tiers=tiers), 32)
    assert group.fanout == (8, 2, 2)
    assert group.ring_bandwidth == min(400e9, 8 * 50e9, 16 * 25e9)
    assert group_on(cluster(tiers=tiers), 4, stride=8).ring_bandwidth == min(50e9, 2 * 25e9)


def test_the_latency_of_a_ring_is_that_of_its_hops():
    group = group_on(cluster(), 32)
    assert group.ring_latency == pytest.approx((28 * 2e-6 + 4 * 10e-6) / 32)


def test_links_shared_by_the_devices_of_a_host():
    card = replace(BETWEEN, shared_by_host=True)
    assert group_on(cluster(tiers=(INSIDE, card)), 4, stride=8).ring_bandwidth == 50e9 / 8


def test_an_all_to_all_is_bound_by_its_slowest_tier():
    group = group_on(cluster(), 32)
    assert all_to_all(group, SIZE) == pytest.approx(SIZE * 24 / 32 / 50e9 + 12e-6)


def test_a_transfer_uses_the_widest_tier_between_neighbours():
    assert send(group_on(cluster(), 4, stride=8), SIZE) == pytest.approx(SIZE / 50e9 + 10e-6)
    assert send(group_on(cluster(), 2), SIZE) == pytest.approx(SIZE / 400e9 + 2e-6)


def test_one_rank_communicates_nothing():
    group = group_on(cluster(), 1)
    for cost in (*ALL_REDUCES.values(), all_gather, all_to_all, send):
        assert cost(group, SIZE) == 0


def test_an_unknown_algorithm_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'tree'"):
        all_reduce(group_on(cluster(), 8), SIZE, "trees")


sizes = st.sampled_from([2, 4, 8, 16, 32, 64])
amounts = st.floats(1, 1e11)


@given(ranks=sizes, stride=st.sampled_from([1, 2, 4, 8]), nbytes=amounts, factor=st.floats(1, 8))
def test_faster_links_are_never_slower(ranks, stride, nbytes, factor):
    plain = cluster(64)
    for level in (0, 1):
        tiers = tuple(replace(tier, bandwidth_gb=tier.bandwidth_gb * (factor if at == level else 1))
                      for at, tier in enumerate(plain.tiers))  # fmt: skip
        faster = replace(plain, tiers=tiers)
        for cost in (all_reduce, all_gather, all_to_all, send, *ALL_REDUCES.values()):
            slow, fast = (cost(group_on(one, ranks, stride), nbytes) for one in (plain, faster))
            assert fast <= slow * (1 + 1e-12)


@given(ranks=sizes, stride=st.sampled_from([1, 3, 8]), nbytes=amounts)
def test_the_fanout_multiplies_to_the_ranks_and_more_bytes_take_longer(ranks, stride, nbytes):
    group = group_on(cluster(64), ranks, stride)
    assert math.prod(group.fanout) == ranks
    assert all_reduce(group, nbytes) <= all_reduce(group, 2 * nbytes)
