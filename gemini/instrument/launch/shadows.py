"""Gemini's own imports and the user's, kept apart where they share a name.

A program may have a ``types.py`` or an ``ast.py`` next to it: it means its own when it imports that name, Gemini means
the library's. While Gemini imports something

    the library comes first on `sys.path`, and modules of the user's that have a library's name are out of sight;

afterwards both are as they were, and a library module that was imported meanwhile is forgotten if the user's folders
have one of that name: Gemini keeps using it, and the user's program, when it imports the name, gets its own.

Loaded in the user's process before anything of the user's: it imports nothing that Python has not loaded already.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
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


class LibraryFirst:
    """The stretch of time in which Gemini imports; `library` comes first, `users` are further folders of the user's."""

    def __init__(self, library: Sequence[str], users: Sequence[str] = ()) -> None:
        self._library = list(library)
        self._users = [*users, *(entry for entry in sys.path if entry not in self._library)]

    def __enter__(self) -> None:
        self._hidden = _hide(self._users)
        self._known = set(sys.modules)
        self._path = sys.path[:]
        sys.path[:] = [*self._library, *(entry for entry in self._path if entry not in self._library)]

    def __exit__(self, *_: object) -> None:
        sys.path[:] = self._path
        for name in set(sys.modules) - self._known:
            top = name.partition(".")[0]
            if top != "gemini" and any(_has_module(folder, top) for folder in self._users):
                del sys.modules[name]
        sys.modules.update(self._hidden)


def _hide(folders: Sequence[str]) -> dict[str, ModuleType]:
    """Take modules that lie in `folders` but have the name of a library's out of `sys.modules`, and return them."""
    found = {}
    places = tuple(os.path.join(_absolute(folder), "") for folder in folders)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in sys.stdlib_module_names:
            path = getattr(module, "__file__", None)
            if isinstance(path, str) and _absolute(path).startswith(places) and not _is_library(path):
                found[name] = sys.modules.pop(name)
    return found


def _is_library(path: str) -> bool:
    return _absolute(path).startswith(os.path.join(os.path.dirname(os.__file__), ""))


def _has_module(folder: str, name: str) -> bool:
    path = os.path.join(folder, name)
    return os.path.isfile(path + ".py") or os.path.isfile(os.path.join(path, "__init__.py"))
