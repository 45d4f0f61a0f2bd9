"""Imports in a dumped program: its own modules first, whatever it does to `sys.path`.

A dump lies in another folder than the original. A script that puts folders of its own in front of `sys.path` would
find the originals there; dumped scripts that change `sys.path` begin with a call of `prefer`.
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
        """The module as dumped; None for all others. A finder imports nothing: it would have to find that first."""
        place = self.modules.get(name)
        if place is None:
            return None
        file = os.path.join(self.folder, place)
        package = [os.path.dirname(file)] if os.path.basename(file).startswith("__init__.") else None
        return self._make_spec(name, file, submodule_search_locations=package)


def prefer(file: str) -> None:
    """Let imports find the modules dumped beside `file` first."""
    import json

    folder = os.path.dirname(os.path.abspath(file))
    if any(isinstance(finder, DumpedModules) and finder.folder == folder for finder in sys.meta_path):
        return
    try:
        with open(os.path.join(folder, DUMP_MARKER), encoding="utf-8") as marker:
            modules = json.load(marker)["modules"]
    except (OSError, ValueError, KeyError):  # copied out of its folder: an ordinary script again
        return
    sys.meta_path.insert(0, DumpedModules(folder, modules))
