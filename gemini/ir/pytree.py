"""Forms: how a value is written down, as plain immutable data.

`gemini.ir.encode` turns values into forms and back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemini.ir.callables import Closure, Method, Partial
from gemini.ir.import_paths import Symbol
from gemini.ir.symint import Expr

Step = tuple[str, Any]  # ("i", index), ("k", key) or ("a", attribute)
Path = tuple[Step, ...]


@dataclass(frozen=True)
class Ref:
    """A tensor: result (`ret`), changed argument (`arg`), module attribute (`attr`) or inner module's result
    (`inner`) of a node, at a path."""

    node: int
    source: str = "ret"
    path: Path = ()

    def __str__(self) -> str:
        return f"%{self.node}" + "".join(f".{step[1]}" for step in self.path)


def spelled(value: Any) -> str:
    """A plain value as text that no other one has: NumPy leaves most of a large array out, and some digits."""
    if not isinstance(value, np.ndarray):
        return repr(value)
    return f"array({value.shape}, {value.dtype}, {hashlib.sha256(value.tobytes()).hexdigest()[:32]})"


@dataclass(frozen=True)
class Literal:
    """An immutable Python value."""

    value: Any

    def __repr__(self) -> str:
        return f"Literal(value={spelled(self.value)})"


@dataclass(frozen=True)
class Number:
    """A traced number, computed anew in every run."""

    expr: Expr


@dataclass(frozen=True)
class Sequence:
    """A list, tuple, named tuple or torch.Size. The label lets `Again` name it."""

    cls: type
    items: tuple[Any, ...]
    label: int = -1


@dataclass(frozen=True)
class Mapping:
    """A dict or a subclass of dict, with the attributes of the latter."""

    cls: type
    items: tuple[tuple[Any, Any], ...]
    state: tuple[tuple[str, Any], ...] = ()
    label: int = -1


@dataclass(frozen=True)
class Record:
    """An object of a Python class, rebuilt from its attributes."""

    cls: type
    state: tuple[tuple[str, Any], ...]
    label: int = -1


@dataclass(frozen=True)
class Again:
    """A container that occurred before in the same value: the same object, not a copy."""

    label: int


@dataclass(frozen=True)
class Slice:
    """A slice, whose bounds may be traced."""

    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True)
class Owned:
    """An object the model holds: a module, or an attribute of one (a configuration)."""

    module: str
    attribute: str = ""


Form = (
    Ref | Literal | Number | Sequence | Mapping | Record | Again | Slice | Owned | Symbol | Closure | Partial | Method
)


def leaves(form: Any) -> Iterator[Any]:
    """All forms in a form that have no parts (references, numbers, literals …)."""
    if isinstance(form, Sequence):
        for part in form.items:
            yield from leaves(part)
    elif isinstance(form, (Mapping, Record)):
        for _, part in (*getattr(form, "items", ()), *form.state):
            yield from leaves(part)
    elif isinstance(form, Slice):
        for part in (form.start, form.stop, form.step):
            yield from leaves(part)
    elif isinstance(form, Closure):
        for part in (*form.cells, *form.defaults):
            yield from leaves(part)
    elif isinstance(form, Partial):
        for part in (form.function, *form.args, *(part for _, part in form.kwargs)):
            yield from leaves(part)
    elif isinstance(form, Method):
        yield from leaves(form.owner)
    else:
        yield form


def refs(form: Any) -> Iterator[Ref]:
    """All references in a form, those inside expressions included."""
    for leaf in leaves(form):
        if isinstance(leaf, Ref):
            yield leaf
        elif isinstance(leaf, Number):
            yield from expr_refs(leaf.expr)


def expr_refs(expr: Any) -> Iterator[Ref]:
    """All references in an expression."""
    if isinstance(expr, Expr):
        for part in expr.operands:
            yield from expr_refs(part)
    elif not isinstance(expr, (int, float, str, tuple)):
        yield from refs(expr)
