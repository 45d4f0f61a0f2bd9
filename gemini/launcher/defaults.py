"""Choosing: workers and micro-batches where a configuration leaves them open, for this machine."""

from __future__ import annotations

import os

from gemini.config.gemini_config import GeminiConfig
from gemini.config.modes import Mode

_MOST = 8  # workers that are started unasked
_PIECES = 2  # micro-batches a worker


def devices() -> int:
    """The workers that this machine has room for: one a GPU, else one a core."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return min(count if count > 1 else len(os.sched_getaffinity(0)), _MOST)


def completed(config: GeminiConfig) -> GeminiConfig:
    """The configuration with workers and micro-batches."""
    values = config.to_dict()
    if config.device_mapping is None and not config.workers:
        if config.mode is Mode.SHARDING:
            values["sharding_size"] = config.sharding_size or max(2, devices())
        elif not config.pipeline_degree:
            values["pipeline_degree"] = max(2, devices() // (config.sharding_size or 1))
    values["accum_degree"] = config.accum_degree or _PIECES * _stages(values)
    return GeminiConfig(**values)


def _stages(values: dict[str, object]) -> int:
    mapping, workers, degree = values["device_mapping"], values["workers"], values["pipeline_degree"]
    if isinstance(mapping, dict):
        return len(mapping)
    return degree if isinstance(degree, int) else workers if isinstance(workers, int) else 2
