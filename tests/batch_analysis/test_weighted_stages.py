"""Generated stages weight flagged nodes; without flags their source is unchanged."""

from __future__ import annotations

import torch
from torch import nn

from gemini.batch_analysis.precompute import Precomputed
from gemini.batch_analysis.reference_run import micro_batch_ranges
from gemini.codegen import generate_stages
from gemini.partition.assignment import Partition
from gemini.pipe.live_stages import make_stages
from gemini.pipe.value_routes import ValueRoutes
from tests.batch_analysis.recorder import Step


class Deep(nn.Module):
    """Alike layers, each with a mean over the batch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x, mask):
        total = 0.0
        for layer in self.layers:
            x = torch.tanh(layer(x))
            total = total + (x.square().sum(-1) * mask).sum() / mask.sum() + x.mean() * 0.1
        return total


def halves(graph):
    middle = next(node.id for node in graph.nodes if node.target == "layers.3")
    compute = [node.id for node in graph.compute_nodes]
    stages = (tuple(n for n in compute if n < middle), tuple(n for n in compute if n >= middle))
    return Partition(graph.model_name, "by hand", 2, stages, (0, 1))


def test_flagged_nodes_are_weighed_and_stay_out_of_loops():
    torch.manual_seed(0)
    model = Deep().double()
    x, mask = torch.randn(7, 3, 4, dtype=torch.float64), (torch.rand(7, 3) > 0.4).double()
    step = Step(model, (x, mask), lambda o: o * 1.0)
    assert step.reason == ""
    assert step.difference([3, 4]) == ""
    shares = {node: at for at, node in enumerate(sorted(step.splitting.node_shares))}
    partition = halves(step.graph)
    plain = generate_stages(step.graph, partition)
    assert [code.source for code in generate_stages(step.graph, partition, shares={})] == [
        code.source for code in plain
    ]
    codes = generate_stages(step.graph, partition, shares=shares)
    for at in shares.values():
        assert sum(code.source.count(f"self.shares[{at}])") for code in codes) == 1
    stages = make_stages(codes, model, "<test>")
    wiring = ValueRoutes(step.graph, [code.interface for code in codes])
    sizes = [3, 2, 2]
    weights, _ = step.splitting.weights(Precomputed(step.graph, step.bound, step.tape), sizes)
    total = torch.zeros((), dtype=torch.float64)
    for index, (start, length) in enumerate(micro_batch_ranges(sizes)):
        for stage in stages:
            if hasattr(stage, "shares"):
                stage.shares[:] = [weights[node][index] for node in shares]
        piece = {"x": x[start : start + length], "mask": mask[start : start + length]}
        total = total + wiring.run(stages, model, piece)
    assert torch.allclose(total, step.loss, rtol=1e-12)
