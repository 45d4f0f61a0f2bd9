"""Readers of single settings: each converts user input to a value, or returns the fault with a remedy."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gemini.config.modes import SPELLINGS, Mode
from gemini.nearest_name import remedy

_MEMORY = re.compile(r"(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]i?b?|b)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
PARTITIONERS = ("exact", "metis", "mpipe", "acyclic", "multilevel", "pipedream")
_DEVICE = re.compile(r"[a-z][a-z_]*(:\d+)?")

SCHEDULES = ("auto", "composed", "none")  # besides those of the library
RNG = ("exact", "fast")
BATCH_NORM = ("batch", "micro-batch")
DATA_PARALLEL = ("auto", "replicated")


@dataclass(frozen=True)
class Wrong:
    """A rejected value: the fault, and the remedy."""

    what: str
    remedy: str


def mode(value: Any) -> Mode | Wrong:
    """A mode by name; `hybrid` is `sharding_and_pipeline`."""
    if isinstance(value, Mode):
        return value
    if isinstance(value, str) and value.lower() in SPELLINGS:
        return SPELLINGS[value.lower()]
    return Wrong("not a mode", remedy(str(value), SPELLINGS))


def count(value: Any) -> int | Wrong:
    """A whole number, 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        return Wrong(f"a whole number is needed, not {type(value).__name__}", "write 1 or more, as in 4")
    return value if value >= 1 else Wrong("must be 1 or more", "leave it out to let Gemini choose")


def dimension(value: Any) -> int | Wrong:
    """A tensor dimension, counted from the end where negative."""
    if isinstance(value, bool) or not isinstance(value, int):
        return Wrong(f"a dimension is a whole number, not {type(value).__name__}", "write 0, 1, … or -1 for the last")
    return value


def seed(value: Any) -> int | Wrong:
    """A whole number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return Wrong("a seed is a whole number, 0 or more", "write one, as in 0")
    return value


def seconds(value: Any) -> float | Wrong:
    """A time, above zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return Wrong("a number of seconds is needed", "write one, as in 60")
    return float(value) if value > 0 else Wrong("must be above zero", "write seconds, as in 60")


def flag(value: Any) -> bool | Wrong:
    """True or false."""
    return value if isinstance(value, bool) else Wrong("must be true or false", "write true or false, without quotes")


def word(value: Any) -> str | Wrong:
    """A name or a path."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text.strip():
        return Wrong("a name is needed", "write it as text, or leave the setting out")
    return text


def partitioner(value: Any) -> str | Wrong:
    """Read the name of a partitioner: built in, or registered by an installed package (`gemini.partitioners`)."""
    if value in PARTITIONERS:
        return str(value)
    if isinstance(value, str) and value in (found := registered_names("gemini.partitioners")):
        return found[found.index(value)]
    return Wrong("not a partitioner", remedy(str(value), PARTITIONERS))


def schedule(value: Any) -> str | Wrong:
    """`auto`, `composed`, `none`, a schedule of the library, or the path of a plan's JSON file."""
    text = str(os.fspath(value)) if isinstance(value, os.PathLike) else value
    if isinstance(text, str) and (text in SCHEDULES or text.endswith(".json")):
        return text
    from gemini.schedule.library import LIBRARY

    if isinstance(text, str) and text in LIBRARY:
        return text
    return Wrong("not a schedule", remedy(str(text), [*SCHEDULES, *LIBRARY]) + ", or a plan's .json file")


def rng(value: Any) -> str | Wrong:
    """Read the policy for random numbers in micro-batches."""
    return value if value in RNG else Wrong("not an rng policy", remedy(str(value), RNG))


def batch_norm(value: Any) -> str | Wrong:
    """Read the scope of batch-norm statistics in training."""
    return value if value in BATCH_NORM else Wrong("not a scope of statistics", remedy(str(value), BATCH_NORM))


def data_parallel(value: Any) -> str | Wrong:
    """Read where replicas are optimized."""
    return (
        value if value in DATA_PARALLEL else Wrong("not a kind of data parallelism", remedy(str(value), DATA_PARALLEL))
    )


SHARDING_CHOICES = ("replicate", "shard", "0", "-1")


def registered_names(group: str) -> list[str]:
    """Return the names that installed packages register under an entry-point group."""
    from importlib.metadata import entry_points

    return sorted(entry.name for entry in entry_points(group=group))


def memory(value: Any) -> int | Wrong:
    """Bytes, as a number or as text with a unit: 12GB is 12·10⁹, 12GiB is 12·2³⁰."""
    help = "write bytes as a number, or text such as '12GB' or '512MiB'"
    if isinstance(value, str):
        match = _MEMORY.fullmatch(value.strip())
        if match is None:
            return Wrong("not an amount of memory", help)
        unit = (match["unit"] or "").lower()
        scale = _BINARY[unit[0]] if "i" in unit else _UNITS[unit[:1]]
        value = float(match["amount"]) * scale
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return Wrong("not an amount of memory", help)
    return int(value) if value >= 1 else Wrong("must be above zero", help)


def sharding_overrides(value: Any) -> str | Wrong:
    """`scope=choice,scope=choice`, or a mapping from scopes to choices; returned as text."""
    example = f"write 'lm_head=replicate,encoder.*=0': scopes of the model, and {', '.join(SHARDING_CHOICES)}"
    if isinstance(value, Mapping):
        value = ",".join(f"{scope}={choice}" for scope, choice in value.items())
    if not isinstance(value, str):
        return Wrong(f"not scopes with choices, but {type(value).__name__}", example)
    found: dict[str, str] = {}
    for part in value.split(","):
        scope, equals, choice = (text.strip() for text in part.rpartition("="))
        if not equals or not scope or choice not in SHARDING_CHOICES:
            return Wrong(f"{part.strip()!r} is no scope with a choice", example)
        if found.get(scope, choice) != choice:
            return Wrong(f"{scope!r} has two choices, {found[scope]} and {choice}", "leave one of them out")
        found[scope] = choice
    return ",".join(f"{scope}={choice}" for scope, choice in found.items())


def device_mapping(value: Any) -> Mapping[str, Mapping[str, str]] | Wrong:
    """`{"stage_0": {"shard_0": "cuda:0", …}, …}`, complete and in order; several shards may share a device."""
    example = 'write {"stage_0": {"shard_0": "cuda:0"}, "stage_1": {"shard_0": "cuda:1"}}'
    if isinstance(value, str):
        value = _parse_mapping(value)
        if isinstance(value, Wrong):
            return value
    if not isinstance(value, Mapping) or not value:
        return Wrong("a mapping from stages to shards to devices is needed", example)
    if set(value) != {f"stage_{index}" for index in range(len(value))}:
        return Wrong(f"stages must be stage_0 … stage_{len(value) - 1}, got {', '.join(map(str, value))}", example)
    result: dict[str, Mapping[str, str]] = {}
    bad: list[str] = []
    for index in range(len(value)):
        stage = f"stage_{index}"
        shards = value[stage]
        if not isinstance(shards, Mapping) or not shards:
            return Wrong(f"{stage} must map shards to devices, got {shards!r}", example)
        if set(shards) != {f"shard_{number}" for number in range(len(shards))}:
            names = ", ".join(map(str, shards))
            return Wrong(f"{stage}: shards must be shard_0 … shard_{len(shards) - 1}, got {names}", example)
        bad += [f"{stage}: {name!r} is not a device" for name in shards.values() if not _is_device(name)]
        result[stage] = MappingProxyType(
            {f"shard_{number}": shards[f"shard_{number}"] for number in range(len(shards))}
        )
    if bad:
        remedy = "name devices as cpu, cuda:0 or xpu:1, on other hosts node2/cuda:0, of TensorFlow /device:GPU:0"
        return Wrong(", ".join(bad), remedy)
    return MappingProxyType(result)


def _parse_mapping(text: str) -> Any:
    """Parse JSON, or the JSON file that `text` names: the form of a command-line flag."""
    try:
        return json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Wrong(f"neither JSON nor a readable JSON file: {error}", "write a JSON object or the path of a file")


def _is_device(name: Any) -> bool:
    from gemini.config.host_address import is_tensorflow_device, worker_at

    return isinstance(name, str) and bool(_DEVICE.fullmatch(name) or worker_at(name) or is_tensorflow_device(name))
