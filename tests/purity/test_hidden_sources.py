"""Code is impure as well if a library calls what the script gave it: overridden methods, ops, classes, objects."""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.purity.proof import prove_purity

pytestmark = pytest.mark.unit
R = random.Random(1)


class Uses(nn.Module):
    """Multiplies its input with what a function returns."""

    def __init__(self, function: Callable[..., Any], held: Any = None) -> None:
        super().__init__()
        self.lin, self.function, self.held = nn.Linear(4, 4), function, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.function(self)


class NoisyNorm(nn.BatchNorm1d):
    def _check_input_dim(self, input: torch.Tensor) -> None:
        self.eps = R.random()


class NoisyRate(nn.Dropout):
    @property
    def p(self) -> float:
        return R.random()

    @p.setter
    def p(self, value: float) -> None:
        pass


class Meta(type):
    @property
    def level(cls) -> float:
        return R.random()


class OfMeta(Uses, metaclass=Meta):
    pass


class Missing(Enum):
    A = 1

    @classmethod
    def _missing_(cls, value: object) -> Missing:
        R.random()
        return cls.A


class Partly(Uses):
    def _draw(self, source: random.Random) -> float:
        return source.random()

    draw = functools.partialmethod(_draw, R)


class Dispatched(Uses):
    @functools.singledispatchmethod
    def draw(self, value: object) -> float:
        return 0.0

    @draw.register
    def _(self, value: int) -> float:
        return R.random()


class ComputedModule(types.ModuleType):
    @property
    def level(self) -> float:
        return R.random()


computed: Any = ComputedModule("computed_levels")
per_key: defaultdict[int, float] = defaultdict(R.random)
drawing: Any = np.frompyfunc(lambda x: R.random(), 1, 1)


@torch.library.custom_op("gemini_tests::noisy", mutates_args=())
def noisy_op(x: torch.Tensor) -> torch.Tensor:
    return x * R.random()


IMPURE: dict[str, Callable[[], nn.Module]] = {
    "overridden method of a layer": lambda: NoisyNorm(4),
    "overridden setting of a layer": lambda: nn.Sequential(nn.Linear(4, 4), NoisyRate()),
    "property of a metaclass": lambda: OfMeta(lambda self: type(self).level),
    "missing member of an enumeration": lambda: Uses(lambda self: Missing(3).value),
    "partial method": lambda: Partly(lambda self: self.draw()),
    "method by the type of an argument": lambda: Dispatched(lambda self: self.draw(1)),
    "class of a module": lambda: Uses(lambda self: computed.level),
    "default of a dictionary": lambda: Uses(lambda self: per_key[3]),
    "function of arrays": lambda: Uses(lambda self: float(drawing(1.0))),
    "attribute by name": lambda: Uses(lambda self: object.__getattribute__(self, "held").random(), R),
    "op in Python": lambda: Uses(lambda self: noisy_op(torch.ones(4))),
    "op in Python, by its name": lambda: Uses(lambda self: torch.ops.gemini_tests.noisy(torch.ones(4))),
    "sequence of a library": lambda: Uses(lambda self: self.held.draw(1), torch.quasirandom.SobolEngine(2)),
}


@pytest.fixture
def additions() -> Iterator[None]:
    """Put functions of the script into libraries, and remove them again."""
    space: Any = F
    sys.modules[computed.__name__] = computed
    space.gemini_noise = R.random
    nn.Linear.gemini_source = R  # type: ignore[assignment]
    yield
    del space.gemini_noise, nn.Linear.gemini_source
    del sys.modules[computed.__name__]


@pytest.mark.parametrize("case", IMPURE)
def test_impure_code_is_named(case: str) -> None:
    assert prove_purity(IMPURE[case]()).reason


def test_additions_to_libraries_are_followed(additions: None) -> None:
    assert prove_purity(Uses(lambda self: F.gemini_noise())).reason  # type: ignore[attr-defined]
    assert prove_purity(Uses(lambda self: self.lin.gemini_source.random())).reason


def test_objects_of_libraries_without_state_are_pure() -> None:
    assert prove_purity(Uses(lambda self: self.held.sample(), torch.distributions.Normal(0.0, 1.0))).reason == ""
    assert prove_purity(Uses(operator.attrgetter("held"), 2.0)).reason == ""
