"""Step simulation: the time of a training step, its parts, and the memory of a device.

step  =  micro-batches by the schedule  +  exposed gradient reduction  +  optimizer
         ├ compute, recompute                 (ZeRO ≤ 2: what exceeds the last backward)
         ├ tensor, context, expert, data exchanges that stay visible
         ├ pipeline transfers
         └ bubble
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from gemini.cluster.cluster_description import Cluster
from gemini.cluster.device_class import DeviceClass
from gemini.errors import ConfigError, Fault
from gemini.tune.layer_cost import CostModel
from gemini.tune.memory_table import MemoryTable, memory_table
from gemini.tune.parallel_config import ParallelConfig
from gemini.tune.pipeline_run import PipelineRun, check_schedule, estimate_pipeline, run_pipeline
from gemini.tune.rank_communication import RankCommunication
from gemini.tune.shared_processors import share_processors
from gemini.tune.stage_costs import KINDS, StageBuilder, StageCost

OPTIMIZER_TRAFFIC = 40  # bytes per parameter that an update in single precision reads and writes, clipping included
PARTS = (*KINDS, "pipeline", "bubble", "gradients", "optimizer", "controller")
Pipeline = Callable[[ParallelConfig, Sequence[StageCost], float], PipelineRun]


@dataclass(frozen=True)
class StepResult:
    """The prediction for one configuration; seconds and bytes."""

    model: str
    cluster: Cluster = field(repr=False)
    config: ParallelConfig
    seconds: float
    parts: dict[str, float]  # of the device that works longest; they add up to `seconds`
    memory: MemoryTable
    tokens: int  # per step
    model_flops: float
    hardware_flops: float  # with recomputation
    peak_flops: float
    run: PipelineRun = field(repr=False, compare=False)
    stages: tuple[StageCost, ...] = field(repr=False, compare=False, default=())
    layout: tuple[int, ...] = ()  # layers of every stage, where they are not even
    places: tuple[str, ...] = ()  # device class of every stage, where there are several

    def describe_layout(self) -> str:
        """Return the layers on the device classes: `4 × 12 on h100, 4 × 8 on a100`; '' where they are even."""
        if not self.layout:
            return ""
        names = self.places or ("",) * len(self.layout)
        found = []
        for (count, name), group in groupby(zip(self.layout, names)):
            found.append(f"{len(list(group))} × {count}" + (f" on {name}" if name else ""))
        return "layers per stage: " + ", ".join(found)

    @property
    def fits(self) -> bool:
        """Whether the memory of a device suffices."""
        return self.memory.fits

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model operations per second as a share of the peak of all devices."""
        return self.model_flops / self.seconds / (self.config.devices * self.peak_flops)

    @property
    def hfu(self) -> float:
        """The same with recomputation."""
        return self.mfu * self.hardware_flops / self.model_flops if self.model_flops else 0.0

    @property
    def bubble(self) -> float:
        """The share of the step in which the busiest device waits for other stages."""
        return self.parts["bubble"] / self.seconds

    @property
    def money(self) -> float:
        """The price of a step; 0 where prices are unknown."""
        return self.seconds / 3600 * self.cluster.price_per_hour if self.cluster.check_prices() else 0.0

    @property
    def joules(self) -> float:
        """The energy of a step at full power; 0 where it is unknown."""
        return self.seconds * self.cluster.watts


def simulate(model: CostModel, cluster: Cluster, config: ParallelConfig, *, layout: Sequence[int] = ()) -> StepResult:
    """Predict a step by the real schedule. `layout` is the number of layers of every stage (default: even)."""
    check_configuration(model, cluster, config)
    return predict(model, cluster, config, run_pipeline, layout)


def estimate(model: CostModel, cluster: Cluster, config: ParallelConfig) -> StepResult:
    """Predict a step by closed form, without checks."""
    return predict(model, cluster, config, estimate_pipeline)


def check_configuration(model: CostModel, cluster: Cluster, config: ParallelConfig) -> None:
    """Raise one error with every reason for which this configuration cannot run on this cluster."""
    faults = [Fault(what, "change that degree") for what in model.faults(config)]
    if config.devices != cluster.devices:
        what = f"{config.devices} devices in the configuration, {cluster.devices} in cluster {cluster.name}"
        faults.append(Fault(what, "give both the same number, or use `Cluster.resized`"))
    if config.stages > model.layers + 2:  # embedding and head may have stages of their own
        what = f"{config.stages} stages (pipeline × chunks) for {model.layers} layers, an embedding and a head"
        faults.append(Fault(what, f"give at most {model.layers + 2}"))
    if (config.recompute_layers or 0) > model.layers:
        faults.append(Fault(f"recompute_layers = {config.recompute_layers} of {model.layers}", "give at most as many"))
    for device in dict.fromkeys(group.device for group in cluster.groups):
        if config.precision not in device.tflops:
            known = ", ".join(sorted(device.tflops))
            faults.append(Fault(f"{device.name} has no rate for precision {config.precision!r}", f"give {known}"))
    if faults:
        raise ConfigError(faults, "simulation")
    if config.pipeline > 1:
        check_schedule(config)


def predict(  # noqa: PLR0917
    model: CostModel,
    cluster: Cluster,
    config: ParallelConfig,
    pipeline: Pipeline,
    layout: Sequence[int] = (),
    places: Sequence[DeviceClass] = (),
) -> StepResult:
    """Predict a step; `pipeline` gives the time of the micro-batches, `places` the device class of each stage place."""
    links = RankCommunication(cluster, config)
    devices = list(places) or [weakest_device(cluster, config.precision)] * config.pipeline
    counts = tuple(layout) or model.layer_counts(config, devices[0])
    builders = {device: StageBuilder(model, config, device, links) for device in dict.fromkeys(devices)}
    built = {device: builder.stages(counts) for device, builder in builders.items()}
    stages = tuple(built[devices[at % config.pipeline]][at] for at in range(config.stages))
    hop = links.hop(max(stage.boundary for stage in stages[:-1]) if len(stages) > 1 else 0.0)
    run = pipeline(config, stages, hop)
    run = share_processors(run, cluster.processors, config.tensor * config.context * config.data)
    held = [list(stages[at :: config.pipeline]) for at in range(config.pipeline)]
    parts = _pipeline_parts(config, held, run, hop)
    exposed, update = _after_backward(builders[devices[0]], devices, links, held)
    controller = model.controller_seconds(config)
    update = update if controller is None else 0.0
    parts["gradients"], parts["optimizer"], parts["controller"] = exposed, update, controller or 0.0
    table = _fullest_device(config, devices, held, run.peaks)
    once = sum(3 * stage.flops for stage in stages)
    repeated = sum(stage.recomputed_flops for stage in stages) / once if once else 0.0
    operations = model.model_flops(config.batch)
    peak = sum(group.devices * group.device.flops(config.precision) for group in cluster.groups) / cluster.devices
    seconds = run.seconds + exposed + update + parts["controller"]
    return StepResult(
        model.name, cluster, config, seconds, parts, table, config.batch * model.sequence,
        operations, operations * (1 + repeated), peak, run, stages, tuple(layout), tuple(d.name for d in places),
    )  # fmt: skip


def weakest_device(cluster: Cluster, precision: str) -> DeviceClass:
    """Return what a step that is equal on all devices waits for: the slowest class, with the least memory of all."""
    devices = [group.device for group in cluster.groups]
    slowest = min(devices, key=lambda device: device.flops(precision))
    memory, bandwidth = min(d.memory_gib for d in devices), min(d.bandwidth_gb for d in devices)
    if (memory, bandwidth) == (slowest.memory_gib, slowest.bandwidth_gb):
        return slowest
    return replace(slowest, memory_gib=memory, bandwidth_gb=bandwidth)


def _fullest_device(
    config: ParallelConfig, devices: Sequence[DeviceClass], held: list[list[StageCost]], peaks: Sequence[float]
) -> MemoryTable:
    """Return the table of the device that lacks most; of those with equal stages, that with most activations."""
    places: dict[tuple[object, ...], int] = {}
    for at, own in enumerate(held):
        key = (id(devices[at]), *map(id, own))
        if key not in places or peaks[at] > peaks[places[key]]:
            places[key] = at
    tables = [memory_table(config, held[at], peaks[at], devices[at].memory_bytes, at) for at in places.values()]
    return max(tables, key=lambda table: (table.total / max(1.0, table.capacity), -table.device))


def _pipeline_parts(
    config: ParallelConfig, held: list[list[StageCost]], run: PipelineRun, hop: float
) -> dict[str, float]:
    """Return the parts of the device that is busy longest; what it does not work is bubble or waiting for transfers."""
    busiest = max(range(len(held)), key=lambda at: run.busy[at])
    parts = dict.fromkeys(PARTS, 0.0)
    for stage in held[busiest]:
        for kind in KINDS:
            parts[kind] += config.micro_batches * stage.parts[kind]
    idle = max(0.0, run.seconds - sum(parts.values()))
    parts["pipeline"] = min(idle, 2 * hop * (config.stages - 1)) if config.pipeline > 1 else 0.0
    parts["bubble"] = idle - parts["pipeline"]
    return parts


def _after_backward(
    builder: StageBuilder, devices: Sequence[DeviceClass], links: RankCommunication, held: list[list[StageCost]]
) -> tuple[float, float]:
    """Return the exposed reduction of gradients (gathers of ZeRO-1 and 2 included) and the optimizer's time."""
    config = links.config
    exposed = update = 0.0
    different = {(id(device), *map(id, own)): (own, device) for own, device in zip(held, devices)}
    for own, device in different.values():
        parameters, expert = sum(s.parameters for s in own), sum(s.expert_parameters for s in own)
        spread = parameters / config.shards + expert / max(1, config.shards // config.expert)
        local = spread if config.zero >= 1 and config.shards > 1 else parameters + expert
        update = max(update, device.traffic_seconds(OPTIMIZER_TRAFFIC * local))
        exposed = max(exposed, _exposed_reduction(config, device, links, own))
    tied = builder.first.parameters if not builder.last.parameters else 0.0
    return exposed + (links.tie_seconds(tied) if config.pipeline > 1 else 0.0), update


def _exposed_reduction(
    config: ParallelConfig, device: DeviceClass, links: RankCommunication, own: Sequence[StageCost]
) -> float:
    if config.shards < 2 or config.zero == 3:
        return 0.0
    parameters, expert = sum(stage.parameters for stage in own), sum(stage.expert_parameters for stage in own)
    whole = links.reduce_seconds(parameters, expert)
    gather = 0.0
    if config.zero:  # half of an all-reduce each: reduce-scatter of gradients, all-gather of weights in 2 bytes
        gather = whole / 2 * 2 / config.reduce_bytes
        whole = whole / 2 if config.zero == 1 else 0.0  # ZeRO-2 reduces every micro-batch, within the stages
    if not config.overlap_data:
        return whole + gather
    layers = max(1, sum(stage.layers for stage in own))
    backward, forward = sum(stage.backward for stage in own), sum(stage.forward for stage in own)
    # The last layer's gradients and the first layer's weights have nothing to hide behind.
    late = max(whole - backward, whole / layers) + device.overlap_loss * min(whole, backward)
    early = max(gather - forward, gather / layers) + device.overlap_loss * min(gather, forward)
    return late + early
