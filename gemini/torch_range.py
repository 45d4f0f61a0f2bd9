"""Torch range: the versions of torch that the tests cover; any other is refused before anything starts."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from gemini.errors import TorchVersionError

OLDEST, NEWEST = (2, 9), (2, 15)


def check_torch() -> None:
    """Raise TorchVersionError for a torch outside the range, without importing it."""
    version = _find_version()
    if version and not OLDEST <= _minor(version) <= NEWEST:
        raise TorchVersionError(
            f"torch {version} is installed; Gemini's tests cover {_text(OLDEST)} to {_text(NEWEST)}\n"
            f"    → pip install '{requirement()}'"
        )


def requirement() -> str:
    """Return the range as a pip requirement."""
    return f"torch>={_text(OLDEST)},<{_text((NEWEST[0], NEWEST[1] + 1))}"


def _find_version() -> str:
    """Return the version of torch; '' where it is not installed or unknown."""
    loaded = sys.modules.get("torch")
    if loaded is not None:
        return str(getattr(loaded, "__version__", ""))
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    file = Path(spec.origin).with_name("version.py")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.split("=")[1].strip(" \"'") for line in lines if line.startswith("__version__ =")), "")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
