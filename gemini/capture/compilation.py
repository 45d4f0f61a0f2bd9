"""Compilation: what torch.compile learns during capture is forgotten.

Code that compiles itself while it runs (`torch.cond`, a compiled layer on its first call) would compile the watched
run, and use that ever after.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compiled_apart() -> Iterator[None]:
    """If something was compiled inside, it is compiled anew after."""
    before = _frames()
    try:
        yield
    finally:
        if _frames() != before:
            import torch._dynamo

            torch._dynamo.reset()


def _frames() -> int:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])
