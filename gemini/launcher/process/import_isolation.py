"""Import isolation: separates Gemini's imports from modules of the user with the same names.

A program may have a ``types.py`` or an ``ast.py`` beside it: its imports of that name mean this file, Gemini's mean the
library. While Gemini imports a module

    the library is first on `sys.path`, the user's finders on `sys.meta_path` are skipped, and modules of the user with
    the name of a library module are hidden from `sys.modules`;

afterwards all are restored, and a library module that was imported meanwhile is removed from `sys.modules` if the
user's folders have one of that name: Gemini keeps its reference, and the program imports its own module.

The program's process loads this module before the user's first statement: it imports only modules that Python has
already loaded.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def library_path() -> list[str]:
    """Return the folders of the library and of installed packages: `sys.path` without the user's PYTHONPATH."""
    users = () if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    user_paths = {_absolute(entry) for entry in users if entry}
    return [entry for entry in sys.path if _absolute(entry) not in user_paths]


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except OSError:  # the working directory has been removed
        return path


_FINDERS = tuple(sys.meta_path)  # before any finder of the user


class OriginalFindersOnly:
    """Context in which this thread imports by Python's original finders only.

    It is first on `sys.meta_path` meanwhile. Other threads are not affected.
    """

    def __init__(self) -> None:
        self._thread = get_ident()

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module for this thread; None, so that the next finder is used, for other threads."""
        if get_ident() != self._thread:
            return None
        for finder in _FINDERS:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class LibraryFirst:
    """Context in which Gemini imports: `library` is searched first; `users` are further folders of the user."""

    def __init__(self, library: Sequence[str], users: Sequence[str] = ()) -> None:
        self._library = list(library)
        self._users = [*users, *(entry for entry in sys.path if entry not in self._library)]
        self._places = tuple(os.path.join(_absolute(folder), "") for folder in self._users)

    def __enter__(self) -> None:
        self._hidden = self._hide()
        self._known = set(sys.modules)
        self._path = sys.path[:]
        self._finders = OriginalFindersOnly()
        sys.path[:] = [*self._library, *(entry for entry in self._path if entry not in self._library)]
        self._finders.__enter__()

    def __exit__(self, *_: object) -> None:
        sys.path[:] = self._path
        self._finders.__exit__()
        for name in set(sys.modules) - self._known:
            # Modules of the user that other threads import meanwhile stay.
            if self._is_shadowed(name.partition(".")[0]) and _file(name) and not self._is_users(name):
                del sys.modules[name]
        sys.modules.update(self._hidden)

    def _hide(self) -> dict[str, ModuleType]:
        """Remove modules of the user with the name of a library module from `sys.modules`; return them."""
        names = [name for name in list(sys.modules) if name.partition(".")[0] in sys.stdlib_module_names]
        return {name: sys.modules.pop(name) for name in names if self._is_users(name)}

    def _is_users(self, name: str) -> bool:
        """Return whether the module `name` is in a folder of the user, outside of the library."""
        file = _file(name)
        return file.startswith(self._places) and not file.startswith(_LIBRARY)

    def _is_shadowed(self, name: str) -> bool:
        paths = [os.path.join(folder, name) for folder in self._users]
        return any(os.path.isfile(path + ".py") or os.path.isfile(path + "/__init__.py") for path in paths)


_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")


def _file(name: str) -> str:
    """Return the file of a module; empty for built-in and frozen modules, which nothing shadows."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return _absolute(file) if isinstance(file, str) and origin != "frozen" else ""
