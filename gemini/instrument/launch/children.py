"""Files and processes that a program starts by other means than `import`, instrumented too.

A process that multiprocessing starts anew (spawn, forkserver) is a ``python -c "from multiprocessing…"``. It is
given one statement more, in front, which installs the hook there. It runs the program's main file again through
`runpy.run_path`, so that asks the hook as well. A forked process has the hook already. Other processes, such as
``subprocess.run([sys.executable, …])``, are plain `python`, as the program asked.
"""

from __future__ import annotations

import os
import runpy
import sys

from gemini.instrument.launch import session
from gemini.instrument.launch.library import respell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from io import BufferedReader
    from types import CodeType
    from typing import Any

    from gemini.instrument.hook import Hook

_UTIL = "multiprocessing.util"
_PROGRAMS = ("from multiprocessing.spawn import ", "from multiprocessing.forkserver import ")
_COMPILED = "compile(f.read(), fname, 'exec')"


def install(hook: Hook) -> None:
    """Follow the program into the processes and scripts that it starts."""
    _ask_in_runpy(hook)
    if _UTIL in sys.modules:
        follow()
    else:
        hook.followers[_UTIL] = __name__


def follow() -> None:
    """Wrap the one function through which multiprocessing starts interpreters."""
    util: Any = sys.modules[_UTIL]
    original = util.spawnv_passfds

    def spawnv_passfds(path: Any, args: Sequence[Any], passfds: Any) -> Any:
        return original(path, with_hook(args), passfds)

    spawnv_passfds.__module__ = original.__module__
    spawnv_passfds.__qualname__ = original.__qualname__
    util.spawnv_passfds = spawnv_passfds


def with_hook(args: Sequence[Any]) -> list[Any]:
    """The command line of an interpreter that multiprocessing starts, with our statement in front of its program."""
    changed = list(args)
    own = session.current()
    at = changed.index("-c") + 1 if "-c" in changed[:-1] else 0
    if at and own is not None and str(changed[at]).startswith(_PROGRAMS):
        place = os.path.join(os.path.dirname(__file__), "spawned.py")
        changed[at] = f"exec(open({place!r}).read(), {{'SESSION': {own!r}, 'PLACE': {place!r}}}); {changed[at]}"
    return changed


def _ask_in_runpy(hook: Hook) -> None:
    """Let `runpy.run_path`, which runs a file that is no module, ask the hook before it compiles the file."""

    def instrumented(file: BufferedReader, name: Any) -> CodeType | None:
        return _code(hook, file, name)

    function: Any = runpy._get_code_from_file  # type: ignore[attr-defined]
    respell(function, _COMPILED, f"(_instrumented_file(f, fname) or {_COMPILED})", _instrumented_file=instrumented)


def _code(hook: Hook, file: BufferedReader, name: Any) -> CodeType | None:
    def read() -> bytes:
        try:
            return file.read()
        finally:
            file.seek(0)

    return hook.code(os.path.abspath(os.fsdecode(name)), "__main__", read)
