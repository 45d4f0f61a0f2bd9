"""The pass manager orders and applies passes and isolates the program from faulty ones."""

import ast
import gc
import re
import sys
import warnings
from collections.abc import Callable, Iterable

import pytest
from assert_pass import assert_pass

from gemini.errors import EditError, PassError
from gemini.instrument.pass_manager.instrumented_file import Instrumented
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.base import Changed, Failed, Pass, Skipped
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.text.edits import Edit
from gemini.instrument.text.source_file import SourceFile


class Given(Pass):
    """A pass made of a function."""

    def __init__(
        self,
        name: str,
        edits: Callable[[Unit], Iterable[Edit]] = lambda unit: (),
        needs: tuple[str, ...] = (),
        triggers: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.needs = needs
        self.triggers = triggers
        self._edits = edits

    def edits(self, unit: Unit) -> Iterable[Edit]:
        return self._edits(unit)


def wrapping(name: str, function: str, wrapper: str, needs: tuple[str, ...] = ()) -> Given:
    """Puts a call of `wrapper` around the calls of a function spelled `function`."""

    def edits(unit: Unit) -> Iterable[Edit]:
        for call in unit.nodes(ast.Call):
            if isinstance(call.func, ast.Name) and call.func.id == function:
                yield Edit.wrap(call, f"{wrapper}(", ")")

    return Given(name, edits, needs)


def run(passes: Iterable[Pass], text: str, notices: list[str] | None = None) -> Instrumented:
    notice = notices.append if notices is not None else None
    return PassManager(passes, notice=notice).run(SourceFile.from_text(text, "user.py"))


def test_a_pass_sees_the_result_of_what_it_needs() -> None:
    assert_pass([wrapping("b", "A", "B", needs=("a",)), wrapping("a", "f", "A")], "f(1)\n", "B(A(f(1)))\n")


def test_passes_that_do_not_need_each_other_see_the_same_text() -> None:
    assert_pass([wrapping("a", "f", "A"), wrapping("b", "f", "B"), wrapping("c", "A", "C")], "f(1)\n", "B(A(f(1)))\n")


def test_schedule_keeps_the_order_of_adding_where_it_may() -> None:
    manager = PassManager([Given("d", needs=("b",)), Given("c"), Given("b"), Given("a", needs=("d",))])
    assert [one.name for one in manager.schedule()] == ["c", "b", "d", "a"]


def test_a_cycle_is_drawn() -> None:
    manager = PassManager([Given("x"), Given("a", needs=("b",)), Given("b", needs=("c",)), Given("c", needs=("a",))])
    with pytest.raises(PassError, match="a → b → c → a"):
        manager.schedule()
    with pytest.raises(PassError, match="a → a"):
        PassManager([Given("a", needs=("a",))]).run(SourceFile.from_text(""))


def test_unknown_needs_are_all_reported_with_the_nearest() -> None:
    manager = PassManager([Given("device-placement"), Given("a", needs=("device-placment", "zzz"))])
    with pytest.raises(PassError, match=r"(?s)'device-placment'.*did you mean 'device-placement'.*'zzz'"):
        manager.schedule()


def test_names_are_given_once() -> None:
    with pytest.raises(PassError, match="two passes are called 'a'"):
        PassManager([Given("a"), Given("a")])
    with pytest.raises(PassError, match="has no name"):
        PassManager([Given("")])


def test_results_tell_what_happened() -> None:
    done = run([wrapping("a", "f", "A"), Given("b", triggers=("torch", "tensorflow")), Given("c")], "f(1)\n")
    assert [type(result) for result in done.results] == [Changed, Skipped, Skipped]
    assert done.results[1] == Skipped("b", "the file does not mention torch or tensorflow")
    assert done.results[2] == Skipped("c", "nothing to change")
    assert len(done.changes[0].edits) == 1


def test_a_file_without_the_trigger_is_not_even_parsed() -> None:
    source = SourceFile.from_text("x = 1\n")
    done = PassManager([Given("a", triggers=("torch",))]).run(source)
    assert "tree" not in vars(source)
    assert done.code() == compile("x = 1\n", "<string>", "exec", dont_inherit=True)


def test_triggers_see_identifiers_as_python_does() -> None:
    done = run([Given("a", triggers=("torch",))], "import ｔｏｒｃｈ\n")
    assert done.results == (Skipped("a", "nothing to change"),)


def boom(unit: Unit) -> Iterable[Edit]:
    yield Edit.wrap(unit.nodes(ast.Call)[1], "A(", ")")
    raise KeyError("é")


def unclosed(unit: Unit) -> Iterable[Edit]:
    return [Edit.replace(unit.nodes(ast.Call)[1], "g((")]


def overlapping(unit: Unit) -> Iterable[Edit]:
    call = unit.nodes(ast.Call)[1]
    return [Edit.replace(call, "a", "one"), Edit.replace(call.func, "b", "two")]


def more_lines(unit: Unit) -> Iterable[Edit]:
    return [Edit.replace(unit.nodes(ast.Call)[1], "(\n)")]


def loses_name(unit: Unit) -> Iterable[Edit]:
    return [Edit.replace(unit.nodes(ast.Assign)[0], "pass")]


def adds_name(unit: Unit) -> Iterable[Edit]:
    return [Edit.before(unit.nodes(ast.Assign)[0], "new = ")]


def adds_walrus(unit: Unit) -> Iterable[Edit]:
    return [Edit.wrap(unit.nodes(ast.Call)[1], "(new := ", ")")]


def no_edits(unit: Unit) -> Iterable[Edit]:
    return ["x"]  # type: ignore[list-item]


def not_iterable(unit: Unit) -> Iterable[Edit]:
    return None  # type: ignore[return-value]


def does_not_compile(unit: Unit) -> Iterable[Edit]:
    return [Edit.before(unit.nodes(ast.Assign)[0], "return; ")]


def own_place(unit: Unit) -> Iterable[Edit]:
    raise EditError("cannot do this", line=2, column=4)


BAD = {
    "raises": (boom, r"raised KeyError: 'é', after its edit of this line"),
    "syntax error": (unclosed, r"not valid Python: '\(' was never closed"),
    "overlap": (overlapping, r"two edits overlap"),
    "more lines": (more_lines, r"1 more line end"),
    "loses a name": (loses_name, r"removes y at the top level"),
    "adds a name": (adds_name, r"adds new at the top level"),
    "adds a name by walrus": (adds_walrus, r"adds new at the top level"),
    "gives something else": (no_edits, r"TypeError: a pass yields Edit values, not str"),
    "gives nothing": (not_iterable, r"TypeError: 'NoneType'"),
    "parses but does not compile": (does_not_compile, r"not valid Python: 'return' outside function"),
    "says where": (own_place, r"user.py:2: pass 'bad' raised EditError: cannot do this"),
}


@pytest.mark.parametrize(("edits", "message"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_bad_pass_is_left_out(edits: Callable[[Unit], Iterable[Edit]], message: str, position: int) -> None:
    text = "y = f(1)\nx = f(2)\n"
    good = [wrapping("a", "f", "A"), wrapping("b", "f", "B")]
    notices: list[str] = []
    done = run([*good[:position], Given("bad", edits), *good[position:]], text, notices)
    assert done.text == "y = B(A(f(1)))\nx = B(A(f(2)))\n"
    (failed,) = done.failures
    assert isinstance(failed, Failed)
    assert failed.pass_name == "bad"
    assert failed.message.startswith("user.py:")
    assert re.search(message, failed.message), failed.message
    assert notices == [failed.notice]
    assert "\n" not in notices[0]
    exec(done.code(), {"A": id, "B": id, "f": id})


def test_a_failure_shows_the_place() -> None:
    (failed,) = run([Given("bad", unclosed)], "y = f(1)\nif y:\n\tx = é + f(2)\n").failures
    assert failed.line == 3
    assert "\n    x = é + f(2)\n            ^\n" in failed.message


def test_every_failure_is_told_once() -> None:
    notices: list[str] = []
    text = "y = f(1)\nx = f(2)\n"
    done = run([Given("a", boom), Given("b", does_not_compile), Given("c", unclosed, needs=("b",))], text, notices)
    assert done.text == text
    assert sorted(notices) == sorted(failed.notice for failed in done.failures)
    assert len(notices) == 3


def test_conflicting_passes_run_one_after_the_other() -> None:
    def replace_by(name: str) -> Given:
        return Given(name, lambda unit: [Edit.replace(call, name) for call in unit.nodes(ast.Call)])

    notices: list[str] = []
    done = run([replace_by("a"), replace_by("b")], "x = f(1)\n", notices)
    assert done.text == "x = a\n"
    assert [type(result) for result in done.results] == [Changed, Skipped]
    assert not notices


def test_the_files_own_faults_stay_pythons() -> None:
    with pytest.raises(SyntaxError, match="never closed"):
        run([Given("a")], "x = (")
    text = "f(1)\nreturn\n"
    done = run([wrapping("a", "f", "A")], text)
    assert not done.changed
    assert done.results == (Skipped("a", "the file itself does not compile"),)
    with pytest.raises(SyntaxError, match="outside function"):
        done.code()


@pytest.mark.parametrize("depth", [1500, 2500])
@pytest.mark.parametrize("wanted", ["f", "nothing"])
def test_a_file_nested_too_deeply_for_a_tree_runs_all_the_same(depth: int, wanted: str) -> None:
    text = "y = f(1)\nx = " + "-" * depth + "1\n"
    done = run([wrapping("a", wanted, "A")], text)
    scope: dict = {"f": int, "A": int}
    exec(done.code(), scope)
    assert scope["x"] == 1
    if sys.version_info < (3, 13):
        assert not done.changed


def test_code_behaves_as_pythons_own() -> None:
    text = (
        '"""Doc é."""\nfrom __future__ import annotations\n'
        "def f(x: undefined) -> 3:\n  'doc'\n  assert x, f(1)\n  return __debug__\nclass A: 'doc'\n"
    )
    done = run([wrapping("a", "f", "A")], text)
    for optimize in (0, 1, 2):
        scope: dict = {}
        plain: dict = {}
        exec(done.code(optimize), scope)
        exec(compile(text, "user.py", "exec", dont_inherit=True, optimize=optimize), plain)
        assert scope.get("__doc__") == plain.get("__doc__")
        assert scope["f"].__doc__ == plain["f"].__doc__
        assert scope["f"].__annotations__ == plain["f"].__annotations__ == {"x": "undefined", "return": "3"}
        assert done.code(optimize).co_filename == "user.py"
        assert scope["f"].__code__.co_firstlineno == plain["f"].__code__.co_firstlineno
    assert done.code() is done.code(sys.flags.optimize)


def test_lines_of_the_code_are_the_originals() -> None:
    text = "def g(h):\n  return f(h,\n    f(1)) + (\n  h)\nx = [f(i)\n for i in range(3)]\n"
    done = run([wrapping("a", "f", "AAAAA")], text)
    assert lines_of(done.code()) == lines_of(compile(text, "user.py", "exec"))


def lines_of(code: object) -> list[set[int]]:
    found = [{line for *_, line in code.co_lines() if line}]
    for constant in code.co_consts:
        if hasattr(constant, "co_lines"):
            found += lines_of(constant)
    return found


def test_warnings_come_once() -> None:
    text = "f('\\d')\nx = 1 is 1\n"
    with warnings.catch_warnings(record=True) as plain:
        warnings.simplefilter("always")
        compile(text, "user.py", "exec")
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always")
        assert run([wrapping("a", "f", "A")], text).code()
    assert sorted(str(one.message) for one in ours) == sorted(str(one.message) for one in plain)


def test_the_collector_is_left_as_it_was() -> None:
    run([wrapping("a", "f", "A")], "f(1)\n")
    assert gc.isenabled()
    gc.disable()
    try:
        run([wrapping("a", "f", "A")], "f(1)\n")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_encodings_survive() -> None:
    data = "# coding: latin-1\nx = f('é')\r\n".encode("latin-1")
    done = PassManager([wrapping("a", "f", "A")]).run(SourceFile("a.py", data))
    assert done.data == "# coding: latin-1\nx = A(f('é'))\r\n".encode("latin-1")


STATEMENTS = [
    "x = (1,\n 2); y = f(\n 3)\nz = f(4)\n",
    "@deco\n# c\n@f(1)\ndef g(): f(2)\n\nf(3)\n",
    "@\\\ndeco\ndef g():\n  f(2)\nf(3)\n",
    "if 1:\n  f(1)\nelse:\n  f(2)\n# end\n",
    "x = '''a\nb'''; f(1)\nwith f(2): pass\n",
    "\n\n# c\nf(1)\n\n\n# d",
    "f(1); f(2); f(3)",
    "class A:\n  x = f(1)\n\n  def m(self): return f(2)\nf(3)\n",
]


@pytest.mark.parametrize("text", STATEMENTS)
def test_parsing_only_what_changed_gives_the_same_tree(text: str) -> None:
    for wrapper in ("A", "__gemini__.mark"):
        for number in range(4):

            def edits(unit: Unit, number: int = number, wrapper: str = wrapper) -> Iterable[Edit]:
                calls = [call for call in unit.nodes(ast.Call) if getattr(call.func, "id", "") == "f"]
                return [Edit.wrap(call, f"{wrapper}(", ")") for call in calls[number : number + 1]]

            done = run([Given("a", edits)], text)
            assert not done.failures
            assert ast.dump(done.tree) == ast.dump(ast.parse(done.text))


def test_a_pass_that_exits_or_changes_the_tree_is_left_out() -> None:
    def exits(_: Unit) -> Iterable[Edit]:
        raise SystemExit(3)

    def mutates(unit: Unit) -> Iterable[Edit]:
        unit.nodes(ast.Constant)[0].value = 2
        unit.tree.body.pop()
        return ()

    passes = [Given("exits", exits), Given("mutates", mutates), wrapping("a", "f", "A")]
    done = run(passes, "f(1)\nx = 3\n")
    assert done.text == "A(f(1))\nx = 3\n"
    assert [type(result) for result in done.results] == [Failed, Failed, Changed]
    assert "raised SystemExit: 3" in done.failures[0].notice
    assert "changed the syntax tree in place" in done.failures[1].notice
    assert run(passes[:2], "f(1)\nx = 3\n").code() == compile("f(1)\nx = 3\n", "<string>", "exec", dont_inherit=True)
