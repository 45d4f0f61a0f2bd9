"""Every encoded value has an expression that evaluates to an equal value."""

from __future__ import annotations

import collections
import enum
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gemini.codegen.attribute_paths import Paths
from gemini.codegen.expression_text import Text
from gemini.codegen.expressions import Expressions
from gemini.codegen.import_block import Imports
from gemini.codegen.stage_modules import Holding, Skeleton
from gemini.errors import GenerateError
from gemini.ir.callables import ClosureForm, MethodForm, PartialForm, decompose
from gemini.ir.encode import decode
from gemini.ir.import_paths import Symbol
from gemini.ir.pytree import Literal, MappingForm, ModelObject, Number, ObjectForm, Ref, SequenceForm, SliceForm
from gemini.ir.symint import Expr, evaluate


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1


@dataclass
class Box:
    value: Any


class Listed(list):
    pass


def outer(scale):
    def inner(x, offset=1):
        return x * scale + offset

    return inner


_, SYMBOL, INDICES, *_ = decompose(outer(3)) or ()
INNER = ClosureForm(SYMBOL, INDICES, "inner", (Literal(3),), (Literal(2),))
TENSOR = torch.arange(24.0).reshape(2, 3, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(size=3)
        self.part = nn.Linear(2, 2)


def text_and_imports(form) -> tuple[str, list[str]]:
    model = Model()
    skeleton = Skeleton(Holding("", model))
    imports = Imports()
    write = Expressions(imports, Paths(skeleton), lambda _: Text("x"), lambda _: None)
    text = write.expr(form) if isinstance(form, Expr) else write.form(form)
    prepared = [f"{name} = {code}" for code, name in write.prepared.items()]
    return str(text), [*imports.lines(f"torch. np. nn math. Tensor {text} {prepared}"), *prepared]


def evaluated(form) -> Any:
    text, lines = text_and_imports(form)
    names: dict[str, Any] = {"x": TENSOR, "self": Model()}
    exec("\n".join(lines), names)
    return eval(text, names)


def read(form) -> Any:
    if isinstance(form, Ref):
        return TENSOR
    if isinstance(form, Number):
        return evaluate(form.expr, read_number)
    return getattr(Model(), form.attribute) if form.attribute else Model().part


def read_number(expr) -> Any:
    if expr.op == "size":
        return TENSOR.shape[expr.operands[1]]
    return TENSOR.stride(expr.operands[1]) if expr.op == "stride" else TENSOR.numel()


SIZE = Number(Expr("add", (Expr("size", (Ref(0), 1)), 1)))
LITERALS = [
    None, True, 3, -3, 2.5, -1e30, 1e-8, math.inf, -math.inf, complex(1, -2), "it's", 'say "x"', "back\\slash\n", b"ab",
    b"\x00\xff", torch.float16, torch.device("cpu"), torch.strided, torch.channels_last, ..., range(3), range(1, 9, 2),
    {1, 2}, set(), frozenset({"a"}),
]  # fmt: skip
FORMS = [
    *map(Literal, LITERALS),
    SequenceForm(list, (Ref(0), SIZE)),
    SequenceForm(tuple, (Literal(1),)),
    SequenceForm(tuple, ()),
    SequenceForm(torch.Size, (SIZE, Literal(2))),
    SequenceForm(Point, (Literal(1), SIZE)),
    SequenceForm(Listed, (Literal(1), Literal(2))),
    SequenceForm(torch.return_types.max, (Ref(0), Ref(0))),
    SequenceForm(tuple, (Number(Expr("size", (Ref(0), 0))), Number(Expr("size", (Ref(0), 1))), Literal(-1))),
    MappingForm(dict, (("a", Ref(0)), (3, Literal(None)), (("k", 1), SIZE))),
    MappingForm(collections.OrderedDict, (("a", Literal(1)),)),
    ObjectForm(Box, (("value", SequenceForm(list, (Literal(1),))),)),
    SliceForm(Literal(None), SIZE, Literal(2)),
    Symbol(__name__, "Colour.RED"),
    Symbol("builtins", "len"),
    Symbol("torch.nn.functional", "gelu"),
    Symbol("math", "sqrt"),
    ModelObject("", "config"),
    MethodForm(ModelObject("", "config"), "__eq__"),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=True)
        return type(one) is type(other) and all(same(a, b) for a, b in pairs)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if callable(one) and getattr(one, "__self__", None) is not None:
        return one.__name__ == other.__name__
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form)[:40])
def test_texts_build_what_decoding_builds(form):
    assert same(decode(form, read), evaluated(form))


def test_not_a_number_and_arrays():
    assert math.isnan(evaluated(Literal(math.nan)))
    array = np.array([[1.5, 2.0]], dtype=np.float32)
    found = evaluated(Literal(array))
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_functions_with_parts():
    assert evaluated(INNER)(5) == 5 * 3 + 2
    assert evaluated(PartialForm(Symbol("builtins", "int"), (Literal("11"),), (("base", Literal(2)),)))() == 3


def test_a_class_that_cannot_be_imported_is_named():
    class Local:
        pass

    with pytest.raises(GenerateError, match=r"Local.*local to a function"):
        text_and_imports(ObjectForm(Local, ()))


NUMBERS = st.recursive(
    st.one_of(st.integers(-9, 9), st.sampled_from([Expr("size", (Ref(0), 2)), Expr("numel", (Ref(0),))])),
    lambda inner: st.one_of(
        st.builds(
            lambda op, a, b: Expr(op, (a, b)),
            st.sampled_from(["add", "sub", "mul", "floordiv", "mod", "eq", "lt"]),
            inner,
            inner,
        ),
        st.builds(lambda op, a: Expr(op, (a,)), st.sampled_from(["neg", "abs", "bool", "ceil"]), inner),
    ),
    max_leaves=8,
)


@given(NUMBERS)
def test_numbers_keep_their_precedence(expr):
    try:
        expected = evaluate(expr, read_number)
    except ZeroDivisionError:
        return
    found = evaluated(Number(expr))
    assert found == expected
