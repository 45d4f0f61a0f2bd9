"""Gemini's own imports and the user's, kept apart where they share a name.

A program may have a ``types.py`` or an ``ast.py`` next to it: it means its own when it imports that name, Gemini means
the library's. While Gemini imports something

    the library comes first on `sys.path`, finders of the user's on `sys.meta_path` are not asked, and modules of the
    user's that have a library's name are out of sight;

afterwards all are as they were, and a library module that was imported meanwhile is forgotten if the user's folders
have one of that name: Gemini keeps using it, and the user's program, when it imports the name, gets its own.

Loaded in the user's process before anything of the user's: it imports nothing that Python has not loaded already.
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
    """Where Python finds its library and what is installed: `sys.path` less what the user's PYTHONPATH put there."""
    users = () if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = {_absolute(entry) for entry in users if entry}
    return [entry for entry in sys.path if _absolute(entry) not in own]


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except OSError:  # the working directory has been removed
        return path


_FINDERS = tuple(sys.meta_path)  # none is the user's yet


class PythonsFinders:
    """The stretch of time in which this thread imports by the finders Python came with, and no others.

    It is first on `sys.meta_path` meanwhile. Other threads go on as before.
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
        """The spec of a module that this thread imports; None, so that others are asked, for any other thread."""
        if get_ident() != self._thread:
            return None
        for finder in _FINDERS:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class LibraryFirst:
    """The stretch of time in which Gemini imports; `library` comes first, `users` are further folders of the user's."""

    def __init__(self, library: Sequence[str], users: Sequence[str] = ()) -> None:
        self._library = list(library)
        self._users = [*users, *(entry for entry in sys.path if entry not in self._library)]
        self._places = tuple(os.path.join(_absolute(folder), "") for folder in self._users)

    def __enter__(self) -> None:
        self._hidden = self._hide()
        self._known = set(sys.modules)
        self._path = sys.path[:]
        self._finders = PythonsFinders()
        sys.path[:] = [*self._library, *(entry for entry in self._path if entry not in self._library)]
        self._finders.__enter__()

    def __exit__(self, *_: object) -> None:
        sys.path[:] = self._path
        self._finders.__exit__()
        for name in set(sys.modules) - self._known:
            # Other threads may be importing modules of the user's meanwhile: those stay.
            if self._is_shadowed(name.partition(".")[0]) and _file(name) and not self._is_users(name):
                del sys.modules[name]
        sys.modules.update(self._hidden)

    def _hide(self) -> dict[str, ModuleType]:
        """Take modules of the user's that have the name of a library's out of `sys.modules`, and return them."""
        names = [name for name in list(sys.modules) if name.partition(".")[0] in sys.stdlib_module_names]
        return {name: sys.modules.pop(name) for name in names if self._is_users(name)}

    def _is_users(self, name: str) -> bool:
        """Whether the module imported as `name` lies in a folder of the user's, and is not the library itself."""
        file = _file(name)
        return file.startswith(self._places) and not file.startswith(_LIBRARY)

    def _is_shadowed(self, name: str) -> bool:
        paths = [os.path.join(folder, name) for folder in self._users]
        return any(os.path.isfile(path + ".py") or os.path.isfile(path + "/__init__.py") for path in paths)


_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")


def _file(name: str) -> str:
    """The file that a module was loaded from; empty for what is built or frozen into Python, which nothing shadows."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return _absolute(file) if isinstance(file, str) and origin != "frozen" else ""
