"""Recurrent layers on shards hold slices of hidden units: results, gradients and masks are those of one device."""

from collections import Counter

import pytest
import torch
from torch import nn

from gemini.tensor_parallel.layouts import PartialGrad, Shard
from gemini.tensor_parallel.shard_plan import DIVIDED_RECURRENCE
from gemini.tensor_parallel.shard_planner import plan_shards
from tests.tensor_parallel.local_stages import run_local
from tests.tensor_parallel.planned_models import opened
from tests.tensor_parallel.shard_comparison import SLOW, compare, loss_of

pytestmark = pytest.mark.unit


class Recurrent(nn.Module):
    """A recurrent layer between linear ones, with or without initial states, of which all results count."""

    def __init__(self, kind, states="", **options):
        super().__init__()
        self.cell, width = kind(8, 12, **options), options.get("proj_size") or 12
        self.states = nn.ModuleDict({name: nn.Linear(8, width if name == "h" else 12) for name in states})
        self.head = nn.Linear(width * (1 + options.get("bidirectional", False)), 6)

    def forward(self, x):
        given, count = (), self.cell.num_layers * (1 + self.cell.bidirectional)
        if self.states:
            state = [layer(x.mean(1)).tanh().expand(count, -1, -1).contiguous() for layer in self.states.values()]
            given = (state[0] if isinstance(self.cell, nn.GRU) else (state[0], state[-1]),)
        made, ends = self.cell(x if self.cell.batch_first else x.transpose(0, 1), *given)
        ends = ends if isinstance(ends, tuple) else (ends,)
        return self.head(made).square().mean() + sum((one * (at + 1)).tanh().mean() for at, one in enumerate(ends))


class Steps(nn.Module):
    """A loop over the steps of a cell."""

    def __init__(self, kind, **options):
        super().__init__()
        self.cell, self.head = kind(8, 12, **options), nn.Linear(12, 5)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 12)
        state, found = (h, h) if isinstance(self.cell, nn.LSTMCell) else h, []
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(found, 1)).square().mean()


CASES = {
    "lstm": (Recurrent, nn.LSTM, {}),
    "deep lstm": (Recurrent, nn.LSTM, {"num_layers": 2, "bidirectional": True, "dropout": 0.3, "states": "hc"}),
    "same states": (Recurrent, nn.LSTM, {"batch_first": True, "states": "h", "bias": False}),
    "projection": (Recurrent, nn.LSTM, {"proj_size": 4, "num_layers": 2, "bidirectional": True, "states": "hc"}),
    "gru": (Recurrent, nn.GRU, {"num_layers": 2, "dropout": 0.2, "batch_first": True, "states": "h"}),
    "rnn": (Recurrent, nn.RNN, {"bidirectional": True, "nonlinearity": "relu"}),
    "lstm cell": (Steps, nn.LSTMCell, {}),
    "gru cell": (Steps, nn.GRUCell, {"bias": False}),
    "rnn cell": (Steps, nn.RNNCell, {}),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_recurrent_layers_are_divided_and_equal_one_device(case, size):
    model, kind, options = CASES[case]
    if case == "projection" and size == 3:
        size = 4
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8).double()
    graph = opened(model(kind, **options).double(), x)
    plan = plan_shards(graph, size, costs=SLOW)
    assert DIVIDED_RECURRENCE in {one.local for one in plan.nodes}
    assert all(isinstance(one.layout, Shard) for one in plan.tensors if one.name.startswith("cell"))
    compare(graph, plan, x)
    if not options.get("dropout"):  # threads share their generator
        _compare_generated_code(graph, plan, x)


def _compare_generated_code(graph, plan, x):
    outs, wholes, counts = run_local(graph, plan, {"x": x})
    planned = Counter(one.name for one in plan.collectives() if one.phase != "step")
    reduced = sum(isinstance(one.layout, PartialGrad) and one.trainable for one in plan.tensors)  # by the test
    assert counts - Counter({"all-reduce": reduced}) == planned
    model = graph.bound_model()
    model.zero_grad()
    torch.manual_seed(0)
    expected = loss_of(model(x))
    expected.backward()
    torch.testing.assert_close(next(iter(outs.values())), expected.detach(), rtol=1e-9, atol=1e-9)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(wholes[name], parameter.grad, rtol=1e-9, atol=1e-11)
