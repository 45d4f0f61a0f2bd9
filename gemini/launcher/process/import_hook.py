"""Import hook: instruments the user's modules when they are imported.

The hook is called between the loader's `get_code` and the execution of the code. That covers every import of a source
file (import, reload, editable installs, `spec_from_file_location`, `runpy`) and changes nothing that a program can
observe: finders, loaders, specs, `__cached__`, the stack.

    import mymodel
        finder → SourceFileLoader.exec_module
                     ├─ get_code     Python's: reads or writes __pycache__, raises its errors
                     ├─ hook         a user file that a pass changes: its instrumented code instead
                     └─ exec(code)

Python always compiles the original first, so ``__pycache__`` never contains instrumented code.

The program's process loads this module before the user's first statement: it imports only modules that Python has
already loaded.
"""

from __future__ import annotations

import runpy
import sys
from _frozen_importlib_external import SourceFileLoader
from _thread import RLock, get_ident

from gemini.instrument.program.ownership import Ownership
from gemini.launcher.process.import_isolation import LibraryFirst, OriginalFindersOnly
from gemini.launcher.process.stdlib_patch import patch_expression

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType
    from typing import Any

    from gemini.launcher.process.launch_session import Session

_FOLLOWED = "exec('code', globals()); __import__('importlib').import_module('follower').follow(__name__)"


class ImportHook:
    """Returns the instrumented code of the user's files; Gemini's imports search the folders `library` first."""

    def __init__(self, session: Session, library: Sequence[str]) -> None:
        self.ownership = Ownership(session["instrument"], session["main"])
        self.followers: dict[str, str] = {}
        """Imported module → the module whose `follow` is called after that import."""
        self._session = session
        self._library = list(library)
        self._lock = RLock()
        self._busy: set[int] = set()
        self._instrument: Callable[[str, bytes, str], CodeType | None] | None = None

    def code(self, path: str, module: str, read: Callable[[], bytes]) -> CodeType | None:
        """Return the instrumented code of the file at `path`; None to run the original."""
        thread = get_ident()
        if thread in self._busy or not self.ownership.owns(path, module):
            return None
        self._busy.add(thread)  # imports of the passes are not instrumented
        trace, profile = sys.gettrace(), sys.getprofile()
        sys.settrace(None)  # the user's tracer sees the user's program only
        sys.setprofile(None)
        try:
            data = read()
            if not self._is_triggered(data):
                return None
            with OriginalFindersOnly():
                return self._instrumenter()(path, data, module)
        except Exception as fault:
            if not self._session["quiet"]:
                sys.stderr.write(f"gemini_python: {path} is not instrumented: {type(fault).__name__}: {fault}\n")
            return None
        finally:
            sys.settrace(trace)
            sys.setprofile(profile)
            self._busy.discard(thread)

    def _is_triggered(self, data: bytes) -> bool:
        """Return whether any pass can change this file."""
        triggers = self._session["triggers"]
        return not triggers or not data.isascii() or any(trigger.encode() in data for trigger in triggers)

    def follow(self, module: str, code: CodeType) -> CodeType:
        """Return the code of a module with a call of its follower at the end."""
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


def install(hook: ImportHook) -> bool:
    """Call `hook` for every imported source file; return False if the library cannot be patched."""
    own = (SourceFileLoader.get_code, SourceFileLoader.source_to_code)

    def instrumented(loader: object, module: str, code: CodeType | None) -> CodeType | None:
        if not isinstance(loader, SourceFileLoader) or code is None:
            return code
        if module in hook.followers and not hook.ownership.owns(loader.path, module):
            return hook.follow(module, code)
        if (type(loader).get_code, type(loader).source_to_code) != own:  # the loader of another hook: its code stays
            return code
        return hook.code(loader.path, module, lambda: loader.get_data(loader.path)) or code

    execute: Any = SourceFileLoader.exec_module
    details: Any = runpy._get_module_details  # type: ignore[attr-defined]
    from_loader = "self.get_code(module.__name__)"
    in_runpy = "loader.get_code(mod_name)"
    return patch_expression(
        execute, from_loader, f"_instrumented(self, module.__name__, {from_loader})", _instrumented=instrumented
    ) and patch_expression(
        details, in_runpy, f"_instrumented(loader, mod_name, {in_runpy})", _instrumented=instrumented
    )
