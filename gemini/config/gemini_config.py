"""`GeminiConfig`: every setting of a run, checked on construction, frozen afterwards.

Settings come from four sources. Where two sources name the same setting, the one higher up in this list wins:

    1. keywords                 GeminiConfig(accum_degree=8), in the program
    2. command-line flags       gemini_python --accum-degree 8, for one run
    3. a JSON file              gemini_python --config gemini.json, for a project
    4. GEMINI_CONFIG            the path of a JSON file, or JSON itself, for a machine

`GeminiConfig(…)` reads keywords only; `GeminiConfig.load(…)` merges all four. One `ConfigError` reports all faults of
a configuration, each with its value and a remedy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gemini.config import readers
from gemini.config.modes import Mode
from gemini.errors import ConfigError, Fault
from gemini.nearest_name import nearest

ENVIRONMENT = "GEMINI_CONFIG"
ALIASES = {"stage_cnt": "pipeline_degree"}
_EXAMPLE = 'a configuration is JSON: write {"mode": "pipeline", …}'

DeviceMapping = Mapping[str, Mapping[str, str]]


def _setting(default: Any, read: Callable[[Any], Any], value: str, help: str, *, hash: bool = True) -> Any:
    """A field with its reader, the placeholder of its command-line flag ("" for a switch) and its help text."""
    return field(default=default, metadata={"read": read, "value": value, "help": help}, hash=hash)


@dataclass(frozen=True, init=False)
class GeminiConfig:
    """The settings of a run. `None` means: Gemini chooses.

    The command-line flags of `gemini_python` are derived from these fields (`gemini.cli.launcher_flags`).

    >>> GeminiConfig(mode="hybrid", sharding_size=4, pipeline_degree=8).mode
    <Mode.SHARDING_AND_PIPELINE: 'sharding_and_pipeline'>
    """

    mode: Mode = _setting(Mode.AUTO, readers.mode, "MODE", "parallelism: auto, pipeline, sharding or hybrid")
    sharding_size: int | None = _setting(None, readers.count, "N", "devices that share one operator")
    sharding_dim: int | None = _setting(
        None, readers.dimension, "N", "weight dimension to shard: 0 reduction, -1 output"
    )
    sharding_overrides: str | None = _setting(
        None, readers.sharding_overrides, "SCOPE=CHOICE,…", "layouts by scope: replicate, shard, 0 or -1"
    )
    pipeline_degree: int | None = _setting(None, readers.count, "N", "pipeline stages (also: stage_cnt)")
    accum_degree: int | None = _setting(None, readers.count, "N", "micro-batches per batch")
    replicas: int | None = _setting(
        None, readers.count, "N", "copies of the model that each take a part of every batch (data parallelism)"
    )
    data_parallel: str = _setting(
        "auto", readers.data_parallel, "KIND",
        "auto: the script's host runs the optimizer; replicated: every copy does, after an all-reduce",
    )  # fmt: skip
    device_mapping: DeviceMapping | None = _setting(
        None,
        readers.device_mapping,
        "JSON",
        """devices, as '{"stage_0": {"shard_0": "cuda:0"}}' or the path of a JSON file""",
        hash=False,
    )
    cluster: str | None = _setting(
        None, readers.word, "ADDRESS", "Ray cluster whose hosts run workers, as HOST:PORT; auto: that of RAY_ADDRESS"
    )
    partitioner: str = _setting("exact", readers.partitioner, "NAME", "algorithm that cuts the model into stages")
    schedule: str = _setting(
        "auto", readers.schedule, "NAME", "auto, composed, none, a schedule of the library, or the file of a plan"
    )
    rng: str = _setting("exact", readers.rng, "KIND", "exact: the random numbers of one device; fast: per worker")
    batch_norm: str = _setting(
        "batch", readers.batch_norm, "KIND", "batch-norm statistics in training: of the batch or of each micro-batch"
    )
    trace: bool = _setting(False, readers.flag, "", "write the timeline of one step to the run folder")
    live: bool = _setting(False, readers.flag, "", "show the present step on the last row of the terminal")
    report: str | None = _setting(None, readers.word, "FILE", "write a page about the run at its end")
    memory_limit: int | None = _setting(None, readers.memory, "SIZE", "memory per device, in bytes or as 12GB")
    workers: int | None = _setting(None, readers.count, "N", "worker processes")
    watchdog: float = _setting(
        60.0, readers.seconds, "SECONDS", "seconds without a reply after which a worker counts as hung"
    )
    program: str | None = _setting(None, readers.word, "DIR", "run the plans and stages that gemini compile wrote")
    run_folder: str = _setting(".gemini", readers.word, "DIR", "folder for the artifacts of a run")
    seed: int = _setting(0, readers.seed, "N", "seed of every search")
    strict: bool = _setting(False, readers.flag, "", "raise instead of falling back to a slower path")
    verify: bool = _setting(
        False, readers.flag, "", "compare the first steps of a plan with one process, before they count"
    )
    dry_run: bool = _setting(False, readers.flag, "", "plan and report; end before the first backward pass")
    quiet: bool = _setting(False, readers.flag, "", "print nothing but the output of the script")

    def __init__(self, **given: Any) -> None:
        self._assign(given, source="GeminiConfig")

    def _assign(self, given: Mapping[str, Any], source: str) -> None:
        """Read and check all values, then set the fields; all faults are raised in one error."""
        faults: list[Fault] = []
        values = {entry.name: entry.default for entry in fields(self)}
        read = {entry.name: entry.metadata["read"] for entry in fields(self)}
        for name, value in _drop_unknown(given, faults).items():
            if value is None:
                continue
            result = read[name](value)
            if isinstance(result, readers.Wrong):
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
        """Merge keywords, flags, a JSON file and GEMINI_CONFIG, in that order of precedence."""
        environment = (os.environ if environ is None else environ).get(ENVIRONMENT, "").strip()
        merged: dict[str, Any] = {}
        sources = []
        if environment:
            merged |= _resolve_aliases(_read_environment(environment))
            sources.append(ENVIRONMENT)
        if path is not None:
            merged |= _resolve_aliases(_read_file(Path(path), str(path)))
            sources.append(str(path))
        for name, layer in (("command line", flags), ("keywords", keywords)):
            if layer:
                merged |= _resolve_aliases({key: value for key, value in layer.items() if value is not None})
                sources.append(name)
        config = cls.__new__(cls)
        config._assign(merged, source="configuration from " + (" + ".join(sources) or "defaults"))
        return config

    @property
    def asks_for_workers(self) -> bool:
        """Whether these settings request several devices, rather than leave the choice to Gemini."""
        degrees = (self.sharding_size or 1, self.pipeline_degree or 1, self.workers or 1, self.replicas or 1)
        is_forced = self.mode is not Mode.AUTO or self.cluster is not None
        return is_forced or max(degrees) > 1 or self.device_mapping is not None

    @property
    def worker_count(self) -> int:
        """The number of workers these settings request."""
        if self.device_mapping is not None:
            return sum(len(devices) for devices in self.device_mapping.values())
        return self.workers or (self.replicas or 1) * (self.sharding_size or 1) * (self.pipeline_degree or 1)

    @property
    def shard_count(self) -> int:
        """The number of workers that share one stage."""
        if self.device_mapping is not None:
            return max((len(devices) for devices in self.device_mapping.values()), default=1)
        if self.sharding_size is None and self.mode is Mode.SHARDING:
            return self.worker_count
        return self.sharding_size or 1

    @property
    def stage_count(self) -> int:
        """The number of groups of workers that share one stage."""
        return max(1, self.worker_count // self.shard_count)

    def check_replicated(self) -> None:
        """Raise where data_parallel = 'replicated' has no replicas on other hosts."""
        if self.data_parallel == "replicated" and ((self.replicas or 1) < 2 or self.cluster is None):
            what = "data_parallel = 'replicated' without replicas on other hosts"
            remedy = "start on several nodes (torchrun --nnodes 2 …), or give replicas and cluster"
            raise ConfigError([Fault(what, remedy)])

    def check_supported(self) -> None:
        """Raise for settings that models of PyTorch cannot run with, before anything starts."""
        faults = list(self._unsupported())
        if faults:
            raise ConfigError(faults)

    def _unsupported(self) -> Iterator[Fault]:
        if self.sharding_dim not in (None, 0, -1):
            yield Fault(f"sharding_dim = {self.sharding_dim}", "give 0 (reduction) or -1 (output), or leave it out")
        if self.shard_count > 1 and (self.replicas or 1) > 1:
            yield Fault(f"{self.shard_count} shards with replicas", "leave one of them out")
        if self.worker_count % self.shard_count:
            yield Fault(
                f"workers = {self.workers} with sharding_size = {self.sharding_size}",
                "give a multiple of sharding_size",
            )
        mapping = self.device_mapping or {}
        counts = {stage: len(devices) for stage, devices in mapping.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{stage} has {count}" for stage, count in counts.items())
            yield Fault(f"device_mapping: stages with different numbers of shards ({listed})", "map as many in each")
        elif self.shard_count > 1:
            if not self.mode.shards:
                yield Fault(f"mode = 'pipeline' with {self.shard_count} shards in device_mapping", "use mode='hybrid'")
            names = [name for devices in mapping.values() for name in devices.values()]
            other = next((name for name in names if name.rpartition("/")[2].partition(":")[0] != "cpu"), None)
            if other is not None:
                yield Fault(f"device_mapping puts a shard on {other}", "shards are processes on CPUs: map them to cpu")
        if len(counts) > 1 and not self.mode.pipelines:
            yield Fault(f"mode = 'sharding' with {len(counts)} stages in device_mapping", "use mode='hybrid'")

    def to_dict(self) -> dict[str, Any]:
        """Return every setting as plain JSON values."""
        plain: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Mapping):
                value = {stage: dict(shards) for stage, shards in value.items()}
            plain[entry.name] = str(value) if isinstance(value, Mode) else value
        return plain

    def differences(self) -> dict[str, Any]:
        """Return the settings that are not the defaults, as plain JSON values."""
        defaults = GeminiConfig().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}

    def to_json(self) -> str:
        """Return the settings as JSON text that `load` reads back."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def __reduce__(self) -> tuple[Callable[..., GeminiConfig], tuple[dict[str, Any]]]:
        return _rebuild, (self.to_dict(),)


def _rebuild(values: dict[str, Any]) -> GeminiConfig:
    return GeminiConfig(**values)


def setting_names() -> tuple[str, ...]:
    """Return the names a configuration may use, aliases included."""
    return (*(entry.name for entry in fields(GeminiConfig)), *ALIASES)


def _resolve_aliases(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replace aliases by field names, so that a stronger source overrides a weaker one under either name."""
    if any(alias in given and name in given for alias, name in ALIASES.items()):
        return dict(given)
    return {ALIASES.get(name, name): value for name, value in given.items()}


def _drop_unknown(given: Mapping[str, Any], faults: list[Fault]) -> dict[str, Any]:
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
    faults += _replica_contradictions(values)
    if values["data_parallel"] == "replicated" and values["replicas"] == 1:
        faults.append(Fault("data_parallel = 'replicated' with replicas = 1", "give more replicas, or leave one out"))
    if mapping is not None:
        faults += _mapping_contradictions(mapping, stages, shards, values["workers"])
    return faults


def _replica_contradictions(values: Mapping[str, Any]) -> list[Fault]:
    """Check that the replicas share workers and micro-batches evenly."""
    replicas, faults = values["replicas"] or 1, []
    for name in ("accum_degree", "workers"):
        if (values[name] or replicas) % replicas:
            what = f"{name} = {values[name]} cannot be shared evenly by replicas = {replicas}"
            faults.append(Fault(what, f"give a multiple of {replicas}"))
    if replicas > 1 and values["device_mapping"] is not None:
        what = f"device_mapping with replicas = {replicas}"
        faults.append(Fault(what, "leave one of them out: a mapping names the workers of one copy"))
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
        raise ConfigError([Fault(f"{name!r} occurs twice", "remove one") for name in repeated], source)
    return value
