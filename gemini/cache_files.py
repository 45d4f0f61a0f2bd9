"""Cache files: the folder of every on-disk cache, the key of an entry, its atomic write and its eviction.

    $XDG_CACHE_HOME/gemini/       by default in ~/.cache
        graphs/KEY/               captured graphs (`gemini.cache.graphs`)
        profiles/KEY.json         measurements of nodes (`gemini.profiling.profile_cache`)
        plans/KEY.json            step plans (`gemini.cache.plans`)
        runs/KEY.json             the last run without workers, by run folder (`gemini.runtime.run_journal`)

A cache is never an error: an entry that cannot be written is not there, and processes that share a folder see whole
entries only.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gemini import __version__
from gemini.atomic_files import write_whole
from gemini.errors import ArtifactError


def cache_folder(kind: str, cache: bool | str | Path = True) -> Path | None:
    """Return the folder of one kind of entries; None where there is no cache. `cache` may name another root."""
    if not cache:
        return None
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemini"
    return (default if cache is True else Path(cache)) / kind


def software_versions() -> dict[str, str]:
    """Return the versions that generated files and cached results depend on."""
    import torch

    return {"gemini": __version__, "torch": torch.__version__, "python": platform.python_version()}


def hash_facts(facts: Iterable[Any]) -> str:
    """Return the key of an entry: it differs where any of the facts does."""
    return hashlib.sha256(repr(list(facts)).encode()).hexdigest()[:32]


def write_entry(path: Path, text: str) -> None:
    """Write an entry atomically; that it cannot be written is no error."""
    with suppress(OSError, ArtifactError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, sync=False)


def mark_used(path: Path) -> None:
    """Make an entry the last to be evicted."""
    with suppress(OSError):  # another process may have replaced it
        os.utime(path)


def evict_oldest(folder: Path, limit: int, pattern: str = "[!.]*") -> None:
    """Remove the least recently used entries of a pattern beyond `limit`."""
    with suppress(OSError):
        entries = sorted(folder.glob(pattern), key=_modification_time)
        for path in entries[:-limit]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _modification_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0
