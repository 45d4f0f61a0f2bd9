"""Nodes are equivalent exactly if they agree in everything that affects cost or meaning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gemini.capture import Graph, capture
from gemini.ir.equivalence import node_signature


class Leaf(nn.Module):
    """A leaf with settings."""

    def __init__(self, layer_idx=0, padding_idx=0, act=F.relu, sizes=(1, 2)):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.layer_idx, self.padding_idx, self.act, self.sizes = layer_idx, padding_idx, act, sizes

    def forward(self, x):
        return self.act(x * self.weight)


def classes(*layers, x=None):
    model = nn.Sequential(*layers)
    return [
        len(ids)
        for ids in capture(model, (torch.randn(4, 8, requires_grad=True) if x is None else x,)).classes().values()
    ]


def test_the_number_of_a_layer_does_not_count():
    assert classes(*(Leaf(layer_idx=index) for index in range(4))) == [4]


def test_settings_count():
    assert classes(Leaf(0), Leaf(1, act=F.gelu), Leaf(2)) == [2, 1]
    assert classes(Leaf(0, padding_idx=3), Leaf(1, padding_idx=3), Leaf(2, padding_idx=4)) == [2, 1]
    assert classes(Leaf(0), Leaf(1, sizes=(1, 3))) == [1, 1]
    assert classes(Leaf(0), Leaf(1, sizes=[1, 2])) == [1, 1]
    half = Leaf(1)
    half.weight.requires_grad_(False)
    assert classes(Leaf(0), half) == [1, 1]


def test_the_padding_of_an_embedding_counts():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Embedding(9, 8, padding_idx=at) for at in (0, 0, 5))

        def forward(self, ids):
            return self.a(ids) + self.b(ids) + self.c(ids)

    graph = capture(Two(), (torch.randint(0, 9, (4, 3)),))
    assert sorted(len(ids) for ids in graph.classes().values()) == [1, 2, 2]  # the additions are alike too


def test_the_place_in_memory_counts_for_nodes_and_not_for_layers():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x).relu()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x):
            x = x.transpose(1, 2)
            for layer in self.layers:
                x = layer(x)
            return x

    graph = capture(Model(), (torch.randn(2, 8, 5, requires_grad=True),))
    linears = [node for node in graph.compute_nodes if node.cls == "Linear"]
    assert len({node_signature(graph, node) for node in linears}) == 2
    assert len({node_signature(graph, node, costs=False) for node in linears}) == 1
    assert graph.layers() == [["layers.0", "layers.1", "layers.2"]]
    first = graph.nodes[0]
    assert graph.meta(next(iter(linears[0].inputs()))).strides == (40, 1, 5)
    assert first.outputs["ret", ()].strides is None


def test_channels_last_images_are_another_class():
    model = nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 8, 8)
    found = {
        node_signature(graph, graph.compute_nodes[0])
        for graph in (capture(nn.Sequential(model), (given,)) for given in (x, x.to(memory_format=torch.channels_last)))
    }
    assert len(found) == 2


class Wired(nn.Module):
    """The same two layers and one addition, wired in two ways."""

    def __init__(self, long):
        super().__init__()
        self.a, self.b, self.long = nn.Linear(8, 8), nn.Linear(8, 8), long

    def forward(self, x):
        y = self.a(x)
        return self.b(y) + (x if self.long else y)


def test_layers_that_are_wired_otherwise_are_not_alike():
    model = nn.Sequential(Wired(True), Wired(False), Wired(True))
    assert capture(model, (torch.randn(4, 8),)).layers()[0] == ["0", "2"]


def test_plain_arguments_and_their_names_count():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            x = self.norm(x)
            return x.sum(0), x.sum(1), x.sum(dim=1), x.sum(1), x.mean(1)

    graph = capture(Sums(), (torch.randn(4, 4),))
    assert sorted(len(ids) for ids in graph.classes().values()) == [1, 1, 1, 1, 2]


def test_signatures_survive_saving(tmp_path):
    model = nn.Sequential(*(Leaf(layer_idx=index) for index in range(3)), nn.Linear(8, 8))
    graph = capture(model, (torch.randn(8, 4).t(),))
    graph.save(tmp_path / "graph.json")
    again = Graph.load(tmp_path / "graph.json", model)
    assert again.classes() == graph.classes()
    assert again.layers() == graph.layers()
