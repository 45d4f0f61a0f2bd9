"""Entry points of a group, without `importlib.metadata` where no installed package declares any.

Importing `importlib.metadata` takes longer than the rest of the launcher. So the files that declare entry points are
searched for the name of the group first, and the library is imported only on a match.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def entry_points(group: str) -> Sequence[EntryPoint]:
    """Return the entry points of `group`, sorted by name."""
    if not _is_declared(group):
        return ()
    from importlib import metadata

    return sorted(metadata.entry_points(group=group), key=lambda entry: entry.name)


def _is_declared(group: str) -> bool:
    """Whether any distribution on `sys.path` names the group; True for archives, which are not opened."""
    wanted = group.encode()
    return any(
        wanted in text for folder in dict.fromkeys(sys.path) for text in _declarations(folder or os.curdir, wanted)
    )


def _declarations(folder: str, wanted: bytes) -> list[bytes]:
    if not os.path.isdir(folder):
        return [wanted] if folder.endswith((".egg", ".whl")) else []
    found = []
    for name in os.listdir(folder):
        if name.endswith((".dist-info", ".egg-info", ".egg")):
            inside = os.path.join(folder, name, "EGG-INFO" if name.endswith(".egg") else "")
            try:
                with open(os.path.join(inside, "entry_points.txt"), "rb") as file:
                    found.append(file.read())
            except OSError:
                continue
    return found
