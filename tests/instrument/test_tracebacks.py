"""A traceback through an instrumented line shows the user's text and underlines what Python would."""

import ast
import marshal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.base import Pass
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.text.edits import Edit
from gemini.instrument.text.source_file import SourceFile


class Marks(Pass):
    """Wraps calls, operands and items in a call of a builtin that gives them back."""

    name = "marks"

    def edits(self, unit: Unit) -> list[Edit]:
        nodes = [*unit.nodes(ast.Call), *unit.nodes(ast.BinOp), *unit.nodes(ast.Subscript)]
        return [
            Edit.wrap(node.func if isinstance(node, ast.Call) else node, "(lambda mark: mark)(", ")")
            for node in nodes
            if not isinstance(getattr(node, "ctx", None), ast.Store)
        ]


FAILING = {
    "division": "def f(x):\n    return 1 + x / 0  # é\nprint(f(1) + 2)\n",
    "call": "import math\nx = [1, math.sqrt(4), math.sqrt(-1)]\n",
    "attribute": "é = '日本'; print(é.upper() + é.nope())\n",
    "subscript": "d = {'a': {}}\nprint(d['a']['b'], 1)\n",
    "over lines": "def f(a, b):\n    return a[b]\nx = f(\n    [1],\n    2 +\n    3)\n",
    "in a comprehension": "x = [1 / i for i in (2, 1, 0)]\n",
    "raise": "def f():\n    raise ValueError(str(1) + 'x')\nf()\n",
    "semicolons": "a = abs(1); b = abs('x'); c = 3\n",
    "with tabs": "if 1:\n\tx = abs(1) + abs('x')\n",
    "class body": "class A:\n    x = int('1') + int('z')\n",
    "decorator": "def deco(x): return int(x)\n@deco\ndef f(): pass\n",
}


@pytest.mark.parametrize("text", FAILING.values(), ids=FAILING.keys())
def test_the_same_traceback(text: str, tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text(text, encoding="utf-8")
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    runner = tmp_path / "runner.py"
    runner.write_text(
        textwrap.dedent(
            f"""
            import marshal, sys
            code = marshal.loads(open({str(tmp_path / "code")!r}, "rb").read())
            try:
                exec(code, {{"__name__": "__main__"}})
            except Exception as error:
                import traceback
                trace = error.__traceback__.tb_next
                traceback.print_exception(type(error), error, trace)
            """
        )
    )

    done = PassManager([Marks()]).run(SourceFile(str(script), script.read_bytes(), "__main__"))
    assert done.changed
    assert not done.failures
    (tmp_path / "code").write_bytes(marshal.dumps(done.code()))
    ours = subprocess.run([sys.executable, str(runner)], capture_output=True, text=True, timeout=60, check=False)
    assert plain.returncode == 1
    assert ours.stderr == plain.stderr


def test_positions_of_every_instruction_lie_in_the_users_text() -> None:
    text = FAILING["over lines"]
    source = SourceFile.from_text(text)
    done = PassManager([Marks()]).run(source)
    codes = [done.code()]
    for code in codes:
        codes.extend(one for one in code.co_consts if hasattr(one, "co_code"))
        if sys.version_info >= (3, 11):
            for line, end_line, column, end_column in code.co_positions():
                if None not in (line, column, end_column) and line > 0:
                    assert (line, column) <= (end_line, end_column)
                    assert end_column <= len(source.lines.line(end_line).encode())
