"""Names of the frameworks, without importing them.

Two tables: which names a star import of a framework's module binds, and which public name an object has that is
reached by the module it is defined in (``torch.nn.modules.linear.Linear`` is ``torch.nn.Linear``).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

_STAR_IMPORTS = Path(__file__).with_name("torch_star_imports.txt")
_ROOTS = frozenset(["torch", "tensorflow", "keras", "numpy", "builtins"])

# Defining module → the public module that has its objects under the same name.
_PUBLIC = {
    "torch._tensor.": "torch",
    "torch.functional.": "torch",
    "torch.amp.": "torch.amp",
    "torch.autograd.": "torch.autograd",
    "torch.cuda.amp.": "torch.cuda.amp",
    "torch.nn.modules.": "torch.nn",
    "torch.nn.parallel.": "torch.nn.parallel",
    "torch.nn.parameter.": "torch.nn",
    "torch.optim.": "torch.optim",
    "torch.utils.data.": "torch.utils.data",
}
_PREFIXES = ("torch.nn.functional.", *_PUBLIC)


def is_framework(qualified: str) -> bool:
    """Return whether a name lies in a known framework, which is never looked up as a file."""
    return qualified.partition(".")[0] in _ROOTS


@cache
def star(module: str) -> frozenset[str] | None:
    """Return the names that ``from module import *`` binds; None for other modules."""
    return torch_star_imports().get(module)


@cache
def torch_star_imports() -> dict[str, frozenset[str]]:
    """Return the names that a star import binds, by public module of PyTorch; a test compares them with PyTorch's."""
    names: dict[str, list[str]] = {}
    module = ""
    for line in _STAR_IMPORTS.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            names[module] += line.split()
        elif not line.startswith("#"):
            module = line
            names[module] = []
    return {module: frozenset(bound) for module, bound in names.items()}


@cache
def canonical(qualified: str) -> str:
    """Return the public name of the object that `qualified` names."""
    if not qualified.startswith(_PREFIXES):
        return qualified
    module, _, name = qualified.rpartition(".")
    if module == "torch.nn.functional":
        return _IMPORTED.get(name, qualified)
    if not name[:1].isupper() and name not in _FUNCTIONS and module != "torch.functional":
        return qualified
    for prefix, public in _PUBLIC.items():
        if qualified.startswith(prefix) and name in (star(public) or ()):
            return f"{public}.{name}"
    return qualified


# Names that ``from torch.nn.functional import *`` also binds, as that module has no ``__all__``.
_IMPORTED = {name: name for name in ("dataclasses", "importlib", "math", "torch", "warnings")}
_IMPORTED |= {"np": "numpy", "grad": "torch.nn.grad", "Tensor": "torch.Tensor"}
# Functions that code reaches through their defining module; other lower-case names may be submodules.
_FUNCTIONS = frozenset(["autocast", "custom_fwd", "custom_bwd", "random_split", "default_collate", "default_convert"])
