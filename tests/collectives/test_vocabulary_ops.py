"""Embedding and cross entropy over a divided vocabulary equal those of one device, gradients and errors included."""

import pytest
import torch
from torch.nn import functional as F

from gemini.collectives.thread_group import run_shards
from gemini.collectives.value_moves import move
from gemini.collectives.vocabulary_ops import vocabulary_cross_entropy, vocabulary_embedding
from gemini.tensor_parallel.layouts import PARTIAL, REPLICATE, Shard, join_shards, take_shard

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("entries", [12, 13])
@pytest.mark.parametrize("padding", [None, 0, 7, -1])
def test_embedding(size, entries, padding):
    table = torch.randn(entries, 5, dtype=torch.float64, requires_grad=True)
    ids, layout = torch.randint(entries, (3, 8)), Shard(0)
    direction = torch.randn(3, 8, 5, dtype=torch.float64)
    expected = F.embedding(ids, table, padding)
    expected.backward(direction)

    def run(group):
        own = take_shard(table.detach(), layout, group.size, group.rank).clone().requires_grad_()
        found = move(vocabulary_embedding(ids, own, padding, entries=entries, layout=layout), PARTIAL, REPLICATE)
        found.backward(direction)
        return found.detach(), own.grad

    results = run_shards(size, run)
    assert torch.equal(results[0][0], expected)
    assert torch.allclose(join_shards([grad for _, grad in results], layout), table.grad, atol=1e-12)


def test_an_id_outside_the_table_is_an_error():
    def run(group):
        return vocabulary_embedding(torch.tensor([12]), torch.randn(6, 2), entries=12, layout=Shard(0))

    with pytest.raises(IndexError, match="out of range"):
        run_shards(2, run)


@pytest.mark.parametrize("options", [
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": 3},
    {"weight": True}, {"weight": True, "label_smoothing": 0.2, "ignore_index": 2, "reduction": "sum"},
    {"weight": True, "label_smoothing": 0.2, "ignore_index": 2},
])  # fmt: skip
@pytest.mark.parametrize(("entries", "shape"), [(12, (7,)), (13, (7,)), (12, (2, 5)), (12, ())])
def test_cross_entropy(options, entries, shape):
    logits = torch.randn(*shape[:1], entries, *shape[1:], dtype=torch.float64, requires_grad=True)
    target = torch.randint(4, shape)
    target.view(-1)[0] = 0  # not ignored: the mean of no rows is tested below
    options = dict(options)
    if options.pop("weight", False):
        options["weight"] = torch.rand(entries, dtype=torch.float64)
    expected = F.cross_entropy(logits, target, **options)
    direction = torch.randn_like(expected)
    expected.backward(direction)
    layout = Shard(min(1, logits.dim() - 1))

    def run(group):
        own = take_shard(logits.detach(), layout, group.size, group.rank).clone().requires_grad_()
        found = vocabulary_cross_entropy(own, target, **options, entries=entries, layout=layout)
        found.backward(direction)
        return found.detach(), own.grad

    results = run_shards(2, run)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][0], expected, atol=1e-12)
    assert torch.allclose(join_shards([grad for _, grad in results], layout), logits.grad, atol=1e-12)


def test_all_labels_ignored_is_nan_as_on_one_device():
    def run(group):
        return vocabulary_cross_entropy(torch.randn(2, 3), torch.full((2,), -100), entries=6, layout=Shard(1))

    assert all(value.isnan() for value in run_shards(2, run))


def test_a_label_outside_the_classes_is_an_error():
    def run(group):
        return vocabulary_cross_entropy(torch.randn(2, 3), torch.tensor([0, 6]), entries=6, layout=Shard(1))

    with pytest.raises(IndexError, match="out of bounds"):
        run_shards(2, run)


def test_half_precision_is_summed_in_single():
    logits, target = torch.randn(64, 512).bfloat16().requires_grad_(), torch.randint(512, (64,))
    expected = F.cross_entropy(logits, target)

    def run(group):
        own = take_shard(logits.detach(), Shard(1), 2, group.rank)
        return vocabulary_cross_entropy(own, target, entries=512, layout=Shard(1))

    assert torch.allclose(run_shards(2, run)[0], expected, rtol=0.01)
