"""Models that are hard to trace: graph and model agree on every call."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.capture import capture
from gemini.errors import CaptureError

TABLE = torch.linspace(0, 1, 8)
SEEN: list[float] = []


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class GlobalTensor(Base):
    def forward(self, x):
        return self.b(self.a(x) * TABLE)


class PlainAttribute(Base):
    def __init__(self):
        super().__init__()
        self.scale = torch.tensor(2.0)
        self.tables = {"x": [torch.ones(8), torch.zeros(8)]}

    def forward(self, x):
        return self.b(self.a(x) * self.scale + self.tables["x"][1])


class ReadsItem(Base):
    def forward(self, x):
        y = self.a(x)
        return self.b(y * y.abs().max().item())


class ItemAsSize(Base):
    def forward(self, x):
        length = (x[0] > 0).sum().item()
        return self.b(self.a(x))[:, : length + 1]


class ItemInRange(Base):
    def forward(self, x):
        y = self.a(x)
        for _ in range(int((x > 0).sum()) % 3):
            y = self.b(y)
        return y


class ItemInSlice(Base):
    def forward(self, x):
        layers = [self.a, self.b, self.c]
        for layer in layers[: (x > 0).sum().item() % 4]:
            x = layer(x)
        return x * 1


class Numpy(Base):
    def forward(self, x):
        y = self.a(x)
        return self.b(y + torch.from_numpy(np.tanh(x.detach().numpy())))


class WhileLoop(Base):
    def forward(self, x):
        y = self.a(x)
        while y.norm() > 1:
            y = y / 2
        return self.b(y)


class TryExcept(Base):
    def forward(self, x):
        try:
            y = self.a(x[:, :3])
        except RuntimeError:
            y = self.a(x)
        return self.b(y)


class OwnGenerator(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return self.b(self.a(x) + torch.randn(8, generator=self.generator))


class WritesInput(Base):
    def forward(self, x):
        x.mul_(2)
        return self.b(self.a(x)), x


class ClampsWeights(Base):
    def forward(self, x):
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        self.b.weight.data.mul_(0.9)
        return self.b(self.a(x))


class Swapped(Base):
    def forward(self, x):
        fast = {name: p - 0.1 * p for name, p in self.b.named_parameters()}
        return torch.func.functional_call(self.b, fast, (self.a(x),))


class Recursive(Base):
    def forward(self, x, depth=2):
        x = torch.tanh(self.a(x))
        return x if depth == 0 else self(x, depth - 1)


class VarArgs(Base):
    def forward(self, *xs, **named):
        return sum(self.a(x) for x in xs) + self.b(named["y"])


class Iterates(Base):
    def forward(self, x):
        return torch.stack([self.a(row) for row in x.unbind(1)], 1).sum(1) + self.b(x[:, 0])


class Sorts(Base):
    def forward(self, x):
        order = x.sum(-1).argsort()
        rows = x[order]
        kept = rows[rows.sum(-1) > 0]
        return self.b(self.a(kept)).sum() / max(kept.shape[0], 1)


class FrozenBranch(Base):
    def forward(self, x):
        y = self.a(x)
        return self.b(y) if y.requires_grad else -self.b(y)


class DtypeBranch(Base):
    def forward(self, x):
        return self.b(self.a(x.to(self.a.weight.dtype))).float()


class VMapped(Base):
    def forward(self, x):
        return torch.vmap(lambda row: row * row.sum())(self.a(x)) + self.b(x)


class SizeMath(Base):
    def forward(self, x):
        n = x.shape[0]
        scale = (n // 2 + n % 2) ** 0.5 / max(n, 1)
        pad = F.pad(self.a(x), (0, -(-n // 4) * 4 - n))
        return self.b(pad[:, :8] if pad.shape[1] >= 8 else x) * scale, torch.full((n,), float(n))


class ShapesDecide(Base):
    def forward(self, x):
        layer = self.a if x.shape[0] > 3 else self.b
        return layer(x)


class SideEffect(Base):
    def forward(self, x):
        SEEN.append(float(x.sum()))
        return self.b(self.a(x))


def x(rows=6, seed=0):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


SINGLE = [
    GlobalTensor, PlainAttribute, ReadsItem, ItemAsSize, ItemInRange, ItemInSlice, Numpy, WhileLoop, TryExcept,
    WritesInput, ClampsWeights, Swapped, Recursive, Sorts, FrozenBranch, DtypeBranch, VMapped,
    SizeMath, ShapesDecide,
]  # fmt: skip


def step(model, run, *args, **kwargs):
    """Outputs, gradients, state afterwards and inputs afterwards of one training step."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    own = getattr(model, "generator", None)
    kept = own.get_state() if own is not None else None
    args = [a.clone() for a in args]
    torch.manual_seed(5)
    out = run(*args, **kwargs)
    outs = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    loss = sum(t.sum() for t in outs if t.requires_grad)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) if torch.is_tensor(loss) else []
    after = [value.clone() for value in model.state_dict().values()]
    model.load_state_dict(state)
    if own is not None:
        own.set_state(kept)
    return [t.detach().clone() for t in (*outs, *(torch.zeros(()) if g is None else g for g in grads), *after, *args)]


def agree(model, graph, *args, **kwargs):
    expected, found = step(model, model, *args, **kwargs), step(model, graph.run, *args, **kwargs)
    assert len(expected) == len(found)
    for a, b in zip(expected, found):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", SINGLE)
def test_agrees_on_many_batches(cls):
    torch.manual_seed(0)
    model = cls().train()
    graph = capture(model, (x(),))
    for rows, seed in ((6, 0), (6, 1), (6, 2), (6, 3), (2, 4), (9, 5), (1, 6), (4, 7)):
        agree(model, graph, x(rows, seed))


def test_the_capture_of_odd_models_stays_fine_where_it_can():
    torch.manual_seed(0)
    kinds = {
        cls: capture(cls().train(), (x(),)) for cls in (PlainAttribute, ItemAsSize, TryExcept, SizeMath, Recursive)
    }
    assert not any(graph.is_whole for graph in kinds.values())
    assert capture(GlobalTensor(), (x(),)).is_whole


def test_attributes_replaced_later_are_used():
    model = PlainAttribute()
    graph = capture(model, (x(),))
    model.scale = torch.tensor(5.0)
    agree(model, graph, x())


def test_freezing_and_converting_later_is_noticed():
    model = FrozenBranch()
    graph = capture(model, (x(),))
    model.a.requires_grad_(False)
    torch.testing.assert_close(model(x()), graph.run(x()))
    model = DtypeBranch()
    graph = capture(model, (x(),))
    model.double()
    torch.testing.assert_close(model(x()), graph.run(x()))


def test_variable_arguments_and_iteration():
    model = VarArgs()
    graph = capture(model, (x(), x()), {"y": x()})
    agree(model, graph, x(6, 1), x(6, 2), y=x(6, 3))
    agree(model, graph, x(6, 1), y=x(6, 3))
    model = Iterates()
    batch = torch.randn(6, 3, 8)
    graph = capture(model, (batch,))
    agree(model, graph, torch.randn(4, 3, 8))
    agree(model, graph, torch.randn(4, 5, 8))


@pytest.mark.parametrize(("kind", "uses"), [(OwnGenerator, "self.generator"), (SideEffect, "SEEN")])
def test_code_that_is_not_repeatable_is_not_run(kind, uses):
    with pytest.raises(CaptureError, match=uses):
        capture(kind(), (x(),))
    assert not SEEN


class Remembering(nn.Module):
    """Appends to a list that it is given, as models with a cache of keys and values do."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, past):
        past[0] = torch.cat([past[0], self.into(x)], 1)
        return self.out(past[0].mean(1))


def test_a_model_that_changes_what_it_is_given_stays_whole_and_says_so():
    graph = capture(Remembering(), (torch.randn(2, 1, 4), [torch.zeros(2, 1, 4)]))
    assert graph.is_whole
    assert graph.blocks[""].startswith("it changes its arguments: input 1: (2, 1, 4)")


class Counting(Remembering):
    """Counts its calls in a dictionary that it is given."""

    def forward(self, x, calls):
        calls["made"] += 1
        return self.out(self.into(x))


def test_a_model_that_changes_plain_values_it_is_given_stays_whole_and_says_so():
    graph = capture(Counting(), (torch.randn(2, 4), {"made": 0}))
    assert graph.is_whole
    assert graph.blocks[""].startswith("it changes its arguments: input 1.made: 0, not 1")
