"""Graph devices: the TensorFlow device of every shard of every stage.

    configuration                          device                                       process
    ────────────────────────────────────   ──────────────────────────────────────────   ─────────────────────────
    no mapping, or `cpu`                   /job:worker/replica:0/task:N/device:CPU:0    a server per shard
    `cuda:1`, `gpu:1`                      /device:GPU:1                                the script's
    `/device:CPU:1`, `/cpu:1`              /device:CPU:1                                the script's, a logical device
    `/job:worker/task:1/cpu:0`             /job:worker/replica:0/task:1/device:CPU:0    server 1

The process of the script is task 0 wherever there are servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gemini.config.gemini_config import GeminiConfig
from gemini.config.modes import Mode
from gemini.errors import ConfigError, Fault

_JOB = "worker"
_NAME = re.compile(
    r"(?:/job:(?P<job>\w+)(?:/replica:0)?/task:(?P<task>\d+))?/(?:device:)?(?P<kind>[A-Za-z_]+):(?P<index>\d+)"
)
_SHORT = re.compile(r"(?P<kind>cuda|gpu|tpu)(?::(?P<index>\d+))?")


@dataclass(frozen=True)
class GraphDevice:
    """One device; `task` is None where the graph runs in the process of the script alone."""

    kind: str
    index: int = 0
    task: int | None = None
    job: str = _JOB

    def __str__(self) -> str:
        place = "" if self.task is None else f"/job:{self.job}/replica:0/task:{self.task}"
        return f"{place}/device:{self.kind}:{self.index}"


@dataclass(frozen=True)
class GraphDevices:
    """The devices by stage and shard."""

    stages: tuple[tuple[GraphDevice, ...], ...]

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """The full names, by stage and shard, as for `tf.device`."""
        return tuple(tuple(map(str, shards)) for shards in self.stages)

    @property
    def job(self) -> str:
        """The job of the servers."""
        return next((device.job for device in self if device.task is not None), _JOB)

    @property
    def tasks(self) -> int:
        """The number of servers, task 0 included; 0 where the graph runs in one process."""
        return max((device.task + 1 for device in self if device.task is not None), default=0)

    def cpus(self, task: int | None = None) -> int:
        """Return the number of logical CPU devices that a process needs: of a task, or of the only process."""
        at = [device.index + 1 for device in self if device.kind == "CPU" and device.task == task]
        return max(at, default=1)

    def __iter__(self) -> Iterator[GraphDevice]:
        return (device for shards in self.stages for device in shards)


def graph_devices(config: GeminiConfig) -> GraphDevices:
    """Return the devices of a configuration; raises ConfigError for names that TensorFlow would not understand."""
    mapping = config.device_mapping
    if mapping is None:
        return _one_server_each(config)
    faults: list[Fault] = []
    stages = []
    fresh = 0
    for stage, shards in mapping.items():
        devices = []
        for shard, name in shards.items():
            if name == "cpu":
                device: GraphDevice | None = GraphDevice("CPU", task=fresh)
                fresh += 1
            else:
                device = _read(name)
            if device is None:
                faults.append(_unreadable(f"device_mapping[{stage!r}][{shard!r}] = {name!r}"))
            else:
                devices.append(device)
        stages.append(tuple(devices))
    if len({device.job for shards in stages for device in shards if device.task is not None}) > 1:
        faults.append(Fault("device_mapping names servers of several jobs", "use one job, as in /job:worker/task:1"))
    if faults:
        raise ConfigError(faults)
    return _in_tasks(GraphDevices(tuple(stages)))


def _one_server_each(config: GeminiConfig) -> GraphDevices:
    stages, shards = degrees(config)
    if stages * shards == 1:
        return GraphDevices(((GraphDevice("CPU"),),))
    return GraphDevices(
        tuple(tuple(GraphDevice("CPU", task=at * shards + shard) for shard in range(shards)) for at in range(stages))
    )


def degrees(config: GeminiConfig) -> tuple[int, int]:
    """Return the stages and shards that a configuration requests; two where its mode splits and it sets no number."""
    mode, workers = config.mode, config.workers
    shards = config.sharding_size
    if mode is Mode.SHARDING:
        return 1, shards or workers or 2
    shards = shards or (2 if mode is Mode.SHARDING_AND_PIPELINE and not config.pipeline_degree else 1)
    if config.pipeline_degree or workers:
        return config.pipeline_degree or max(1, (workers or 1) // shards), shards
    return (1 if mode is Mode.AUTO else 2), shards


def _in_tasks(devices: GraphDevices) -> GraphDevices:
    """Put the devices without a task on task 0, where there are servers; a single task needs no server."""
    if not devices.tasks:
        return devices
    single = devices.tasks == 1

    def moved(device: GraphDevice) -> GraphDevice:
        task = None if single else device.task or 0
        return GraphDevice(device.kind, device.index, task, devices.job)

    return GraphDevices(tuple(tuple(map(moved, shards)) for shards in devices.stages))


def _read(name: str) -> GraphDevice | None:
    if short := _SHORT.fullmatch(name):
        kind = "GPU" if short["kind"] == "cuda" else short["kind"].upper()
        return GraphDevice(kind, int(short["index"] or 0))
    if found := re.fullmatch(r"cpu:(\d+)", name):
        return GraphDevice("CPU", int(found[1]))
    full = _NAME.fullmatch(name)
    if full is None:
        return None
    task = None if full["task"] is None else int(full["task"])
    return GraphDevice(full["kind"].upper(), int(full["index"]), task, full["job"] or _JOB)


def _unreadable(what: str) -> Fault:
    remedy = "write cpu, cuda:0, /device:GPU:0, or /job:worker/task:1/cpu:0"
    return Fault(f"{what} is not a device of TensorFlow", remedy)
