"""Instrumenting the user's own modules as they are imported.

The hook sits in one place: between the code that Python's loader has for a source file and its execution. That covers
every way a source file becomes a module (import, reload, editable installs, `spec_from_file_location`, `runpy`) and
leaves all that a program can look at as it is: finders, loaders, specs, `__cached__`, the stack.

    import mymodel
        finder → SourceFileLoader.exec_module
                     ├─ get_code     Python's own: reads or writes __pycache__, raises what it raises
                     ├─ ours         the user's own file, and a pass changes it? its instrumented code instead
                     └─ exec(code)

Python's own code is always made first, so ``__pycache__`` holds what it holds without us, and never anything of ours.

Loaded in the user's process before anything of the user's: it imports nothing that Python has not loaded already.
"""

from __future__ import annotations

import runpy
import sys
from _frozen_importlib_external import SourceFileLoader
from _thread import RLock, get_ident

from gemini.instrument.program.ownership import Ownership
from gemini.launcher.process.import_isolation import LibraryFirst, PythonsFinders
from gemini.launcher.process.stdlib_patch import respell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType
    from typing import Any

    from gemini.launcher.process.launch_session import Session

_FOLLOWED = "exec('code', globals()); __import__('importlib').import_module('follower').follow(__name__)"


class Hook:
    """Gives the code of the user's own files, instrumented; `library` is where Gemini's own imports look first."""

    def __init__(self, session: Session, library: Sequence[str]) -> None:
        self.ownership = Ownership(session["instrument"], session["main"])
        self.followers: dict[str, str] = {}
        """Modules to be told, by calling their `follow`, when one of the standard library has been imported."""
        self._session = session
        self._library = list(library)
        self._lock = RLock()
        self._busy: set[int] = set()
        self._instrument: Callable[[str, bytes, str], CodeType | None] | None = None

    def code(self, path: str, module: str, read: Callable[[], bytes]) -> CodeType | None:
        """The instrumented code of the file at `path`; None where Python's own is to run."""
        thread = get_ident()
        if thread in self._busy or not self.ownership.owns(path, module):
            return None
        self._busy.add(thread)  # what the passes import is theirs, wherever it lies
        trace, profile = sys.gettrace(), sys.getprofile()
        sys.settrace(None)  # what the user traces is the user's program
        sys.setprofile(None)
        try:
            data = read()
            if not self._is_triggered(data):
                return None
            with PythonsFinders():
                return self._instrumenter()(path, data, module)
        except Exception as fault:
            if not self._session["quiet"]:
                sys.stderr.write(f"gemini_python: {path} runs unchanged: {type(fault).__name__}: {fault}\n")
            return None
        finally:
            sys.settrace(trace)
            sys.setprofile(profile)
            self._busy.discard(thread)

    def _is_triggered(self, data: bytes) -> bool:
        """Whether any pass can change this file; the passes themselves look closer."""
        triggers = self._session["triggers"]
        return not triggers or not data.isascii() or any(trigger.encode() in data for trigger in triggers)

    def follow(self, module: str, code: CodeType) -> CodeType:
        """The code of a module, with a call of its follower behind it."""
        text = _FOLLOWED.replace("follower", self.followers[module])
        template = compile(text, code.co_filename, "exec", dont_inherit=True)
        return template.replace(co_consts=tuple(code if value == "code" else value for value in template.co_consts))

    def _instrumenter(self) -> Callable[[str, bytes, str], CodeType | None]:
        if self._instrument is None:
            with self._lock:
                self._instrument = self._instrument or self._load()
        return self._instrument

    def _load(self) -> Callable[[str, bytes, str], CodeType | None]:
        with LibraryFirst(self._library):
            from gemini.launcher.process.session_passes import Instrumenter

            return Instrumenter(self._session).code


def install(hook: Hook) -> bool:
    """Let `hook` see the code of every source file that becomes a module; False where this Python does not allow it."""
    own = (SourceFileLoader.get_code, SourceFileLoader.source_to_code)

    def instrumented(loader: object, module: str, code: CodeType | None) -> CodeType | None:
        if not isinstance(loader, SourceFileLoader) or code is None:
            return code
        if module in hook.followers and not hook.ownership.owns(loader.path, module):
            return hook.follow(module, code)
        if (type(loader).get_code, type(loader).source_to_code) != own:  # another hook's loader: its code stays
            return code
        return hook.code(loader.path, module, lambda: loader.get_data(loader.path)) or code

    execute: Any = SourceFileLoader.exec_module
    details: Any = runpy._get_module_details  # type: ignore[attr-defined]
    from_loader = "self.get_code(module.__name__)"
    in_runpy = "loader.get_code(mod_name)"
    return respell(
        execute, from_loader, f"_instrumented(self, module.__name__, {from_loader})", _instrumented=instrumented
    ) and respell(details, in_runpy, f"_instrumented(loader, mod_name, {in_runpy})", _instrumented=instrumented)
