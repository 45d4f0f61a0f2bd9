"""Messages of failed passes: file, line, the source line with a caret, and the fault."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from gemini.errors import EditError
from gemini.instrument.passes.base import Failed
from gemini.instrument.text.edits import Edit
from gemini.instrument.text.lines import caret
from gemini.instrument.text.source_file import SourceFile


def of_pass(name: str, source: SourceFile, error: BaseException, made: Sequence[Edit]) -> Failed:
    """Return the failure of a pass that raised `error` after it had yielded the edits `made`."""
    line, column = _place_of(error)
    after = ""
    if not line and made:
        line, column = made[-1].span.line, made[-1].span.column
        after = ", after its edit of this line"
    return _build_failure(name, source, f"raised {_describe_error(error)}{after}", (line, column), _origin_of(error))


def of_edits(name: str, source: SourceFile, error: BaseException, edits: Sequence[Edit]) -> Failed:
    """Return the failure of a pass whose edits could not be applied or did not leave a valid file."""
    line, column = _place_of(error)
    if not line and edits:
        line, column = edits[0].span.line, edits[0].span.column
    if isinstance(error, EditError):
        what = f"yielded edits that cannot be applied: {error}"
    elif isinstance(error, SyntaxError):
        what = f"produced text that is not valid Python: {error.msg}"
        text = (error.text or "").strip()
        return _build_failure(
            name, source, what, (error.lineno or line, column), f"the text it produced: {text}" if text else ""
        )
    else:
        what = f"produced text that cannot be compiled: {_describe_error(error)}"
    return _build_failure(name, source, what, (line, column))


def of_tree(name: str, source: SourceFile) -> Failed:
    """Return the failure of a pass that changed the shared tree in place."""
    return _build_failure(name, source, "changed the syntax tree in place instead of yielding edits", (0, 0))


def _build_failure(name: str, source: SourceFile, what: str, place: tuple[int, int], detail: str = "") -> Failed:
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


def _describe_error(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _origin_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"raised at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
