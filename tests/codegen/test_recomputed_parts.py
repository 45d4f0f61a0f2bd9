"""Stages recompute what the model recomputes: same results and gradients, and as few tensors retained for backward."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from gemini.capture import capture
from gemini.capture.options import CaptureOptions
from gemini.codegen import generate_stages
from gemini.ir.serialize import load_graph, save_graph
from tests.codegen.cutting import Sequential, even_cut, random_cut


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, scale):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x))))) * scale


def one_per_layer(layers, x, scale):
    for layer in layers:
        x = checkpoint(layer, x, scale, use_reentrant=False)
    return x


def reentrant(layers, x, scale):
    for layer in layers:
        x = checkpoint(layer, x, scale, use_reentrant=True)
    return x


def two_layers_each(layers, x, scale):
    for at in range(0, len(layers), 2):
        x = checkpoint(lambda y, at=at: layers[at + 1](layers[at](y, scale), scale), x, use_reentrant=False)
    return x


def one_in_another(layers, x, scale):
    def both(y, at):
        return checkpoint(layers[at + 1], layers[at](y, scale), scale, use_reentrant=False) + y

    for at in range(0, len(layers), 2):
        x = checkpoint(both, x, at, use_reentrant=False)
    return x


def segments(layers, x, scale):
    return checkpoint_sequential([lambda y, one=one: one(y, scale) for one in layers], 2, x, use_reentrant=False)


def every_second_layer(layers, x, scale):
    for at, layer in enumerate(layers):
        x = checkpoint(layer, x, scale, use_reentrant=False) if at % 2 else layer(x, scale)
    return x


def collected(layers, x, scale):
    found = []
    for layer in layers:
        x = checkpoint(layer, x, scale, use_reentrant=False)
        found.append(x)
    return torch.stack(found).sum(0)


def a_part_of_each_layer(layers, x, scale):
    for layer in layers:
        x = x + checkpoint(lambda y, layer=layer: layer.down(F.gelu(layer.up(y))), layer.norm(x), use_reentrant=False)
    return x * scale


def several_values(layers, x, scale):
    def pair(y, z, factor, layer):
        half = layer(y, factor)
        return half, half * z, factor * 2

    y = x
    for layer in layers:
        x, y, scale = checkpoint(pair, x, y, scale, layer, use_reentrant=False)
    return x + y


def mixed_modes(layers, x, scale):
    def run(y, layer):
        with torch.no_grad():
            factor = layer.up.weight.mean()
        return layer(y, scale) * factor

    for layer in layers:
        x = checkpoint(run, x, layer, use_reentrant=False)
    return x


WAYS = (one_per_layer, reentrant, two_layers_each, one_in_another, segments, every_second_layer, collected,
        a_part_of_each_layer, several_values, mixed_modes)  # fmt: skip


class Stack(nn.Module):
    def __init__(self, way) -> None:
        super().__init__()
        self.way, self.first = way, nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        return self.way(self.layers, self.first(x), x.abs().mean()).square()


def run(call, model, x):
    """Output, gradients, and the bytes that are retained for backward outside of checkpoints."""
    retained = []
    model.zero_grad()
    torch.manual_seed(1)
    own = {id(one) for one in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda one: retained.append(one) or one, lambda one: one):
        made = call(x)
    made.sum().backward()
    found = {one.data_ptr(): one.nbytes for one in retained if id(one) not in own}
    return made.detach(), [one.grad.clone() for one in model.parameters()], sum(found.values())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_stages_recompute_what_the_model_recomputes(way, tmp_path):
    torch.manual_seed(0)
    model, x = Stack(way).double(), torch.randn(6, 8).double()
    graph = capture(model, (x,), options=CaptureOptions(opens_leaves=True))
    assert not graph.blocks
    assert any(node.recomputed for node in graph.nodes)
    save_graph(graph, tmp_path / "graph.json")
    assert [node.recomputed for node in load_graph(tmp_path / "graph.json").nodes] == [
        node.recomputed for node in graph.nodes
    ]
    wanted = run(model, model, x)
    rng = random.Random(0)
    for at, partition in enumerate([even_cut(graph, 1), even_cut(graph, 2), *(random_cut(graph, rng) for _ in "ab")]):
        stages = Sequential(graph, generate_stages(graph, partition))
        found = run(stages, model, x)
        torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-12, atol=1e-12)
        if not at and way is not reentrant:
            assert found[2] <= 1.3 * wanted[2]


def test_writes_to_earlier_values_are_not_repeated():
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            seen = torch.zeros_like(x)

            def part(y):
                seen.add_(1)
                return self.two(y).relu()

            return checkpoint(part, self.one(x), use_reentrant=False) + seen

    torch.manual_seed(0)
    model, x = Writer(), torch.randn(6, 8)
    graph = capture(model, (x,), options=CaptureOptions(opens_leaves=True))
    wanted = run(model, model, x)[0]
    stages = Sequential(graph, generate_stages(graph, even_cut(graph, 1)))
    assert torch.equal(run(stages, model, x)[0], wanted)
