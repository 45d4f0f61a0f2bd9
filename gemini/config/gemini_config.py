"""`GeminiConfig`: every setting of a run, checked when it is made, frozen afterwards.

Settings come from four places. Where two of them name the same setting, the one higher up in this list wins:

    1. keywords                 GeminiConfig(accum_degree=8), written in the program
    2. command-line flags       gemini_python --accum-degree 8, typed for one run
    3. a JSON file              gemini_python --config gemini.json, kept for a project
    4. GEMINI_CONFIG            a JSON file's path, or JSON itself, kept for a machine

`GeminiConfig(…)` alone reads keywords only; `GeminiConfig.load(…)` puts the four together. All faults of a
configuration are reported in one `ConfigError`, each with its value and a remedy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gemini.config import readers as settings
from gemini.config.modes import Mode
from gemini.errors import ConfigError, Fault
from gemini.nearest_name import nearest

ENVIRONMENT = "GEMINI_CONFIG"
ALIASES = {"stage_cnt": "pipeline_degree"}
_EXAMPLE = 'a configuration is JSON: write {"mode": "pipeline", …}'

DeviceMapping = Mapping[str, Mapping[str, str]]


def _setting(default: Any, read: Callable[[Any], Any], help: str, hash: bool = True) -> Any:
    return field(default=default, metadata={"read": read, "help": help}, hash=hash)


@dataclass(frozen=True, init=False)
class GeminiConfig:
    """The settings of a run. `None` means: Gemini chooses.

    >>> GeminiConfig(mode="hybrid", sharding_size=4, pipeline_degree=8).mode
    <Mode.SHARDING_AND_PIPELINE: 'sharding_and_pipeline'>
    """

    mode: Mode = _setting(Mode.AUTO, settings.mode, "how to spread the model: auto, sharding, pipeline or hybrid")
    sharding_size: int | None = _setting(None, settings.count, "devices that share one operator")
    sharding_dim: int | None = _setting(None, settings.dimension, "tensor dimension to split operators along")
    pipeline_degree: int | None = _setting(None, settings.count, "stages the model is cut into (also: stage_cnt)")
    accum_degree: int | None = _setting(None, settings.count, "micro-batches a batch is split into")
    device_mapping: DeviceMapping | None = _setting(
        None, settings.device_mapping, 'devices, as {"stage_0": {"shard_0": "cuda:0"}}', hash=False
    )
    partitioner: str = _setting("exact", settings.partitioner, "how the model is cut")
    schedule: str = _setting("auto", settings.schedule, "auto, composed, none, a library name, or a plan's file")
    rng: str = _setting("exact", settings.rng, "exact: random numbers as on one device; fast: each worker its own")
    batch_norm: str = _setting(
        "batch", settings.batch_norm, "batch normalization in training: statistics of the batch, or of each micro-batch"
    )
    trace: bool = _setting(False, settings.flag, "write the timeline of a step to the run folder")
    memory_limit: int | None = _setting(None, settings.memory, "memory of a device, in bytes or as 12GB")
    workers: int | None = _setting(None, settings.count, "worker processes")
    watchdog: float = _setting(60.0, settings.seconds, "seconds after which a worker that does not answer hangs")
    run_folder: str = _setting(".gemini", settings.word, "where a run keeps what it writes")
    seed: int = _setting(0, settings.seed, "seed of every search Gemini makes")
    strict: bool = _setting(False, settings.flag, "raise where Gemini would fall back to a slower path")
    verify: bool = _setting(False, settings.flag, "make the first steps on one device too, and compare")
    dry_run: bool = _setting(False, settings.flag, "plan and report, without training")
    quiet: bool = _setting(False, settings.flag, "print nothing but the program's own output")

    def __init__(self, **given: Any) -> None:
        self._take(given, source="GeminiConfig")

    def _take(self, given: Mapping[str, Any], source: str) -> None:
        faults: list[Fault] = []
        values = {entry.name: entry.default for entry in fields(self)}
        readers = {entry.name: entry.metadata["read"] for entry in fields(self)}
        for name, value in _canonical(given, faults).items():
            if value is None:
                continue
            result = readers[name](value)
            if isinstance(result, settings.Wrong):
                faults.append(Fault(f"{name} = {value!r}: {result.what}", result.remedy))
            else:
                values[name] = result
        faults += _contradictions(values)
        if faults:
            raise ConfigError(faults, source)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        **keywords: Any,
    ) -> GeminiConfig:
        """Put keywords, flags, a JSON file and GEMINI_CONFIG together, in that order of precedence."""
        environment = (os.environ if environ is None else environ).get(ENVIRONMENT, "").strip()
        merged: dict[str, Any] = {}
        sources = []
        if environment:
            merged |= _spelled(_read_environment(environment))
            sources.append(ENVIRONMENT)
        if path is not None:
            merged |= _spelled(_read_file(Path(path), str(path)))
            sources.append(str(path))
        for name, layer in (("command line", flags), ("keywords", keywords)):
            if layer:
                merged |= _spelled({key: value for key, value in layer.items() if value is not None})
                sources.append(name)
        config = cls.__new__(cls)
        config._take(merged, source="configuration from " + (" + ".join(sources) or "defaults"))
        return config

    @property
    def asks_for_workers(self) -> bool:
        """Whether these settings, and not only Gemini's own choice, spread the model over several devices."""
        degrees = (self.sharding_size or 1, self.pipeline_degree or 1, self.workers or 1)
        return self.mode is not Mode.AUTO or max(degrees) > 1 or self.device_mapping is not None

    @property
    def worker_count(self) -> int:
        """The number of workers that these settings ask for."""
        if self.device_mapping is not None:
            return sum(len(devices) for devices in self.device_mapping.values())
        return self.workers or (self.sharding_size or 1) * (self.pipeline_degree or 1)

    def to_dict(self) -> dict[str, Any]:
        """Every setting as plain JSON values."""
        plain: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Mapping):
                value = {stage: dict(shards) for stage, shards in value.items()}
            plain[entry.name] = str(value) if isinstance(value, Mode) else value
        return plain

    def to_json(self) -> str:
        """The settings as JSON text that `load` reads back."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def __reduce__(self) -> tuple[Callable[..., GeminiConfig], tuple[dict[str, Any]]]:
        return _rebuild, (self.to_dict(),)


def _rebuild(values: dict[str, Any]) -> GeminiConfig:
    return GeminiConfig(**values)


def setting_names() -> tuple[str, ...]:
    """The names a configuration may use, aliases included."""
    return (*(entry.name for entry in fields(GeminiConfig)), *ALIASES)


def _spelled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Aliases under their one name, so that a stronger source replaces a weaker one whichever word each used."""
    if any(alias in given and name in given for alias, name in ALIASES.items()):
        return dict(given)
    return {ALIASES.get(name, name): value for name, value in given.items()}


def _canonical(given: Mapping[str, Any], faults: list[Fault]) -> dict[str, Any]:
    known = setting_names()
    result: dict[str, Any] = {}
    for name, value in given.items():
        target = ALIASES.get(name, name)
        if name not in known:
            close = nearest(str(name), known)
            remedy = f"did you mean {close!r}?" if close else f"the settings are {', '.join(known)}"
            faults.append(Fault(f"unknown setting {name!r} = {value!r}", remedy))
        elif target in result and result[target] != value:
            alias = next(other for other, meant in ALIASES.items() if meant == target)
            what = f"{alias} = {given[alias]!r} and {target} = {given[target]!r} are one setting"
            faults.append(Fault(what, "give one of them"))
        else:
            result[target] = value
    return result


def _contradictions(values: Mapping[str, Any]) -> list[Fault]:
    mode, shards, stages = values["mode"], values["sharding_size"], values["pipeline_degree"]
    faults = []
    if not mode.shards and (shards or 1) > 1:
        faults.append(
            Fault(f"mode = 'pipeline' with sharding_size = {shards}", "use mode='hybrid', or sharding_size=1")
        )
    if not mode.pipelines and (stages or 1) > 1:
        faults.append(
            Fault(f"mode = 'sharding' with pipeline_degree = {stages}", "use mode='hybrid', or pipeline_degree=1")
        )
    mapping = values["device_mapping"]
    if mapping is not None:
        faults += _mapping_contradictions(mapping, stages, shards, values["workers"])
    return faults


def _mapping_contradictions(
    mapping: DeviceMapping, stages: int | None, shards: int | None, workers: int | None
) -> list[Fault]:
    faults = []
    if stages is not None and stages != len(mapping):
        faults.append(
            Fault(
                f"device_mapping names {len(mapping)} stages, pipeline_degree = {stages}",
                "map every stage, or leave pipeline_degree out",
            )
        )
    for stage, devices in mapping.items():
        if shards is not None and shards != len(devices):
            faults.append(
                Fault(
                    f"device_mapping[{stage!r}] names {len(devices)} shards, sharding_size = {shards}",
                    "map every shard of it (several may share a device), or leave sharding_size out",
                )
            )
    entries = sum(len(devices) for devices in mapping.values())
    if workers is not None and workers != entries:
        faults.append(
            Fault(
                f"device_mapping has {entries} entries, workers = {workers}",
                "one worker serves each entry: leave workers out",
            )
        )
    return faults


def _read_environment(text: str) -> dict[str, Any]:
    if text.startswith("{"):
        return _parse(text, ENVIRONMENT)
    return _read_file(Path(text), f"{ENVIRONMENT} ({text})")


def _read_file(path: Path, source: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError([Fault(f"cannot read {path}: {reason}", "name a readable JSON file")], source) from None
    return _parse(text, source)


def _parse(text: str, source: str) -> dict[str, Any]:
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in items]
        repeated.extend(sorted({name for name in names if names.count(name) > 1}))
        return dict(items)

    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        line = text[: error.pos].rpartition("\n")[2] + text[error.pos :].partition("\n")[0]  # empty at the end
        what = f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}: {line.strip()!r}"
        remedy = "correct that line" if text.lstrip().startswith("{") else _EXAMPLE
        raise ConfigError([Fault(what, remedy)], source) from None
    if not isinstance(value, dict):
        what = f"a configuration is a JSON object, not {type(value).__name__}"
        raise ConfigError([Fault(what, _EXAMPLE)], source)
    if repeated:
        raise ConfigError([Fault(f"{name!r} is given twice", "keep one") for name in repeated], source)
    return value
