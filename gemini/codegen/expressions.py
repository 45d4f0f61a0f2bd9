"""Expressions: Python text of node arguments and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from gemini.codegen.attribute_paths import Paths, attribute, is_name
from gemini.codegen.expression_text import COMPARE, PLUS, POWER, TIMES, UNARY, Text, infix, slice_text, subscript
from gemini.codegen.import_block import Imports
from gemini.codegen.literals import literal, string
from gemini.codegen.value_names import unique
from gemini.errors import GenerateError
from gemini.ir.callables import ClosureForm, MethodForm, PartialForm
from gemini.ir.import_paths import Symbol, symbol_of
from gemini.ir.pytree import (
    BackReference,
    Literal,
    MappingForm,
    ModelObject,
    Number,
    ObjectForm,
    Path,
    Ref,
    SequenceForm,
    SliceForm,
)
from gemini.ir.symint import Expr

_INFIX = {
    "add": ("+", PLUS), "sub": ("-", PLUS), "mul": ("*", TIMES), "floordiv": ("//", TIMES), "truediv": ("/", TIMES),
    "mod": ("%", TIMES), "pow": ("**", POWER), "eq": ("==", COMPARE), "ne": ("!=", COMPARE), "lt": ("<", COMPARE),
    "le": ("<=", COMPARE), "gt": (">", COMPARE), "ge": (">=", COMPARE),
}  # fmt: skip
_ROUND = {"ceil": "math.ceil", "floor": "math.floor", "trunc": "math.trunc"}
_COMPUTED = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow")
_LONG_NUMBER = 32
_READS = {"numel": "numel()", "item": "item()", "storage_offset": "storage_offset()"}


class Expressions:
    """Writes forms. `value` returns the text of a tensor, `number` that of a number read by another stage."""

    def __init__(
        self,
        imports: Imports,
        paths: Paths,
        value: Callable[[Ref], Text],
        number: Callable[[Expr], Text | None],
    ) -> None:
        self.imports, self.paths, self.value, self.number = imports, paths, value, number
        # Containers that have a variable, by label: in the positional arguments, in the keywords.
        self.labels: tuple[dict[int, str], dict[int, str]] = ({}, {})
        self.hoisted = self.labels[0]
        self.where = ""
        self.taken: set[str] = set()  # names of variables
        self.prepared: dict[str, str] = {}  # long numbers of the current statement → variables

    # ── forms ──────────────────────────────────────────────────────────────────────────────────────────────────
    def form(self, form: Any) -> Text:
        """Return the text of any form."""
        label = getattr(form, "label", -1)
        if label in self.hoisted and not isinstance(form, BackReference):
            return Text(self.hoisted[label])
        writer = _WRITERS.get(type(form))
        if writer is None:
            raise GenerateError(f"{self.where}: a {type(form).__name__} cannot be written as code")
        return writer(self, form)

    def all(self, forms: Any) -> str:
        """Return several forms, separated by commas."""
        return ", ".join(self.each(forms))

    def each(self, forms: Any) -> list[str]:
        """Return the texts of several forms; consecutive sizes of one tensor become `*x.shape[:2]`."""
        texts: list[str] = []
        at = 0
        while at < len(forms):
            count = self._sizes(forms[at:])
            if count < 2:
                texts.append(str(self.form(forms[at])))
                at += 1
                continue
            ref, first = forms[at].expr.operands
            texts.append(f"*{self.value(ref).owner}.shape[{first or ''}:{first + count}]")
            at += count
        return texts

    def _sizes(self, forms: Any) -> int:
        """Count the forms from the first on that are consecutive sizes of one tensor."""
        count = 0
        for form in forms:
            expr = form.expr if isinstance(form, Number) else None
            if not isinstance(expr, Expr) or expr.op != "size" or self.number(expr) is not None:
                break
            ref, dim = expr.operands
            start, first = forms[0].expr.operands
            if ref != start or first < 0 or dim != first + count:
                break
            count += 1
        return count

    def arguments(self, args: Any, kwargs: Any) -> list[str]:
        """Return the texts between the parentheses of a call."""
        with self.inside(0):
            texts = self.each(args)
        with self.inside(1):
            if all(isinstance(key, str) and is_name(key) for key, _ in kwargs):
                return texts + [f"{key}={self.form(part)}" for key, part in kwargs]
            listed = ", ".join(f"{self.plain(key)}: {self.form(part)}" for key, part in kwargs)
            return [*texts, f"**{{{listed}}}"]

    @contextmanager
    def inside(self, which: int) -> Iterator[None]:
        """Write parts of the positional arguments (0) or of the keywords (1) of a node."""
        outer, self.hoisted = self.hoisted, self.labels[which]
        yield
        self.hoisted = outer

    def plain(self, value: Any) -> str:
        """Return the text of a plain value, as it occurs in keys and expressions."""
        text = literal(value)
        if text is not None:
            if "np.array(" in text:
                self.imports.alias("numpy", "np")
            return text
        if isinstance(value, tuple):
            return f"({', '.join(self.plain(part) for part in value)}{',' if len(value) == 1 else ''})"
        symbol = symbol_of(value)
        if symbol is not None:
            return self.imports.symbol(symbol)
        if is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        raise GenerateError(f"{self.where}: the value {value!r:.60} cannot be written as code")

    def _dataclass(self, value: Any) -> str:
        """Return the text of a dataclass of plain values, such as a layout: fields up to the last without default."""
        given = [(getattr(value, one.name), one.default) for one in fields(value)]
        while given and given[-1][0] == given[-1][1]:
            given.pop()
        return f"{self.imports.cls(type(value), self.where)}({', '.join(self.plain(one) for one, _ in given)})"

    def _literal(self, form: Literal) -> Text:
        text = self.plain(form.value)
        return Text(text, UNARY if text.startswith("-") else 16)

    def _sequence(self, form: SequenceForm) -> Text:
        texts = self.each(form.items)
        inner = ", ".join(texts)
        if form.cls is list:
            return Text(f"[{inner}]")
        trailing = "," if len(texts) == 1 else ""
        if form.cls is tuple:
            return Text(f"({inner}{trailing})")
        if form.cls is torch.Size:
            return Text(f"torch.Size(({inner}{trailing}))")
        name = self.imports.cls(form.cls, self.where)
        if form.cls.__bases__ == (tuple,) and hasattr(form.cls, "_fields"):
            return Text(f"{name}({inner})")
        return Text(f"{self.imports.support('sequence')}({', '.join([name, inner] if inner else [name])})")

    def _mapping(self, form: MappingForm) -> Text:
        inner = ", ".join(f"{self.plain(key)}: {self.form(part)}" for key, part in form.items)
        if form.cls is dict:
            return Text(f"{{{inner}}}")
        name = self.imports.cls(form.cls, self.where)
        return Text(f"{self.imports.support('mapping')}({name}, {{{inner}}}{self.state(form.state)})")

    def _record(self, form: ObjectForm) -> Text:
        name = self.imports.cls(form.cls, self.where)
        return Text(f"{self.imports.support('record')}({name}{self.state(form.state)})")

    def state(self, state: Any) -> str:
        """Return attributes as additional keywords of a call."""
        if all(is_name(key) for key, _ in state):
            return "".join(f", {key}={self.form(part)}" for key, part in state)
        return f", **{{{', '.join(f'{self.plain(key)}: {self.form(part)}' for key, part in state)}}}"

    def _again(self, form: BackReference) -> Text:
        return Text(self.hoisted[form.label])

    def _slice(self, form: SliceForm) -> Text:
        return Text(f"slice({self.all((form.start, form.stop, form.step))})")

    def _model_object(self, form: ModelObject) -> Text:
        return Text(self.paths.model_object(form.module, form.attribute))

    def _symbol(self, form: Symbol) -> Text:
        return Text(self.imports.symbol(form))

    def _closure(self, form: ClosureForm) -> Text:
        outer = f"({string(form.outer.module)}, {string(form.outer.qualname)})"
        parts = [outer, self.plain(form.indices), string(form.name), f"[{self.all(form.cells)}]"]
        if form.defaults:
            parts.append(str(self.form(SequenceForm(tuple, form.defaults))))
        return Text(f"{self.imports.support('closure')}({', '.join(parts)})")

    def _partial(self, form: PartialForm) -> Text:
        name = self.imports.name("functools", "partial")
        given = [str(self.form(part)) for part in (form.function, *form.args)]
        return Text(f"{name}({', '.join(given)}{self.state(form.kwargs)})")

    def _method(self, form: MethodForm) -> Text:
        return Text(attribute(self.form(form.owner).owner, form.name))

    # ── subscripts ─────────────────────────────────────────────────────────────────────────────────────────────
    def index(self, form: Any) -> str:
        """Return the text between the brackets of `x[…]`."""
        if isinstance(form, SequenceForm) and form.cls is tuple and form.items and form.label not in self.hoisted:
            parts = [self._index_part(part) for part in form.items]
            return ", ".join(parts) if len(parts) > 1 else f"{parts[0]},"
        return self._index_part(form)

    def _index_part(self, form: Any) -> str:
        if not isinstance(form, SliceForm):
            return str(self.form(form))
        bounds = [
            "" if isinstance(part, Literal) and part.value is None else str(self.form(part))
            for part in (form.start, form.stop, form.step)
        ]
        return slice_text(bounds[0], bounds[1], bounds[2] or None)

    # ── numbers ────────────────────────────────────────────────────────────────────────────────────────────────
    def _number(self, form: Number) -> Text:
        return self.expr(form.expr)

    def expr(self, expr: Any) -> Text:
        """Return the text of an expression."""
        if not isinstance(expr, Expr):
            text = self.plain(expr)
            return Text(text, UNARY if text.startswith("-") else 16)
        known = self.number(expr)
        if known is not None:
            return known
        if expr.op in _INFIX:
            sign, binds = _INFIX[expr.op]
            left, right = (self.expr(part) for part in expr.operands)
            return self._short(infix(left, sign, right, binds), expr)
        if expr.op == "neg":
            return Text(f"-{self.expr(expr.operands[0]).at(UNARY)}", UNARY)
        if expr.op in ("abs", "round", "bool"):
            return Text(f"{expr.op}({self.expr(expr.operands[0])})")
        if expr.op in _ROUND:
            self.imports.modules["math"] = ""
            return Text(f"{_ROUND[expr.op]}({self.expr(expr.operands[0])})")
        return self._read_text(expr)

    def _short(self, text: Text, expr: Expr) -> Text:
        """Return the text of a computed number, or a variable that is set first where the text is long."""
        if len(text.code) <= _LONG_NUMBER or expr.op not in _COMPUTED:
            return text
        if text.code not in self.prepared:
            self.prepared[text.code] = unique("size", {*self.taken, *self.prepared.values()})
        return Text(self.prepared[text.code])

    def _read_text(self, expr: Expr) -> Text:
        if expr.op == "call":
            name, args, kwargs = expr.operands
            return self.call_op(name, args.items, kwargs.items)
        owner = self.value(expr.operands[0]).owner
        if expr.op == "size":
            return Text(subscript(f"{owner}.shape", self.plain(expr.operands[1])))
        if expr.op == "stride":
            return Text(f"{owner}.stride({self.plain(expr.operands[1])})")
        return Text(f"{owner}.{_READS[expr.op]}")

    def call_op(self, name: str, args: Any, kwargs: Any) -> Text:
        """Return the text of a call of a torch function."""
        from gemini.codegen.op_text import operation

        return operation(self, name, args, kwargs)


def follow_text(text: Text, path: Path) -> Text:
    """Return the text of a part of a value."""
    code = text.owner if path else text.code
    for kind, key in path:
        code = attribute(code, key) if kind == "a" else subscript(code, _key(key))
    return Text(code) if path else text


def _key(key: Any) -> str:
    text = literal(key)
    if text is None:
        raise GenerateError(f"the key {key!r:.60} cannot be written as code")
    return text


_WRITERS: dict[type, Callable[[Any, Any], Text]] = {
    Ref: lambda self, form: self.value(form),
    Literal: Expressions._literal,
    Number: Expressions._number,
    SequenceForm: Expressions._sequence,
    MappingForm: Expressions._mapping,
    ObjectForm: Expressions._record,
    BackReference: Expressions._again,
    SliceForm: Expressions._slice,
    ModelObject: Expressions._model_object,
    Symbol: Expressions._symbol,
    ClosureForm: Expressions._closure,
    PartialForm: Expressions._partial,
    MethodForm: Expressions._method,
}
