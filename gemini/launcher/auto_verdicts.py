"""Auto verdicts: the models that stay local on this machine, remembered for later runs."""

from __future__ import annotations

import json
import os
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from gemini.cache_files import cache_folder, evict_oldest, hash_facts, mark_used, software_versions, write_entry

if TYPE_CHECKING:
    from torch import nn

    from gemini.config.gemini_config import GeminiConfig

_LIMIT = 256  # entries


class Verdicts:
    """Verdicts on disk; a model is known by the shapes of its parameters and the time of its step."""

    def __init__(self, config: GeminiConfig) -> None:
        self._settings = sorted(config.to_dict().items())
        self._folder = cache_folder("verdicts")

    def find(self, model: nn.Module, step_ms: float) -> str:
        """Return why a model stays local, as an earlier run has found; '' where nothing is known."""
        path = self._path(model, step_ms)
        try:
            reason = json.loads(path.read_text(encoding="utf-8"))["local"] if path is not None else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        if path is None or not isinstance(reason, str):
            return ""
        mark_used(path)
        return reason

    def store(self, model: nn.Module, step_ms: float, reason: str) -> None:
        """Remember why a model stays local."""
        path = self._path(model, step_ms)
        if path is not None:
            write_entry(path, json.dumps({"local": reason}))
            evict_oldest(path.parent, _LIMIT)

    def _path(self, model: nn.Module, step_ms: float) -> Path | None:
        if self._folder is None:
            return None
        shapes = [(name, tuple(one.shape), str(one.dtype)) for name, one in model.named_parameters()]
        cores = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
        size = round(log2(max(step_ms, 1.0)))  # another batch or a faster machine is another question
        facts = [software_versions(), self._settings, type(model).__qualname__, shapes, cores, size]
        return self._folder / f"{hash_facts(facts)}.json"
