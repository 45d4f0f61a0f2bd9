"""Real files: the standard library, its tests with their odd encodings, and the installed packages."""

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def files(limit: int, *, largest: int = 400_000) -> list[Path]:
    """About `limit` Python files spread over all there are, a fifth of them odd ones from Python's own tests."""
    found = [path for path in _all() if path.stat().st_size <= largest]
    odd = [path for path in _odd() if path.stat().st_size <= largest]
    return sorted({*_spread(odd, limit // 5), *_spread(found, limit)})


@cache
def _all() -> list[Path]:
    return sorted({path for root in _roots() for path in _below(Path(root))})


@cache
def _odd() -> list[Path]:
    return [path for path in _all() if _is_odd(path)]


def _spread(paths: list[Path], count: int) -> list[Path]:
    return paths[:: max(1, len(paths) // max(1, count))]


def _roots() -> list[str]:
    return [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.dirname(ast.__file__)]


def _below(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("__pycache__", "lib2to3")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _is_odd(path: Path) -> bool:
    if "test" not in path.parts or sys.prefix in str(path):
        return False
    data = path.read_bytes()
    return b"\r" in data or b"\x0c" in data or not data.isascii() or b"\x00" in data or data[-1:] not in (b"\n", b"")


def parses(data: bytes) -> bool:
    """Whether Python can read the file at all (its own test data has some that it must not)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
