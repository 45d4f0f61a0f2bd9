"""Script site: the line of a script from which Gemini was called, past frames of torch and of Gemini itself."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

_INSIDE = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), torch.__file__))


def find_script_site() -> str:
    """Return file and line of the innermost frame of the script, its libraries included; '' where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE) and not name.startswith("<"):
            return f"{os.path.abspath(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
