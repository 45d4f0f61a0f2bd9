"""The import that instrumented files carry goes where it moves no line and comes before every use."""

# ruff: noqa: E501  (before and after read best side by side)

import ast
from collections.abc import Iterator

import pytest

from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.pass_manager.prelude_import import IMPORT, INLINE
from gemini.instrument.passes.base import Pass
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.text.edits import Edit
from gemini.instrument.text.source_file import SourceFile


class Mark(Pass):
    """Wraps every call of `f`."""

    name = "mark"

    def edits(self, unit: Unit) -> Iterator[Edit]:
        for call in unit.nodes(ast.Call):
            if isinstance(call.func, ast.Name) and call.func.id == "f":
                yield Edit.wrap(call, "__gemini__.mark(", ")")


PLACES = {
    "first statement": ("import os\nf(1)\n", f"{IMPORT}; import os\n__gemini__.mark(f(1))\n"),
    "the name is the user's": ("__gemini__ = 5\nf(1)\n", f"__gemini__ = 5\n{INLINE}.mark(f(1))\n"),
    "the use itself": ("f(1)\n", f"{IMPORT}; __gemini__.mark(f(1))\n"),
    "after the docstring": ('"""Doc."""\nimport os\nf(1)\n', f'"""Doc."""\n{IMPORT}; import os\n__gemini__.mark(f(1))\n'),
    "after the future": (
        "# c\nfrom __future__ import annotations\nx = f(1)\n",
        f"# c\nfrom __future__ import annotations\n{IMPORT}; x = __gemini__.mark(f(1))\n",
    ),
    "after several of the future": (
        '"""Doc."""\nfrom __future__ import division\nfrom __future__ import (annotations,\n  generators)\nf(1)\n',
        '"""Doc."""\nfrom __future__ import division\nfrom __future__ import (annotations,\n  generators)\n'
        f"{IMPORT}; __gemini__.mark(f(1))\n",
    ),
    "behind the docstring of a module of functions": (
        '"""Doc\nmore."""  # c\n\ndef g():\n  f(1)\n',
        f'"""Doc\nmore."""; {IMPORT}  # c\n\ndef g():\n  __gemini__.mark(f(1))\n',
    ),
    "behind the future": (
        "from __future__ import annotations\n@f(1)\ndef g(): pass\n",
        f"from __future__ import annotations; {IMPORT}\n@__gemini__.mark(f(1))\ndef g(): pass\n",
    ),
    "on a blank line": ("#!/x\n# coding: utf-8\n\ndef g():\n  f(1)\n", f"#!/x\n# coding: utf-8\n{IMPORT}\ndef g():\n  __gemini__.mark(f(1))\n"),
    "on a blank line with blanks": ("# c\n  \nif f(1): pass\n", f"# c\n{IMPORT}  \nif __gemini__.mark(f(1)): pass\n"),
    "nowhere": ("def g(): f(1)\n", f"def g(): {INLINE}.mark(f(1))\n"),
    "nowhere below comments": ("# c\nfor i in f(1): pass\n", f"# c\nfor i in {INLINE}.mark(f(1)): pass\n"),
    "nowhere above a decorator": ("@f(1)\ndef g(): pass\n", f"@{INLINE}.mark(f(1))\ndef g(): pass\n"),
    "semicolons": ("'doc'; f(1); f(2)", f"'doc'; {IMPORT}; __gemini__.mark(f(1)); __gemini__.mark(f(2))"),
    "bytes are no docstring": ("b'x'\ndef g(): f(1)\n", f"{IMPORT}; b'x'\ndef g(): __gemini__.mark(f(1))\n"),
    "brackets around the docstring": ("('doc')\ndef g(): f(1)\n", f"('doc'); {IMPORT}\ndef g(): __gemini__.mark(f(1))\n"),
    "there already": (f"{IMPORT}; import os\nf(1)\n", f"{IMPORT}; import os\n__gemini__.mark(f(1))\n"),
    "Windows line ends": ("import os\r\nf(1)\r\n", f"{IMPORT}; import os\r\n__gemini__.mark(f(1))\r\n"),
    "no use, no import": ("g(1)\n", "g(1)\n"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), PLACES.values(), ids=PLACES.keys())
def test_place(before: str, after: str) -> None:
    done = PassManager([Mark()]).run(SourceFile.from_text(before))
    assert not done.failures
    assert done.text == after
    assert ast.get_docstring(done.tree) == ast.get_docstring(ast.parse(before))
    code = done.code()
    assert code.co_flags & ~0xFFFF == compile(before, "a", "exec", dont_inherit=True).co_flags & ~0xFFFF


def test_in_an_fstring_without_a_place() -> None:
    text = 'def g(): return f"{f(1)}"\n'
    done = PassManager([Mark()]).run(SourceFile.from_text(text))
    assert not done.failures
    assert "__import__" in done.text
    ast.parse(done.text)


def test_the_import_comes_once_for_all_passes() -> None:
    class Later(Mark):
        name = "later"
        needs = ("mark",)

        def edits(self, unit: Unit) -> Iterator[Edit]:
            yield from (Edit.wrap(node, "__gemini__.seen(", ")") for node in unit.nodes(ast.Constant))

    done = PassManager([Mark(), Later()]).run(SourceFile.from_text("import os\nx = f(1)\n"))
    assert done.text == f"{IMPORT}; import os\nx = __gemini__.mark(f(__gemini__.seen(1)))\n"
    positions = {type(node).__name__: node for node in ast.walk(done.tree) if isinstance(node, ast.Constant)}
    assert (positions["Constant"].lineno, positions["Constant"].col_offset) == (2, 6)
