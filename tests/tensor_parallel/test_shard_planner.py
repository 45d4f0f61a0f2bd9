"""Planned shards compute the loss and gradients of one device, with the collectives of the best layouts by hand."""

import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.errors import ShardingError
from gemini.tensor_parallel.layouts import PARTIAL_GRAD, REPLICATE, Shard, layout_text, wire_bytes
from gemini.tensor_parallel.shard_plan import VOCABULARY_CROSS_ENTROPY, ShardPlan
from gemini.tensor_parallel.shard_planner import plan_shards
from tests.tensor_parallel.planned_models import (
    ACTIVATION,
    BATCH,
    LENGTH,
    NAMES,
    opened,
    transformer,
    transformer_graph,
)
from tests.tensor_parallel.shard_comparison import compare, planned

pytestmark = pytest.mark.unit


# ── transformers ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", NAMES)
def test_transformers_are_sharded_and_equal_one_device(name):
    graph = transformer_graph(name, drop=0.1 if name in ("gpt2", "bert", "t5") else 0.0)
    plan = plan_shards(graph, 2)
    assert plan.sharded_share >= 0.95
    single = name in ("llama", "mixtral")  # they cast to float32
    compare(graph, plan, tolerance=3e-6 if single else 1e-9, **transformer(name)[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_block_has_no_more_collectives_than_the_layout_by_hand(name):
    graph = transformer_graph(name)
    plan = plan_shards(graph, 2)
    blocks = Counter()
    for move in plan.moves:
        maker = graph.nodes[move.ref.node].name if move.ref else ""
        scope = re.match(r".*?(?:h|layer|layers|block)\.\d+\b", maker)
        for phase, collective in zip(("forward", "backward"), move.collectives, strict=True):
            if scope:
                blocks[scope[0], phase] += wire_bytes(collective, move.bytes, 2)
    size = ACTIVATION * (4 if name == "mixtral" else 8)
    assert len(blocks) >= 4
    for (scope, phase), wire in blocks.items():
        reductions = 3 if "decoder" in scope else 2  # a decoder of T5 attends twice
        assert wire <= reductions * size, (scope, phase, wire / size)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_computed_on_divided_logits(name):
    graph = transformer_graph(name)
    plan = plan_shards(graph, 2)
    (loss,) = [one for one in plan.nodes if one.local == VOCABULARY_CROSS_ENTROPY]
    element = 4 if name == "mixtral" else 8
    assert sum(inner.size for inner in loss.collectives) <= 3 * BATCH * LENGTH * element
    logits = {ref for ref, layout in loss.inputs if isinstance(layout, Shard)}
    assert not [move for move in plan.moves if move.ref in logits and any(move.collectives)]


def test_four_shards_with_two_heads_of_keys_replicate_the_keys():
    graph = transformer_graph("llama")
    plan = plan_shards(graph, 4)
    assert plan.sharded_share > 0.95
    compare(graph, plan, tolerance=3e-6, **transformer("llama")[1])


# ── layouts ────────────────────────────────────────────────────────────────────────────────────────────────────────
class FusedAttention(nn.Module):
    """Hand-written attention with one weight for queries, keys and values."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / 2).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2))


def layouts(plan):
    """The layouts of all parameters."""
    return {one.name: layout_text(one.layout) for one in plan.tensors}


def test_a_fused_weight_is_divided_in_interleaved_groups():
    _, plan = planned(FusedAttention(), torch.randn(3, 6, 16).double())
    found = layouts(plan)
    assert found["qkv.weight"] == "S0/3"
    assert found["out.weight"] == "S1"


def test_grouped_convolutions_divide_their_groups():
    model = nn.Sequential(
        nn.Conv1d(8, 32, 3, padding=1), nn.GELU(), nn.Conv1d(32, 32, 3, padding=1, groups=8), nn.GELU(),
        nn.Conv1d(32, 8, 1),
    )  # fmt: skip
    graph, plan = planned(model, torch.randn(3, 8, 10).double())
    assert layouts(plan)["2.weight"] == "S0"
    (node,) = [one for one in plan.nodes if graph.nodes[one.node].target == "2"]
    assert [size.place for size in node.sizes] == [(("a", "groups"),)]


class Mutating(nn.Module):
    """Values that an op overwrites keep one layout."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = self.up(x)
        view = y.view(x.shape[0], -1)
        view.mul_(2.0)
        z = y + 1
        z[:, 0] = 0.0
        return self.down(z.tanh())


def test_values_that_are_written_are_not_copied():
    _, plan = planned(Mutating(), torch.randn(3, 16).double())
    assert plan.sharded_share > 0.4


class Tied(nn.Module):
    """One table for the embedding and the head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())


def test_a_tied_table_is_divided_once():
    ids = torch.randint(64, (3, 5))
    _, plan = planned(Tied(), ids, ids.roll(1))
    (tensor,) = plan.tensors
    assert tensor.names == ("table.weight", "head.weight")
    assert isinstance(tensor.layout, Shard)


def test_one_shard_needs_no_collectives():
    graph = opened(FusedAttention(), torch.randn(3, 6, 16))
    plan = plan_shards(graph, 1)
    assert not plan.moves or not any(any(move.collectives) for move in plan.moves)


def test_a_plan_round_trips(tmp_path):
    graph = opened(FusedAttention(), torch.randn(3, 6, 16))
    plan = plan_shards(graph, 2)
    plan.save(tmp_path / "plan.json")
    assert ShardPlan.load(tmp_path / "plan.json") == plan
    assert plan == plan_shards(graph, 2), "planning is deterministic"


def test_ops_without_a_rule_are_named_with_their_cost():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x):
            return self.cell(x)[0]

    plan = plan_shards(opened(Odd(), torch.randn(3, 5, 8)), 2)
    assert plan.replicated[0].name.startswith("cell")
    assert plan.replicated[0].ms > 0
    assert {one.layout for one in plan.tensors} <= {REPLICATE, PARTIAL_GRAD}


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_size_that_is_no_number_of_shards_is_refused(size):
    graph = opened(nn.Linear(4, 4), torch.randn(3, 4))
    with pytest.raises(ShardingError, match="no number of shards"):
        plan_shards(graph, size)


# ── sizes that shards do not divide ────────────────────────────────────────────────────────────────────────────────
class OddHeads(nn.Module):
    """Three heads, and a vocabulary of 1001 words, on two shards."""

    def __init__(self):
        super().__init__()
        self.table, self.qkv = nn.Embedding(1001, 24), nn.Linear(24, 72)
        self.out, self.head = nn.Linear(24, 24), nn.Linear(24, 1001, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        x = self.table(ids)
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_heads_and_words_that_do_not_divide_are_sharded_unevenly():
    ids = torch.randint(1001, (3, 64))
    graph, plan = planned(OddHeads(), ids, ids.roll(1))
    table = plan.tensor("table.weight")
    assert table.layout == Shard(0, 1)
    assert [table.shard_bytes(2, at) for at in (0, 1)] == [501 * 24 * 8, 500 * 24 * 8]
    (attention,) = [one for one in plan.nodes if "scaled_dot" in graph.nodes[one.node].name]
    assert {layout for _, layout in attention.outputs} == {Shard(1, 1)}


def test_masks_are_drawn_in_the_memory_order_of_one_device():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            y = F.dropout(self.up(x).transpose(1, 2), 0.3)
            return self.down(F.dropout(y, 0.2).transpose(1, 2))

    _, plan = planned(Transposed(), torch.randn(3, 6, 16).double())
    assert any(one.mask is not None for one in plan.nodes)


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1}, {"ignore_index": 3, "reduction": "none"}, {"weight": True, "reduction": "sum"},
     {"weight": True, "label_smoothing": 0.2, "ignore_index": 5}],
    ids=str,
)  # fmt: skip
def test_the_loss_is_divided_with_weights_of_classes_smoothing_and_ignored_targets(options):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.head = nn.Linear(16, 32), nn.Linear(32, 512)
            self.register_buffer("classes", torch.rand(512) + 0.5)

        def forward(self, x, labels):
            given = {**options, "weight": self.classes} if "weight" in options else options
            scores = self.head(self.up(x).tanh())
            return F.cross_entropy(scores.transpose(1, 2), labels, **given)

    x, labels = torch.randn(3, 40, 16).double(), torch.randint(8, (3, 40))
    _, plan = planned(Head(), x, labels)
    assert VOCABULARY_CROSS_ENTROPY in {one.local for one in plan.nodes}
