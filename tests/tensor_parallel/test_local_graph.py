"""The generated code of a shard plan has the losses and gradients of one device."""

import pytest
import torch

from gemini.tensor_parallel.shard_planner import plan_shards
from tests.tensor_parallel.local_stages import run_local
from tests.tensor_parallel.planned_models import NAMES, transformer, transformer_graph


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [1, 2])
def test_shards_equal_one_device(name, stages):
    graph = transformer_graph(name)
    model, plan = graph.bound_model(), plan_shards(graph, 2)
    call = transformer(name)[1]
    model.zero_grad()
    expected = model(**call).loss
    expected.backward()
    wanted = {key: one.grad.clone() for key, one in model.named_parameters()}
    model.zero_grad()
    found, grads, _ = run_local(graph, plan, call, stages)
    tolerance = 1e-5 if name == "mixtral" else 1e-6
    assert any(torch.allclose(one, expected, rtol=tolerance) for one in found.values() if one.dim() == 0)
    for key, grad in wanted.items():
        torch.testing.assert_close(grads[key], grad, rtol=tolerance, atol=tolerance, msg=key)
