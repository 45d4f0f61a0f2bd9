"""The cache: measurements on disk, by node signature, device and versions.

One small JSON file a class. A file is only believed if it is complete, of this format and names the very signature
asked for; anything else is as if it were not there, and is overwritten.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from gemini import __version__
from gemini.profiling.class_measurement import Measurement
from gemini.profiling.cost_signature import digest

FORMAT = 2


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/gemini/profiles`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemini" / "profiles"


class Cache:
    """Measurements of one device, in a folder; no folder is no cache."""

    def __init__(self, folder: Path | None, device: str) -> None:
        self.folder = folder
        python = ".".join(map(str, sys.version_info[:2]))
        self.setting = f"{device}\ntorch {torch.__version__}\ngemini {__version__}\npython {python}\nformat {FORMAT}"
        self.hits = 0

    def _path(self, key: str) -> Path:
        if self.folder is None:
            raise ValueError("there is no cache folder")
        return self.folder / f"{digest(key)}.json"

    def read(self, signature: str) -> Measurement | None:
        """What is known about a class, if anything can be trusted."""
        if self.folder is None:
            return None
        key = f"{self.setting}\n{signature}"
        try:
            data = json.loads(self._path(key).read_text(encoding="utf-8"))
            if data["key"] != key:
                return None
            found = Measurement.from_json(data["measurement"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        self.hits += 1
        return found

    def write(self, signature: str, measurement: Measurement) -> None:
        """Remember a class; a folder that cannot be written to is no error."""
        if self.folder is None:
            return
        key = f"{self.setting}\n{signature}"
        text = json.dumps({"key": key, "measurement": measurement.to_json()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(name, self._path(key))  # other processes see the old file or the new one, never half of one
            except OSError:
                Path(name).unlink(missing_ok=True)
        except OSError:
            return
