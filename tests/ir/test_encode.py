"""Values round-trip through their encoded form; symbolic integers compute like plain ones and record how."""

from __future__ import annotations

import math
import operator
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.ir.codec import Reader, Writer
from gemini.ir.encode import Encoder, decode, tensors
from gemini.ir.out_spec import structure_of
from gemini.ir.pytree import Ref
from gemini.ir.symint import Expr, TracedInt, evaluate, to_plain

Pair = namedtuple("Pair", ["a", "b"])


@dataclass
class Holder:
    item: object
    name: str = "x"


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.text(max_size=5),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.strided, torch.channels_last, ..., slice(1, None, 2),
                     range(3), 1j, b"ab", math.inf, torch.Size([2, 3])]),
    st.builds(torch.arange, st.integers(0, 4)),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(0, 5), inner, max_size=2).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Holder, inner),
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=150, deadline=None)
def test_a_value_round_trips_through_form_and_json(value):
    held = []

    def resolve(tensor):
        held.append(tensor)
        return Ref(len(held) - 1)

    form = Encoder(resolve, lambda _: None)(value)
    writer = Writer()
    again = Reader(writer.arrays)(writer(form))
    assert again == form
    rebuilt = decode(again, lambda ref: held[ref.node])
    assert structure_of(rebuilt) == structure_of(value)
    assert [id(t) for _, t in tensors(rebuilt)] == [id(t) for _, t in tensors(value)]


def test_shared_and_cyclic_objects_keep_their_identity():
    shared = [torch.ones(1)]
    holder = Holder((shared, shared))
    holder.name = holder
    rebuilt = decode(Encoder(lambda t: Ref(0), lambda _: None)(holder), lambda ref: shared[0])
    assert rebuilt.name is rebuilt
    assert rebuilt.item[0] is rebuilt.item[1]


class Log:
    disguise = None

    def __init__(self):
        self.facts = []

    def on_compare(self, expr, outcome):
        self.facts.append((expr, outcome))

    def on_concretize(self, expr, value):
        self.facts.append((expr, value))

    def on_hash(self, expr):
        pass


OPS = ["add", "sub", "mul", "floordiv", "truediv", "mod"]


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.sampled_from(OPS), st.integers(1, 9), st.booleans()), max_size=6),
    st.integers(1, 50),
)
@settings(max_examples=200, deadline=None)
def test_expressions_recompute_what_python_computed(size, steps, other):
    def compute(start):
        value = start
        for op, operand, reflected in steps:
            if value == 0:
                break
            value = getattr(operator, op)(operand, value) if reflected else getattr(operator, op)(value, operand)
        return value

    log = Log()
    number = TracedInt(size, Expr("size", (Ref(0), 0)), log)
    result = compute(number)
    assert to_plain(result) == compute(size)
    if not hasattr(result, "expr") or any(to_plain(fact) for _, fact in log.facts):
        return
    read = lambda _: other
    if all(evaluate(expr, read) == expected for expr, expected in log.facts):
        assert evaluate(result.expr, read) == compute(other)


def test_what_turns_a_traced_number_into_a_plain_one_is_logged():
    for use in (int, float, math.sqrt, bool, lambda n: n > 3, lambda n: n == 3, lambda n: n & 1, lambda n: {n: 1}[3]):
        log = Log()
        use(TracedInt(3, Expr("size", (Ref(0), 0)), log))
        assert log.facts, use
    log = Log()
    number = TracedInt(3, Expr("size", (Ref(0), 0)), log)
    assert (f"{number}", repr(number), hash(number)) == ("3", "3", hash(3))
    assert not log.facts
