"""Cluster file: a cluster read from a preset, from JSON, or from YAML where PyYAML is installed.

    {"name": "ours", "device": "h100", "hosts": 16, "devices_per_host": 8,
     "tiers": [{"name": "nvlink", "bandwidth_gb": 450}, {"name": "rail", "bandwidth_gb": 50}]}

`device` is the name of a preset or an object; `preset` takes a whole preset and overrides parts of it. Several kinds
of hosts are written as `groups`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from gemini.cluster.cluster_description import Cluster, HostGroup
from gemini.cluster.device_class import DeviceClass
from gemini.cluster.link_tier import LinkTier
from gemini.errors import ConfigError, Fault, MissingEngineError
from gemini.nearest_name import remedy

_KEYS = ("name", "preset", "device", "hosts", "devices_per_host", "groups", "tiers")
_GROUP_KEYS = ("device", "hosts", "devices_per_host", "processors")


def presets() -> dict[str, Any]:
    """Return the presets: `devices` and `clusters` by name, as plain data."""
    text = resources.files("gemini.cluster").joinpath("presets.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def find_device_class(name: str) -> DeviceClass:
    """Return a device class by the name of its preset."""
    known = presets()["devices"]
    if name.lower() not in known:
        raise ConfigError([Fault(f"unknown device {name!r}", remedy(name.lower(), sorted(known)))], "cluster")
    return DeviceClass(name.lower(), **{key: value for key, value in known[name.lower()].items() if key != "source"})


def load_cluster(name: str | Path) -> Cluster:
    """Return a preset by its name, or the cluster of a `.json`, `.yaml` or `.yml` file."""
    text = str(name)
    if text.endswith((".json", ".yaml", ".yml")):
        return read_cluster(read_document(Path(text)), text)
    known = presets()["clusters"]
    if text.lower() not in known:
        fault = Fault(f"unknown cluster {text!r}", remedy(text.lower(), sorted(known)) + ", or a .json or .yaml file")
        raise ConfigError([fault], "cluster")
    return read_cluster({"name": text.lower(), **known[text.lower()]}, text)


def read_document(path: Path) -> Any:
    """Read a JSON or YAML file as plain data."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError([Fault(f"cannot read {path}: {reason}", "name a readable file")], str(path)) from None
    if path.suffix in (".yaml", ".yml"):
        return _parse_yaml(text, path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise ConfigError([Fault(what, "correct that line")], str(path)) from None


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingEngineError("PyYAML", "yaml", f"reading {path}") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([Fault(f"not YAML: {error}", "correct that line")], str(path)) from None


def read_cluster(data: Any, source: str = "cluster") -> Cluster:
    """Build a cluster from plain data; all faults of its keys are reported at once."""
    if isinstance(data, str):
        return load_cluster(data)
    if not isinstance(data, Mapping):
        fault = Fault(f"a cluster is an object, not {type(data).__name__}", 'write {"device": "h100", "hosts": 2, …}')
        raise ConfigError([fault], source)
    faults = [Fault(f"unknown key {key!r}", remedy(str(key), _KEYS)) for key in data if key not in _KEYS]
    if "preset" in data:
        known = presets()["clusters"]
        if data["preset"] not in known:
            faults.append(Fault(f"unknown preset {data['preset']!r}", remedy(str(data["preset"]), sorted(known))))
        else:
            data = {"name": data["preset"], **known[data["preset"]], **{k: v for k, v in data.items() if k != "preset"}}
    if "groups" in data and any(key in data for key in _GROUP_KEYS):
        faults.append(Fault("`groups` and the keys of a single group", "write one of the two"))
    if not faults and "groups" not in data and "device" not in data:
        faults.append(Fault("no device", f"name one: {', '.join(sorted(presets()['devices']))}"))
    if not faults and "tiers" not in data:
        faults.append(Fault("no tiers", 'give the links: [{"name": "nvlink", "bandwidth_gb": 450}, …]'))
    if faults:
        raise ConfigError(faults, source)
    groups = data.get("groups") or [{key: data[key] for key in _GROUP_KEYS if key in data}]
    return Cluster(
        str(data.get("name", Path(source).stem)),
        tuple(_read_group(group, source) for group in groups),
        tuple(_read_fields(LinkTier, tier, source, "tier") for tier in data["tiers"]),
    )


def _read_group(data: Any, source: str) -> HostGroup:
    if not isinstance(data, Mapping) or "device" not in data:
        raise ConfigError([Fault(f"{data!r} is no group of hosts", f"give {', '.join(_GROUP_KEYS)}")], source)
    unknown = [Fault(f"unknown key {key!r}", remedy(str(key), _GROUP_KEYS)) for key in data if key not in _GROUP_KEYS]
    if unknown:
        raise ConfigError(unknown, source)
    return HostGroup(
        read_device(data["device"], source), data.get("hosts", 1), data.get("devices_per_host", 1),
        data.get("processors", 0),
    )  # fmt: skip


def read_device(data: Any, source: str = "cluster") -> DeviceClass:
    """Build a device class from the name of a preset or plain data; `preset` overrides parts of a preset."""
    if isinstance(data, str):
        return find_device_class(data)
    if isinstance(data, Mapping) and "preset" in data:
        own = {key: value for key, value in data.items() if key != "preset"}
        data = {**find_device_class(str(data["preset"])).to_dict(), **own}
    device: DeviceClass = _read_fields(DeviceClass, data, source, "device")
    return device


def _read_fields(kind: Any, data: Any, source: str, what: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError([Fault(f"a {what} is an object, not {data!r}", "write its keys and values")], source)
    names = [entry.name for entry in fields(kind)]
    needed = [entry.name for entry in fields(kind) if repr(entry.default).startswith("<dataclasses._MISSING")]
    faults = [Fault(f"{what}: unknown key {key!r}", remedy(str(key), names)) for key in data if key not in names]
    faults += [Fault(f"{what}: no {name}", f"give {name}") for name in needed if name not in data]
    if faults:
        raise ConfigError(faults, source)
    return kind(**data)
