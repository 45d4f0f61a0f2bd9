"""Annotated source: the files of a program with what Gemini recognised and what its passes edit."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from gemini.instrument.inspect import recognise
from gemini.instrument.inspect.finding import KINDS
from gemini.instrument.pass_manager.instrumented_file import Instrumented
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.pass_manager.registry import select
from gemini.instrument.program.code_tree import CodeTree
from gemini.instrument.program.search_path import find_added_folders
from gemini.instrument.text.parser import mute_parser_warnings
from gemini.instrument.text.source_file import SourceFile

_SHOWN = ("model", "loss", "optimizer", "scheduler", "trainer", "forward", "backward", "step", "zero grad",
          "train loop", "eval loop", "train step", "device", "checkpoint", "data")  # fmt: skip
_NEAR = 3  # lines around a marked one
_WHOLE = 300  # lines of a file that is shown without gaps
_FILES = 12
_WORDS = re.compile(r"__gemini__\.\w+\(?|\w+|\s+|\W")  # an inserted call is one word: its name is no word of the line


@dataclass(frozen=True)
class Piece:
    """A part of a line: "same", "added" by a pass, or "removed" by one."""

    kind: str
    text: str


@dataclass(frozen=True)
class AnnotatedLine:
    """One line of a file; number 0 stands for lines that are not shown."""

    number: int
    pieces: tuple[Piece, ...] = ()
    tags: tuple[tuple[str, str, str], ...] = ()  # kind, colour, name


@dataclass(frozen=True)
class AnnotatedFile:
    """The annotated lines of a file, and notes about it."""

    path: str
    lines: tuple[AnnotatedLine, ...]
    edits: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnnotatedProgram:
    """The files of a program with findings or edits, the main one first; `note` says why there are none or fewer."""

    files: tuple[AnnotatedFile, ...] = ()
    note: str = ""
    sites: dict[str, int] = field(default_factory=dict)  # findings by kind


def annotate(program: dict[str, Any], times: dict[str, tuple[str, float]]) -> AnnotatedProgram:
    """Annotate the program of a recorded run; `times`: kind and ms of some sites, by file and line."""
    file = program["file"]
    if not file or not file.endswith(".py") or not os.path.isfile(file):
        return AnnotatedProgram(note="the program is no file that can be read now")
    try:
        sources = _sources(program)
        with mute_parser_warnings():
            findings = [one for one in recognise(sources) if one.kind in _SHOWN]
            manager = PassManager(select())
            done = [manager.run(source) for source in sources]
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        return AnnotatedProgram(note=f"the source cannot be analysed: {type(error).__name__}: {error}")
    tags: dict[tuple[str, int], dict[tuple[str, str, str], None]] = {}
    for one in findings:
        tags.setdefault((one.file, one.line), {})[one.kind, KINDS[one.kind].colour, one.name] = None
    _add_times(tags, times)
    files = [made for one in done if (made := _file(one, tags, program)) is not None]
    sites: dict[str, int] = {}
    for one in findings:
        sites[one.kind] = sites.get(one.kind, 0) + 1
    note = f"{len(files) - _FILES} more files are not shown" if len(files) > _FILES else ""
    return AnnotatedProgram(tuple(files[:_FILES]), note, sites)


def _add_times(tags: dict[tuple[str, int], dict[tuple[str, str, str], None]], times: dict[str, Any]) -> None:
    """Add the times to the tags of their lines."""
    files = {os.path.realpath(file): file for file, _ in tags}
    for site, (kind, took_ms) in times.items():
        path, _, line = site.rpartition(":")
        file = files.get(os.path.realpath(path))
        if file is not None:
            own = tags.setdefault((file, int(line)), {})
            for tag in [tag for tag in own if tag[0] == kind]:
                del own[tag]
            own[f"{kind} {took_ms:.3g} ms", KINDS[kind].colour, "in the last recorded step"] = None


def _sources(program: dict[str, Any]) -> list[SourceFile]:
    root = SourceFile.read(program["file"], "__main__")
    folder = os.path.dirname(os.path.realpath(root.path))
    search = [folder, program["folder"], *find_added_folders(root), *sys.path]
    return CodeTree(root, [one for one in search if one]).own()


def _file(done: Instrumented, tags: dict[Any, Any], program: dict[str, Any]) -> AnnotatedFile | None:
    path = done.source.path
    before, after = done.source.text.splitlines(), done.text.splitlines()
    marked = {line for file, line in tags if file == path}
    changed = {at for at, (one, other) in enumerate(zip(before, after), 1) if one != other}
    if not marked and not changed:
        return None
    shown = set(range(1, len(before) + 1)) if len(before) <= _WHOLE else _around(marked | changed, len(before))
    lines: list[AnnotatedLine] = []
    for number in sorted(shown):
        if lines and number != lines[-1].number + 1:
            lines.append(AnnotatedLine(0))
        pieces = tuple(_pieces(before[number - 1], after[number - 1]))
        lines.append(AnnotatedLine(number, pieces, tuple(tags.get((path, number), ()))))
    notes = [f"{failed}" for failed in done.failures]
    if os.path.getmtime(path) > program["began"]:
        notes.append("the file has changed since the run began")
    return AnnotatedFile(_near(path, program["folder"]), tuple(lines), len(changed), tuple(notes))


def _near(path: str, folder: str) -> str:
    relative = os.path.relpath(path, folder) if folder else path
    return path if relative.startswith("..") else relative


def _around(lines: Iterable[int], count: int) -> set[int]:
    return {near for line in lines for near in range(line - _NEAR, line + _NEAR + 1) if 1 <= near <= count}


def _pieces(before: str, after: str) -> Iterator[Piece]:
    """Yield the parts of a line, so that the edits are marked."""
    if before == after:
        yield Piece("same", before)
        return
    old, new = _WORDS.findall(before), _WORDS.findall(after)
    for what, begin, end, start, stop in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if what == "equal":
            yield Piece("same", "".join(old[begin:end]))
            continue
        if end > begin:
            yield Piece("removed", "".join(old[begin:end]))
        if stop > start:
            yield Piece("added", "".join(new[start:stop]))
