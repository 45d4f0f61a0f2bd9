"""Results of sweeps: one JSON line a model, in one file a shard, with the versions they were made with.

A row carries digests of the code that was judged, so that a table can say whether all its rows are of one version.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import gemini

Row = dict[str, Any]
CAPTURE = ("capture",)
CUTTING = ("capture", "profiling", "partition", "codegen", "pipe")


@cache
def digest(parts: tuple[str, ...]) -> str:
    """A short hash of the sources of some parts of the package."""
    root = Path(gemini.__file__).parent
    made = hashlib.sha256()
    for path in sorted(path for part in parts for path in (root / part).rglob("*.py")):
        made.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return made.hexdigest()[:10]


@cache
def versions() -> Row:
    """What rows of now are made with."""
    found = {"torch": torch.__version__, "transformers": "", "commit": _commit()}
    try:
        import transformers
    except ImportError:
        return found
    return {**found, "transformers": transformers.__version__}


def _commit() -> str:
    """The commit of the code; ZOO_COMMIT says it for a copy without a history."""
    told = os.environ.get("ZOO_COMMIT", "")
    if told:
        return told
    root = Path(gemini.__file__).parent.parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=30, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "gemini", "conformance")
    return git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else "")


def read(path: Path) -> dict[str, Row]:
    """The rows of a file by model; the last of a model counts."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {row["name"]: row for row in rows}


def append(path: Path, row: Row) -> None:
    """Add a row, at once: a sweep that is stopped keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, sorted by name, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in sorted(rows, key=lambda row: str(row["name"])))
    path.write_text(text)
