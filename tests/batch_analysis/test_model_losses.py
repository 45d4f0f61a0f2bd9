"""Models with their own loss, and the paths of samples through them, in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from gemini.batch_analysis.numeric_check import check_splitting
from tests.batch_analysis.recorder import Step
from tests.batch_analysis.test_losses import SIZES, N, split_equals

D, T = 6, 4


def own(outputs):
    return outputs * 1.0 if isinstance(outputs, torch.Tensor) else outputs[0] * 1.0


class Masked(nn.Module):
    """A mean over a mask, a count clamped, two heads with ignored targets, a term of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.start, self.end = nn.Linear(D, D), nn.Linear(D, 1), nn.Linear(D, 1)

    def forward(self, x, mask, begin, finish):
        h = torch.tanh(self.fc(x))
        masked = (h.square().sum(-1) * mask).sum() / mask.sum().clamp(min=1)
        one, two = self.start(h).squeeze(-1), self.end(h).squeeze(-1)
        qa = (F.cross_entropy(one, begin, ignore_index=2) + F.cross_entropy(two, finish, ignore_index=1)) / 2
        return masked + qa + 0.1 * self.fc.weight.square().sum(), h


def batch(*shape):
    return torch.randn(N, *shape, dtype=torch.float64)


def make(model):
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double()


def test_masks_heads_and_a_term_of_weights():
    torch.manual_seed(0)
    mask = (torch.rand(N, T) > 0.5).double()
    mask[-1] = 0
    begin, finish = torch.randint(0, T, (N,)), torch.randint(0, T, (N,))
    step = Step(make(Masked()), (batch(T, D), mask, begin, finish), own)
    split_equals(step)
    step = Step(step.model, (batch(T, D), mask, begin, finish), lambda o: o[0] + F.mse_loss(o[1], batch(T, D)))
    split_equals(step)
    assert check_splitting(step.forms, step.tape, step.root, step.splitting, step.inputs, {}) == ""


class Body(nn.Module):
    """One way of computing something from x (n, t, d)."""

    def __init__(self, way, training=True) -> None:
        super().__init__()
        self.fc, self.way = nn.Linear(D, D), way
        self.norm, self.train_norm = nn.BatchNorm1d(D), training
        self.lstm = nn.LSTM(D, D, batch_first=True)
        self.gru = nn.GRU(D, D)
        self.cell, self.lstm_cell = nn.GRUCell(D, D), nn.LSTMCell(D, D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
        self.table = nn.Parameter(torch.randn(T, D))

    def forward(self, x):
        return self.way(self, self.fc(x))


WAYS = {
    "sum over the number of samples": lambda m, x: x.square().sum() / x.shape[0],
    "times and over it": lambda m, x: x.square().mean() * x.shape[0] / x.size(0),
    "over all entries": lambda m, x: x.square().sum() / x.numel(),
    "flattened": lambda m, x: x.view(x.shape[0] * x.shape[1], -1).tanh().view(x.shape[0], x.shape[1], -1).mean(),
    "a cell on rows of samples": lambda m, x: m.cell(x.reshape(-1, D), x.tanh().reshape(-1, D)).square().mean(),
    "a cell at a time": lambda m, x: m.lstm_cell(x[:, 0], (x[:, 1], x[:, 2]))[1].square().sum(),
    "time first": lambda m, x: m.gru(x.transpose(0, 1))[0].mean() + m.gru(x.transpose(0, 1))[1].sum(),
    "time first, flattened": lambda m, x: x.transpose(0, 1).reshape(-1, D).tanh().sum(),
    "lstm": lambda m, x: m.lstm(x)[0].mean() + m.lstm(x)[1][0].sum(),
    "lstm from a state": lambda m, x: m.lstm(x, (x.new_zeros(1, len(x), D), x.new_ones(1, x.size(0), D)))[0].sum(),
    "attention": lambda m, x: m.attention(x, x, x)[0].mean(),
    "encoder": lambda m, x: m.encoder(x).mean(),
    "sdpa": lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True).sum(),
    "last of each": lambda m, x: x[torch.arange(x.shape[0]), (x[..., 0] > 0).sum(-1).clamp(max=T - 1)].mean(),
    "table": lambda m, x: (x + m.table).mean() + (x @ m.table.T).softmax(-1).sum(),
    "expanded token": lambda m, x: torch.cat([m.table[:1].expand(x.shape[0], -1, -1), x], 1).square().mean(),
    "zeros like": lambda m, x: (torch.zeros(x.shape[0], T, D).to(x) + x).tanh().sum(),
    "written": lambda m, x: written(x).sum(),
    "einsum": lambda m, x: torch.einsum("btd,bsd->bts", x, x).softmax(-1).mean(),
    "outer heads": lambda m, x: x.view(x.shape[0], T, 2, 3).permute(2, 0, 1, 3).reshape(-1, T, 3).tanh().mean(),
    "chunks": lambda m, x: sum(part.tanh().mean() for part in x.chunk(2, -1)),
    "stacked": lambda m, x: torch.stack([x, 2 * x]).mean(0).sum() + torch.stack([x, x], 1).mean(),
    "padded": lambda m, x: F.pad(x, (0, 0, 1, 0)).cumsum(1).sum(),
    "repeated": lambda m, x: x.repeat_interleave(2, 0).tanh().mean() + x.repeat(2, 1, 1).sum(),
    "eval norm": lambda m, x: F.batch_norm(x.transpose(1, 2), m.norm.running_mean, m.norm.running_var).mean(),
    "normalized": lambda m, x: F.layer_norm(x, (D,)).sum() + F.normalize(x, dim=-1).mean(),
    "mean over time first": lambda m, x: x.mean(1).tanh().mean(0).sum(),
    "convolution": lambda m, x: F.conv1d(x.transpose(1, 2), m.fc.weight[:, :, None]).amax(-1).mean(),
}  # fmt: skip
BROKEN = {
    "training norm": lambda m, x: m.norm(x.transpose(1, 2)).square().mean(),
    "centred": lambda m, x: (x - x.mean(0)).square().mean(),
    "times the number": lambda m, x: x.mean() * x.shape[0] ** 0.5,
    "all pairs": lambda m, x: (x[:, 0] @ x[:, 0].T).square().mean(),
    "maximum": lambda m, x: x.amax(),
    "balance": lambda m, x: (x.softmax(-1).mean((0, 1)) * (x > 0).double().mean((0, 1))).sum(),
    "first sample": lambda m, x: x[0].sum() + x.sum(),
    "root": lambda m, x: x.square().sum().sqrt(),
}  # fmt: skip


def written(x):
    made = torch.zeros_like(x)
    made[:, 1:] = x[:, :-1]
    made[:, 0] += 1.0
    return made.tanh()


@pytest.mark.parametrize("name", WAYS)
def test_ways_through_a_model(name):
    step = Step(make(Body(WAYS[name])), (batch(T, D),), own)
    split_equals(step, SIZES[1:3])
    assert check_splitting(step.forms, step.tape, step.root, step.splitting, step.inputs, {}) == ""


@pytest.mark.parametrize("name", BROKEN)
def test_ways_that_mix_samples(name):
    step = Step(make(Body(BROKEN[name])), (batch(T, D),), own)
    assert step.reason


@pytest.mark.parametrize("samples", [2, T, D])
def test_batches_of_the_size_of_something_else(samples):
    for name in ("flattened", "outer heads", "last of each", "expanded token", "einsum", "time first"):
        step = Step(make(Body(WAYS[name])), (batch(T, D)[:samples],) if samples < N else (batch(T, D),), own)
        split_equals(step, [[1, samples - 1]])


def test_captured_on_one_sample_and_run_on_more():
    one = Step(make(Body(WAYS["last of each"])), (batch(T, D)[:1],), own)
    assert one.reason == ""
    assert str(one.forms.kind(one.graph.outputs()[0])).startswith("WeightedPartial")


@pytest.mark.parametrize("itself", [False, True])
def test_checkpointed_layers_are_looked_into(itself):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.act = nn.Linear(D, D), nn.GELU()

        def forward(self, x, mix):
            if itself:
                return torch.utils.checkpoint.checkpoint(self.run, x, mix, use_reentrant=False)
            return self.run(x, mix)

        def run(self, x, mix):
            x = x + self.act(self.fc(x))
            return x - x.mean(0) if mix else x

    class Checkpointed(nn.Module):
        def __init__(self, mix) -> None:
            super().__init__()
            self.layers, self.mix = nn.ModuleList(Layer() for _ in range(2)), mix

        def forward(self, x):
            for layer in self.layers:
                if itself:
                    x = layer(x, self.mix)
                else:
                    x = torch.utils.checkpoint.checkpoint(layer, x, self.mix, use_reentrant=False)
            return x.square().mean()

    split_equals(Step(make(Checkpointed(False)), (batch(T, D),), own), SIZES[1:2])
    assert "samples and a sum or mean over the batch" in Step(make(Checkpointed(True)), (batch(T, D),), own).reason


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * torch.sigmoid(x * scale)

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        s = torch.sigmoid(x * scale)
        slope = x * x * s * (1 - s)
        return grad * (s + x * scale * s * (1 - s)), (grad * slope).sum((0, 1))


class Centred(Swish):
    @staticmethod
    def backward(ctx, grad):
        ours, scale = Swish.backward(ctx, grad)
        return ours - ours.mean(0), scale


@pytest.mark.parametrize("function", [Swish, Centred])
def test_custom_functions_are_looked_into(function):
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale = nn.Linear(D, D), nn.Parameter(torch.ones(D))

        def forward(self, x):
            return function.apply(self.fc(x), self.scale).square().mean()

    step = Step(make(Custom()), (batch(T, D),), own)
    if function is Swish:
        split_equals(step, SIZES[1:3])
    else:
        assert "custom autograd function" in step.reason


def test_randomness_is_by_sample():
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(D, D)

        def forward(self, x):
            noise = torch.rand(x.shape[0], 1, 1, dtype=x.dtype)
            return (F.dropout(self.fc(x), 0.5) * noise + torch.randn_like(x)).square().mean()

    step = Step(make(Dropped()), (batch(T, D),), own)
    assert step.reason == ""
    assert check_splitting(step.forms, step.tape, step.root, step.splitting, step.inputs, {}) == ""


def test_batch_in_another_dimension_and_inputs_without_one():
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(D, D)

        def forward(self, x, scale):
            return self.gru(x)[0] * scale

    x = torch.randn(T, N, D, dtype=torch.float64)
    scale = torch.randn(D, dtype=torch.float64)
    y = torch.randn(T, N, D, dtype=torch.float64)
    step = Step(make(TimeFirst()), (x, scale), lambda o: F.mse_loss(o, y))
    assert step.splitting.inputs == (1, None)
    split_equals(step)


def test_what_was_drawn_may_be_written_to():
    layers = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.4), nn.LeakyReLU(0.2, inplace=True), nn.Linear(D, 1))
    step = Step(make(layers), (batch(D),), lambda o: F.mse_loss(o, torch.ones_like(o)))
    assert step.reason == ""
    assert check_splitting(step.forms, step.tape, step.root, step.splitting, step.inputs, {}) == ""


def test_a_wrong_proof_is_overruled():
    step = Step(make(Body(WAYS["flattened"])), (batch(T, D),), own)
    wrong = type(step.splitting)(**{**vars(step.splitting), "node_shares": {}, "op_shares": {}})
    assert "the loss of the whole batch" in check_splitting(step.forms, step.tape, step.root, wrong, step.inputs, {})
    tape_step = Step(make(Body(lambda m, x: x)), (batch(T, D),), lambda o: o.square().mean())
    wrong = type(tape_step.splitting)(**{**vars(tape_step.splitting), "op_shares": {}})
    assert "the loss of the whole batch" in check_splitting(
        tape_step.forms, tape_step.tape, tape_step.root, wrong, tape_step.inputs, {}
    )


class Places(nn.Module):
    """A table of positions, for as many samples as it is told."""

    def __init__(self, way) -> None:
        super().__init__()
        self.table, self.way = nn.Parameter(torch.randn(T, D)), way

    def forward(self, samples):
        return self.way(self.table, samples)


class Told(nn.Module):
    def __init__(self, way) -> None:
        super().__init__()
        self.fc, self.places = nn.Linear(D, D), Places(way)

    def forward(self, x):
        return (self.fc(x) + self.places(x.shape[0])).tanh().square().mean()


TOLD = {
    "expanded": lambda table, n: table.expand(n, T, D),
    "ones": lambda table, n: torch.ones(n, T, 1).to(table) * table,
    "over the number": lambda table, n: table / n,
    "for many": lambda table, n: table.expand(n, T, D) if n > 4 else 2 * table,
    "numbered": lambda table, n: torch.arange(n).to(table)[:, None, None] * table,
}


@pytest.mark.parametrize("name", TOLD)
def test_layers_that_are_given_the_number_of_samples(name):
    step = Step(make(Told(TOLD[name])), (batch(T, D),), own)
    if name in ("expanded", "ones"):
        split_equals(step, SIZES[1:3])
    else:
        assert step.reason


def test_layers_that_are_given_different_numbers():
    class Two(Told):
        def forward(self, x):
            twice = x.repeat_interleave(2, 0)
            one = self.fc(x) + self.places(x.shape[0])
            return one.tanh().mean() + (self.fc(twice) + self.places(twice.shape[0])).tanh().square().mean()

    split_equals(Step(make(Two(TOLD["expanded"])), (batch(T, D),), own), SIZES[1:3])
