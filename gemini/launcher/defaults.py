"""The configuration of a session, and defaults for the workers and micro-batches it leaves open."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.config.gemini_config import GeminiConfig
from gemini.config.modes import Mode

if TYPE_CHECKING:
    from gemini.launcher.process.launch_session import Session

_IS_LAUNCHED = "GEMINI_NODES" in os.environ
_MOST_WORKERS = 8  # default workers
_MICROBATCHES_PER_WORKER = 2  # micro-batches per worker


def load_config(session: Session, folder: str) -> GeminiConfig:
    """Return the configuration of a session; its paths are relative to `folder`."""
    config = GeminiConfig.load(session["config"], flags=session["flags"])
    paths = {"run_folder": str(Path(folder, config.run_folder))}
    if config.report is not None:
        paths["report"] = str(Path(folder, config.report))
    return GeminiConfig(**_with_nodes(config.to_dict()) | paths)


def _with_nodes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the nodes on which a launcher has started the program: one replica on each."""
    if not _IS_LAUNCHED:
        return values
    from gemini.runtime.hosts.node_cluster import launched_nodes

    nodes = launched_nodes()
    return values if nodes is None else values | {"cluster": "nodes", "replicas": values["replicas"] or nodes.number}


def count_devices() -> int:
    """Return the number of workers for this machine: one per GPU, else one per core."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return min(count, _MOST_WORKERS) if count > 1 else count_cores()


def count_cores() -> int:
    """Return the number of workers for this machine without GPUs: one per core."""
    return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)


def fill_defaults(config: GeminiConfig, count: Callable[[], int] = count_devices) -> GeminiConfig:
    """Return the configuration with workers and micro-batches filled in; `count` returns the workers of the machine."""
    values = config.to_dict()
    if config.device_mapping is None and not config.workers:
        if config.mode is Mode.SHARDING:
            values["sharding_size"] = config.sharding_size or max(2, count())
        elif not config.pipeline_degree:
            fewest = 1 if (config.replicas or 1) > 1 else 2
            values["pipeline_degree"] = max(fewest, count() // ((config.sharding_size or 1) * (config.replicas or 1)))
    if config.mode is Mode.SHARDING:  # one stage: micro-batches would only make its products smaller
        values["accum_degree"] = config.accum_degree or 1
    replicas = config.replicas or 1
    per_replica = _count_stages(values) // replicas if config.workers else _count_stages(values)
    default = _MICROBATCHES_PER_WORKER * per_replica if per_replica > 1 else 1
    values["accum_degree"] = values["accum_degree"] or replicas * default
    return GeminiConfig(**values)


def _count_stages(values: dict[str, object]) -> int:
    mapping, workers, degree = values["device_mapping"], values["workers"], values["pipeline_degree"]
    if isinstance(mapping, dict):
        return len(mapping)
    return degree if isinstance(degree, int) else workers if isinstance(workers, int) else 2
