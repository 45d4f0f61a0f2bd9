"""Code is pure only if everything it reaches is a tensor, a value, or a function for which the same holds."""

# ruff: noqa: PLW0108, PLW0603, RUF034

from __future__ import annotations

import argparse
import csv
import functools
import io
import itertools
import logging
import math
import multiprocessing
import operator
import os
import queue
import random
import socket
import sys
import threading
import time
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.purity.proof import find_impure_argument, prove_purity

pytestmark = pytest.mark.unit

generator, python_generator, torch_generator = np.random.default_rng(0), random.Random(0), torch.Generator()
legacy_generator = np.random.RandomState(0)
cycle, counter, lines = itertools.cycle([1.0, 2.0]), itertools.count(), (line for line in ["a"])
log, lock, waiting, shared = logging.getLogger("x"), threading.Lock(), queue.Queue(), multiprocessing.Value("d", 1.0)
writer, text = csv.writer(io.StringIO()), io.StringIO()
level: ContextVar[float] = ContextVar("level", default=1.0)
storage = threading.local()
path = Path("factor.txt")
counts, history, unused = {"n": 0}, [1.0], open
options = argparse.Namespace(tau=1.0, rng=generator)
scale, table, shift, array = 2.0, {"relu": torch.relu, "gelu": F.gelu}, torch.zeros(4), np.ones(4)
teacher = nn.Linear(4, 4)
frozen = nn.Linear(4, 4).requires_grad_(False)
Pair = namedtuple("Pair", ["a", "b"])


class Kind(Enum):
    A = 1


@dataclass
class Settings:
    width: int = 4
    names: list[str] = field(default_factory=list)

    def factor(self) -> float:
        return math.sqrt(self.width)


class Tracker:
    def __init__(self) -> None:
        self.seen, self.items = 0, [1]

    def count(self) -> None:
        self.seen += 1

    def keep(self, x: Any) -> None:
        self.items.append(x)

    def mean(self) -> float:
        return sum(self.items) / len(self.items)


class Sampler:
    def __init__(self) -> None:
        self.source = random.Random(1)

    def draw(self) -> float:
        return self.source.random()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class TimedSquare(Square):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * time.time()


settings, tracker, sampler = Settings(), Tracker(), Sampler()


class CountedKey:
    def __hash__(self) -> int:
        history.append(1)
        return 1

    def __eq__(self, other: object) -> bool:
        return True


class NamedKey:
    def __hash__(self) -> int:
        return hash(type(self).__name__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedKey)


@dataclass(frozen=True)
class PlainKey:
    name: str = "a"


counted_keys, plain_keys = {CountedKey(): 2.0}, {NamedKey(): 2.0, PlainKey(): 3.0}


class OwnGenerator(random.Random):
    pass


class Drawing(Enum):
    A = functools.partial(lambda source, x: x * source.normal(), generator)

    def draw(self) -> float:
        return float(generator.normal())


class Level(float):
    def draw(self) -> float:
        return float(generator.normal())


class Special:
    def __pos__(self) -> float:
        return float(generator.normal())


class Meta(type):
    def __call__(cls) -> Any:
        return generator.normal()


class Called(metaclass=Meta):
    pass


held, own_generator, number = UserDict(rng=generator), OwnGenerator(1), Level(1)
partial_getattr = functools.partial(getattr, options, "rng")


def draw_from_default(x: torch.Tensor, source: Any = generator) -> torch.Tensor:
    return x * (source is not None)


def bump(counted: Any) -> None:
    counted.seen += 1


@functools.lru_cache
def memoized_list() -> list[int]:
    return [1]


def activate(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return F.gelu(x) * by * math.pi


def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + generator.normal()


def remember(x: torch.Tensor, seen: list[Any] = []) -> torch.Tensor:  # noqa: B006
    seen.append(x)
    return x


@functools.lru_cache
def positions(length: int) -> torch.Tensor:
    return torch.arange(length)


class Net(nn.Module):
    """Calls a function on the output of a layer."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.lin, self.function = nn.Linear(4, 4), function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.lin(x))


class Owned(nn.Module):
    """Uses an attribute of its own."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.lin, self.held, self.unread = nn.Linear(4, 4), held, log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * (1 if self.held is None else 1)


def _closure(value: Any) -> Callable[..., Any]:
    return lambda x: x if value is None else x


def _assigns_around() -> Callable[..., Any]:
    n = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal n
        n += 1
        return x * n

    return function


def _assigns_global(x: torch.Tensor) -> torch.Tensor:
    global scale
    scale = 3.0
    return x


def _imports_inside(x: torch.Tensor) -> torch.Tensor:
    import os.path as where

    return x if where.exists("x") else -x


def _from_inside(x: torch.Tensor) -> torch.Tensor:
    from time import monotonic

    return x * monotonic()


IMPURE: dict[str, Callable[[], nn.Module]] = {
    "a hash with an effect": lambda: Net(lambda x: x * next(iter(counted_keys.values()))),
    "numpy generator": lambda: Net(noisy),
    "numpy generator, owned": lambda: Owned(np.random.default_rng(0)),
    "numpy generator in a closure": lambda: Net(_closure(generator)),
    "numpy generator in an attribute of arguments": lambda: Net(lambda x: x + options.rng.normal()),
    "random state": lambda: Net(lambda x: x + legacy_generator.rand()),
    "python generator": lambda: Net(lambda x: x * python_generator.random()),
    "bound method of a generator": lambda: Owned(python_generator.random),
    "torch generator": lambda: Net(lambda x: x + torch.randn(4, generator=torch_generator)),
    "torch generator, owned": lambda: Owned(torch.Generator()),
    "made in the call, unseeded": lambda: Net(lambda x: x + np.random.default_rng().normal()),
    "generator in a list": lambda: Owned([1, {"a": (generator,)}]),
    "object with a generator": lambda: Net(lambda x: x * sampler.draw()),
    "owned object with a generator": lambda: _Draws(),
    "cycle": lambda: Net(lambda x: x * next(cycle)),
    "counter": lambda: Owned(itertools.count()),
    "python iterator": lambda: Owned(iter([1, 2])),
    "generator function's result": lambda: Net(lambda x: x if next(lines, None) else -x),
    "shared value": lambda: Net(lambda x: x * shared.value),
    "queue": lambda: Net(lambda x: x * waiting.get_nowait()),
    "lock": lambda: Net(lambda x: x if lock.locked() else -x),
    "open": lambda: Net(lambda x: x * float(open("factor.txt").read())),  # noqa: SIM115
    "path": lambda: Net(lambda x: x * float(path.read_text())),
    "os.path": lambda: Net(lambda x: x if os.path.exists("flag") else -x),
    "environment": lambda: Net(lambda x: x * float(os.environ.get("SCALE", "1"))),
    "getenv": lambda: Net(lambda x: x * float(os.getenv("SCALE") or 1)),
    "clock": lambda: Net(lambda x: x * time.time()),
    "date": lambda: Net(lambda x: x * datetime.now().second),
    "csv writer": lambda: Net(lambda x: (writer.writerow([1]), x)[1]),
    "text stream": lambda: Net(lambda x: (text.write("a"), x)[1]),
    "print": lambda: Net(lambda x: (print(x.shape), x)[1]),
    "logger": lambda: Net(lambda x: (log.info("x"), x)[1]),
    "standard output": lambda: Net(lambda x: (sys.stdout.write("x"), x)[1]),
    "socket": lambda: Owned(socket.socket()),
    "context variable": lambda: Net(lambda x: x * level.get()),
    "thread storage": lambda: Net(lambda x: x * storage.value),
    "globals()": lambda: Net(lambda x: x * globals()["scale"]),
    "eval": lambda: Net(lambda x: eval("x")),
    "global dictionary written": lambda: Net(lambda x: counts.update(n=1) or x),
    "global item written": lambda: _CountsItems(),
    "global list written": lambda: Net(lambda x: history.append(1) or x),
    "global assigned": lambda: Net(_assigns_global),
    "variable around assigned": lambda: Net(_assigns_around()),
    "mutable default": lambda: Net(remember),
    "object changed": lambda: Net(lambda x: tracker.count() or x),
    "object's list changed": lambda: Net(lambda x: tracker.keep(x) or x),
    "attribute assigned": lambda: _AssignsAttribute(),
    "tensor changed": lambda: Net(lambda x: x + shift.add_(1)),
    "class's list changed": lambda: _ClassList(),
    "imported inside": lambda: Net(_imports_inside),
    "imported from inside": lambda: Net(_from_inside),
    "id": lambda: Net(lambda x: x * (id(x) % 7)),
    "numpy file": lambda: Net(lambda x: x + np.load("a.npy")),
    "torch file": lambda: Net(lambda x: x + torch.load("a.pt")),
    "weights of another model": lambda: Net(lambda x: teacher(x)),
    "backward of a function": lambda: Net(TimedSquare.apply),
    "partial": lambda: Net(functools.partial(lambda source, x: x + source.normal(), generator)),
    "in a table": lambda: Net(lambda x: {"noise": noisy}["noise"](x)),
    "function of a library's module": lambda: nn.TransformerEncoderLayer(4, 2, 4, activation=noisy),
    "attribute of a layer": lambda: _Holding("lin"),
    "attribute of a weight": lambda: _Holding("lin.weight"),
    "user dictionary": lambda: Net(lambda x: x * UserDict(rng=generator)["rng"].normal()),
    "global user dictionary": lambda: Net(lambda x: x * held["rng"].normal()),
    "subclass of a generator": lambda: Net(lambda x: x * own_generator.random()),
    "value of an enumeration": lambda: Net(lambda x: Drawing.A.value(x)),
    "method of an enumeration": lambda: Net(lambda x: x * Drawing.A.draw()),
    "number with a method": lambda: Net(lambda x: x * number.draw()),
    "special method": lambda: Net(lambda x: x * +Special()),
    "class of a class": lambda: Net(lambda x: x * Called()),
    "unread default": lambda: Net(draw_from_default),
    "method by a caller": lambda: Net(lambda x: operator.methodcaller("draw")(sampler) * x),
    "partial getattr": lambda: Net(lambda x: x * partial_getattr().normal()),
    "arguments of the process": lambda: Net(lambda x: x * len(sys.argv)),
    "defaults of a function": lambda: Net(lambda x: x * remember.__defaults__[0][0]),
    "attribute set through an argument": lambda: Net(lambda x: bump(tracker) or x),
    "changed result of a memoized function": lambda: Net(lambda x: x.add(memoized_list().append(1) or 1)),
    "hook": lambda: _with_hook(),
    "inside a sequence": lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Net(noisy))),
}  # fmt: skip


class _Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sampler = Sampler()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.sampler.draw()


class _CountsItems(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts["n"] += 1
        return x


class _AssignsAttribute(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options.tau += 0.1
        return x


class _ClassList(nn.Module):
    seen: list[int] = []  # noqa: RUF012

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return x


class _Holding(nn.Module):
    """Uses an attribute of a part."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        part = self.lin if path == "lin" else self.lin.weight
        part.rng = generator  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: Any = self.lin
        return x * (part.rng if hasattr(part, "rng") else part.weight.rng).normal()


def _with_hook() -> nn.Module:
    model = Net(activate)
    model.lin.register_forward_hook(lambda module, args, output: noisy(output))
    return model


class _OwnState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.tracker, self.logger = 0, [], Tracker(), log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.tracker.count()
        return x * getattr(self, "calls")  # noqa: B009

    def report(self) -> None:
        self.logger.info("%s", time.time())


PURE: dict[str, Callable[[], nn.Module]] = {
    "torch and math": lambda: Net(activate),
    "numbers": lambda: Net(lambda x: x * scale + len(history) + array.sum() + counts["n"]),
    "table of functions": lambda: Net(lambda x: table["relu"](x)),
    "tensor": lambda: Net(lambda x: x + shift),
    "frozen network": lambda: Net(lambda x: frozen(x)),
    "settings": lambda: Net(lambda x: x * settings.factor() * options.tau),
    "settings, owned": lambda: Owned(settings),
    "read of an object": lambda: Net(lambda x: x * tracker.mean()),
    "own state": _OwnState,
    "global generators": lambda: Net(lambda x: x * random.random() + np.random.rand() + torch.rand(4)),
    "keys with a hash of their own": lambda: Net(lambda x: x * sum(plain_keys.values())),
    "choice": lambda: Net(lambda x: x * random.choice([1, 2])),
    "enumeration and pair": lambda: Net(lambda x: x * Kind.A.value + Pair(1, 2).a),
    "containers": lambda: Owned([OrderedDict(a=1), defaultdict(list), deque([1]), Counter("ab"), {1, 2}, (None, ...)]),
    "memoized": lambda: Net(lambda x: x + positions(4)),
    "autograd function": lambda: Net(Square.apply),
    "iterators made in the call": lambda: Net(lambda x: sum(a * b for a, b in zip([1, 2], itertools.cycle([x])))),
    "object made in the call": lambda: Net(lambda x: x * Tracker().mean()),
    "constants of impure modules": lambda: Net(lambda x: x * sys.maxsize + len(os.sep)),
    "types": lambda: Net(lambda x: x if isinstance(x, (torch.Tensor, np.ndarray, types.SimpleNamespace)) else -x),
    "partial": lambda: Net(functools.partial(activate, by=3.0)),
    "torch layers": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LSTM(4, 4)),
    "transformer layer": lambda: nn.TransformerEncoderLayer(4, 2, 4, activation=activate),
    "unread attributes": lambda: Owned(None),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPURE)
def test_impure_code_is_named(case: str) -> None:
    assert prove_purity(IMPURE[case]()).reason


@pytest.mark.parametrize("case", PURE)
def test_pure_code_is_proven(case: str) -> None:
    assert prove_purity(PURE[case]()).reason == ""


def test_the_reason_names_function_and_value() -> None:
    assert prove_purity(Net(noisy)).reason == "noisy uses generator (numpy.random._generator.Generator)"
    assert prove_purity(IMPURE["os.path"]()).reason.endswith("uses os.path.exists (genericpath.exists)")


@pytest.mark.parametrize("value", [generator, cycle, waiting, text, [generator], {"a": lock}, log, Sampler()])
def test_impure_arguments_are_named(value: Any) -> None:
    assert find_impure_argument([torch.ones(2), 3, value], Net(activate))


def test_code_among_arguments_that_may_change_what_it_reads_is_refused() -> None:
    seen = [1, 2]

    def shorten(values: list[int]) -> int:
        return values.pop()

    assert "reads seen" in find_impure_argument([lambda x: x * shorten(seen)], Net(activate))


@pytest.mark.parametrize("value", [None, 3, "a", [1, torch.ones(2)], {"a": (1, None)}, settings, Kind.A, activate])
def test_plain_arguments_pass(value: Any) -> None:
    assert find_impure_argument([value], Net(activate)) == ""
