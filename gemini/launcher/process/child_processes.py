"""Files and processes that a program starts by other means than `import`, instrumented too.

    fork         the child has the hook already
    spawn        a new interpreter gets the child's data as a pickle, whose first object installs the hook there
    forkserver   the server is a ``python -c``, which is given one statement more, in front
    run_path     asks the hook before it compiles a file; that is how a spawned child runs the main program again

Other processes, such as ``subprocess.run([sys.executable, …])``, are plain `python`, as the program asked.
"""

from __future__ import annotations

import os
import runpy
import sys

from gemini.launcher.process import launch_session
from gemini.launcher.process.stdlib_patch import respell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import BufferedReader
    from types import CodeType
    from typing import Any

    from gemini.launcher.process.import_hook import Hook

_GREET = "with open(PLACE, encoding='utf-8') as file: exec(file.read())"
_COMPILED = "compile(f.read(), fname, 'exec')"


class Greeting:
    """Installs the hook where it is unpickled; nothing happens there if that cannot be done."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"try:\n    {_GREET}\nexcept Exception: pass", _names())


def install(hook: Hook) -> None:
    """Follow the program into the processes and scripts that it starts."""
    _ask_in_runpy(hook)
    for name in _FOLLOWED:
        if name in sys.modules:
            follow(name)
        else:
            hook.followers[name] = __name__


def follow(name: str) -> None:
    """Have `name`, a module of the standard library that has just been imported, pass the hook on."""
    _FOLLOWED[name](sys.modules[name])


def _follow_spawn(spawn: Any) -> None:
    def greeted(data: dict[str, Any]) -> dict[str, Any]:
        return {"gemini": Greeting(), **data}

    respell(spawn.get_preparation_data, "return d\n", "return _greeted(d)\n", _greeted=greeted)


def _follow_forkserver(forkserver: Any) -> None:
    def greeting(program: str) -> str:
        return f"exec({_GREET!r}, {_names()!r}); {program}"

    start = forkserver.ForkServer.ensure_running
    respell(start, "['-c', cmd]", "['-c', _greeting(cmd)]", _greeting=greeting)


def _names() -> dict[str, Any]:
    return {"SESSION": launch_session.current(), "PLACE": _PLACE}


_PLACE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spawned_child.py")
_FOLLOWED = {"multiprocessing.spawn": _follow_spawn, "multiprocessing.forkserver": _follow_forkserver}


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
