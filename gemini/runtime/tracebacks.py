"""Tracebacks as they are without us: what raises in a worker is shown as if it had raised here, and ours is not shown.

    in a worker    where an exception went through the model, as plain data      `exception_chain`
    here           frames at those places, in the traceback that is raised       `attach_traceback`
    at the end     an exception nobody caught is shown without frames of ours    `strip_frames`

A traceback wants frames, and frames of another process cannot be had. Each is one of code of a single statement,
compiled for the file, line and name of the original; Python reads the text of the line from the file, as always.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

_OURS = str(Path(__file__).parents[1]) + os.sep
_NOT_THE_PROGRAMS = (_OURS, str(Path(torch.__file__).parent) + os.sep)
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LONG = 10  # exceptions in a chain, and no more
_UNKNOWN = -1  # a column


class CodePosition(NamedTuple):
    """Where code was when an exception went through it."""

    file: str
    name: str
    line: int
    end_line: int
    column: int
    end_column: int


class ChainedException(NamedTuple):
    """One exception of a chain, in a form that travels, and its places; `explains` the next: it is its cause."""

    exception: Any
    places: list[CodePosition]
    explains: bool


# ── in a worker ──────────────────────────────────────────────────────────────────────────────────────────────────────
def exception_chain(error: BaseException, portable: Callable[[BaseException], Any]) -> list[ChainedException]:
    """An exception and those that led to it, last one first. The first is not sent with it: `Raised` has it."""
    found = [ChainedException(None, traceback_positions(error.__traceback__), False)]
    for one, explains in itertools.islice(_leading_to(error), _LONG):
        places = traceback_positions(one.__traceback__)
        if places:  # else it is a matter of ours
            found.append(ChainedException(portable(one), places, explains))
    return found


def traceback_positions(trace: TracebackType | None) -> list[CodePosition]:
    """Where an exception went through code that is not ours."""
    found = []
    for one in _entries(trace):
        code = one.tb_frame.f_code
        if not _is_ours(code):
            end_line, *columns = _extent(code, one)
            found.append(CodePosition(code.co_filename, code.co_name, one.tb_lineno, end_line, *columns))
    return found


def find_scope(module: nn.Module, error: BaseException) -> str:
    """Return the name of the innermost submodule whose method an exception passed through; '' for the module itself."""
    names = {id(part): name for name, part in module.named_modules()}
    found = ""
    for entry in _entries(error.__traceback__):
        found = names.get(id(entry.tb_frame.f_locals.get("self")), found)
    return found


def _leading_to(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    known = {id(error)}
    while True:
        explains = error.__cause__ is not None
        before = error.__cause__ if explains else None if error.__suppress_context__ else error.__context__
        if before is None or id(before) in known:
            return
        known.add(id(before))
        yield before, explains
        error = before


def _extent(code: CodeType, entry: TracebackType) -> tuple[int, int, int]:
    """The last line, the first and the last column of what was being done; from Python 3.11 on."""
    unknown = (entry.tb_lineno, _UNKNOWN, _UNKNOWN)
    positions: Any = getattr(code, "co_positions", None)
    if positions is None or entry.tb_lasti < 0:
        return unknown
    found = next(itertools.islice(positions(), entry.tb_lasti // 2, None), None)
    if found is None:
        return unknown
    line, end_line, column, end_column = found
    if line != entry.tb_lineno or end_line is None or column is None or end_column is None:
        return unknown
    return end_line, column, end_column


# ── here ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def attach_traceback(
    error: BaseException, chain: Sequence[ChainedException], rebuilt: Callable[[Any], BaseException]
) -> None:
    """Let an exception that has come from a worker go on where it was there, after those that led to it."""
    for raising in chain:
        if raising.exception is not None:
            before = rebuilt(raising.exception)
            if raising.explains:
                error.__cause__ = before
            else:
                error.__context__ = before
            error = before
        waiting = [_waiting_at(place) for place in raising.places]
        error.__traceback__ = _trace(waiting, raising.places)
        vars(error)["_gemini_frames"] = FrameOwner(waiting)


class FrameOwner:
    """Generators, for as long as the exception lives through whose traceback they go.

    One that is gone would be closed, by frames that its own might keep. Nor may it be found by its own frame alone: a
    frame does not tell the garbage collector what it holds while its generator waits, and would be left with names
    that are freed.
    """

    def __init__(self, waiting: Sequence[GeneratorType[None, None, None]] = ()) -> None:
        self.waiting = waiting

    def __reduce__(self) -> tuple[Any, ...]:
        return FrameOwner, ()  # copies of the exception have no traceback


def _trace(waiting: Sequence[GeneratorType[None, None, None]], places: Sequence[CodePosition]) -> TracebackType | None:
    made: TracebackType | None = None
    for generator, place in zip(reversed(waiting), reversed(places), strict=True):
        frame = generator.gi_frame
        assert frame is not None
        made = TracebackType(made, frame, frame.f_lasti, place.line)
    return made


def _waiting_at(place: CodePosition) -> GeneratorType[None, None, None]:
    """A generator that waits at a place; frames of what does not wait keep those they were made in, with all that
    these know."""
    generator: GeneratorType[None, None, None] = FunctionType(_code(place), {})()
    next(generator)
    return generator


@functools.lru_cache(maxsize=64)
def _code(place: CodePosition) -> CodeType:
    columns = place.column, place.end_column
    if place.column < 0 and sys.version_info < (3, 11):
        columns = 0, 0
    tree = ast.parse("def at():\n    yield")
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno, node.end_lineno = place.line, place.end_line
            node.col_offset, node.end_col_offset = columns
    module = compile(tree, place.file, "exec", dont_inherit=True)
    (code,) = (one for one in module.co_consts if isinstance(one, CodeType))
    return code.replace(co_name=place.name)


def add_note(error: BaseException, text: str) -> None:
    """Add a line that is shown below an exception, where Python shows such."""
    error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]


class CallSite(NamedTuple):
    """Where the program is."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line}, in {self.code.co_name}"


def call_site() -> CallSite:
    """Where the program has called us, or torch, from."""
    frame, found = sys._getframe(1), sys._getframe(1)
    while frame is not None:
        found = frame
        if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAMS):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return CallSite(found.f_code, found.f_lineno)


# ── at the end ───────────────────────────────────────────────────────────────────────────────────────────────────────
def strip_frames(error: BaseException) -> TracebackType | None:
    """Take frames of ours out of the tracebacks of an exception and of those that led to it; its traceback then.

    One that has no other frames is left as it is. An interrupt that came while we were at work is shown where the
    program was: the libraries that we used are no matter of its.
    """
    if isinstance(error, KeyboardInterrupt) and any(
        _is_ours(one.tb_frame.f_code) for one in _entries(error.__traceback__)
    ):
        _end_in_the_program(error)
    for one in itertools.chain((error,), (before for before, _ in itertools.islice(_leading_to(error), _LONG))):
        one.__traceback__ = _without_ours(one.__traceback__)
    return error.__traceback__


def _end_in_the_program(error: BaseException) -> None:
    own = [one for one in _entries(error.__traceback__) if _is_the_programs(one.tb_frame.f_code)]
    if own:
        own[-1].tb_next = None
    before = error.__context__
    if before is not None and not any(_is_the_programs(one.tb_frame.f_code) for one in _entries(before.__traceback__)):
        error.__suppress_context__ = True


def shorten_traceback(error: BaseException) -> None:
    """Of an exception of the program's code, on its way out: leave of frames of ours the first, which it called.

    What our own code raises keeps its frames, for whoever looks for the fault.
    """
    entries = [*_entries(error.__traceback__)]
    if entries and not _is_ours(entries[-1].tb_frame.f_code):
        entries[0].tb_next = next(_without(entries[0].tb_next), None)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    return next(_without(trace), trace)


def _without(trace: TracebackType | None) -> Iterator[TracebackType]:
    """The entries that are not ours, linked to each other."""
    kept = [one for one in _entries(trace) if not _is_ours(one.tb_frame.f_code)]
    for one, following in zip(kept, [*kept[1:], None]):
        one.tb_next = following
    return iter(kept)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_the_programs(code: CodeType) -> bool:
    return not code.co_filename.startswith((*_NOT_THE_PROGRAMS, *_LIBRARIES, "<frozen ", "<__array_function__"))


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)
