"""How a failed pass is told: file, line, the source there with a caret, and what went wrong."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from gemini.errors import EditError
from gemini.instrument.passes.base import Failed
from gemini.instrument.text.edits import Edit
from gemini.instrument.text.lines import caret
from gemini.instrument.text.source_file import SourceFile


def of_pass(name: str, source: SourceFile, error: BaseException, made: Sequence[Edit]) -> Failed:
    """A pass raised `error` after it had asked for the edits `made`."""
    line, column = _place_of(error)
    after = ""
    if not line and made:
        line, column = made[-1].span.line, made[-1].span.column
        after = ", after its edit here"
    return _failed(name, source, f"raised {_said(error)}{after}", (line, column), _raised_at(error))


def of_edits(name: str, source: SourceFile, error: BaseException, edits: Sequence[Edit]) -> Failed:
    """The edits of a pass could not be made, or did not leave a valid file."""
    line, column = _place_of(error)
    if not line and edits:
        line, column = edits[0].span.line, edits[0].span.column
    if isinstance(error, EditError):
        what = f"asked for something impossible: {error}"
    elif isinstance(error, SyntaxError):
        what = f"made text that is not valid Python: {error.msg}"
        text = (error.text or "").strip()
        return _failed(name, source, what, (error.lineno or line, column), f"the text it made: {text}" if text else "")
    else:
        what = f"made text that cannot be compiled: {_said(error)}"
    return _failed(name, source, what, (line, column))


def of_tree(name: str, source: SourceFile) -> Failed:
    """A pass changed the shared tree in place."""
    return _failed(name, source, "changed the syntax tree itself instead of asking for edits", (0, 0))


def _failed(name: str, source: SourceFile, what: str, place: tuple[int, int], detail: str = "") -> Failed:
    line, column = place
    first, _, rest = what.partition("\n")
    shown = [f"{source.path}:{line or 1}: pass {name!r} {first}; the file runs without it"]
    if 1 <= line <= source.lines.count:
        text = source.lines.line(line)
        at = len(text.encode("utf-8", "surrogatepass")[:column].decode("utf-8", "replace"))
        shown.append(caret(text, at))
    shown.extend(part for part in (rest, detail and f"    {detail}") if part)
    return Failed(name, "\n".join(shown), line)


def _place_of(error: BaseException) -> tuple[int, int]:
    line = getattr(error, "line", None)
    column = getattr(error, "column", None)
    return (line, column) if isinstance(line, int) and isinstance(column, int) else (0, 0)


def _said(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"raised at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
