"""Draws: which Python functions of a model draw from Python's or NumPy's generator.

The tracer only sees that a generator moved between two modules. One more run under a profiler names the
innermost function that moved it, so that this function, not its whole module, is kept whole.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from gemini.capture.source_location import is_model_code, name_of_call


def _token() -> tuple[Any, ...]:
    python = random.getstate()[1]
    numpy: Any = np.random.get_state(legacy=True)
    return python[-1], python[0], numpy[2], int(numpy[1][0]), numpy[3]


def drawing_functions(run: Callable[[], Any]) -> tuple[str, ...]:
    """The interceptable functions that draw during `run()`, as `package.module:name`."""
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
