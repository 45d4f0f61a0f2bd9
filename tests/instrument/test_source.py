"""A source file reads as Python reads it, byte for byte, position for position."""

import ast
import codecs

import pytest
from corpus import files, parses
from hypothesis import given
from hypothesis import strategies as st

from gemini.instrument.text.lines import Lines
from gemini.instrument.text.source_file import SourceFile

ODD = {
    "latin-1": "# -*- coding: latin-1 -*-\nx = 'é'; y = x\n".encode("latin-1"),
    "cp1252": "#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nx = '€'; y = x\n".encode("cp1252"),
    "shift_jis": "# coding: shift_jis\nx = '日本'; y = x\n".encode("shift_jis"),
    "utf-8 declared": "# coding: utf8\nx = '日本'; y = x\n".encode(),
    "byte order mark": codecs.BOM_UTF8 + "x = 'é'; y = x\n".encode(),
    "byte order mark and declaration": codecs.BOM_UTF8 + "# coding: utf-8\nx = 'é'; y = x\n".encode(),
    "carriage returns": b"x = 1; y = x\r\nz = (x +\r\n y)\r\n",
    "old Mac line ends": b"x = 1; y = x\rz = (x +\r y)\r",
    "mixed line ends": b"x = 1\r\ny = 2\rz = x\n\r\nw = z\n",
    "no final line end": b"x = 1\ny = x",
    "form feeds": b"x = 1\n\x0cy = x\n\x0c\n  # c\x0c\nif x:\n\x0c  z = y\n",
    "other separators": "x = 'a\x0bb\x1cc\u2028d\x85e'; y = x\nz = y\n".encode(),
    "tabs": b"if 1:\n\tx = 1;\ty = x\n",
    "wide characters": "日本 = '🚀🚀'; y = 日本\n".encode(),
    "backslashes": b"x = 1 + \\\n  2; y = x\n",
    "empty": b"",
    "only a comment": b"# x",
}


@pytest.mark.parametrize("data", ODD.values(), ids=ODD.keys())
def test_odd_files_read_as_python_reads_them(data: bytes) -> None:
    source = SourceFile("odd.py", data)
    assert source.encode(source.text) == data
    scope: dict[str, object] = {}
    exec(compile(data, "odd.py", "exec"), scope)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name):
            assert source.segment(node) == node.id
            start, end = source.span(node)
            assert source.position(start) == (node.lineno, node.col_offset)
            assert source.position(end) == (node.end_lineno, node.end_col_offset)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert ast.literal_eval(source.segment(node)) == node.value


BROKEN = {
    "syntax": b"x = 1\ny = (\n",
    "indentation": b"if 1:\nx\n",
    "tabs": b"if 1:\n\tx\n        y\n",
    "null byte": b"x = 1\x00\n",
    "unknown encoding": b"# coding: nonsense\nx = 1\n",
    "undecodable": b"x = '\xe9'\n",
    "undecodable by declaration": b"# coding: ascii\nx = '\xe9'\n",
    "mark against declaration": codecs.BOM_UTF8 + b"# coding: latin-1\n",
    "unterminated": b"x = '''abc\n",
    "print statement": b"print 'x'\n",
    "utf-16": "x = 1\n".encode("utf-16"),
}


UNREADABLE = ("unknown encoding", "undecodable", "undecodable by declaration", "mark against declaration", "utf-16")


@pytest.mark.parametrize(
    ("name", "attribute"), [*((name, "tree") for name in BROKEN), *((name, "text") for name in UNREADABLE)]
)
def test_faults_are_reported_as_python_reports_them(name: str, attribute: str) -> None:
    data = BROKEN[name]
    with pytest.raises((SyntaxError, ValueError)) as expected:
        compile(data, "broken.py", "exec")
    with pytest.raises(type(expected.value)) as raised:
        getattr(SourceFile("broken.py", data), attribute)
    assert str(raised.value) == str(expected.value)
    assert raised.value.args == expected.value.args


def test_text_and_tree_are_made_once_and_only_when_asked_for() -> None:
    source = SourceFile("a.py", b"x = 1\n", "a")
    assert set(vars(source)) == {"path", "data", "module"}
    assert source.tree is source.tree
    assert source == SourceFile("a.py", b"x = 1\n", "a")


@given(st.text(alphabet="aé日🚀 \t\r\n\x0c\x0b\u2028", max_size=60))
def test_lines_are_counted_as_python_counts_them(text: str) -> None:
    lines = Lines(text)
    flat = text.replace("\r\n", "\n").replace("\r", "\n")
    assert lines.line_ends == flat.count("\n")
    assert "".join(lines.line_with_end(number) for number in range(1, lines.count + 1)) == text
    for offset in range(len(text) + 1):
        if text[offset - 1 : offset + 1] != "\r\n":
            assert lines.offset(*lines.position(offset)) == offset


def test_real_files_keep_their_bytes_and_their_names_positions() -> None:
    read = 0
    for path in files(80):
        data = path.read_bytes()
        if not parses(data):
            continue
        source = SourceFile(str(path), data)
        assert source.encode(source.text) == data
        for node in ast.walk(source.tree):
            # In an f-string before Python 3.12 a position may be approximate; identifiers may be written unnormalised.
            if isinstance(node, ast.alias | ast.arg) and source.segment(node).isascii():
                assert source.segment(node).startswith(node.name if isinstance(node, ast.alias) else node.arg)
        read += 1
    assert read > 50
