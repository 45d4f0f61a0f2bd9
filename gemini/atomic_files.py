"""Atomic files: a file appears complete or not at all."""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from gemini.errors import ArtifactError


def unused_path(folder: Path, prefix: str = "") -> Path:
    """Return a path in a folder that no run has used: the time, the process and a number."""
    stem, count = f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}", 1
    while (folder / f"{stem}-{count}").exists():
        count += 1
    return folder / f"{stem}-{count}"


def write_whole(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Replace the file at `path` by `content` atomically; on failure the previous file stays.

    `sync` waits until the content is on disk; a cache does not need that.
    """
    content = content.encode("utf-8") if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            _write_special(path, content)
            return
        target = path.resolve()
        draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            with open(draft, "xb") as file:
                file.write(content)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {path}: {error.strerror or error}\n"
            "    → give a path in a folder that exists and that you may write to"
        ) from error


def write_json(path: str | Path, data: Any) -> None:
    """Write plain data as indented JSON."""
    write_whole(Path(path), json.dumps(data, indent=1))


def read_json(path: str | Path) -> Any:
    """Read JSON; raises ArtifactError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON: {error}") from error


def _write_special(target: Path, content: bytes) -> None:
    """Write to a pipe or a device such as /dev/stdout, which cannot be replaced."""
    if target.is_dir():
        raise IsADirectoryError(21, "it is a folder")
    with open(target, "wb") as file:
        file.write(content)
