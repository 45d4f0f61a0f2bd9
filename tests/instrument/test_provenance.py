"""Headers of dumped files: the program below them is the same, in the same encoding."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.instrument.output.dump_header import render_annotated, render_verbatim
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.text.source_file import SourceFile

FIRST = st.sampled_from(["", "#!/usr/bin/python\n", "#!/bin/sh coding=utf-8\n", "\n", "# a comment\n", "\x0c\n"])
SECOND = st.sampled_from(["", "# -*- coding: latin-1 -*-\n", "# vim: set fileencoding=utf-8 :\n", "#\n"])
DOC = st.sampled_from(["", '"""Doc."""\n', "'''Doc\nof two.'''\n", '"""Doc."""; x = 1\n'])
FUTURE = st.sampled_from(["", "from __future__ import annotations\n", "from __future__ import annotations, division\n"])
BODY = st.sampled_from(["", "x = 1", "x = __file__\n", "@print\ndef f(): ...\n", "if __file__:\n\ty = 2\n", "# end"])
PATHS = st.sampled_from(["/home/me/train.py", "/tmp/coding=ascii/a b.py", "C:\\new\\é.py", "/x\udcff.py", 'quote".py'])


@settings(max_examples=300, deadline=None)
@given(FIRST, SECOND, DOC, FUTURE, BODY, PATHS, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_the_program_is_the_same(first, second, doc, future, body, path, newline, bom) -> None:  # noqa: PLR0917
    text = (first + second + doc + future + body).replace("\n", newline)
    latin = "latin-1" in second and not bom and first.strip("\x0c\n")[:1] in ("", "#")
    data = text.encode("latin-1" if latin else "utf-8")
    source = SourceFile(path, b"\xef\xbb\xbf" + data if bom and "latin" not in text else data, "__main__")
    before = ast.dump(source.tree)
    made = render_annotated(PassManager().run(source), file="/somewhere/é/train.py", argv0="train.py")
    after = SourceFile(path, made, "__main__")
    assert after.encoding == source.encoding
    assert made.count(b"# Instrumented by Gemini.") == 1
    statements = after.tree.body
    restored = [node for node in statements if ast.unparse(node).startswith("__file__ = ")]
    assert len(restored) == ("__file__" in text)
    kept = ast.Module([node for node in statements if node not in restored], [])
    assert ast.dump(kept) == before
    if restored:
        namespace: dict[str, object] = {"__file__": "dumped", "print": lambda f: f}
        exec(compile(ast.Module([restored[0]], []), "x", "exec"), namespace)
        assert namespace["__file__"] == "/somewhere/é/train.py"
    if newline == "\r\n" and "\r\n" in text:
        assert b"\n" not in made.replace(b"\r\n", b"")


def test_files_of_the_library_keep_their_every_byte() -> None:
    folder = Path(os.__file__).parent
    for path in sorted(folder.glob("*.py"))[::4]:
        source = SourceFile.read(path, path.stem)
        made = render_annotated(PassManager().run(source))
        head, _, rest = made.partition(b"#   no pass changed this file")
        kept = head[: head.index(b"# Instrumented by Gemini.")] + rest.lstrip(b"\r").removeprefix(b"\n")
        assert kept == source.data, path


def test_what_cannot_be_read_is_copied() -> None:
    broken = SourceFile("b.py", b"def f(:\n", "b")
    assert render_verbatim(broken, "not instrumented: SyntaxError").endswith(
        b"#   not instrumented: SyntaxError\ndef f(:\n"
    )
    unknown = SourceFile("b.py", b"# coding: klingon\n\xff", "b")
    assert render_verbatim(unknown, "no") == unknown.data
