"""Dumps: a program's instrumented sources as a folder that plain `python` runs.

    program                        folder
    train.py                       train.py
    models/__init__.py             models/__init__.py      modules lie by their names, so that imports find
    models/net.py                  models/net.py           them before the originals
    models/weights.json            models/weights.json     a link: data of packages is not copied
    (-m tool.train)                __main__.py             starts the module:  python FOLDER

The folder is written beside its target and renamed when complete. An existing target is replaced only if it is empty or
an earlier dump (it has the marker file).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from gemini.errors import ArtifactError
from gemini.instrument.output import DUMP_MARKER
from gemini.instrument.output.dump_header import render_annotated, render_verbatim
from gemini.instrument.pass_manager.instrumented_file import Instrumented
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.program.package_data import find_links, find_other_modules
from gemini.instrument.text.parser import mute_parser_warnings
from gemini.instrument.text.source_file import SourceFile

_RUNNER = """\
# Written by Gemini: starts the dumped module as `python -m {module}` starts the original.
import runpy
{begin}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class DumpedFile:
    """One file of a dump: its path in the folder, its bytes, and its instrumentation (None: a copy)."""

    place: PurePath
    data: bytes
    done: Instrumented | None = None
    origin: str = ""


@dataclass
class Dump:
    """The files of a dump and the links to package data."""

    files: list[DumpedFile] = field(default_factory=list)
    links: dict[PurePath, Path] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)  # name → place
    start: str = ""  # the argument of `python`, relative to the folder
    arguments: tuple[str, ...] = ()  # of the program, where it was run for the dump

    @property
    def changed(self) -> int:
        """The number of files that a pass changed."""
        return sum(1 for file in self.files if file.done is not None and file.done.changed)

    def patches(self) -> list[tuple[str, Instrumented]]:
        """Return (shown path, file) of the instrumented files, for `unified_diff`."""
        return [(file.place.as_posix(), file.done) for file in self.files if file.done is not None]


def build_dump(
    sources: Sequence[SourceFile],
    manager: PassManager,
    *,
    module: str = "",
    argv0: str = "",
    is_parallel: bool = False,
) -> Dump:
    """Return the dump of a program from its sources, the script first; `module` is the target of ``-m``, if any.

    With `is_parallel` the program begins with `__gemini__.run_parallel`.
    """
    script = None if module else sources[0]
    own = [*sources, *find_other_modules(sources)]
    prefer = any("sys.path" in _text(source) or "addsitedir" in _text(source) for source in own)
    dump = Dump(start="" if script is None else os.path.basename(script.path))
    places: set[PurePath] = set()
    for source in own:
        main = source is script
        place = PurePath(dump.start) if main else path_in_dump(source)
        if not main:
            dump.modules[source.module] = place.as_posix()
        if place not in places:  # a module of the script may import the script
            places.add(place)
            calls = (("prefer",) if prefer and main else ()) + (("run_parallel",) if is_parallel and main else ())
            dump.files.append(_dump_file(source, place, manager, argv0=argv0 if main else "", calls=calls))
    dump.links = {place: path for place, path in find_links(own).items() if place not in places}
    if module:
        begin = "import gemini.managed\n\ngemini.managed.run_parallel(__file__)\n" if is_parallel else ""
        dump.files.append(DumpedFile(PurePath("__main__.py"), _RUNNER.format(module=module, begin=begin).encode()))
    return dump


def path_in_dump(source: SourceFile) -> PurePath:
    """Return the path of a module in a dump: by its name."""
    *folders, last = source.module.split(".")
    suffix = os.path.splitext(source.path)[1] or ".py"
    if source.is_package:
        return PurePath(*folders, last, f"__init__{suffix}")
    return PurePath(*folders, f"{last}{suffix}")


def _dump_file(
    source: SourceFile, place: PurePath, manager: PassManager, *, argv0: str, calls: Sequence[str]
) -> DumpedFile:
    try:
        with mute_parser_warnings():
            done = manager.run(source)
            data = render_annotated(done, file=os.path.abspath(source.path), argv0=argv0, calls=calls)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return DumpedFile(
            place, render_verbatim(source, f"not instrumented: {type(error).__name__}"), None, source.path
        )
    return DumpedFile(place, data, done, source.path)


def _text(source: SourceFile) -> str:
    try:
        return source.text
    except (SyntaxError, ValueError):
        return ""


def write_dump(dump: Dump, folder: Path, add: Callable[[Path], None] | None = None) -> None:
    """Write `dump` as `folder`, atomically; `add` writes further files."""
    target = Path(os.path.realpath(folder))
    check_folder(folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            _fill(dump, draft)
            if add is not None:
                add(draft)
            _publish(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ArtifactError(
            f"cannot write the dump {folder}: {error.strerror or error}\n    → name a folder that can be written"
        ) from error


def check_folder(folder: Path) -> None:
    """Raise unless `folder` is absent, empty or an earlier dump."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        file = next((one for one in (folder, *folder.parents) if one.is_file()), folder)
        raise ArtifactError(f"{file} is a file\n    → name a folder for the dump, new or empty") from None
    except OSError as error:
        raise ArtifactError(
            f"cannot read the folder {folder}: {error.strerror or error}\n    → name another folder for the dump"
        ) from error
    if names and DUMP_MARKER not in names:
        raise ArtifactError(
            f"{folder} is not empty and not an earlier dump (it has no {DUMP_MARKER})\n    → name a new or empty folder"
        )


def _fill(dump: Dump, draft: Path) -> None:
    draft.chmod(0o777 & ~_umask())  # temporary folders are private; the dump is not
    for file in dump.files:
        path = draft / file.place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
        if file.origin:
            path.chmod((os.stat(file.origin).st_mode & 0o777) | 0o600)
    for place, origin in dump.links.items():
        link = draft / place
        link.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(link):
            link.symlink_to(origin)
    marker: dict[str, object] = {"made_by": "gemini", "start": dump.start or ".", "modules": dump.modules}
    if dump.arguments:
        marker["arguments"] = dump.arguments
    (draft / DUMP_MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _publish(draft: Path, target: Path) -> None:
    """Rename the finished folder to its target; an earlier dump is removed only after that."""
    if not target.exists() or not os.listdir(target):
        os.replace(draft, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    os.replace(target, old / "old")
    try:
        os.replace(draft, target)
    except OSError:
        os.replace(old / "old", target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
