"""Hookless: a model without the hooks that hang on itself, while they run.

Hooks of the model run around its overlapped call, once, in the program's process. Whoever runs the model inside of
them, to look at it, must not run them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def hookless(model: nn.Module) -> Iterator[None]:
    """Inside, a call of the model is a call of its forward and nothing else."""
    own = vars(model)
    held: dict[str, Any] = {kind: own[kind] for kind in _KINDS if own[kind]}
    stand_in = own.get("forward")
    stands = hasattr(stand_in, "__gemini_stands_for__")
    try:
        own.update({kind: OrderedDict() for kind in held})
        if stands:
            own["forward"] = stand_in.__gemini_stands_for__
            if own["forward"] is None:
                del own["forward"]
        yield
    finally:
        own.update(held)
        if stands:
            own["forward"] = stand_in
