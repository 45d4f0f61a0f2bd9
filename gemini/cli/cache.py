"""Show or empty the cache: captured graphs, measurements, plans, and journals of runs without workers.

gemini cache                 folder, entries and size of each kind
gemini cache --clean         removes all entries
gemini cache --clean plans profiles
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from gemini.errors import UsageError

SUMMARY = "show or empty the cache of graphs, profiles and plans"
_ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini cache`."""
    parser.add_argument("--clean", nargs="*", metavar="KIND", help="remove the entries of these kinds (all)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the contents, after removing what is requested."""
    from gemini.cache_files import cache_folder

    root = cache_folder("")
    assert root is not None
    kinds = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    if args.clean is not None:
        unknown = [name for name in args.clean if name not in kinds]
        if unknown:
            known = ", ".join(kinds) or "none: the cache is empty"
            raise UsageError(f"no cache of {', '.join(unknown)}\n    → the kinds are {known}")
        for name in args.clean or kinds:
            shutil.rmtree(root / name, ignore_errors=True)
    found = {name: _measure(root / name) for name in kinds if (root / name).is_dir()}
    if args.json:
        entries = {name: {"entries": count, "bytes": size} for name, (count, size) in found.items()}
        print(json.dumps({"folder": str(root), "kinds": entries}, indent=1))
        return 0
    print(f"{root}: {sum(size for _, size in found.values()) / 1e6:.1f} MB")
    for name, (count, size) in found.items():
        print(f"  {name:<12} {count:>5} entr{'ies' if count != 1 else 'y'} {size / 1e6:>9.1f} MB")
    return 0


def _measure(folder: Path) -> tuple[int, int]:
    """Return the number of entries of a kind and their bytes."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(1 for _ in folder.iterdir()), sum(_size(path) for path in files)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # another process has removed it
        return 0
