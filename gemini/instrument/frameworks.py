"""What Gemini knows of the frameworks' names without importing them.

Two facts: which names a star import of a framework's module binds, and which public name an object has that is
reached by the module it is defined in (``torch.nn.modules.linear.Linear`` is ``torch.nn.Linear``).
"""

from __future__ import annotations

_STARS: dict[str, frozenset[str]] = {}
_ROOTS = frozenset(["torch", "tensorflow", "keras", "numpy", "builtins"])


def is_framework(qualified: str) -> bool:
    """Whether a name lies in a module known here, which is then never looked up as a file."""
    return qualified.partition(".")[0] in _ROOTS


def star(module: str) -> frozenset[str] | None:
    """The names that ``from module import *`` binds; None where the module is not known here."""
    return _STARS.get(module)


def canonical(qualified: str) -> str:
    """The public name of what `qualified` names."""
    return qualified
