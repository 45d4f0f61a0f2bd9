"""The launcher's work, step by step: read the program, instrument it, pack it, become `python`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING, NoReturn

import gemini
from gemini.instrument.program.module_search import find
from gemini.launcher.process import become_python
from gemini.launcher.process.program_file import Program, Request, read
from gemini.launcher.process.pyc_pack import pyc, with_prologue

if TYPE_CHECKING:
    from gemini.launcher.process.bootstrap import Plan
    from gemini.launcher.process.launch_session import Session
    from gemini.launcher.process.session_passes import Instrumenter

_HOME = os.path.dirname(os.path.abspath(gemini.__file__))


def start(request: Request, session: Session) -> NoReturn:
    """Run what `request` asks for, instrumented, in place of this process."""
    from gemini.launcher.process.session_passes import Instrumenter

    instrumenter = Instrumenter(session)
    program = read(request)
    if program is None:
        become_python.become(request.arguments())
    obstacle = _obstacle(program, request)
    if obstacle:
        _say(f"{obstacle}; running under plain python", session)
        _run_plain(program, request)
    if program.kind == "script":
        session["main"] = program.file
    for package in session["instrument"]:
        if find(package, [program.path0 or os.curdir, *sys.path]) is None:
            _say(f"--instrument {package}: no package of that name is installed", session)
    store = become_python.Store(os.path.basename(program.name) or "program")
    plan = _plan(program, request, session, store)
    try:
        store.write(pyc(_code(program, request, plan, instrumenter)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python says best what is wrong
        store.close()
        _run_plain(program, request)
    except Exception as fault:
        store.close()
        _say(f"{type(fault).__name__}: {fault}; running under plain python", session)
        _run_plain(program, request)
    flags = [*_without_x(request.flags), "-X", f"gemini={program.name}"]
    become_python.become([*flags, store.path, *request.args])


def _run_plain(program: Program, request: Request) -> NoReturn:
    """Let plain `python` run the program, or say what is wrong with it."""
    if program.kind == "stdin":
        become_python.feed_standard_input(program.data)
    become_python.become(request.arguments())


def _without_x(flags: Sequence[str]) -> list[str]:
    """The interpreter's flags but for ``-x``, which is done already: there is no first line to skip any more."""
    kept = []
    for at, flag in enumerate(flags):
        is_value = at > 0 and flags[at - 1][-1] in "WX" and not flags[at - 1].startswith("--")
        is_cluster = not is_value and flag.startswith("-") and not flag.startswith("--") and not set("WX") & set(flag)
        kept.append(flag.replace("x", "") if is_cluster else flag)
    return [flag for flag in kept if flag != "-"]


def _plan(program: Program, request: Request, session: Session, store: become_python.Store) -> Plan:
    return {
        "kind": program.kind,
        "descriptor": store.descriptor,
        "opened": store.path,
        "gemini": _HOME,
        "plain": None if program.kind == "stdin" else request.arguments(),
        "file": program.file,
        "argv": program.argv,
        "orig_argv": request.arguments(),
        "path0": program.path0,
        "compile": None,
        "session": session,
    }


def _code(program: Program, request: Request, plan: Plan, instrumenter: Instrumenter) -> CodeType:
    """The program's code object, which begins with `plan`."""
    if program.kind in ("module", "container"):
        from gemini.launcher.process.runpy_frame import module_code

        is_module = program.kind == "module"
        frozen = not any("frozen_modules=off" in flag for flag in request.flags)
        return module_code(request.target if is_module else "__main__", is_module, plan, frozen)
    from gemini.instrument.text.source_file import SourceFile

    def compiled() -> CodeType:
        return compile(with_prologue(tree, plan), program.filename, "exec", dont_inherit=True, optimize=level)

    level = request.optimize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tree = instrumenter.tree(SourceFile(program.filename, program.data, "__main__"))
        code = compiled()
        if caught:  # the user's filters, in the user's process, decide what becomes of these
            plan["compile"] = program.data
            code = compiled()
    return code


def _obstacle(program: Program, request: Request) -> str:
    """Why this program cannot be instrumented; empty where it can.

    A pipe can be read only once, and what is read here is lost to Python. A program with a ``gemini`` of its own
    means that when it imports the name, and instrumented code, which imports Gemini, could not run there.
    """
    if program.kind == "pipe":
        return f"{request.target} is not a regular file"
    folders = [] if program.path0 is None or set("IP") & set(request.letters) else [program.path0]
    if not set("EI") & set(request.letters):
        folders += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    for folder in folders:
        for name in ("gemini.py", "gemini/__init__.py"):
            path = os.path.join(folder, name)
            if os.path.isfile(path) and os.path.realpath(os.path.dirname(path)) != os.path.realpath(_HOME):
                return f"{path} hides Gemini's own package"
    return ""


def _say(notice: str, session: Session) -> None:
    if not session["quiet"]:
        print(f"gemini_python: {notice}", file=sys.stderr)
