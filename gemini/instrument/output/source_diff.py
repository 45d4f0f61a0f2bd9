"""Source diff: the edits of the passes as a patch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

from gemini.instrument.pass_manager.instrumented_file import Instrumented

_LINES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z")
_COLOURS = {"---": "1", "+++": "1", "@@": "36", "-": "31", "+": "32"}


def unified_diff(files: Iterable[tuple[str, Instrumented]], *, colour: bool = False) -> Iterator[str]:
    """Yield the lines of the patch from the originals to the instrumented files, without line ends."""
    for name, done in files:
        if done.changed:
            lines = _patch(name, done.source.text, done.text)
            yield from map(_add_colour, lines) if colour else lines


def _patch(name: str, before: str, after: str) -> Iterator[str]:
    old, new = _LINES.findall(before), _LINES.findall(after)
    for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"):
        bare = line.rstrip("\r\n")
        yield bare
        if bare == line and not line.startswith(("---", "+++", "@@")):
            yield "\\ No newline at end of file"


def _add_colour(line: str) -> str:
    for start, code in _COLOURS.items():
        if line.startswith(start):
            return f"\033[{code}m{line}\033[0m"
    return line
