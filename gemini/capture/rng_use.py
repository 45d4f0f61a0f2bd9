"""Use of random numbers: the functions of a model that use Python's or NumPy's generator.

The tracer only detects that a generator advanced between two modules. One more run under a profiler finds the
innermost function that advanced it, so that this function, and not its module, becomes opaque.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np

from gemini.capture.source_location import is_model_code, name_of_call

# Names of functions that use torch's, Python's or NumPy's generators, without a trailing underscore.
_RNG_NAMES = frozenset(
    [
        "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "random", "uniform",
        "normal", "bernoulli", "multinomial", "exponential", "geometric", "cauchy", "log_normal", "poisson", "dropout",
        "sample", "rsample", "shuffle", "choice", "choices", "gauss", "default_rng", "standard_normal", "trunc_normal",
        "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "orthogonal", "permutation",
        "Generator", "gumbel_softmax", "alpha_dropout",
    ]
)  # fmt: skip


def names_rng(names: Iterable[str]) -> bool:
    """Return whether one of the names that code uses is that of a function of random numbers."""
    return not _RNG_NAMES.isdisjoint(name.rstrip("_") for name in names)


def _token() -> tuple[Any, ...]:
    python = random.getstate()[1]
    numpy: Any = np.random.get_state(legacy=True)
    return python[-1], python[0], numpy[2], int(numpy[1][0]), numpy[3]


def find_rng_functions(run: Callable[[], Any]) -> tuple[str, ...]:
    """Return the interceptable functions that use these generators during `run()`, as `package.module:name`."""
    stack: list[tuple[FrameType, tuple[Any, ...]]] = []
    found: dict[str, None] = {}
    blamed = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal blamed
        if event == "call" and is_model_code(frame):
            stack.append((frame, _token()))
            blamed = False
        elif event == "return" and stack and stack[-1][0] is frame:
            _, before = stack.pop()
            if before == _token() or blamed:
                return
            target = name_of_call(frame)
            if target and frame.f_code.co_name != "forward":
                found[target] = None
                blamed = True

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return tuple(found)
