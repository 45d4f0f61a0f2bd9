"""Imports of a dumped program: modules of the dump first, for any `sys.path`.

A script that puts folders in front of `sys.path` would import the original modules from them instead of the dumped
ones, so a dumped script that changes `sys.path` begins with a call of `prefer`.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

from gemini.instrument.output import DUMP_MARKER


class DumpedModules:
    """A finder for the modules that a dump's marker file lists."""

    def __init__(self, folder: str, modules: dict[str, str]) -> None:
        from importlib.util import spec_from_file_location

        self.folder = folder
        self.modules = modules
        self._make_spec = spec_from_file_location

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return the spec of a dumped module; None for other modules. A finder must not import."""
        place = self.modules.get(name)
        if place is None:
            return None
        file = os.path.join(self.folder, place)
        package = [os.path.dirname(file)] if os.path.basename(file).startswith("__init__.") else None
        return self._make_spec(name, file, submodule_search_locations=package)


def prefer(file: str) -> None:
    """Make imports find the modules dumped beside `file` first."""
    import json

    folder = os.path.dirname(os.path.abspath(file))
    if any(isinstance(finder, DumpedModules) and finder.folder == folder for finder in sys.meta_path):
        return
    try:
        with open(os.path.join(folder, DUMP_MARKER), encoding="utf-8") as marker:
            modules = json.load(marker)["modules"]
    except (OSError, ValueError, KeyError):  # copied out of the dump: an ordinary script
        return
    sys.meta_path.insert(0, DumpedModules(folder, modules))
