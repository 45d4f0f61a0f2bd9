"""The captured graph of every classic architecture equals the model in training mode."""

from __future__ import annotations

import pytest
import torch

from conformance.zoo.classics import CLASSICS
from conformance.zoo.graph_checks import differences
from gemini.capture import capture


@pytest.mark.parametrize("name", sorted(CLASSICS))
def test_graph_equals_model(name):
    model, args, kwargs = CLASSICS[name]()
    graph = capture(model, args, kwargs)
    assert differences(graph, model, args, kwargs) == []


def test_capture_leaves_the_model_and_the_generators_as_they_were():
    for name in ("resnet", "buffers_in_glue", "python_counter", "layer_drop", "loss_in_attribute"):
        model, args, kwargs = CLASSICS[name]()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        generator = torch.get_rng_state()
        plain = [{k: v for k, v in vars(m).items() if isinstance(v, (int, float, str))} for m in model.modules()]
        capture(model, args, kwargs)
        assert torch.equal(generator, torch.get_rng_state()), name
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items()), name
        assert plain == [
            {k: v for k, v in vars(m).items() if isinstance(v, (int, float, str))} for m in model.modules()
        ]
        assert all(p.grad is None for p in model.parameters()), name


@pytest.mark.parametrize(
    "name",
    ["early_exit", "mixture_of_experts", "python_randomness", "python_counter", "checkpointing", "loop_over_samples"],
)
def test_what_branches_inside_runs_its_python_each_time(name):
    model, args, kwargs = CLASSICS[name]()
    graph = capture(model, args, kwargs)
    assert any(node.kind == "block" and node.reason for node in graph.nodes)


def test_the_reason_names_module_and_line():
    model, args, kwargs = CLASSICS["early_exit"]()
    graph = capture(model, args, kwargs)
    assert graph.is_whole
    assert "classics_flow.py:" in graph.blocks[""]
    assert "branches on values" in graph.blocks[""]
