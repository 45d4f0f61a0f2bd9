"""The journal of a run: which path each model's steps took, and what kept them from a faster one.

Paths, the fastest first:

    overlapped     by a plan: micro-batches go through the workers at the same time
    undivided      by a plan, the batch as one micro-batch: only gradients of weights overlap
    dispatched     the program's forward here, its modules in the workers, one batch at a time
    local          in the program's own process

It is written when the program ends, one file a process, and `gemini explain` reads the newest.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gemini.errors import ArtifactError
from gemini.schedule.files import write_whole

OVERLAPPED, UNDIVIDED, DISPATCHED, LOCAL = PATHS = ("overlapped", "undivided", "dispatched", "local")
FORMAT = 1
_KEPT = 20  # files of earlier runs


@dataclass
class Story:
    """One model in one run."""

    model: str
    workers: int
    plan: str = ""  # stages and schedule, where there is one
    steps: dict[str, int] = field(default_factory=dict)  # calls by path
    reasons: dict[str, int] = field(default_factory=dict)  # why a call took a slower path, and how often
    traces: list[str] = field(default_factory=list)

    def took(self, path: str, reason: str = "") -> None:
        """A call has taken a path; `reason` says why not a faster one."""
        self.steps[path] = self.steps.get(path, 0) + 1
        if reason:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def __str__(self) -> str:
        taken = ", ".join(f"{self.steps[path]} {path}" for path in PATHS if self.steps.get(path)) or "no calls"
        lines = [f"{self.model} on {self.workers} workers: {taken}"]
        if self.plan:
            lines.append(f"  plan: {self.plan}")
        lines += [f"  {count} × not faster: {reason}" for reason, count in Counter(self.reasons).most_common()]
        lines += [f"  trace: {path}" for path in self.traces]
        return "\n".join(lines)


class Journal:
    """The stories of a process. Written at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.owner = folder, os.getpid()
        self.stories: list[Story] = []
        atexit.register(self._end)

    def story(self, model: str, workers: int) -> Story:
        """A new story."""
        self.stories.append(Story(model, workers))
        return self.stories[-1]

    def write(self) -> Path:
        """Write it as it is now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"explain-{self.owner}.json"
        told = {"format": FORMAT, "time": time.time(), "models": [asdict(story) for story in self.stories]}
        write_whole(path, json.dumps(told, indent=1) + "\n")
        for old in _files(self.folder)[_KEPT:]:
            with contextlib.suppress(OSError):
                old.unlink()
        return path

    def _end(self) -> None:
        if os.getpid() == self.owner and any(story.steps for story in self.stories):
            with contextlib.suppress(ArtifactError, OSError):  # a full disk is no reason to end with an error
                self.write()


_journals: dict[tuple[int, Path], Journal] = {}


def journal_of(folder: Path) -> Journal:
    """The journal of this process in a run folder."""
    key = os.getpid(), folder
    if key not in _journals:
        _journals[key] = Journal(folder)
    return _journals[key]


def _files(folder: Path) -> list[Path]:
    """Journals, the newest first."""
    found = [(path.stat().st_mtime, path) for path in folder.glob("explain-*.json")]
    return [path for _, path in sorted(found, reverse=True)]


def read_newest(folder: Path) -> list[Story]:
    """The stories of the last run that ended; raises ArtifactError."""
    for path in _files(folder) if folder.is_dir() else ():
        try:
            return [_story(entry) for entry in json.loads(path.read_text(encoding="utf-8"))["models"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"cannot read {path}: {error}\n    → run the program again") from error
    raise ArtifactError(
        f"{folder} holds no journal of a run\n    → run a program with workers first, or name its run folder: "
        "gemini explain --run-folder DIR"
    )


def _story(entry: dict[str, Any]) -> Story:
    return Story(**{name: entry[name] for name in ("model", "workers", "plan", "steps", "reasons", "traces")})
