"""Forms: values as immutable plain data. `gemini.ir.encode` turns values into forms and back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemini.ir.callables import ClosureForm, MethodForm, PartialForm
from gemini.ir.import_paths import Symbol
from gemini.ir.symint import Expr

Step = tuple[str, Any]  # ("i", index), ("k", key) or ("a", attribute)
Path = tuple[Step, ...]


@dataclass(frozen=True)
class Ref:
    """A tensor of a node, at a path: its result (`ret`), a changed argument (`arg`), a module attribute (`attr`) or the
    result of an inner module (`inner`)."""

    node: int
    source: str = "ret"
    path: Path = ()

    def __str__(self) -> str:
        return f"%{self.node}" + "".join(f".{step[1]}" for step in self.path)


def value_text(value: Any) -> str:
    """Return a text unique to a plain value; the repr of a NumPy array drops elements and digits."""
    if not isinstance(value, np.ndarray):
        return repr(value)
    return f"array({value.shape}, {value.dtype}, {hashlib.sha256(value.tobytes()).hexdigest()[:32]})"


@dataclass(frozen=True)
class Literal:
    """An immutable Python value."""

    value: Any

    def __repr__(self) -> str:
        return f"Literal(value={value_text(self.value)})"


@dataclass(frozen=True)
class Number:
    """A traced number, recomputed in every run."""

    expr: Expr


@dataclass(frozen=True)
class SequenceForm:
    """A list, tuple, named tuple or torch.Size. A `BackReference` refers to it by its label."""

    cls: type
    items: tuple[Any, ...]
    label: int = -1


@dataclass(frozen=True)
class MappingForm:
    """A dict or a subclass of dict, with the attributes of the latter."""

    cls: type
    items: tuple[tuple[Any, Any], ...]
    state: tuple[tuple[str, Any], ...] = ()
    label: int = -1


@dataclass(frozen=True)
class ObjectForm:
    """An object of a Python class, rebuilt from its attributes."""

    cls: type
    state: tuple[tuple[str, Any], ...]
    label: int = -1


@dataclass(frozen=True)
class BackReference:
    """A container that occurs earlier in the same value: the same object, not a copy."""

    label: int


@dataclass(frozen=True)
class SliceForm:
    """A slice, whose bounds may be traced."""

    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True)
class ModelObject:
    """An object of the model: a module, or an attribute of one (a configuration)."""

    module: str
    attribute: str = ""


Form = (
    Ref
    | Literal
    | Number
    | SequenceForm
    | MappingForm
    | ObjectForm
    | BackReference
    | SliceForm
    | ModelObject
    | Symbol
    | ClosureForm
    | PartialForm
    | MethodForm
)


def leaves(form: Any) -> Iterator[Any]:
    """Yield all forms in a form that have no parts (references, numbers, literals …)."""
    if isinstance(form, SequenceForm):
        for part in form.items:
            yield from leaves(part)
    elif isinstance(form, (MappingForm, ObjectForm)):
        for _, part in (*getattr(form, "items", ()), *form.state):
            yield from leaves(part)
    elif isinstance(form, SliceForm):
        for part in (form.start, form.stop, form.step):
            yield from leaves(part)
    elif isinstance(form, ClosureForm):
        for part in (*form.cells, *form.defaults):
            yield from leaves(part)
    elif isinstance(form, PartialForm):
        for part in (form.function, *form.args, *(part for _, part in form.kwargs)):
            yield from leaves(part)
    elif isinstance(form, MethodForm):
        yield from leaves(form.owner)
    else:
        yield form


def refs(form: Any) -> Iterator[Ref]:
    """Yield all references in a form, those in expressions included."""
    for leaf in leaves(form):
        if isinstance(leaf, Ref):
            yield leaf
        elif isinstance(leaf, Number):
            yield from expr_refs(leaf.expr)


def expr_refs(expr: Any) -> Iterator[Ref]:
    """Yield all references in an expression."""
    if isinstance(expr, Expr):
        for part in expr.operands:
            yield from expr_refs(part)
    elif not isinstance(expr, (int, float, str, tuple)):
        yield from refs(expr)
