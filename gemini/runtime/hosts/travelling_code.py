"""Travelling code: the Python files of a program that workers on other hosts import, copied to a folder for Ray.

Classes that the script itself defines travel with the model. Classes of its other files are imported on the worker's
host, so these files must be there: all `.py` files below the script's folder, without data, environments and hidden
folders.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gemini.errors import ConfigError, Fault

_MOST_FILES, _MOST_BYTES = 5000, 64 << 20
_SKIPPED = ("__pycache__", "node_modules", "site-packages")


def copy_code(folder: Path, target: Path) -> int:
    """Copy the Python files below a folder; return how many. Raise ConfigError if they are too many to travel."""
    found, size = [], 0
    for path, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in _SKIPPED and not Path(path, name, "pyvenv.cfg").exists()
        ]
        found += [Path(path, name) for name in files if name.endswith(".py") and Path(path, name).is_file()]
        if len(found) > _MOST_FILES:
            raise _refuse(folder, f"more than {_MOST_FILES} Python files")
    for source in found:
        size += source.stat().st_size
        if size > _MOST_BYTES:
            raise _refuse(folder, f"more than {_MOST_BYTES >> 20} MB of Python files")
        place = target / source.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(source, place)
        except OSError as error:
            raise _refuse(folder, f"{source.name}, which cannot be read ({error.strerror})") from None
    return len(found)


def _refuse(folder: Path, what: str) -> ConfigError:
    remedy = "put the script and its modules into a folder of their own, or install the modules on all hosts"
    return ConfigError([Fault(f"the code cannot travel to other hosts: {folder} has {what}", remedy)])
