"""Simulation request: model, cluster and configuration from a file and from flags.

    {"model": "llama3-70b", "cluster": "h100", "parallel": {"devices": 256, "batch": 512, "tensor": 8, "zero": 3}}

`model` is a preset, a table of sizes or {"capture": "module:function"}; `cluster` is a preset, a file or an object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gemini.cluster.cluster_description import Cluster
from gemini.cluster.cluster_file import read_cluster, read_document
from gemini.errors import ConfigError, Fault
from gemini.nearest_name import remedy
from gemini.tune.layer_cost import CostModel
from gemini.tune.parallel_config import ParallelConfig, read_parallel
from gemini.tune.transformer_costs import TransformerCosts
from gemini.tune.transformer_model import read_transformer

KEYS = ("model", "cluster", "parallel", "devices", "batch", "sequence", "layout")
Capture = Callable[[str, Cluster, str], CostModel]  # target, cluster, precision


@dataclass(frozen=True)
class SimulationRequest:
    """What to simulate."""

    model: CostModel
    cluster: Cluster
    config: ParallelConfig
    layout: tuple[int, ...] = ()


def read_request_file(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML file with a request; unknown keys are an error."""
    data = read_document(path)
    if not isinstance(data, Mapping):
        fault = Fault(f"a request is an object, not {type(data).__name__}", 'write {"model": …, "cluster": …}')
        raise ConfigError([fault], str(path))
    faults = [Fault(f"unknown key {key!r}", remedy(str(key), KEYS)) for key in data if key not in KEYS]
    if faults:
        raise ConfigError(faults, str(path))
    return dict(data)


def read_model(
    data: Any, cluster: Cluster, precision: str, capture: Capture | None = None, sequence: int | None = None
) -> CostModel:
    """Return the costs of a model: of a preset, of a table, or captured."""
    if isinstance(data, Mapping) and "capture" in data:
        if capture is None:
            fault = Fault("a captured model in a request from Python", "use gemini.tune.capture_model")
            raise ConfigError([fault], "model")
        return capture(str(data["capture"]), cluster, precision)
    model = read_transformer(data)
    return TransformerCosts(model if sequence is None else replace(model, sequence=sequence))


def read_simulation(
    data: Mapping[str, Any], overrides: Mapping[str, Any], source: str = "request", capture: Capture | None = None
) -> SimulationRequest:
    """Build a request; `overrides` are fields of the parallel configuration, and win."""
    faults = [Fault(f"no {name}", f"give {name}") for name in ("model", "cluster") if name not in data]
    if faults:
        raise ConfigError(faults, source)
    cluster = read_cluster(data["cluster"], source)
    parallel = {
        **{key: data[key] for key in ("devices", "batch") if key in data},
        **(data.get("parallel") or {}),
        **overrides,
    }
    parallel.setdefault("devices", cluster.devices)
    if "batch" not in parallel:
        used = {key: parallel.get(key, 1) for key in ("tensor", "context", "pipeline")}
        parallel["batch"] = _default_batch(parallel, used)
    if "precision" not in parallel:
        parallel["precision"] = default_precision(cluster)
    config = read_parallel(parallel, source)
    if cluster.devices != config.devices:
        cluster = cluster.resized(config.devices)
    model = read_model(data["model"], cluster, config.precision, capture, data.get("sequence"))
    return SimulationRequest(model, cluster, config, tuple(data.get("layout", ())))


def default_precision(cluster: Cluster) -> str:
    """Return 16 bits where the devices have them, except on CPUs."""
    known = cluster.device.tflops
    is_cpu = "bf16" in known and known["bf16"] <= known.get("fp32", 0.0)
    return "bf16" if "bf16" in known and not is_cpu else next(iter(known))


def _default_batch(parallel: Mapping[str, Any], used: Mapping[str, Any]) -> int:
    """Return one micro-batch per replica, and four per stage of a pipeline."""
    try:
        degrees = int(used["tensor"]) * int(used["context"]) * int(used["pipeline"])
        replicas = max(1, int(parallel["devices"]) // degrees)
        many = 4 * int(used["pipeline"]) if int(used["pipeline"]) > 1 else 1
        return replicas * int(parallel.get("micro_batch", 1)) * many
    except (TypeError, ValueError, ZeroDivisionError):
        return 1  # the faults of these values are reported when the configuration is read


def config_fields() -> tuple[str, ...]:
    """Return the names of all fields of a configuration."""
    return tuple(entry.name for entry in fields(ParallelConfig))
