"""Header of a dumped file: its origin and edits, and the statements it needs to run from another folder.

    #!/usr/bin/env python                       the first lines stay first: shebang and encoding
    # Instrumented by Gemini.                   the header: its origin, and the edits of each pass
    # …
    \"\"\"The script's docstring.\"\"\"
    from __future__ import annotations
    __file__ = '/home/me/train.py'              only where the source uses it: to find data beside the script

Only comments and that one line are added; the rest is the instrumented text, byte for byte.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from gemini.instrument.pass_manager.instrumented_file import Instrumented
from gemini.instrument.passes.base import Changed, Failed, Skipped
from gemini.instrument.text.source_file import SourceFile

# Python's rule for an encoding declaration (PEP 263).
_ENCODING = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*([-_.a-zA-Z0-9]+)")
_LINE_END = re.compile(r"\r\n|\r|\n")


def render_annotated(done: Instrumented, *, file: str = "", argv0: str = "", calls: Sequence[str] = ()) -> bytes:
    """Return the bytes of an instrumented file with its header.

    Where the file uses it, `__file__` is set to `file` and `sys.argv[0]` to `argv0`. Before that it calls the functions
    `calls` of `gemini.managed` with its own path.
    """
    text = done.text
    added = _statements(text, file, argv0, calls)
    if added:
        text = _with_statement(done.source.with_text(text), "; ".join(added.values()))
    lines = [*header(done), *(f"{name}: {_WHY[name]}" for name in added)]
    return done.source.encode(_with_header(text, lines))


def render_verbatim(source: SourceFile, reason: str) -> bytes:
    """Return the bytes of a file that could not be instrumented, with a header if its encoding is known."""
    try:
        return source.encode(_with_header(source.text, [f"from {ascii(source.path)[1:-1]}", reason]))
    except (SyntaxError, UnicodeError, LookupError):
        return source.data


def header(done: Instrumented) -> list[str]:
    """Return the lines of the header: the origin, then the result of each pass."""
    lines = [f"from {ascii(done.source.path)[1:-1]}"]
    for result in done.results:
        if isinstance(result, Changed):
            lines.append(f"{result.pass_name}: {_edits(result)}")
        elif isinstance(result, Failed):
            lines.append(f"{result.pass_name}: failed; this file runs without it")
        elif isinstance(result, Skipped):
            lines.append(f"{result.pass_name}: {result.reason}")
    if not done.changed:
        lines.append("no pass changed this file")
    return lines


_WHY = {
    "prefer": "modules of this folder are found first, for any sys.path",
    "run_parallel": "the rest runs in workers, by the plans and stages in stages/",
    "__file__": "set to the original's path, to find files beside it",
    "sys.argv[0]": "set to the original's path, as typed",
}


def _statements(text: str, file: str, argv0: str, calls: Sequence[str]) -> dict[str, str]:
    made = {name: f'__import__("gemini.managed").managed.{name}(__file__)' for name in calls}
    if file and "__file__" in text:
        made["__file__"] = f"__file__ = {file!a}"
    if argv0 and re.search(r"\bargv\s*\[\s*0\s*\]", text):
        made["sys.argv[0]"] = f'__import__("sys").argv[0] = {argv0!a}'
    return made


def _edits(result: Changed) -> str:
    """`3 edits, on lines 12, 40 and 41`, in the lines of the original."""
    lines = sorted(Counter(edit.span.line for edit in result.edits))
    shown = [str(line) for line in lines[:12]]
    if len(lines) > len(shown):
        shown.append(f"{len(lines) - len(shown)} more")
    places = f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)
    count = len(result.edits)
    return f"{count} edit{'s' if count != 1 else ''}, on line{'s' if len(lines) != 1 else ''} {places} of the original"


def _with_header(text: str, lines: Iterable[str]) -> str:
    newline = found[0] if (found := _LINE_END.search(text)) else "\n"
    at = _end_of_first_lines(text)
    before = text[:at]
    if before and not before.endswith(("\n", "\r")):
        before += newline
    # The first two lines contain no user text: a path with "coding=" must not read as an encoding declaration.
    head = ["# Instrumented by Gemini.", "#", *(f"#   {line}" for line in lines), ""]
    return before + newline.join(head) + text[at:]


def _end_of_first_lines(text: str) -> int:
    """Return the end of the shebang and the encoding declaration, which must stay in the first two lines."""
    end = position = 0
    for number in range(2):
        found = _LINE_END.search(text, position)
        stop = found.end() if found else len(text)
        line = text[position:stop]
        if (number == 0 and line.startswith("#!")) or _ENCODING.match(line):
            end = stop
        elif line.strip() and not line.lstrip().startswith("#"):
            break  # a declaration after code has no effect
        position = stop
    return end


def _with_statement(source: SourceFile, statement: str) -> str:
    """Return the text with `statement` inserted after the docstring and the ``__future__`` imports."""
    text, tree = source.text, source.tree
    body = tree.body[1:] if ast.get_docstring(tree, clean=False) is not None else tree.body
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__" and not node.level:
            continue
        decorators = getattr(node, "decorator_list", [])
        start = source.span(node)[0] if not decorators else source.offset(decorators[0].lineno, 0)
        if not text[:start] or text[:start].endswith(("\n", "\r", "\f")):
            newline = found[0] if (found := _LINE_END.search(text)) else "\n"
            return f"{text[:start]}{statement}{newline}{text[start:]}"
        return f"{text[:start]}{statement}; {text[start:]}"
    return text
