"""Features of training code are captured: hooks, checkpoints, parametrizations, dtypes, input and output structures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import trace_rules
from torch.nn.utils import parametrizations, prune, rnn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from conformance.zoo.graph_checks import differences
from gemini.capture import capture
from gemini.capture.patches import ORIGINAL_LEN


def linear():
    return nn.Linear(8, 8)


def x(rows=6):
    return torch.randn(rows, 8)


class Model(nn.Module):
    """Two layers and a forward given as a function."""

    def __init__(self, run, **parts):
        super().__init__()
        self.a, self.b, self.run = linear(), linear(), run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


@dataclass
class Given:
    x: torch.Tensor
    mask: torch.Tensor | None = None
    scale: float = 2.0


@dataclass
class Made:
    y: torch.Tensor
    rest: dict | None = None


class Both(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


class Reverse(torch.autograd.Function):
    """Turns gradients around; takes what is no tensor."""

    @staticmethod
    def forward(ctx, value, factor, name, nothing=None):
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None, None, None


def records(self, given):
    y = self.b(torch.relu(self.a(given.x))) * given.scale
    return Made(y, {"none": None, "pair": Both(y * 2, None), "list": [None, (y,)]})


def both_checkpoints(self, value):
    value = checkpoint(self.seq, self.a(value), use_reentrant=False)
    return self.b(checkpoint(self.seq, value, use_reentrant=True))


def in_place(self, value):
    y = self.a(value).clone()
    y[:, :4].mul_(2)
    y.view(-1)[::2].add_(1)
    y.t()[0].zero_()
    w = torch.zeros(value.shape[0], 8)
    w[:, ::2] = y[:, ::2]
    w.index_add_(0, torch.arange(value.shape[0]), y)
    return self.b(w.masked_fill_(w > 1, 0.0) + y)


def mixed_dtypes(self, value):
    return self.b(self.narrow(self.wide(value.double()).bfloat16()).float())


def spectrum(self, value):
    y = torch.fft.irfft(torch.fft.rfft(value) * self.weight, n=8)
    return self.b(y), self.complex(value.to(torch.cfloat))


def packed(self, ids, lengths):
    given = rnn.pack_padded_sequence(self.table(ids), lengths, batch_first=True, enforce_sorted=False)
    out, (hidden, _) = self.lstm(given)
    return rnn.pad_packed_sequence(out, batch_first=True)[0], hidden


def sampled(self, value):
    normal = torch.distributions.Normal(self.a(value), F.softplus(self.b(value)) + 0.1)
    prior = torch.distributions.Normal(torch.zeros(8), torch.ones(8))
    return normal.rsample(), torch.distributions.kl_divergence(normal, prior).sum(-1)


def ranges(self, value):
    with torch.profiler.record_function("first"):
        value = self.a(value)
    return self.b(value)


def quantized(self, value, zero):
    return self.b((value.to(torch.int32) - zero).float() * self.scale)


def positional_none(self, value, mask=None, bias=None, mode="a", *, extra=None):
    y = self.a(value) if mask is None else self.a(value) * mask
    y = y if bias is None else y + bias
    return self.b(y if mode == "a" else -y), extra


def slices(self, value):
    return self.seq[2:](self.seq[:2](value)) + self.seq[0](value)


def many(self, *values, **named):
    return self.b(sum(self.a(value) for value in values)) * (named.get("gain") or 1.0), named.get("none")


def sequential():
    return nn.Sequential(linear(), nn.Dropout(0.3), linear(), nn.Tanh())


INTEGERS = torch.randint(-128, 127, (6, 8), dtype=torch.int8)
CASES = {
    "dataclasses": lambda: (Model(records), (Given(x()),), {}),
    "function": lambda: (Model(lambda s, v: s.b(Reverse.apply(s.a(v), 0.3, "name", None))), (x(),), {}),
    "checkpoints": lambda: (Model(both_checkpoints, seq=sequential()), (x(),), {}),
    "checkpointed lambda": lambda: (
        Model(lambda s, v: s.b(checkpoint(lambda y: torch.tanh(s.a(y)) * 2, v, use_reentrant=False))),
        (x(),),
        {},
    ),
    "checkpoint_sequential": lambda: (
        Model(lambda s, v: checkpoint_sequential(s.seq, 2, s.a(v), use_reentrant=False), seq=sequential()),
        (x(),),
        {},
    ),
    "in place": lambda: (Model(in_place), (x(),), {}),
    "dtypes": lambda: (Model(mixed_dtypes, wide=linear().double(), narrow=linear().bfloat16()), (x(),), {}),
    "complex": lambda: (
        Model(
            spectrum,
            complex=nn.Linear(8, 8, dtype=torch.cfloat),
            weight=nn.Parameter(torch.randn(5, dtype=torch.cfloat)),
        ),
        (x(),),
        {},
    ),
    "sparse gradients": lambda: (
        Model(lambda s, ids: s.b(s.table(ids).sum(1)), table=nn.Embedding(20, 8, sparse=True)),
        (torch.randint(0, 20, (6, 5)),),
        {},
    ),
    "packed": lambda: (
        Model(packed, table=nn.Embedding(20, 8), lstm=nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)),
        (torch.randint(0, 20, (4, 5)), torch.tensor([5, 4, 2, 1])),
        {},
    ),
    "attention weights": lambda: (
        Model(lambda s, v, **k: s.att(v, v, v, **k), att=nn.MultiheadAttention(8, 2, batch_first=True)),
        (torch.randn(4, 5, 8),),
        {"need_weights": True, "average_attn_weights": False},
    ),
    "distributions": lambda: (Model(sampled), (x(),), {}),
    "profiler ranges": lambda: (Model(ranges), (x(),), {}),
    "integers": lambda: (
        Model(quantized, scale=nn.Parameter(torch.rand(8))),
        (INTEGERS, torch.tensor(3, dtype=torch.int32)),
        {},
    ),
    "positional None": lambda: (Model(positional_none), (x(), None, x()), {"mode": "b"}),
    "slices": lambda: (Model(slices, seq=sequential()), (x(),), {}),
    "args and kwargs": lambda: (Model(many), (x(), x()), {"gain": 2.0, "none": None}),
    "float64": lambda: (nn.Sequential(linear(), nn.BatchNorm1d(8), linear()).double(), (x().double(),), {}),
    "bfloat16": lambda: (nn.Sequential(linear(), nn.LayerNorm(8), linear()).bfloat16(), (x().bfloat16(),), {}),
    "no parameters": lambda: (nn.Sequential(nn.Softmax(-1), nn.Tanh()), (x().requires_grad_(),), {}),
    "weight norm": lambda: (nn.Sequential(parametrizations.weight_norm(linear()), linear()), (x(),), {}),
    "spectral norm": lambda: (nn.Sequential(parametrizations.spectral_norm(linear()), linear()), (x(),), {}),
    "orthogonal": lambda: (nn.Sequential(parametrizations.orthogonal(linear()), linear()), (x(),), {}),
    "scripted": lambda: (nn.Sequential(linear(), torch.jit.script(sequential()), linear()), (x(),), {}),
    "data parallel": lambda: (nn.DataParallel(nn.Sequential(linear(), linear())), (x(),), {}),
}


@pytest.mark.filterwarnings("ignore:.*(script|requires_grad=True).*")
@pytest.mark.parametrize("name", CASES)
def test_captured_finely_and_equal(name):
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    model.train()
    graph = capture(model, args, kwargs)
    assert not graph.is_whole
    assert differences(graph, model, args, kwargs) == []
    assert graph.variants.eager == graph.variants.captured == 0


def test_hooks_of_every_kind_run_around_and_inside():
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.Sequential(linear(), nn.ReLU()), linear())
    model[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model[1].register_forward_hook(lambda _, __, out: out + 1)
    model[1].register_full_backward_hook(lambda _, grads, __: (grads[0] * 3,))
    model[2].register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))
    model.register_forward_hook(lambda _, __, out: out * 2)
    model.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    model[0].weight.register_hook(lambda grad: grad * 5)
    given = (x().requires_grad_(),)
    graph = capture(model, given)
    assert not graph.is_whole
    assert differences(graph, model, given, {}) == []


def test_pruned_weights_and_a_forward_set_on_the_instance():
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    prune.l1_unstructured(model[0], "weight", 0.5)
    plain = model.forward
    model.forward = lambda value: plain(value) * 2
    graph = capture(model, (x(),))
    assert not graph.is_whole
    assert differences(graph, model, (x(),), {}) == []


def test_a_model_that_compiles_itself_still_runs_after_capture():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()

        def forward(self, value):
            y = self.a(value)
            return torch.cond(y.sum() > 0, lambda z: z + 1, lambda z: z - 1, (y,))

    model, value = Branches(), x()
    expected = model(value)
    graph = capture(model, (value,))
    assert graph.is_whole
    assert "cond" in graph.blocks[""]
    torch.testing.assert_close(model(value), expected)
    torch.testing.assert_close(graph.run(value), expected)


@pytest.mark.usefixtures("trusted_tests")
def test_what_a_compiler_learns_of_builtins_during_capture_is_right_afterwards(monkeypatch):
    known = trace_rules._builtin_function_ids
    monkeypatch.setattr(known, "function_ids", None)
    monkeypatch.setattr(known, "function_names", None)

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()

        def forward(self, value):
            if len is not ORIGINAL_LEN:
                known()  # made now
            return self.a(value)

    capture(Asks(), (x(),))
    assert known.function_ids is not None
    assert trace_rules.is_builtin_callable(len)
    assert trace_rules.is_builtin_callable(range)
    assert known.get_name(id(len), "") == "builtins.len"
