"""Child processes and scripts that a program starts, instrumented like its imports.

    fork         the child has the hook already
    spawn        a new interpreter reads the child's data as a pickle, whose first object installs the hook
    forkserver   the server is a ``python -c``, with one more statement in front
    run_path     calls the hook before it compiles a file; a spawned child runs the main program by it

Other processes, such as ``subprocess.run([sys.executable, …])``, run plain `python`.
"""

from __future__ import annotations

import os
import runpy
import sys

from gemini.launcher.process import launch_session
from gemini.launcher.process.stdlib_patch import patch_expression

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import BufferedReader
    from types import CodeType
    from typing import Any

    from gemini.launcher.process.import_hook import ImportHook

_INSTALL = "with open(PLACE, encoding='utf-8') as file: exec(file.read())"
_COMPILED = "compile(f.read(), fname, 'exec')"


class HookInstaller:
    """Installs the hook where it is unpickled; an error has no effect."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"try:\n    {_INSTALL}\nexcept Exception: pass", _names())


def install(hook: ImportHook) -> None:
    """Instrument the processes and scripts that the program starts."""
    _patch_runpy(hook)
    for name in _FOLLOWED:
        if name in sys.modules:
            follow(name)
        else:
            hook.followers[name] = __name__


def follow(name: str) -> None:
    """Patch `name`, a standard-library module that has just been imported, to install the hook in children."""
    _FOLLOWED[name](sys.modules[name])


def _patch_spawn(spawn: Any) -> None:
    def add_installer(data: dict[str, Any]) -> dict[str, Any]:
        return {"gemini": HookInstaller(), **data}

    patch_expression(
        spawn.get_preparation_data, "return d\n", "return _add_installer(d)\n", _add_installer=add_installer
    )


def _patch_forkserver(forkserver: Any) -> None:
    def prepend_installer(program: str) -> str:
        return f"exec({_INSTALL!r}, {_names()!r}); {program}"

    start = forkserver.ForkServer.ensure_running
    patch_expression(start, "['-c', cmd]", "['-c', _prepend(cmd)]", _prepend=prepend_installer)


def _names() -> dict[str, Any]:
    return {"SESSION": launch_session.current(), "PLACE": _PLACE}


_PLACE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spawned_child.py")
_FOLLOWED = {"multiprocessing.spawn": _patch_spawn, "multiprocessing.forkserver": _patch_forkserver}


def _patch_runpy(hook: ImportHook) -> None:
    """Make `runpy.run_path` call the hook before it compiles a file."""

    def instrument_file(file: BufferedReader, name: Any) -> CodeType | None:
        return _code(hook, file, name)

    function: Any = runpy._get_code_from_file  # type: ignore[attr-defined]
    patch_expression(
        function, _COMPILED, f"(_instrumented_file(f, fname) or {_COMPILED})", _instrumented_file=instrument_file
    )


def _code(hook: ImportHook, file: BufferedReader, name: Any) -> CodeType | None:
    def read() -> bytes:
        try:
            return file.read()
        finally:
            file.seek(0)

    return hook.code(os.path.abspath(os.fsdecode(name)), "__main__", read)
