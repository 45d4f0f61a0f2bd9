"""Verdicts kept in a file, a line each, so that a sweep can be taken up again and single programs judged anew."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from conformance.scripts.verdict import Verdict


def read(path: Path) -> dict[str, Verdict]:
    """The last verdict on each program."""
    if not path.exists():
        return {}
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {entry["name"]: Verdict(**{**entry, "seconds": tuple(entry["seconds"])}) for entry in entries}


def add(path: Path, verdict: Verdict) -> None:
    """Keep one more."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(verdict)) + "\n")
