"""Models with unusual outputs, state, sharing and values between stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, rnn

from gemini.pipe import Piped


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.p = nn.Parameter(torch.randn(4))


class ReturnsParameters(Model):
    def forward(self, x):
        y = self.c(self.b(self.a(x) * self.p))
        return y, self.p, self.a.weight, y, x


class NoInput(Model):
    def forward(self):
        return self.c(torch.relu(self.b(self.a(self.p[None]))))


class ReturnsAll(Model):
    def forward(self, x):
        y = self.b(torch.relu(self.a(x)))
        z = self.c(y)
        return [{"a": (y, [z, {"b": y}])}, ((), {}, []), z[:, :2], z.t(), z.detach(), z > 0, z.argmax(), z.shape, None]


class ReturnsNothing(Model):
    def forward(self, x):
        self.c(self.b(self.a(x)))


class Complex(Model):
    def forward(self, x):
        z = torch.fft.fft(torch.complex(self.a(x), self.b(x)))
        return self.c((z.conj() * 2).real + z.imag), z


class Twice(Model):
    """One BatchNorm and one dropout in all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x):
        for layer in (self.a, self.b, self.c, self.a):
            x = self.dropout(self.norm(torch.relu(layer(x))))
        return x


class Sparse(Model):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)

    def forward(self, ids):
        return self.c(torch.relu(self.b(torch.relu(self.a(self.words(ids)))))) + self.words(ids.flip(0))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), linear()
        self.first, self.second = nn.LSTM(4, 4, batch_first=True), nn.LSTM(4, 4, batch_first=True)

    def forward(self, ids, lengths):
        packed = rnn.pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.second(self.first(packed)[0])
        padded, lengths = rnn.pad_packed_sequence(packed, batch_first=True)
        return self.head(padded), lengths


class Sum(Model):
    def forward(self, x, y, *more, scale=1.0, **extra):
        return self.c(torch.relu(self.b(self.a(x) * scale + extra["bias"]))) + y + sum(more)


class Cast(Model):
    """Autocast in the model, and one precision a stage."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(torch.relu(self.a(x)))
        return self.c(y.float()), y


class Extra(Model):
    def forward(self, x):
        return self.c(self.b(self.a(x)))

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        assert state == {"version": 3}


def _shared() -> tuple[Any, ...]:
    x = torch.randn(4, 4, requires_grad=True)
    return Sum(), (x, x, torch.ones(4)), {"bias": torch.randn(4), "scale": 2.0}


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "returns parameters": lambda: (ReturnsParameters(), (torch.randn(4, 4),), {}),
    "returns its input": lambda: (ReturnsParameters(), (torch.randn(4, 4, requires_grad=True),), {}),
    "no input": lambda: (NoInput(), (), {}),
    "returns all kinds": lambda: (ReturnsAll(), (torch.randn(4, 4),), {}),
    "returns nothing": lambda: (ReturnsNothing(), (torch.randn(4, 4),), {}),
    "complex": lambda: (Complex(), (torch.randn(4, 4),), {}),
    "one module in all stages": lambda: (Twice(), (torch.randn(4, 4),), {}),
    "sparse gradients": lambda: (Sparse(), (torch.randint(0, 10, (4, 3)),), {}),
    "packed": lambda: (Packed(), (torch.randint(0, 9, (4, 5)), torch.tensor([5, 3, 2, 2])), {}),
    "one tensor twice": _shared,
    "autocast inside": lambda: (Cast(), (torch.randn(4, 4),), {}),
    "extra state": lambda: (Extra(), (torch.randn(4, 4),), {}),
    "weight norm": lambda: (
        nn.Sequential(*(parametrizations.weight_norm(linear()) for _ in range(4))), (torch.randn(4, 4),), {},
    ),
    "frozen": lambda: (ReturnsParameters().requires_grad_(False), (torch.randn(4, 4),), {}),
    "low precision": lambda: (Extra().bfloat16(), (torch.randn(4, 4).bfloat16(),), {}),
    "no batch": lambda: (Extra(), (torch.randn(4),), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_stages_equal_the_model(pipe, name, tmp_path):
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    piped = pipe(model, args, kwargs, nparts=3, output=tmp_path / "stages")
    for each in (piped, Piped.load(tmp_path / "stages", model)):
        report = each.check(args, kwargs)
        assert report.is_right, str(report)
    assert {key for stage in piped.stages for key in stage.state_dict()} == set(model.state_dict())


def test_under_autocast(pipe):
    torch.manual_seed(0)
    model, x = Extra(), torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        piped = pipe(model, (x,), nparts=3)
        assert piped(x).dtype == torch.bfloat16
        report = piped.check((x,))
    assert report.is_right, str(report)
    with pytest.warns(
        UserWarning, match=r"the stages were generated with gradients on and autocast to bfloat16 on cpu"
    ):
        assert piped(x).dtype == torch.float32


def test_a_model_without_weights(pipe, tmp_path):
    """Of any size: nothing is run, nothing is allocated."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8))), torch.empty(64, 8192)
    piped = pipe(model, (x,), nparts=4, analytic="h100", output=tmp_path / "stages")
    assert piped(x).device.type == "meta"
    assert piped.fallbacks == 0
    assert piped.analysis.to_json()
