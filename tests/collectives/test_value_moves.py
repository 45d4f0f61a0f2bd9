"""A move keeps the value and its gradient: through any layouts, the shards compute what one device does."""

import itertools

import pytest
import torch

from gemini.collectives.shard_group import CollectiveMismatchError, GroupLostError
from gemini.collectives.thread_group import run_shards
from gemini.collectives.value_moves import move
from gemini.tensor_parallel.layouts import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    Partial,
    PartialGrad,
    Shard,
    join_shards,
    move_collectives,
    take_shard,
)

pytestmark = pytest.mark.unit

LAYOUTS = (REPLICATE, PARTIAL_GRAD, PARTIAL, Shard(0, 2), Shard(1, 1), Shard(1, 2, 3))


def part_of(whole, layout, group, noise):
    """What a shard holds of a whole value; parts of a sum differ per shard."""
    if isinstance(layout, Shard):
        return take_shard(whole, layout, group.size, group.rank)
    if isinstance(layout, Partial):
        return noise[group.rank] if group.rank else whole - noise[1:].sum(0)
    return whole


def whole_of(parts, layout):
    """The whole value, or gradient, of the parts of all shards."""
    if isinstance(layout, Shard):
        return join_shards(parts, layout)
    if isinstance(layout, Partial):
        return sum(parts)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def units_of(layout):
    return 0 if not isinstance(layout, Shard) else 3 if layout.dim == 0 else 12 // layout.entries


@pytest.mark.parametrize(("have", "want"), [*itertools.permutations(LAYOUTS, 2)])
@pytest.mark.parametrize("size", [2, 3])
def test_value_and_gradient_are_kept(have, want, size):
    generator = torch.Generator().manual_seed(1)
    whole, direction = (torch.randn(6, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    noise, parts_of_grad = (torch.randn(size, 6, 12, generator=generator, dtype=torch.float64) for _ in range(2))

    def run(group):
        x = part_of(whole, have, group, noise).clone().requires_grad_()
        y = move(x, have, want, units_of(have) or units_of(want))
        gradient = direction
        if isinstance(want, Shard):
            gradient = take_shard(direction, want, group.size, group.rank)
        elif isinstance(want, PartialGrad):
            gradient = part_of(direction, PARTIAL, group, parts_of_grad)
        y.backward(gradient)
        return y.detach(), x.grad, dict(group.counts)

    found = run_shards(size, run)
    assert torch.allclose(whole_of([y for y, _, _ in found], value(want)), whole, atol=1e-12)
    gradients = [gradient for _, gradient, _ in found]
    assert torch.allclose(whole_of(gradients, value_of_gradient(have)), direction, atol=1e-12)
    counted = [name for name in move_collectives(have, want) if name]
    assert sorted(counted) == sorted(name for name, count in found[0][2].items() for _ in range(count))


def value(layout):
    return REPLICATE if isinstance(layout, PartialGrad) else layout


def value_of_gradient(layout):
    if isinstance(layout, Shard):
        return layout
    return PARTIAL if isinstance(layout, PartialGrad) else REPLICATE


def test_shards_at_different_collectives_are_an_error():
    def run(group):
        x = torch.ones(4)
        return group.all_reduce(x) if group.rank else group.all_gather(x, Shard(0, 4))

    with pytest.raises(CollectiveMismatchError, match="different collectives"):
        run_shards(2, run)


def test_the_exception_of_a_shard_ends_the_others():
    def run(group):
        if group.rank:
            raise KeyError("a fault of the model")
        group.all_reduce(torch.ones(4))

    with pytest.raises(KeyError, match="a fault of the model"):
        run_shards(2, run)


def test_a_lost_shard_is_named_where_none_raised():
    with pytest.raises(GroupLostError):
        run_shards(2, lambda group: group._meeting.barrier.abort() or group.all_reduce(torch.ones(1)))
