"""Slices of layouts make up the whole; moves convert value and gradient in opposite directions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini.errors import ArtifactError
from gemini.tensor_parallel.layouts import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    Shard,
    even_shard,
    join_shards,
    local_size,
    move_collectives,
    read_layout,
    shard_blocks,
    take_shard,
    unit_range,
    write_layout,
)

pytestmark = pytest.mark.unit


@given(
    count=st.integers(1, 5), units=st.integers(1, 12), factor=st.integers(1, 4), outer=st.integers(1, 3),
    dim=st.integers(0, 2),
)  # fmt: skip
def test_slices_join_to_the_whole(count, units, factor, outer, dim):
    shape = [2, 3, 2]
    shape[dim] = units * factor * outer
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    layout = Shard(dim, factor, outer)
    parts = [take_shard(whole, layout, count, shard) for shard in range(count)]
    assert torch.equal(join_shards(parts, layout), whole)
    assert [tuple(part.shape) for part in parts] == [local_size(layout, shape, count, j) for j in range(count)]
    sizes = [part.shape[dim] // (factor * outer) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    covered = sorted(block for j in range(count) for block in shard_blocks(layout, shape[dim], count, j))
    assert [start for start, _ in covered] + [shape[dim]] == [0] + [stop for _, stop in covered]


def test_units_that_do_not_divide_give_the_first_shards_one_more():
    assert [unit_range(25, 4, shard) for shard in range(4)] == [(0, 7), (7, 13), (13, 19), (19, 25)]


def test_a_dimension_that_is_no_whole_number_of_units_is_refused():
    with pytest.raises(ValueError, match="10 entries"):
        shard_blocks(Shard(0, 4), 10, 2, 0)


A, B = Shard(0, 2), Shard(1, 2)


@pytest.mark.parametrize(
    ("have", "want", "forward", "backward"),
    [
        (REPLICATE, PARTIAL_GRAD, "", "all-reduce"),
        (PARTIAL_GRAD, REPLICATE, "", ""),
        (REPLICATE, A, "", "all-gather"),
        (PARTIAL_GRAD, A, "", ""),
        (REPLICATE, PARTIAL, "", ""),
        (PARTIAL, REPLICATE, "all-reduce", ""),
        (PARTIAL, PARTIAL_GRAD, "all-reduce", "all-reduce"),
        (PARTIAL, A, "reduce-scatter", "all-gather"),
        (A, REPLICATE, "all-gather", ""),
        (A, PARTIAL_GRAD, "all-gather", "reduce-scatter"),
        (A, PARTIAL, "", ""),
        (A, B, "all-to-all", "all-to-all"),
        (A, A, "", ""),
    ],
)
def test_collectives_of_moves(have, want, forward, backward):
    assert move_collectives(have, want) == (forward, backward)
    assert move_collectives(have, want, grad=False) == (forward, "")


@pytest.mark.parametrize("layout", [REPLICATE, PARTIAL_GRAD, PARTIAL, Shard(2, 3, 4), even_shard(1, 12, 2, 3)])
def test_layouts_round_trip(layout):
    assert read_layout(write_layout(layout)) == layout


def test_what_is_no_layout_is_refused():
    for data in ("whole", ["shard", 0, 1], ["shard", 0, "1", 1], 3):
        with pytest.raises(ArtifactError, match="not a layout"):
            read_layout(data)
