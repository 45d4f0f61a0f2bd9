"""Journal reader: the run journals of a folder, for `gemini explain` and other readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemini.errors import ArtifactError
from gemini.runtime.run_journal import FORMAT, ModelJournal, journal_files

_FIELDS = ("model", "workers", "plan", "verification", "steps", "reasons", "modules", "traces", "last_ms", "local_ms")


def read_newest(folder: Path) -> list[ModelJournal]:
    """Return the models of the last run that ended; raises ArtifactError."""
    for path in journal_files(folder):
        try:
            return _read_models(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"cannot read {path}: {error}\n    → run the script again") from error
    raise ArtifactError(
        f"{folder} holds no journal of a run\n    → run a script with workers first, or name its run folder: "
        "gemini explain --run-folder DIR"
    )


def _read_models(content: dict[str, Any]) -> list[ModelJournal]:
    if content["format"] != FORMAT:
        raise ValueError(f"it has format {content['format']}, this version reads {FORMAT}")
    return [_read_entry(entry) for entry in content["models"]]


def _read_entry(entry: dict[str, Any]) -> ModelJournal:
    return ModelJournal(**{name: entry[name] for name in _FIELDS})
