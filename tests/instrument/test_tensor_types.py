"""Tensor types: which calls of `type` are changed, that they behave as before, and what they see in workers."""

from __future__ import annotations

import ast
import contextlib
import io

import pytest

import gemini.managed
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.tensor_types import TensorTypes
from gemini.instrument.text.source_file import SourceFile
from tests.instrument.assert_pass import assert_pass

IMPORTS = "import torch, builtins"
NEW = f"import gemini.managed as __gemini__; {IMPORTS}"

CHANGED = [
    ("type(x) is torch.Tensor", "__gemini__.type_of(x) is torch.Tensor"),
    ("type(x) is not type(y)", "__gemini__.type_of(x) is not __gemini__.type_of(y)"),
    ("type(x) == torch.Tensor", "__gemini__.type_of(x) == torch.Tensor"),
    ("builtins.type(x) in (int, str)", "__gemini__.type_of(x) in (int, str)"),
    ("table[type(x)](x)", "table[__gemini__.type_of(x)](x)"),
    ("table.get(type ( x ), f)", "table.get(__gemini__.type_of ( x ), f)"),
    ("type(x)(values)", "__gemini__.type_of(x)(values)"),
    ("type(x).__name__", "__gemini__.type_of(x).__name__"),
    ("type(type(x))", "__gemini__.type_of(__gemini__.type_of(x))"),
    ("type(y := x)", "__gemini__.type_of(y := x)"),
    ("type(i for i in x)", "__gemini__.type_of(i for i in x)"),
    ("issubclass(type(x), torch.Tensor)", "issubclass(__gemini__.type_of(x), torch.Tensor)"),
    ("match type(x):\n    case torch.Tensor: y", "match __gemini__.type_of(x):\n    case torch.Tensor: y"),
    ("class A:\n    type = 3\n    def f(self): return type(self)",
     "class A:\n    type = 3\n    def f(self): return __gemini__.type_of(self)"),
]  # fmt: skip
UNCHANGED = [
    'type("B", (), {})',
    "type(*x)",
    "type()",
    "type(x, **options)",
    "map(type, x)",
    "x.type(torch.float)",
    "def f(type): return type(x)",
    "type = kinds.get\ntype(x)",
    "class A:\n    type = kinds.get\n    kind = type(x)",
]


@pytest.mark.parametrize(("before", "after"), CHANGED)
def test_calls_of_the_builtin_are_changed_once(before: str, after: str) -> None:
    done = assert_pass(TensorTypes(), f"{IMPORTS}\n{before}\n", f"{NEW}\n{after}\n")
    assert_pass(TensorTypes(), done.text, done.text)


@pytest.mark.parametrize("text", UNCHANGED)
def test_other_uses_of_the_name_are_not(text: str) -> None:
    assert_pass(TensorTypes(), f"{IMPORTS}\n{text}\n", f"{IMPORTS}\n{text}\n")


def test_files_without_torch_are_not_read() -> None:
    assert_pass(TensorTypes(), "type(x) is int\n", "type(x) is int\n")


PROGRAM = """
import torch
count = 0
def once():
    global count
    count += 1
    return count
table = {int: "whole", torch.Tensor: "tensor", torch.nn.Parameter: "weight"}
class Odd(type):
    __eq__ = None
    __hash__ = type.__hash__
class Strange(metaclass=Odd): pass
for value in (3, torch.ones(2), torch.nn.Parameter(torch.ones(1)), Strange(), Strange, None):
    print(type(value), type(value) is torch.Tensor, table.get(type(value)), type(value).__name__, type(type(value)))
print(type(once()), count)
for text in ("type(1)(2)", "type(missing)"):
    pass
try:
    type(missing)
except NameError as error:
    print(error)
try:
    type(3)("x")
except ValueError as error:
    print(error)
"""


def test_the_program_behaves_as_before() -> None:
    done = PassManager([TensorTypes()]).run(SourceFile.from_text(PROGRAM, "script.py", "__main__"))
    assert done.text.count("__gemini__.type_of(") == PROGRAM.count("type(") - PROGRAM.count('"type(')
    assert len(ast.parse(done.text).body) == len(ast.parse(PROGRAM).body) + 1
    assert _output(done.text) == _output(PROGRAM)
    assert gemini.managed.type_of is type  # no model of this process has workers


def _output(text: str) -> str:
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    return written.getvalue()
