"""Package data: files that a dump needs although no import names them.

A package may import its modules by computed names, list its folder, or read data in it: all modules of every package of
the program belong to a dump, and the other files in its folder are linked. A program that imports by computed names may
use any file beside its script.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from gemini.instrument.output import DUMP_MARKER
from gemini.instrument.text.source_file import SourceFile

_MOST = 5000  # files of one package; a larger folder is not a package
_SOURCE = (".py",)
_COMPILED = (".so", ".pyd")
_COMPUTED = ("import_module", "__import__", "run_module", "run_path", "iter_modules")


def find_other_modules(sources: Sequence[SourceFile]) -> list[SourceFile]:
    """Return the modules of the program's packages, and possible ones beside the script, that `sources` lacks."""
    known = {os.path.realpath(source.path) for source in sources}
    found: dict[str, SourceFile] = {}
    for name, folder in package_folders(sources).items():
        for path in _files(folder):
            if path.suffix in _SOURCE and os.path.realpath(path) not in known:
                module = _module_name(name, folder, path)
                if module and module not in found:
                    found[module] = _read_source(path, module)
    for path in _neighbours(sources):
        if path.suffix in _SOURCE and path.stem.isidentifier() and os.path.realpath(path) not in known:
            found.setdefault(path.stem, _read_source(path, path.stem))
    return [source for source in found.values() if source.data or source.is_package]


def find_links(sources: Sequence[SourceFile]) -> dict[PurePath, Path]:
    """Return the links of a dump: to the other files of packages, and to compiled modules beside the script."""
    links: dict[PurePath, Path] = {}
    for name, folder in package_folders(sources).items():
        for path in _files(folder):
            if path.suffix not in _SOURCE:
                links[PurePath(*name.split("."), path.relative_to(folder))] = path.absolute()
    script = Path(sources[0].path).parent
    for path in sorted(script.glob("*")) if script.is_dir() else ():
        if path.suffix in _COMPILED:
            links[PurePath(path.name)] = path.absolute()
    return links


def package_folders(sources: Sequence[SourceFile]) -> dict[str, Path]:
    """Return the top-level packages of the program and their folders, including namespace packages."""
    found: dict[str, Path] = {}
    for source in sources:
        name = source.module.partition(".")[0]
        depth = source.module.count(".") + source.is_package
        if depth and name != "__main__":
            folder = Path(source.path).parent
            for _ in range(depth - 1):
                folder = folder.parent
            found.setdefault(name, folder)
    return found


def _neighbours(sources: Sequence[SourceFile]) -> list[Path]:
    if not any(word.encode() in source.data for source in sources for word in _COMPUTED):
        return []
    folder = Path(sources[0].path).parent
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def _files(folder: Path) -> list[Path]:
    """Return the files below `folder`, without hidden ones and bytecode caches; none if there are too many."""
    found: list[Path] = []
    for path in _walk(folder):
        found.append(path)
        if len(found) > _MOST:
            return []
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        if "pyvenv.cfg" in files or DUMP_MARKER in files:  # a virtual environment or a dump inside the package
            folders.clear()
            continue
        yield from (Path(root, name) for name in sorted(files) if not name.startswith("."))


def _module_name(package: str, folder: Path, path: Path) -> str:
    parts = [package, *path.relative_to(folder).with_suffix("").parts]
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) if all(part.isidentifier() for part in parts) else ""


def _read_source(path: Path, module: str) -> SourceFile:
    try:
        return SourceFile.read(path, module)
    except OSError:
        return SourceFile(os.fspath(path), b"", module)
