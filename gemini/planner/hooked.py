"""Hooked: models with hooks of the program's on modules inside them.

Such a hook keeps what it sees in lists and dicts of the program, or changes what flows: it has to run in the program's
process, once a call. So there is no plan for such a model, and it is not run to look at it either. Hooks of torch's own
that only make a weight (weight and spectral normalization, pruning) may run anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from gemini.capture.hooks import has_hooks, hook_tables
from gemini.planner.step_plan import UnplannableError

_WEIGHTS = "torch.nn.utils."


def check_hooks(model: nn.Module) -> None:
    """Raises UnplannableError where one hangs on a module inside; those on the model itself run around its call."""
    names = [name for name, module in model.named_modules() if name and has_hooks(module) and any(_own(module))]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UnplannableError(f"hooks of the program hang on {names[0]}{others}")


def _own(module: nn.Module) -> Iterator[bool]:
    """Of each hook, whether it is the program's own."""
    for table in hook_tables(module):
        for hook in (table or {}).values():
            yield not _makes_weights(hook)


def _makes_weights(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # of a partial
    kinds = type(hook).__mro__[:-1]  # pruning methods may be derived from torch's
    return getattr(function, "__module__", "").startswith(_WEIGHTS) or any(
        kind.__module__.startswith(_WEIGHTS) for kind in kinds
    )
