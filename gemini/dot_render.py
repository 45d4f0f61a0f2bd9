"""Rendering of DOT text by graphviz (through pygraphviz); writing the text itself needs neither."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gemini.atomic_files import write_whole
from gemini.errors import ArtifactError, MissingEngineError

SUFFIXES = (".svg", ".png", ".dot")


def check_suffix(path: Path) -> None:
    """Raise unless `path` ends in a format that can be written."""
    if path.suffix.lower() not in SUFFIXES:
        given = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise ArtifactError(f"cannot draw {path}: it {given}\n    → name a file ending in {', '.join(SUFFIXES)}")


def write(dot: str, path: Path, *, dots_per_inch: int = 96) -> None:
    """Write `dot` to `path` atomically: as text for ``.dot``, rendered for ``.svg`` and ``.png``."""
    check_suffix(path)
    suffix = path.suffix.lower()
    data = dot.encode("utf-8") if suffix == ".dot" else _render(dot, suffix[1:], dots_per_inch)
    write_whole(path, data)


def _render(dot: str, form: str, dots_per_inch: int) -> bytes:
    try:
        import pygraphviz
    except ImportError as error:
        raise MissingEngineError("pygraphviz", "viz", f"drawing .{form} pictures") from error
    graph = pygraphviz.AGraph(string=dot)
    graph.graph_attr["dpi"] = "72" if form == "svg" else str(dots_per_inch)
    with without_font_warnings():
        picture = graph.draw(format=form, prog="nop2")
    assert isinstance(picture, bytes)
    return picture


@contextlib.contextmanager
def without_font_warnings() -> Iterator[None]:
    """Suppress the messages of the bundled font library about font settings, and nothing else."""
    try:
        saved = os.dup(2)
    except OSError:  # no standard error at all
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            said.seek(0)
            for line in said.read().decode("utf-8", "replace").splitlines():
                if line.strip() and not line.startswith("Fontconfig"):
                    print(line, file=sys.stderr)
