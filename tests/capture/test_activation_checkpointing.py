"""A module that checkpoints its whole forward stays one node and is recomputed once, as in the model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.zoo.graph_checks import differences
from gemini import pipe_model
from gemini.capture import capture
from gemini.profiling import profile

pytestmark = pytest.mark.usefixtures("trusted_tests")

RUNS: list[nn.Module] = []  # of layers, by what each of them has


class Layer(nn.Module):
    """As layers of `transformers` do since 5.23."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)
        self.reentrant = reentrant

    def forward(self, x, scale=1.0):
        return checkpoint(partial(self._forward, scale=scale), x, use_reentrant=self.reentrant)

    def _forward(self, x, scale):
        RUNS.append(self.down)
        return x + self.down(torch.tanh(self.up(self.norm(x)))) * scale


class Stack(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(Layer(reentrant) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.last(self.layers[0](x))  # one of them twice


@pytest.fixture(params=[False, True], ids=["saved", "reentrant"])
def model(request):
    torch.manual_seed(0)
    return Stack(request.param)


def batch():
    return torch.randn(6, 4)


def test_a_layer_is_one_node_and_equals_the_model(model):
    x = batch()
    graph = capture(model, (x,))
    found = {node.name: node.checkpoint for node in graph.nodes if node.kind == "block"}
    kind = "own reentrant" if model.layers[0].reentrant else "own saved"
    assert found == dict.fromkeys(["layers.0", "layers.1", "layers.2", "layers.0#2"], kind)
    assert graph.blocks == dict.fromkeys(["layers.0", "layers.1", "layers.2"], "checkpointed")
    assert differences(graph, model, (x,), {}) == []


def test_a_checkpoint_of_a_part_does_not_keep_its_module_whole():
    class Partly(Layer):
        def forward(self, x):
            return 2 * super().forward(x)

    graph = capture(nn.Sequential(nn.Linear(8, 8), Partly(False)), (torch.randn(3, 8),))
    assert [node.target for node in graph.nodes if node.kind == "block"] == []


def test_blocks_that_are_asked_for_are_known_to_recompute(model):
    graph = capture(model, (batch(),), basic_blocks=("Layer",))
    assert {node.checkpoint.split()[0] for node in graph.nodes if node.kind == "block"} == {"own"}


def test_stages_recompute_once(model):
    x = batch()
    stages = pipe_model(model, (x,), nparts=2)
    RUNS.clear()
    stages(x).sum().backward()
    assert sum(one is model.layers[1].down for one in RUNS) == 2
    assert "torch.utils.checkpoint" not in "".join(stages.sources.values())


def test_its_cost_is_that_of_a_recomputed_layer(model):
    x = batch()
    costs = profile(capture(model, (x,)), (x,), cache=False, rounds=1)
    inner = sum(tensor.nbytes for tensor in (torch.empty(6, 32), torch.empty(6, 32))) / 2**20
    assert costs["layers.1"].saved_mb < inner
    assert costs["layers.1"].backward_ms > 0
