"""User code: modules of the script, as opposed to installed libraries."""

from __future__ import annotations

import functools
import io
import sys
from pathlib import Path

_FOLDERS = {*(path for path in sys.path if path.endswith("-packages")), str(Path(io.__file__).parent)}
_INSTALLED = tuple(str(Path(folder).resolve()) for folder in (*_FOLDERS, str(Path(__file__).parent)))


@functools.lru_cache(maxsize=4096)
def is_user_module(name: str | None) -> bool:
    """Return whether a module belongs to the script, and not to an installed package or the standard library."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name or ""), "__file__", None)
    return file is not None and not str(Path(file).resolve()).startswith(_INSTALLED)
