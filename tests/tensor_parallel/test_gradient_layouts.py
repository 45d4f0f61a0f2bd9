"""Gradients are those of one device where values are written in place, or read for their type."""

import pytest
import torch
from torch import nn

from tests.tensor_parallel.shard_comparison import planned

pytestmark = pytest.mark.unit


class Typed(nn.Module):
    """A replicated value takes the type of a divided one."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 1), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        wide = self.up(x)
        return self.down(wide.tanh() * self.gate(x).sigmoid().type_as(wide))


class Filled(nn.Module):
    """A new tensor receives its gradient when it is written."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        made = x.new_empty(x.shape[0], 2, 16)
        made[:, 0] = x.tanh()
        made[:, 1] = self.down(self.up(x).tanh())
        return self.down(self.up(made).relu())


class Silent(nn.Module):
    """A value is read without gradients first, and then with them."""

    def __init__(self):
        super().__init__()
        self.router, self.up, self.down = nn.Linear(16, 4), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        scores = self.router(x)
        with torch.no_grad():
            best = scores.softmax(-1).argmax(-1, keepdim=True)
        return self.down(self.up(x).tanh()) * scores.softmax(-1).gather(-1, best)


class Crossed(nn.Module):
    """Equivalent layers, of which one reads the same value twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(3))

    def forward(self, x):
        y = x
        for at, layer in enumerate(self.layers):
            y = layer(y, x if at else y)
        return y


class Mixer(nn.Module):
    """One layer of `Crossed`."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, one, other):
        return self.down(self.up(one + other).tanh()) * other


@pytest.mark.parametrize("model", [Typed, Filled, Silent, Crossed], ids=lambda one: one.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_one_device(model, size):
    torch.manual_seed(1)
    _, plan = planned(model(), torch.randn(3, 16).double(), size=size)
    assert size == 3 or plan.sharded_share > 0.5


class Recurrent(nn.Module):
    """One layer that runs several times."""

    def __init__(self, times=4):
        super().__init__()
        self.first, self.layer, self.times = nn.Linear(16, 16), Mixer(), times

    def forward(self, x):
        y = self.first(x)
        for _ in range(self.times):
            y = self.layer(y, x)
        return y


def test_calls_of_one_module_share_their_layouts():
    torch.manual_seed(1)
    x = torch.randn(3, 16).double()
    (_, short), (_, long) = planned(Recurrent(3), x), planned(Recurrent(6), x)
    assert short.facts["variables"] == long.facts["variables"]
    assert [one.layout for one in short.tensors] == [one.layout for one in long.tensors]


class Attention(nn.Module):
    """Attention of torch.nn by heads: on itself with a mask, and on another value."""

    def __init__(self):
        super().__init__()
        self.own, self.cross = (nn.MultiheadAttention(16, 4, dropout=0.2) for _ in range(2))

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[0], dtype=x.dtype)
        x = self.own(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        padding = torch.zeros(y.shape[1], y.shape[0], dtype=torch.bool).index_fill(1, torch.tensor([0]), True)
        return self.cross(x, y, y, key_padding_mask=padding, need_weights=False)[0]


class Adapted(nn.Module):
    """A frozen weight with a small trained one beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.low, self.high = nn.Linear(32, 32), nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.high(self.low(x))


@pytest.mark.parametrize(("model", "shapes"), [(Attention, [(5, 3, 16), (6, 3, 16)]), (Adapted, [(4, 32)])])
def test_attention_layers_and_frozen_weights_are_divided(model, shapes):
    torch.manual_seed(1)
    _, plan = planned(model(), *(torch.randn(shape).double() for shape in shapes))
    assert plan.sharded_share > 0.9
