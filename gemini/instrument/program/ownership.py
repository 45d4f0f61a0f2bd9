"""Which files are the user's own: the ones Gemini instruments.

Not the user's own are the standard library, whatever is installed (site-packages, dist-packages, the library folder
of this Python or of its virtual environment) and Gemini itself. A package named by ``--instrument`` counts as the
user's own wherever it lies. The import hook and the code tree both ask here, so they always agree.

Loaded in the user's process before anything of the user's: it imports nothing that Python has not loaded already.
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
    """Tells the user's own files from installed ones.

    `packages` are installed ones to treat as the user's, and `main` is the program itself, wherever it lies.
    """

    def __init__(self, packages: Iterable[str] = (), main: str | None = None) -> None:
        self.packages = tuple(packages)
        self.main = main
        self._roots = _installed_roots()
        self._folders: dict[str, bool] = {}

    def owns(self, path: str, module: str) -> bool:
        """Whether the file at `path`, imported as `module`, is to be instrumented."""
        return self.named(module) or path == self.main or self.owns_folder(os.path.dirname(path))

    def named(self, module: str) -> bool:
        """Whether `module` is a package given by ``--instrument``, or lies in one."""
        return any(module == package or module.startswith(package + ".") for package in self.packages)

    def owns_folder(self, folder: str) -> bool:
        """Whether files in `folder` are the user's own."""
        known = self._folders.get(folder)
        if known is None:
            # A link into an installed package is installed, and so is a link to elsewhere in site-packages.
            known = not any(self._installed(place) for place in {os.path.abspath(folder), os.path.realpath(folder)})
            self._folders[folder] = known
        return known

    def _installed(self, folder: str) -> bool:
        slashed = folder + os.sep
        return slashed.startswith(self._roots) or any(f"{os.sep}{name}{os.sep}" in slashed for name in _INSTALLED)


def _installed_roots() -> tuple[str, ...]:
    """Folders, each ending in a separator, below which nothing is the user's own."""
    library = sys.platlibdir
    roots = {os.path.dirname(os.__file__), os.path.dirname(os.path.abspath(gemini.__file__))}
    for prefix in {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}:
        roots.update(os.path.join(prefix, name) for name in {"lib", library})
    roots |= {os.path.realpath(root) for root in roots}
    return tuple(sorted(root.rstrip(os.sep) + os.sep for root in roots))
