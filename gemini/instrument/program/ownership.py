"""Ownership: which files are the user's, and so are instrumented.

Not the user's are the standard library, installed packages (site-packages, dist-packages, the library folder of this
Python or of its virtual environment) and Gemini. A package named by ``--instrument`` counts as the user's in any
folder. The import hook and the code tree both use this module, so they agree.

The program's process loads this module before the user's first statement: it imports only modules that Python has
already loaded.
"""

from __future__ import annotations

import os
import sys

import gemini

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_INSTALLED = ("site-packages", "dist-packages")


class Ownership:
    """Distinguishes the user's files from installed ones.

    `packages` are installed packages to treat as the user's; `main` is the file of the program, in any folder.
    """

    def __init__(self, packages: Iterable[str] = (), main: str | None = None) -> None:
        self.packages = tuple(packages)
        self.main = main
        self._roots = _find_installed_roots()
        self._folders: dict[str, bool] = {}

    def owns(self, path: str, module: str) -> bool:
        """Return whether the file at `path`, imported as `module`, is to be instrumented."""
        return self.is_requested(module) or path == self.main or self.owns_folder(os.path.dirname(path))

    def is_requested(self, module: str) -> bool:
        """Return whether `module` is, or belongs to, a package of ``--instrument``."""
        return any(module == package or module.startswith(package + ".") for package in self.packages)

    def owns_folder(self, folder: str) -> bool:
        """Return whether files in `folder` are the user's."""
        known = self._folders.get(folder)
        if known is None:
            # Both a link into an installed package and a link out of site-packages count as installed.
            known = not any(self._is_installed(place) for place in {os.path.abspath(folder), os.path.realpath(folder)})
            self._folders[folder] = known
        return known

    def _is_installed(self, folder: str) -> bool:
        slashed = folder + os.sep
        return slashed.startswith(self._roots) or any(f"{os.sep}{name}{os.sep}" in slashed for name in _INSTALLED)


def _find_installed_roots() -> tuple[str, ...]:
    """Return folders, each ending in a separator, below which no file is the user's."""
    library = sys.platlibdir
    roots = {os.path.dirname(os.__file__), os.path.dirname(os.path.abspath(gemini.__file__))}
    for prefix in {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}:
        roots.update(os.path.join(prefix, name) for name in {"lib", library})
    roots |= {os.path.realpath(root) for root in roots}
    return tuple(sorted(root.rstrip(os.sep) + os.sep for root in roots))
