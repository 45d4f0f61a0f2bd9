"""Launch: reads the program, instruments it, packs it, and replaces this process by `python`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING, NoReturn

import gemini
from gemini.instrument.program.module_search import find_module
from gemini.launcher.process import become_python
from gemini.launcher.process.program_file import Program, Request, read_program
from gemini.launcher.process.pyc_pack import insert_boot_statement, to_pyc

if TYPE_CHECKING:
    from gemini.launcher.process.bootstrap import BootPlan
    from gemini.launcher.process.launch_session import Session
    from gemini.launcher.process.session_passes import Instrumenter

_GEMINI_FOLDER = os.path.dirname(os.path.abspath(gemini.__file__))


def start(request: Request, session: Session) -> NoReturn:
    """Replace this process by the instrumented program of `request`."""
    from gemini.launcher.process.session_passes import Instrumenter

    instrumenter = Instrumenter(session)
    program = read_program(request)
    if program is None:
        become_python.exec_python(request.arguments())
    obstacle = _find_obstacle(program, request)
    if obstacle:
        _print_notice(f"{obstacle}; running under plain python", session)
        _run_plain(program, request)
    if program.kind == "script":
        session["main"] = program.file
    for package in session["instrument"]:
        if find_module(package, [program.path0 or os.curdir, *sys.path]) is None:
            _print_notice(f"--instrument {package}: no such package is installed", session)
    store = become_python.ProgramStore(os.path.basename(program.name) or "program")
    plan = _plan(program, request, session, store)
    try:
        store.write(to_pyc(_code(program, request, plan, instrumenter)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # plain python reports the error
        store.close()
        _run_plain(program, request)
    except Exception as fault:
        store.close()
        _print_notice(f"{type(fault).__name__}: {fault}; running under plain python", session)
        _run_plain(program, request)
    flags = [*_without_x(request.flags), "-X", f"gemini={program.name}"]
    become_python.exec_python([*flags, store.path, *request.args])


def _run_plain(program: Program, request: Request) -> NoReturn:
    """Replace this process by plain `python`, which runs the program or reports its error."""
    if program.kind == "stdin":
        become_python.feed_standard_input(program.data)
    become_python.exec_python(request.arguments())


def _without_x(flags: Sequence[str]) -> list[str]:
    """Return the interpreter's flags without ``-x``, which is already applied."""
    remaining = []
    for at, flag in enumerate(flags):
        is_value = at > 0 and flags[at - 1][-1] in "WX" and not flags[at - 1].startswith("--")
        is_cluster = not is_value and flag.startswith("-") and not flag.startswith("--") and not set("WX") & set(flag)
        remaining.append(flag.replace("x", "") if is_cluster else flag)
    return [flag for flag in remaining if flag != "-"]


def _plan(program: Program, request: Request, session: Session, store: become_python.ProgramStore) -> BootPlan:
    return {
        "kind": program.kind,
        "descriptor": store.descriptor,
        "opened": store.path,
        "gemini": _GEMINI_FOLDER,
        "plain": None if program.kind == "stdin" else request.arguments(),
        "file": program.file,
        "argv": program.argv,
        "orig_argv": request.arguments(),
        "path0": program.path0,
        "compile": None,
        "session": session,
    }


def _code(program: Program, request: Request, plan: BootPlan, instrumenter: Instrumenter) -> CodeType:
    """Return the program's code object with the boot statement for `plan`."""
    if program.kind in ("module", "container"):
        from gemini.launcher.process.runpy_frame import compile_module_frame

        is_module = program.kind == "module"
        frozen = not any("frozen_modules=off" in flag for flag in request.flags)
        return compile_module_frame(request.target if is_module else "__main__", is_module, plan, frozen)
    from gemini.instrument.text.source_file import SourceFile

    def compiled() -> CodeType:
        return compile(insert_boot_statement(tree, plan), program.filename, "exec", dont_inherit=True, optimize=level)

    level = request.optimize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tree = instrumenter.tree(SourceFile(program.filename, program.data, "__main__"))
        code = compiled()
        if caught:  # repeated in the user's process, under the user's filters
            plan["compile"] = program.data
            code = compiled()
    return code


def _find_obstacle(program: Program, request: Request) -> str:
    """Return why this program cannot be instrumented; empty if it can.

    A pipe can be read only once, so reading it would leave nothing for `python`. In a program with its own ``gemini``
    module, instrumented code could not import Gemini.
    """
    if program.kind == "pipe":
        return f"{request.target} is not a regular file"
    folders = [] if program.path0 is None or set("IP") & set(request.letters) else [program.path0]
    if not set("EI") & set(request.letters):
        folders += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for folder in folders:
        for name in ("gemini.py", "gemini/__init__.py"):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.path.realpath(os.path.dirname(path)) != os.path.realpath(_GEMINI_FOLDER):
                return f"{path} shadows the package gemini"
    return ""


def _print_notice(notice: str, session: Session) -> None:
    if not session["quiet"]:
        print(f"gemini_python: {notice}", file=sys.stderr)
