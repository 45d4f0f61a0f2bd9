"""The tour of Gemini: every step from a model to its parallel training step, in processing order.

    step        package            function            takes                       returns
    ─────────   ────────────────   ─────────────────   ─────────────────────────   ─────────────────────────────────
    capture     capture/, ir/      load_or_capture     model, batch                Graph: a node per module or op
    prove       batch_analysis/    prove_micro_batch   model, batch                MicroBatch: Graph, proof, sizes
    profile     profiling/         profile             Graph, batch                Profile: time, memory per node
    partition   partition/         partition           Graph, Profile              Partition: stages on workers
    schedule    schedule/          search_plan         Graph, Profile              ScheduleChoice: Partition, SchedPlan
    generate    codegen/, pipe/    build_piped         Graph, Profile, Partition   Piped: a readable module per stage
    run         runtime/           start               model, planner              the same model, steps in workers

Graph, Profile, Partition and SchedPlan are values with a JSON form; each step reads the values of earlier steps and
returns a new one. Two flows run these steps:

    pipe_model               capture → profile → partition → generate → files            on one batch, in this process

    compile, gemini_python   run: start workers, intercept the calls of the model; per new kind of call, on its batch
                             (`planner.step_planner.plan_step`, through `planner_for`):
                             capture, prove → profile → partition, schedule → generate → StepPlan → workers

capture and profile results and whole plans are cached on disk (cache/). `gemini_python` reaches the second flow
through launcher/, which finds the models of a script and decides for each whether it runs in workers. guards/ checks
before every call that its plan still holds; report/ shows every value above.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError, Fault
from gemini.planner.config_planner import check_config, planner_for
from gemini.tensorflow.graph_model import builds_graph, compile_graph_model
from gemini.torch_range import check_torch

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gemini.ir.graph import Graph
    from gemini.partition.partition_options import Options
    from gemini.pipe.pipe_request import PipeRequest, Progress
    from gemini.pipe.piped_model import Piped
    from gemini.profiling.device_specs import DeviceSpec
    from gemini.profiling.measured_device import Device
    from gemini.profiling.profile_result import Profile

Model = TypeVar("Model", bound="nn.Module | Callable[..., Any]")
PIPE_STEPS = ("capture", "profile", "partition", "generate", "save")


# ── training in workers ────────────────────────────────────────────────────────────────────────────────────────────
def compile(model: Model, config: GeminiConfig | None = None) -> Model:
    """Return `model` itself, whose training steps run in workers as `config` says (default: the environment).

    The model keeps its identity, and its parameters, outputs and gradients are those of a run without workers.
    For a function that builds a graph of TensorFlow the result is such a function: training steps on its tensors run
    in workers (`gemini.tensorflow`).
    """
    is_graph = builds_graph(model)
    if not is_graph:
        check_torch()
    _check_arguments(model, config, is_graph)
    settings = config or GeminiConfig.load()
    if is_graph and settings.asks_for_workers:
        compiled: Model = compile_graph_model(model, settings)
        return compiled
    check_config(settings)
    if settings.report is not None:
        from gemini.report.run_end import check_report, write_at_exit

        check_report(settings)
        write_at_exit(settings)
    if settings.asks_for_workers:
        from gemini.runtime.session import start

        if settings.sharding_overrides:
            from gemini.tensor_parallel.scope_overrides import match_scopes
            from gemini.tensor_parallel.shard_options import read_overrides

            match_scopes(model, read_overrides(settings.sharding_overrides))

        start(model, settings, planner_for(settings))
    elif not settings.quiet:
        print(
            f"gemini: {getattr(model, '__name__', type(model).__name__)} runs in this process: the configuration "
            "requests no workers (GeminiConfig(mode=pipeline, pipeline_degree=2))",
            file=sys.stderr,
        )
    return model


class GeminiCompiler:
    """The object form of `gemini.compile`."""

    def compiler(self, model: Model, config: GeminiConfig | None = None) -> Model:
        """Return `model`, whose training steps run in workers as `config` says; see `gemini.compile`."""
        return compile(model, config)


def _check_arguments(model: Any, config: Any, is_graph: bool) -> None:
    fault = None
    if not is_graph and not _is_module(model):
        fault = Fault(f"a model is a torch.nn.Module, not {type(model).__name__}", "pass the model object itself")
    elif config is not None and not isinstance(config, GeminiConfig):
        fault = Fault(f"config is a GeminiConfig, not {type(config).__name__}", "write GeminiConfig(mode=…)")
    if fault is not None:
        raise ConfigError([fault], "gemini.compile")


def _is_module(model: Any) -> bool:
    from torch import nn

    return isinstance(model, nn.Module)


# ── stages as files ────────────────────────────────────────────────────────────────────────────────────────────────
def pipe_model(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nparts: int = 4,
    partitioner: str = "exact",
    depth: int | None = None,
    basic_blocks: tuple[type | str, ...] = (),
    output: str | Path | None = None,
    overwrite: bool = False,
    options: Options | None = None,
    device: str | torch.device | Device | None = None,
    analytic: str | DeviceSpec | None = None,
    profile: Profile | None = None,
    graph: Graph | None = None,
    rounds: int = 3,
    cache: bool | str | Path = True,
    progress: Progress | None = None,
) -> Piped:
    """Cut a model into stages for `nparts` workers, on one batch.

    `args` and `kwargs` are a batch as the model takes it. `depth` and `basic_blocks` set how finely it is captured,
    `device`, `analytic`, `rounds` and `cache` how it is profiled, `partitioner` and `options` how it is cut. A `graph`
    or a `profile` from an earlier call replaces its step. With `output` the result is also written to a folder.
    """
    check_torch()
    from gemini.partition.partition_options import Options
    from gemini.pipe.pipe_request import PipeRequest

    return _run_pipe_steps(
        PipeRequest(
            model=model, args=args, kwargs={} if kwargs is None else kwargs, nparts=nparts, partitioner=partitioner,
            options=options or Options(), depth=depth, basic_blocks=basic_blocks,
            output=None if output is None else Path(output), overwrite=overwrite, device=device, analytic=analytic,
            rounds=rounds, cache=cache, graph=graph, profile=profile,
        ),
        progress,
    )  # fmt: skip


def _run_pipe_steps(request: PipeRequest, progress: Progress | None) -> Piped:
    from gemini.cache.graphs import load_or_capture
    from gemini.cache_files import cache_folder
    from gemini.partition import partition
    from gemini.pipe.pipe_request import StepProgress, check_divisible
    from gemini.pipe.piped_model import build_piped
    from gemini.profiling import profile

    request.check()
    steps = StepProgress(progress, PIPE_STEPS)
    batch = tuple(request.args), dict(request.kwargs)

    steps.begin("capture")
    graph, is_cached = request.graph, False
    if graph is None:
        settings = {"depth": request.depth, "basic_blocks": request.basic_blocks}
        graph, is_cached = load_or_capture(request.model, *batch, settings, cache_folder("graphs", request.cache))
    check_divisible(graph, request.nparts)

    within = steps.begin("profile")
    costs = request.profile or profile(
        graph, *batch, device=request.device, analytic=request.analytic, rounds=request.rounds, cache=request.cache,
        progress=within, check=not is_cached,
    )  # fmt: skip

    steps.begin("partition")
    stages = partition(graph, costs, request.nparts, request.partitioner, request.options)

    steps.begin("generate")
    piped = build_piped(graph, costs, stages)

    steps.begin("save")
    if request.output is not None:
        piped.save(request.output, overwrite=request.overwrite)
    steps.finish()
    return piped
