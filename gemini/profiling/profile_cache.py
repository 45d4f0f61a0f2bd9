"""Profile cache: measurements on disk, keyed by node signature, device and versions.

One small JSON file per class. A file is used only if it is complete, of this format and contains the requested key;
anything else is ignored and overwritten.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from gemini import __version__
from gemini.cache_files import write_entry
from gemini.profiling.class_measurement import Measurement
from gemini.profiling.cost_signature import digest

FORMAT = 2


class ProfileCache:
    """Measurements of one device in a folder; without a folder the cache is empty."""

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
        """Return the stored measurement of a class, if there is a valid one."""
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
        """Store the measurement of a class; an unwritable folder is no error."""
        if self.folder is None:
            return
        key = f"{self.setting}\n{signature}"
        text = json.dumps({"key": key, "measurement": measurement.to_json()})
        write_entry(self._path(key), text)
