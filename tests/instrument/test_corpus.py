"""Over real files: no applicable pass changes no byte; a pass that touches everything changes nothing it should not."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpus import files, parses

from gemini.instrument.pass_manager.instrumented_file import Instrumented
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.base import Pass
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.pattern import Rewrite
from gemini.instrument.text.edits import Edit
from gemini.instrument.text.source_file import SourceFile

MARK = "__corpus_wrap__"


class WrapFunctions(Pass):
    """Puts a call around the function of every call."""

    name = "wrap-functions"

    def edits(self, unit: Unit) -> Iterator[Edit]:
        patterns = {node for case in unit.nodes(ast.match_case) for node in ast.walk(case.pattern)}
        for call in unit.nodes(ast.Call):
            if call not in patterns:
                yield Edit.wrap(call.func, f"{MARK}(", ")")


class WrapValues(Pass):
    """Puts a call around every string and every tuple that is read."""

    name = "wrap-values"

    def edits(self, unit: Unit) -> Iterator[Edit]:
        for node in (*unit.nodes(ast.Constant), *unit.nodes(ast.Tuple), *unit.nodes(ast.JoinedStr)):
            if isinstance(node, ast.Constant) and not isinstance(node.value, str | bytes):
                continue
            if self._is_value(unit, node) and not unit.in_fstring(node):
                yield Edit.wrap(node, f"{MARK}(", ")")

    def _is_value(self, unit: Unit, node: ast.expr) -> bool:
        around = [node, *unit.ancestors(node)]
        parent = unit.parent(node)
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del) or isinstance(parent, ast.Expr):
            return False
        if isinstance(parent, ast.Subscript) and isinstance(node, ast.Tuple):
            return not any(isinstance(each, ast.Slice | ast.Starred) for each in node.elts)
        if isinstance(parent, ast.Constant | ast.JoinedStr):
            return False
        return not any(isinstance(each, ast.pattern) for each in around)


def test_an_edit_never_changes_what_an_fstring_shows() -> None:
    text = "print(f'{f(1)=} {f(2) = } {(f(3))=!s} {f(4)!r} {f(5)==6} {g(f(7))=:>{f(8)}}')\n"
    done = PassManager([WrapFunctions()]).run(SourceFile.from_text(text))
    scope = {"f": lambda x: x, "g": lambda x: x, MARK: lambda f: f}
    shown: list[str] = []
    scope["print"] = shown.append
    exec(compile(text, "a", "exec"), dict(scope))
    exec(done.code(), dict(scope))
    assert shown[0] == shown[1]
    assert f"{MARK}(f)(4)" in done.text
    assert f"{MARK}(f)(8)" in done.text


class Unwrap(ast.NodeTransformer):
    """Takes the calls away again."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return node.args[0] if isinstance(node.func, ast.Name) and node.func.id == MARK else node


def check_untouched(path: Path) -> bool:
    source = SourceFile(str(path), path.read_bytes(), path.stem)
    if not parses(source.data):
        return False
    never = [Rewrite("no_such_module.f($args)", "mylib.g($args)", name="a"), WrapNothing()]
    done = PassManager(never).run(source)
    assert not done.changed
    assert done.data is source.data
    assert source.encode(done.text) == source.data
    return True


class WrapNothing(Pass):
    """Looks at everything and wants nothing."""

    name = "nothing"

    def edits(self, unit: Unit) -> Iterator[Edit]:
        yield from (Edit.replace(call, "never") for call in unit.calls("no_such_module.f"))


def check_touched(path: Path, one: Pass) -> Instrumented | None:
    source = SourceFile(str(path), path.read_bytes(), path.stem)
    if not parses(source.data):
        return None
    done = PassManager([one]).run(source)
    assert not done.failures, done.failures[0].message
    assert done.text.count("\n") == source.text.count("\n")
    undone = Unwrap().visit(done.tree)
    assert ast.dump(undone, include_attributes=True) == ast.dump(source.tree, include_attributes=True), path
    return done


def test_no_byte_changes_where_no_pass_applies() -> None:
    assert sum(check_untouched(path) for path in files(110, largest=60_000)) >= 100


@pytest.mark.parametrize("one", [WrapFunctions(), WrapValues()], ids=lambda one: one.name)
def test_touching_everything_keeps_every_position(one: Pass) -> None:
    assert sum(check_touched(path, one) is not None for path in files(50, largest=40_000)) >= 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_byte_changes_in_a_thousand_files() -> None:
    assert sum(check_untouched(path) for path in files(1300)) >= 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("one", [WrapFunctions(), WrapValues()], ids=lambda one: one.name)
def test_touching_everything_in_many_files(one: Pass) -> None:
    assert sum(check_touched(path, one) is not None for path in files(500)) >= 400


def test_code_of_an_untouched_file_is_pythons_own() -> None:
    compared = 0
    for path in files(50, largest=40_000):
        data = path.read_bytes()
        if parses(data):
            try:
                expected = compile(data, str(path), "exec", dont_inherit=True)
            except SyntaxError:
                continue
            assert PassManager([WrapNothing()]).run(SourceFile(str(path), data)).code() == expected
            compared += 1
    assert compared >= 40
