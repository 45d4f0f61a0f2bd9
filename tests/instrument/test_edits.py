"""Edits change what they name and nothing else, and every position finds its way back."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.errors import EditError
from gemini.instrument.text.edits import Edit, apply_edits
from gemini.instrument.text.positions import restore
from gemini.instrument.text.source_file import SourceFile


def parts(text: str, kind: type[ast.AST] = ast.Call) -> tuple[SourceFile, list[ast.AST]]:
    source = SourceFile.from_text(text)
    found = [node for node in ast.walk(source.tree) if isinstance(node, kind)]
    return source, sorted(found, key=lambda node: (node.lineno, node.col_offset, -node.end_col_offset))


def test_no_edits_give_the_text_itself() -> None:
    source, _ = parts("x = f(1)")
    spliced = apply_edits(source, [])
    assert spliced.text is source.text
    assert not spliced.positions


def test_replace_before_after_wrap() -> None:
    source, (call,) = parts("x = f(1)  # c\n")
    assert apply_edits(source, [Edit.replace(call, "g")]).text == "x = g  # c\n"
    assert apply_edits(source, [Edit.before(call, "not ")]).text == "x = not f(1)  # c\n"
    assert apply_edits(source, [Edit.after(call, ".y")]).text == "x = f(1).y  # c\n"
    assert apply_edits(source, [Edit.wrap(call, "g(", ", 2)")]).text == "x = g(f(1), 2)  # c\n"
    assert apply_edits(source, [Edit.insert(1, 0, "y = ")]).text == "y = x = f(1)  # c\n"


def test_edits_nest_and_the_later_goes_around_the_earlier() -> None:
    source, (outer, inner) = parts("f(g(x))")
    edits = [Edit.wrap(inner, "A(", ")"), Edit.wrap(outer, "B(", ")"), Edit.wrap(inner, "C(", ")")]
    assert apply_edits(source, edits).text == "B(f(C(A(g(x)))))"
    edits = [Edit.wrap(inner, "A(", ")"), Edit.replace(inner, "y")]
    assert apply_edits(source, edits).text == "f(A(y))"


def test_parts_are_kept_with_the_edits_in_them() -> None:
    source, (outer, inner) = parts("f(g(x), 2)")
    assert isinstance(outer, ast.Call)
    swap = Edit.rebuild(outer, ["h(", outer.args[1], ", ", inner, ", ", inner, ")"])
    assert apply_edits(source, [swap, Edit.wrap(inner, "A(", ")")]).text == "h(2, A(g(x)), A(g(x)))"


def test_expressions_that_need_brackets_get_them() -> None:
    for text, kind, after in [
        ("x = 1, 2", ast.Tuple, "x = W((1, 2), 3)"),
        ("x[1, 2]", ast.Tuple, "x[W((1, 2), 3)]"),
        ("def f():\n  x = yield 1", ast.Yield, "def f():\n  x = W((yield 1), 3)"),
        ("f(y := 1)", ast.NamedExpr, "f(W((y := 1), 3))"),
        ("sum(i for i in x)", ast.GeneratorExp, "sum(W((i for i in x), 3))"),
        ("sum ( # c\n i for i in x)", ast.GeneratorExp, "sum (W(( # c\n i for i in x), 3))"),
        ("sum((i for i in x))", ast.GeneratorExp, "sum(W((i for i in x), 3))"),
        ("sum((i for i in x), 1)", ast.GeneratorExp, "sum(W((i for i in x), 3), 1)"),
    ]:
        source, (node,) = parts(text, kind)
        made = apply_edits(source, [Edit.wrap(node, "W(", ", 3)")]).text
        assert made == after
        ast.parse(made)


MULTILINE = {
    "in the last bracket": ("x = f(\n 1,\n 2)\ny\n", "g()", "x = g(\n\n)\ny\n"),
    "in brackets of its own": ("x = f(\n 1,\n 2)\ny\n", "g", "x = (g\n\n)\ny\n"),
    "at the end of the file": ("x = f(\n 1,\n 2)", "g", "x = (g\n\n)"),
    "with Windows line ends": ("x = f(\r\n 1,\r\n 2)\r\ny\r\n", "g", "x = (g\r\n\r\n)\r\ny\r\n"),
    "as many as before": ("x = f(\n 1,\n 2)\ny\n", "g(3,\n4,\n5)", "x = g(3,\n4,\n5)\ny\n"),
}


@pytest.mark.parametrize(("text", "new", "after"), MULTILINE.values(), ids=MULTILINE.keys())
def test_line_ends_of_replaced_expressions_stay(text: str, new: str, after: str) -> None:
    source, (call,) = parts(text)
    made = apply_edits(source, [Edit.replace(call, new)])
    assert made.text == after
    ast.parse(made.text)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("if 1:\n  f(1,\n  2)  # c\ny\n", "if 1:\n  pass\n  # c\ny\n"),
        ("f(1,\n  2); y\n", "pass\\\n; y\n"),
        ("f(1,\n  2)", "pass\n"),
    ],
)
def test_line_ends_of_replaced_statements_stay(text: str, after: str) -> None:
    source, statements = parts(text, ast.Expr)
    made = apply_edits(source, [Edit.replace(statements[0], "pass")])
    assert made.text == after
    ast.parse(made.text)


def test_kept_parts_stay_on_their_lines() -> None:
    source, (call,) = parts("x = old.name(  # c\n    1,\n    2)\n")
    assert isinstance(call, ast.Call)
    edit = Edit.rebuild(call, ["new(", call.args[0], ", ", call.args[1], ")"])
    assert apply_edits(source, [edit]).text == "x = new(\n1, \n2)\n"
    edit = Edit.rebuild(call, [call.args[0], " + ", call.args[1]])
    assert apply_edits(source, [edit]).text == "x = (\n1 + \n2)\n"


def test_new_text_does_not_run_into_the_words_beside_it() -> None:
    for text, wrapped, replaced in [
        ("def f():\n  return(a, b)", "  return W((a, b))", "  return name"),
        ("x = 1 if(a, b)else 2", "x = 1 if W((a, b))else 2", "x = 1 if name else 2"),
        ("x = y in(a, b)", "x = y in W((a, b))", "x = y in name"),
        ("(a, b)if 1 else 2", "W((a, b))if 1 else 2", "name if 1 else 2"),
    ]:
        source, (node,) = parts(text, ast.Tuple)
        assert apply_edits(source, [Edit.wrap(node, "W", "")]).text.splitlines()[-1] == wrapped
        made = apply_edits(source, [Edit.replace(node, "name")])
        assert made.text.splitlines()[-1] == replaced
        ast.parse(made.text)
    source, (name,) = parts("x", ast.Name)
    assert apply_edits(source, [Edit.after(name, "_new")]).text == "x_new"


def test_overlapping_edits_name_both() -> None:
    source, (outer, inner) = parts("f(g(x))")
    with pytest.raises(EditError, match=r"(?s)two edits overlap.*'A'.*because a.*'B'.*because b.*→") as raised:
        apply_edits(source, [Edit.replace(outer, "A", "because a"), Edit.replace(inner, "B", "because b")])
    assert raised.value.line == 1
    with pytest.raises(EditError, match="overlap"):
        apply_edits(source, [Edit.replace(inner, "A"), Edit.replace(inner, "B")])
    assert apply_edits(source, [Edit.replace(inner, "A"), Edit.replace(inner, "A")]).text == "f(A)"


def test_impossible_edits_say_why() -> None:
    source, (call,) = parts("f(*x, k=1)")
    assert isinstance(call, ast.Call)
    with pytest.raises(EditError, match="more line end"):
        apply_edits(source, [Edit.replace(call, "a\nb")])
    with pytest.raises(EditError, match="outside of the file, which has 1 lines"):
        apply_edits(source, [Edit.insert(3, 0, "a")])
    with pytest.raises(EditError, match="Starred is not an expression"):
        Edit.wrap(call.args[0], "a(", ")")
    with pytest.raises(EditError, match="no position"):
        Edit.replace(ast.Load(), "a")
    with pytest.raises(EditError, match="outside of the edited span"):
        apply_edits(source, [Edit.rebuild(call.args[0], [call])])


def test_new_text_maps_to_the_span_it_stands_for() -> None:
    source, (call,) = parts("é = f(1) + g\n")
    made = apply_edits(source, [Edit.wrap(call, "__gemini__.mark(", ", 'é')")])
    tree = ast.parse(made.text)
    restore(tree, made.positions)
    wrapped = tree.body[0].value.left  # type: ignore[attr-defined]
    assert source.segment(wrapped) == source.segment(wrapped.args[0]) == "f(1)"
    assert source.segment(tree.body[0].value.right) == "g"  # type: ignore[attr-defined]


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Small programs of nested calls over several lines, with odd characters and line ends."""
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    atom = st.sampled_from(["x", "'é🚀'", "1", "(a, b)", "lambda: y", "[i for i in z]", "sum(i for i in z)", "d[1, 2]"])

    def call(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        gap = st.sampled_from(["", " ", end, f"  # é{end}\t", f" \\{end} "])
        return st.builds(lambda f, g, a, b: f"{f}({g}{a}, {b})", st.sampled_from(["f", "日.g"]), gap, inner, inner)

    expression = st.recursive(atom, call, max_leaves=8)
    lines = draw(st.lists(st.builds(lambda e, c: f"v = {e}{c}", expression, st.sampled_from(["", "  # c", "; w = v"]))))
    return end.join(lines) + draw(st.sampled_from(["", end]))


@given(programs(), st.data())
def test_any_set_of_wraps_can_be_undone(text: str, data: st.DataObject) -> None:
    source = SourceFile.from_text(text)
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call | ast.Tuple | ast.GeneratorExp)]
    calls = [node for node in calls if not isinstance(getattr(node, "ctx", None), ast.Store)]
    chosen = data.draw(st.lists(st.sampled_from(calls), unique=True)) if calls else []
    made = apply_edits(source, [Edit.wrap(node, "W(", ", 0)") for node in chosen])
    assert made.text.count("\n") == text.count("\n")
    assert made.text.count("\r") == text.count("\r")
    tree = ast.parse(made.text)
    restore(tree, made.positions)
    undone = Unwrap().visit(tree)
    assert ast.dump(undone, include_attributes=True) == ast.dump(source.tree, include_attributes=True)


class Unwrap(ast.NodeTransformer):
    """Takes the calls of `W` away again."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return node.args[0] if isinstance(node.func, ast.Name) and node.func.id == "W" else node
