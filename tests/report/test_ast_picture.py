"""Pictures of syntax trees: labels, colours, marks of change, folding, width."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.instrument.inspect import KINDS, recognise
from gemini.instrument.inspect.ast_folds import fold
from gemini.instrument.inspect.ast_outline import OutlineItem, outline
from gemini.instrument.inspect.ast_picture import SCREEN_WIDTH, columns_of, shorten, to_dot
from gemini.instrument.output.new_nodes import find_new_nodes
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.pass_manager.registry import select
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.text.source_file import SourceFile

MNIST = Path(__file__).parents[2] / "samples" / "mnist" / "train.py"


def items(text: str, *, full: bool = False, after: bool = False) -> OutlineItem:
    source = SourceFile.from_text(textwrap.dedent(text), "script.py", "__main__")
    changed: set[ast.AST] = set()
    if after:
        done = PassManager(select()).run(source)
        source = source.with_text(done.text)
        changed = find_new_nodes(done, source.tree)
    kinds = {
        ((one.line, one.column, one.end_line, one.end_column), one.is_statement): one.kind
        for one in recognise([source])
    }
    return outline(Unit(source), kinds, changed, title="script.py", full=full)


def lines(item: OutlineItem, depth: int = 0) -> list[str]:
    mark = f"  [{item.kind}]" if item.kind else ""
    own = [f"{'  ' * depth}{item.type} {item.text}".rstrip() + mark + ("  *" if item.changed else "")]
    return own + [line for child in (*item.parts, *item.body) for line in lines(child, depth + 1)]


SCRIPT = """
from torch import nn
import torch

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(784,
                            128)  # a comment

for x, y in loader:
    loss = model(x.cuda()).sum()
    loss.backward()
else:
    print("done")
"""


def test_labels_are_readable_and_kinds_are_known() -> None:
    assert lines(items(SCRIPT)) == [
        "Module script.py",
        "  ImportFrom torch import nn",
        "  Import torch",
        "  ClassDef Net(nn.Module)  [model]",
        "    FunctionDef __init__(self)",
        "      Call super().__init__()",
        "      Assign self.fc = …",
        "        Call torch.nn.Linear(784, 128)  [layer]",
        "  For x, y in loader  [train loop]",
        "    Assign loss = …",
        "      Call ….sum()",
        "        Call model(…)  [forward]",
        "          Call x.cuda()  [device]",
        "    Call loss.backward()  [backward]",
        "    else",
        '      Call print("done")',
    ]


def test_what_passes_changed_is_marked_and_nothing_else() -> None:
    marked = [line.strip() for line in lines(items(SCRIPT, after=True)) if line.endswith("*")]
    assert marked == [
        "Import gemini.managed as __gemini__  *",
        "Call __gemini__.on(x)  *",
        "Call __gemini__.loss(loss)  *",
    ]


def test_full_shows_every_expression() -> None:
    text = "x = [a + b.c, f'{d!r:>{w}}', *e, {1: 2}, lambda q: -q, g[1:2]]\nmatch x:\n    case [1, y] if y: pass\n"
    shown = {item.type for item in items(text, full=True).walk()}
    assert {"BinOp", "Attribute", "Name", "JoinedStr", "Dict", "Lambda", "UnaryOp", "Subscript", "Slice"} <= shown


def test_folding_keeps_what_matters() -> None:
    quiet = "\n".join(f"def f{n}(a):\n    b = a\n    return b" for n in range(30))
    root = items(SCRIPT + "\n" + quiet)
    before = [item.kind for item in root.walk() if item.kind]
    nodes = root.size
    fold(root, most=20)
    assert root.count <= 25
    assert [item.kind for item in root.walk() if item.kind] == before
    hidden = [item for item in root.walk() if item.text.startswith("… ")]
    assert hidden
    assert all(re.fullmatch(r"… \d+ nodes?( \(.*\))?", item.text) for item in hidden)
    assert root.size == nodes


def test_depth_folds_and_says_what_is_hidden() -> None:
    root = fold(items(SCRIPT), depth=1)
    texts = [item.text for item in root.walk()]
    assert "… 16 nodes (1 × layer)" in texts
    assert not any(item.kind == "layer" for item in root.walk())


def test_the_mnist_sample_fits_a_screen() -> None:
    root = items(MNIST.read_text())
    columns = columns_of(root)
    assert sum(column.width for column in columns) < SCREEN_WIDTH
    assert len(columns) == 2
    dot = to_dot(root, title="train.py")
    for kind in ("layer", "train loop", "backward", "step", "eval loop", "checkpoint"):
        assert KINDS[kind].colour in dot


@pytest.mark.parametrize("name", ["argparse.py", "dataclasses.py", "typing.py", "inspect.py", "enum.py"])
def test_any_file_of_the_library_draws(name: str) -> None:
    path = Path(sys.modules["os"].__file__ or "").parent / name
    root = items(path.read_text("utf-8"))
    every = root.count
    fold(root, most=300)
    assert root.count < every
    boxes = [box for column in columns_of(root) for box in column.boxes]
    assert len(boxes) == root.count - 1
    # No two boxes of one column lie on each other.
    for column in columns_of(root):
        rows: dict[int, list[tuple[float, float]]] = {}
        for box in column.boxes:
            rows.setdefault(box.row, []).append((box.x, box.x + box.width))
        for spans in rows.values():
            spans.sort()
            assert all(left[1] < right[0] for left, right in pairwise(spans))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200), st.integers(2, 40))
def test_shortened_is_one_line_of_at_most_that_many_characters(text: str, most: int) -> None:
    short = shorten(text, most)
    assert len(short) <= most
    assert "\n" not in short


def test_html_in_source_is_text_in_the_picture() -> None:
    pygraphviz = pytest.importorskip("pygraphviz")
    root = items('x = "<b>&amp;</b>" < y > z & "\\\\N \\\\n é 漢"\nprint("]]>")\n')
    painted = pygraphviz.AGraph(string=to_dot(root, title='a<b>"&.py')).draw(format="svg", prog="nop2").decode()
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;" in painted
    assert "漢" in painted
    assert "a&lt;b&gt;" in painted
