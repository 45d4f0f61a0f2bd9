"""Options of a plan: dimensions, overrides of scopes, memory limits."""

import pytest
import torch
from torch import nn

from gemini.errors import ShardingError
from gemini.tensor_parallel.elimination import minimize
from gemini.tensor_parallel.layouts import Shard, layout_text
from gemini.tensor_parallel.memory_limited import minimize_limited
from gemini.tensor_parallel.shard_options import ScopeOverride, ShardOptions
from gemini.tensor_parallel.shard_planner import _Planner, plan_shards
from tests.tensor_parallel.planned_models import opened, transformer, transformer_graph
from tests.tensor_parallel.shard_comparison import SLOW, compare
from tests.tensor_parallel.test_elimination import problem

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def perceptron():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)).double()
    return opened(model, torch.randn(3, 16).double())


def weights(plan):
    return {one.name: layout_text(one.layout) for one in plan.tensors if len(one.shape) > 1}


@pytest.mark.parametrize(("dim", "layout"), [(0, "S1"), (-1, "S0")])
def test_the_dimension_of_weights_is_that_of_the_option(perceptron, dim, layout):
    plan = plan_shards(perceptron, 2, ShardOptions(dim=dim), SLOW)
    assert set(weights(plan).values()) == {layout}
    compare(perceptron, plan, torch.randn(3, 16).double())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("dim", [0, -1])
def test_a_transformer_with_one_dimension_equals_one_device(name, dim):
    graph = transformer_graph(name)
    plan = plan_shards(graph, 2, ShardOptions(dim=dim))
    assert plan.sharded_share > 0.5
    compare(graph, plan, tolerance=3e-6 if name == "llama" else 1e-9, **transformer(name)[1])


def test_an_override_holds_for_its_scope(perceptron):
    found = [ScopeOverride("0", -1), ScopeOverride("2", "replicate"), ScopeOverride.read("4.weight=0")]
    plan = plan_shards(perceptron, 2, ShardOptions(overrides=tuple(found)), SLOW)
    assert weights(plan) == {"0.weight": "S0", "2.weight": weights(plan)["2.weight"], "4.weight": "S1"}
    assert not isinstance(plan.tensor("2.weight").layout, Shard)
    compare(perceptron, plan, torch.randn(3, 16).double())


def test_the_most_specific_override_wins_and_patterns_select_many():
    graph = transformer_graph("gpt2")
    overrides = (ScopeOverride("transformer.h.*", "replicate"), ScopeOverride("transformer.h.1.mlp", "shard"))
    plan = plan_shards(graph, 2, ShardOptions(overrides=overrides), SLOW)
    sharded = {one.name for one in plan.tensors if isinstance(one.layout, Shard) and ".h." in one.name}
    assert {name.rpartition(".c_")[0] for name in sharded} == {"transformer.h.1.mlp"}
    compare(graph, plan, **transformer("gpt2")[1])


def test_faulty_options_name_the_remedy(perceptron):
    with pytest.raises(ShardingError, match=r"no scope 'lm_heat'.*\n.*did you mean 'lm_head'"):
        plan_shards(transformer_graph("gpt2"), 2, ShardOptions(overrides=(ScopeOverride("lm_heat", 0),)))
    with pytest.raises(ShardingError, match="no scope"):
        plan_shards(perceptron, 2, ShardOptions(overrides=(ScopeOverride("decoder", 0),)))
    with pytest.raises(ShardingError, match="sharding_dim = 2"):
        ShardOptions(dim=2)
    for text in ("lm_head", "=0", "a=b"):
        with pytest.raises(ShardingError, match="no override"):
            ScopeOverride.read(text)


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def state_mb(plan, options):
    return sum(one.shard_bytes(plan.size) for one in plan.tensors) * options.copies * 1e-6


def test_a_memory_limit_holds():
    graph = transformer_graph("gpt2")
    free = ShardOptions(share=0.0)
    whole = sum(one.bytes for one in plan_shards(graph, 2, free).tensors) * free.copies * 1e-6
    for part in (0.9, 0.7, 0.55):
        options = ShardOptions(share=0.0, memory_mb=whole * part)
        plan = plan_shards(graph, 2, options)
        assert state_mb(plan, options) <= whole * part
        compare(graph, plan, **transformer("gpt2")[1])


def test_a_limit_that_nothing_meets_is_refused(perceptron):
    with pytest.raises(ShardingError, match=r"MB on each of 2 shards at least, the limit is 0\.01 MB"):
        plan_shards(perceptron, 2, ShardOptions(memory_mb=0.01), SLOW)


@pytest.mark.parametrize("seed", range(6))
def test_elimination_equals_cp_sat(seed):
    domains, factors = problem(seed, count=8)
    exact, found = minimize(domains, factors), minimize_limited(domains, factors)
    if exact.total == float("inf"):
        assert found is None
    else:
        assert found.proven
        assert found.total == pytest.approx(exact.total, rel=1e-5)


def test_elimination_equals_cp_sat_on_a_model(perceptron):
    planner = _Planner(perceptron, 2, ShardOptions(), SLOW)
    planner._find_strategies()
    layouts = planner._problem()
    exact = minimize(layouts.domains, layouts.factors(1e-7))
    found = minimize_limited(layouts.domains, layouts.factors(1e-7))
    assert found.proven
    assert found.total == pytest.approx(exact.total, rel=1e-5)
