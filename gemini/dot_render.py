"""Painting DOT text with graphviz, which comes with pygraphviz; the text itself needs neither."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gemini.errors import ArtifactError, MissingEngineError

SUFFIXES = (".svg", ".png", ".dot")


def check_suffix(path: Path) -> None:
    """Raise unless `path` ends in a format that can be written."""
    if path.suffix.lower() not in SUFFIXES:
        given = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise ArtifactError(f"cannot draw {path}: it {given}\n    → name a file ending in {', '.join(SUFFIXES)}")


def write(dot: str, path: Path, *, dots_per_inch: int = 96) -> None:
    """Write `dot` to `path`: as it is for ``.dot``, painted for ``.svg`` and ``.png``; whole or not at all."""
    check_suffix(path)
    suffix = path.suffix.lower()
    data = dot.encode("utf-8") if suffix == ".dot" else _painted(dot, suffix[1:], dots_per_inch)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as draft:
            draft.write(data)
        _publish(Path(draft.name), path)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {path}: {error.strerror or error}\n    → name a folder that exists and can be written"
        ) from error


def _publish(draft: Path, path: Path) -> None:
    try:
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o666 & ~mask)  # as open() would have made it; temporary files are private
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _painted(dot: str, form: str, dots_per_inch: int) -> bytes:
    try:
        import pygraphviz
    except ImportError as error:
        raise MissingEngineError("pygraphviz", "viz", f"drawing .{form} pictures") from error
    graph = pygraphviz.AGraph(string=dot)
    graph.graph_attr["dpi"] = "72" if form == "svg" else str(dots_per_inch)
    with without_font_warnings():
        painted = graph.draw(format=form, prog="nop2")
    assert isinstance(painted, bytes)
    return painted


@contextlib.contextmanager
def without_font_warnings() -> Iterator[None]:
    """Keep back what the bundled font library says about this machine's font settings, and nothing else."""
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
