"""Stage folder: files written atomically, never over edits of the user.

New contents are written beside the target and replace it by one exchange of names, so that a crash, a kill or a full
disk leaves the old folder intact. A folder is replaced only if it has a manifest and its files are unedited. Other
files in it are retained.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.errors import ArtifactError
from gemini.pipe.manifest import NAME, hash_content, parse_manifest

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_IGNORED = ("__pycache__",)


@dataclass(frozen=True)
class FolderContents:
    """The manifest of a folder, its unedited files, and its edited or missing ones."""

    manifest: dict[str, Any]
    files: dict[str, bytes]
    changed: tuple[str, ...]  # one line per edited or missing file


def read_folder(folder: Path) -> FolderContents:
    """Read a stage folder; every file is read once, so that the verified bytes are those that are used."""
    path = folder / NAME
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ArtifactError(f"{folder} {what}\n    → name a folder that Piped.save wrote")
    try:
        manifest = parse_manifest(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise ArtifactError(f"{folder} has no {NAME}: it is not a folder of stages\n    → name another") from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
    files, changed = {}, []
    for name, expected in manifest["files"].items():
        try:
            content = (folder / name).read_bytes()
        except FileNotFoundError:
            changed.append(f"{name} is missing")
            continue
        except OSError as error:
            raise ArtifactError(f"{folder / name} cannot be read: {error.strerror}") from error
        if hash_content(content) == expected:
            files[name] = content
        else:
            changed.append(f"{name} was edited")
    return FolderContents(manifest, files, tuple(changed))


def check_replaceable(folder: Path, overwrite: bool) -> None:
    """Raise ArtifactError unless a folder can be written: new, empty, or an unedited stage folder (or `overwrite`)."""
    folder = folder.absolute()
    if folder.is_dir() and any(folder.iterdir()):
        try:
            changed = read_folder(folder).changed
        except ArtifactError as error:
            if (folder / NAME).is_file() and overwrite:
                changed = ()
            else:
                raise ArtifactError(f"{folder} is not replaced: {error}") from error
        if changed and not overwrite:
            listed = "\n".join(f"  - {line}" for line in changed)
            raise ArtifactError(
                f"{folder} is not replaced, its files have changed since they were written:\n{listed}\n"
                "    → overwrite=True (on the command line --overwrite) replaces them"
            )
    elif folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file\n    → name a folder")
    parent = next(path for path in folder.parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ArtifactError(f"{folder} cannot be written: {parent} is not a folder that may be written to")


def write_folder(folder: Path, files: Mapping[str, bytes], overwrite: bool) -> None:
    """Write files into a folder, replacing those of an earlier call."""
    check_replaceable(folder, overwrite)
    folder = folder.absolute()
    folder = folder.resolve() if folder.is_symlink() else folder
    fresh: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".new", dir=folder.parent))
        for name, content in files.items():
            _write(fresh / name, content)
        if folder.is_dir():
            _copy_other_files(folder, fresh, files)
            shutil.copymode(folder, fresh)
        else:
            fresh.chmod(0o777 & ~_umask())
        _sync(fresh)
        _replace_folder(fresh, folder)
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be written: {error.strerror or error}") from error
    finally:
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _copy_other_files(folder: Path, fresh: Path, files: Mapping[str, bytes]) -> None:
    """Copy the files that the old manifest does not list."""
    try:
        listed = {NAME, *read_folder(folder).manifest["files"]}
    except ArtifactError:
        listed = {NAME}
    for path in folder.iterdir():
        if path.name in listed or path.name in files or path.name in _IGNORED:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, fresh / path.name, symlinks=True)
        else:
            shutil.copy2(path, fresh / path.name, follow_symlinks=False)


def _replace_folder(fresh: Path, folder: Path) -> None:
    if not folder.exists():
        fresh.rename(folder)
    elif not _exchange(fresh, folder):
        # Two renames, for file systems without exchange: for a moment the old folder has another name.
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
        folder.rename(aside)
        try:
            fresh.rename(folder)
        except OSError:
            aside.rename(folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically (Linux); return False where that is not supported."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
