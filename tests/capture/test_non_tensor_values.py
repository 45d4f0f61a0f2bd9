"""Non-tensor values, such as NumPy arrays, may pass from node to node."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from gemini.capture import capture
from gemini.profiling import profile


def draw_mask(shape):
    return np.random.rand(*shape) < 0.5


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        mask = torch.tensor(draw_mask((x.shape[0], 6)), dtype=x.dtype)
        return self.second(self.first(x) * mask)


def test_an_array_between_nodes_has_a_class_a_cost_and_a_picture(tmp_path):
    graph = capture(Masked(), (torch.randn(4, 6),))
    arrays = [ref for _, _, ref in graph.edges() if (ref.source, ref.path) not in graph.nodes[ref.node].outputs]
    assert arrays, "the array should be a value of its own"
    assert sum(len(nodes) for nodes in graph.classes().values()) == len(graph.compute_nodes)
    assert len(profile(graph, analytic="cpu", cache=False).nodes) == len(graph.compute_nodes)
    graph.draw(tmp_path / "picture.dot")
    assert (tmp_path / "picture.dot").stat().st_size > 0
