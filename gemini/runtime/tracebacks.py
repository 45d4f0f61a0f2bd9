"""Tracebacks: an exception of a worker is shown as if it had been raised in the script, without frames of Gemini.

    in a worker        the code positions that an exception passed, as plain data      `exception_chain`
    in the controller  frames at those positions, in the traceback that is raised      `attach_traceback`
    at the exit        an uncaught exception is shown without frames of Gemini         `strip_frames`

A traceback needs frames, and frames of another process are not available. Each is a frame of code with a single
statement, compiled for the file, line and name of the original; Python reads the text of the line from the file.
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
_NOT_USER_CODE = (_OURS, str(Path(torch.__file__).parent) + os.sep)
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_LONG = 10  # exceptions in a chain, at most
_UNKNOWN = -1  # a column


class CodePosition(NamedTuple):
    """Where code was when an exception passed through it."""

    file: str
    name: str
    line: int
    end_line: int
    column: int
    end_column: int


class ChainedException(NamedTuple):
    """One exception of a chain, in a portable form, with its positions; `explains`: it is the cause of the next."""

    exception: Any
    places: list[CodePosition]
    explains: bool


# ── in a worker ──────────────────────────────────────────────────────────────────────────────────────────────────────
def exception_chain(error: BaseException, portable: Callable[[BaseException], Any]) -> list[ChainedException]:
    """Return an exception and those that led to it, last one first. The first is not included: `Raised` has it."""
    found = [ChainedException(None, traceback_positions(error.__traceback__), False)]
    for one, explains in itertools.islice(_leading_to(error), _LONG):
        places = traceback_positions(one.__traceback__)
        if places:  # else it is internal
            found.append(ChainedException(portable(one), places, explains))
    return found


def traceback_positions(trace: TracebackType | None) -> list[CodePosition]:
    """Return where an exception passed through code outside Gemini."""
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
    """Return the last line, the first and the last column of the current instruction; from Python 3.11 on."""
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


# ── in the controller ───────────────────────────────────────────────────────────────────────────────────────────────
def attach_traceback(
    error: BaseException, chain: Sequence[ChainedException], rebuilt: Callable[[Any], BaseException]
) -> None:
    """Continue the traceback of an exception from a worker with its frames there, after those that led to it."""
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
    """Generators, for as long as the exception lives whose traceback refers to their frames.

    A generator that is freed is closed, by frames that its own might retain. Nor may only its own frame refer to it:
    a frame does not report its references to the garbage collector while its generator waits, and would be left with
    freed names.
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
    """Return a generator suspended at a position; other frames would retain their callers and their variables."""
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
    """Add a line that is shown below an exception, if Python supports notes."""
    error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]


class CallSite(NamedTuple):
    """A position in the script."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line}, in {self.code.co_name}"


def call_site() -> CallSite:
    """Return where the script has called Gemini or torch."""
    frame, found = sys._getframe(1), sys._getframe(1)
    while frame is not None:
        found = frame
        if not frame.f_code.co_filename.startswith(_NOT_USER_CODE):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return CallSite(found.f_code, found.f_lineno)


# ── at the exit ─────────────────────────────────────────────────────────────────────────────────────────────────────
def strip_frames(error: BaseException) -> TracebackType | None:
    """Remove frames of Gemini from the tracebacks of an exception and of those that led to it; return its traceback.

    A traceback without other frames is unchanged. An interrupt during Gemini's work is shown where the script was,
    without frames of libraries that Gemini used.
    """
    if isinstance(error, KeyboardInterrupt) and any(
        _is_ours(one.tb_frame.f_code) for one in _entries(error.__traceback__)
    ):
        _end_in_user_code(error)
    for one in itertools.chain((error,), (before for before, _ in itertools.islice(_leading_to(error), _LONG))):
        one.__traceback__ = _without_ours(one.__traceback__)
    return error.__traceback__


def _end_in_user_code(error: BaseException) -> None:
    own = [one for one in _entries(error.__traceback__) if _is_user_code(one.tb_frame.f_code)]
    if own:
        own[-1].tb_next = None
    before = error.__context__
    if before is not None and not any(_is_user_code(one.tb_frame.f_code) for one in _entries(before.__traceback__)):
        error.__suppress_context__ = True


def shorten_traceback(error: BaseException) -> None:
    """Remove frames of Gemini, except the first, from an exception of user code.

    Exceptions of Gemini's own code keep their frames, for debugging.
    """
    entries = [*_entries(error.__traceback__)]
    if entries and not _is_ours(entries[-1].tb_frame.f_code):
        entries[0].tb_next = next(_without(entries[0].tb_next), None)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    return next(_without(trace), trace)


def _without(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the entries outside Gemini, linked to each other."""
    rest = [one for one in _entries(trace) if not _is_ours(one.tb_frame.f_code)]
    for one, following in zip(rest, [*rest[1:], None]):
        one.tb_next = following
    return iter(rest)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_user_code(code: CodeType) -> bool:
    return not code.co_filename.startswith((*_NOT_USER_CODE, *_LIBRARIES, "<frozen ", "<__array_function__"))


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)
