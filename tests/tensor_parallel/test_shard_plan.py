"""A plan derives its moves and collectives, round-trips through JSON and is checked against its graph."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from gemini.capture.entry import capture
from gemini.errors import ArtifactError, ShardingError
from gemini.ir.pytree import Ref
from gemini.tensor_parallel.layouts import PARTIAL, PARTIAL_GRAD, REPLICATE, Shard
from gemini.tensor_parallel.plan_check import check_plan
from gemini.tensor_parallel.shard_plan import (
    VOCABULARY_EMBEDDING,
    DividedSize,
    InnerCollective,
    NodeShards,
    ReplicatedOp,
    ShardPlan,
    TensorShards,
    conversions,
)

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def graph():
    return capture(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), (torch.randn(6, 4),))


def column_row_plan(graph):
    """The pair of a divided output and a divided reduction dimension, by hand."""
    source, first, middle, last = graph.nodes
    x, a, b, y = (Ref(node.id) for node in (source, first, middle, last))
    wide = Shard(1, 4)
    return ShardPlan(
        2,
        graph.model_name,
        (
            NodeShards(0, outputs=((x, REPLICATE),)),
            NodeShards(1, ((x, PARTIAL_GRAD),), ((a, wide),), (("0.weight", Shard(0, 4)), ("0.bias", Shard(0, 4)))),
            NodeShards(2, ((a, wide),), ((b, wide),)),
            NodeShards(3, ((b, wide),), ((y, PARTIAL),), (("2.weight", Shard(1, 4)), ("2.bias", PARTIAL))),
        ),
        (
            TensorShards(("0.weight",), Shard(0, 4), (8, 4), 128),
            TensorShards(("0.bias",), Shard(0, 4), (8,), 32),
            TensorShards(("2.weight",), Shard(1, 4), (4, 8), 128),
            TensorShards(("2.bias",), REPLICATE, (4,), 16),
        ),
        ((x, REPLICATE),),
        ((y, REPLICATE),),
        ((x, 96), (a, 192), (b, 192), (y, 96)),
        frozenset((a, b, y)),
        (ReplicatedOp(2, "1", "an example", 0.5),),
        {"predicted_ms": 1.5},
    )


def test_a_column_row_pair_has_one_all_reduce(graph):
    plan = column_row_plan(graph)
    check_plan(plan, graph)
    assert [(one.name, one.phase, one.size, one.wire) for one in plan.collectives()] == [
        ("all-reduce", "forward", 96, 96.0)
    ]
    assert {str(move) for move in plan.moves} == {"%0: R → R+", "2.bias: R → P", "%3: P → R"}
    assert plan.sharded_share == (128 + 32 + 128) / (128 + 32 + 128 + 16)
    assert plan.tensor("0.weight").shard_bytes(2) == 64


def test_the_input_gradient_is_summed_where_there_is_one(graph):
    plan = column_row_plan(graph)
    with_grad = dataclasses.replace(plan, grads=plan.grads | {Ref(0)})
    assert [one.phase for one in with_grad.collectives()] == ["backward", "forward"]


def test_a_plan_round_trips_through_json(graph, tmp_path):
    plan = column_row_plan(graph)
    special = dataclasses.replace(
        plan.nodes[2],
        local=VOCABULARY_EMBEDDING,
        sizes=(DividedSize((("i", 1), ("k", "size")), 25),),
        mask=Shard(1, 4),
        collectives=(InnerCollective("all-reduce", 64),),
    )
    plan = dataclasses.replace(plan, nodes=(*plan.nodes[:2], special, plan.nodes[3]))
    plan.save(tmp_path / "plan.json")
    loaded = ShardPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.facts == plan.facts
    assert ("all-reduce", "vocabulary embedding") in {(one.name, one.what) for one in loaded.collectives()}


def test_a_divided_size_is_that_of_the_units_of_a_shard():
    size = DividedSize((), 25)
    assert [size.local(1600, 2, shard) for shard in (0, 1)] == [832, 768]


def test_a_replicated_version_is_made_from_the_one_with_partial_gradients():
    assert conversions(PARTIAL, (REPLICATE, PARTIAL_GRAD), grad=True) == [
        (PARTIAL, PARTIAL_GRAD),
        (PARTIAL_GRAD, REPLICATE),
    ]
    assert conversions(PARTIAL, (REPLICATE,), grad=True) == [(PARTIAL, REPLICATE)]


def test_the_gradients_of_a_replicated_parameter_with_partial_gradients_are_summed_once_per_step(graph):
    plan = column_row_plan(graph)
    tensors = (*plan.tensors[:3], dataclasses.replace(plan.tensors[3], layout=PARTIAL_GRAD))
    plan = dataclasses.replace(plan, tensors=tensors)
    assert [one.name for one in plan.gradient_sums()] == ["2.bias"]
    assert [one.what for one in plan.collectives() if one.phase == "step"] == ["2.bias"]


def test_a_plan_that_does_not_fit_names_every_fault(graph):
    plan = column_row_plan(graph)
    wrong = dataclasses.replace(
        plan,
        nodes=(
            *plan.nodes[:1],
            dataclasses.replace(plan.nodes[1], outputs=((Ref(1), Shard(5, 4)),), local="magic"),
            *plan.nodes[3:],
            plan.nodes[3],
        ),
        results=((Ref(9), REPLICATE),),
    )
    with pytest.raises(ShardingError) as caught:
        check_plan(wrong, graph)
    for part in ("no slices", "unknown local op 'magic'", "planned twice", "reads %2, which neither arrives", "%9"):
        assert part in str(caught.value)
    assert "plan again" in str(caught.value)


def test_files_that_are_no_plans_are_refused(graph, tmp_path):
    path = tmp_path / "plan.json"
    for text in ("{", "{}", json.dumps(column_row_plan(graph).to_json() | {"nodes": [{"node": 1}]})):
        path.write_text(text)
        with pytest.raises(ArtifactError, match=r"plan\.json"):
            ShardPlan.load(path)
