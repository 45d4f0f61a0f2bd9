"""`pipe_model`: the whole flow from a model and one batch to its stages.

    capture ─► profile ─► partition ─► generate ─► save

Each step is one function on a `_Flow`, and leaves its artifact there. What can be refused is refused before the
first step, since capturing and profiling a large model take their time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.errors import PartitionError
from gemini.partition.partition_options import Options
from gemini.pipe.piped_model import Piped

if TYPE_CHECKING:
    from gemini.codegen.stage_generator import StageCode
    from gemini.ir.graph import Graph
    from gemini.partition.assignment import Partition
    from gemini.profiling.device_specs import DeviceSpec
    from gemini.profiling.measured_device import Device
    from gemini.profiling.profile_result import Profile

Progress = Callable[[int, int, str], None]


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
    or a `profile` made before is used as it is. With `output` the result is also written to a folder.
    """
    flow = _Flow(
        model, args, {} if kwargs is None else kwargs, nparts, partitioner, options or Options(), depth, basic_blocks,
        None if output is None else Path(output), overwrite, device, analytic, rounds, cache, graph, profile,
    )  # fmt: skip
    flow.check()
    tell = progress or (lambda *_: None)
    for at, (name, step) in enumerate(STEPS):
        tell(at, len(STEPS), name)
        step(flow, _within(tell, at, name))
    tell(len(STEPS), len(STEPS), "done")
    return flow.piped


def _within(tell: Progress, at: int, name: str) -> Progress:
    """Progress of one step as progress of the whole flow."""
    return lambda done, total, what: tell(at * total + done, len(STEPS) * total, f"{name}: {what}")


@dataclass(repr=False)
class _Flow:
    """What was asked, and what the steps have made of it so far."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    nparts: int
    partitioner: str
    options: Options
    depth: int | None
    basic_blocks: tuple[type | str, ...]
    output: Path | None
    overwrite: bool
    device: str | torch.device | Device | None
    analytic: str | DeviceSpec | None
    rounds: int
    cache: bool | str | Path
    known_graph: Graph | None
    known_profile: Profile | None
    graph: Graph = field(init=False)
    profile: Profile = field(init=False)
    is_warm: bool = False  # the graph was kept from before: so are, most likely, the costs
    partition: Partition = field(init=False)
    codes: tuple[StageCode, ...] = field(init=False)
    piped: Piped = field(init=False)

    def cache_folder(self) -> Path | None:
        """Where graphs are kept: beside profiles, or in the folder that was named."""
        from gemini.profiling.profile_cache import default_folder

        if isinstance(self.cache, bool):
            return default_folder().parent / "graphs" if self.cache else None
        return Path(self.cache) / "graphs"

    def check(self) -> None:
        """Refuse what cannot succeed, all of it at once."""
        faults = list(self._faults())
        if faults:
            listed = "\n".join(f"  - {fault}" for fault in faults)
            raise PartitionError(f"pipe_model cannot begin:\n{listed}")
        check_request(
            nparts=self.nparts, partitioner=self.partitioner, options=self.options, device=self.device,
            analytic=self.analytic, output=self.output, overwrite=self.overwrite,
        )  # fmt: skip

    def _faults(self) -> list[str]:
        faults = []
        if not isinstance(self.model, nn.Module):
            faults.append(f"a model is a torch.nn.Module, not {type(self.model).__name__}")
        if not isinstance(self.nparts, int) or isinstance(self.nparts, bool) or self.nparts < 1:
            faults.append(f"nparts={self.nparts!r}; it is a whole number, 1 or more")
        for name, kinds, remedy in (
            ("args", (tuple, list), "it is a tuple of arguments: args=(batch,)"),
            ("kwargs", Mapping, "it is a dictionary of keyword arguments"),
            ("options", Options, "write Options(…) of gemini.partition"),
        ):
            if not isinstance(getattr(self, name), kinds):
                faults.append(f"{name} is a {type(getattr(self, name)).__name__}; {remedy}")
        if self.known_graph is not None and self.known_graph.model is not self.model:
            faults.append("the graph was captured from another model object; load it with Graph.load(path, model)")
        return faults


def check_request(
    *,
    nparts: int,
    partitioner: str,
    options: Options,
    device: str | torch.device | Device | None = None,
    analytic: str | DeviceSpec | None = None,
    output: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Raise what can be known to be wrong without a model: names, numbers, the folder."""
    from gemini.partition.registry import find_partitioner
    from gemini.partition.step_estimate import find_schedule
    from gemini.pipe.stage_folder import check_replaceable
    from gemini.profiling.device_specs import find_spec
    from gemini.profiling.measured_device import find_device

    if nparts < 1:
        raise PartitionError(f"{nparts} parts\n    → ask for 1 or more")
    find_partitioner(partitioner)
    options.workers_for(nparts)
    find_schedule(options.schedule)
    if device is not None:
        find_device(device)
    if isinstance(analytic, str):
        find_spec(analytic)
    if output is not None:
        check_replaceable(output, overwrite)


# ── the steps ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _capture(flow: _Flow, _: Progress) -> None:
    from gemini.cache.graphs import capture_or_reuse

    if flow.known_graph is not None:
        flow.graph = flow.known_graph
    else:
        settings = {"depth": flow.depth, "basic_blocks": flow.basic_blocks}
        folder = flow.cache_folder()
        flow.graph, flow.is_warm = capture_or_reuse(flow.model, tuple(flow.args), dict(flow.kwargs), settings, folder)
    if flow.graph.is_whole and flow.nparts > 1:
        raise PartitionError(
            f"{flow.graph.model_name} cannot be cut into {flow.nparts} parts: it had to be captured whole, "
            f"because {flow.graph.blocks['']}\n    → train it on one device"
        )


def _profile(flow: _Flow, tell: Progress) -> None:
    from gemini.profiling import profile

    if flow.known_profile is not None:
        flow.profile = flow.known_profile
    else:
        flow.profile = profile(
            flow.graph, tuple(flow.args), dict(flow.kwargs), device=flow.device, analytic=flow.analytic,
            rounds=flow.rounds, cache=flow.cache, progress=tell, check=not flow.is_warm,
        )  # fmt: skip


def _partition(flow: _Flow, _: Progress) -> None:
    from gemini.partition import partition

    flow.partition = partition(flow.graph, flow.profile, flow.nparts, flow.partitioner, flow.options)


def _generate(flow: _Flow, _: Progress) -> None:
    from gemini.codegen import generate_stages

    flow.codes = generate_stages(flow.graph, flow.partition)
    flow.piped = Piped(flow.model, flow.graph, flow.profile, flow.partition, flow.codes)


def _save(flow: _Flow, _: Progress) -> None:
    if flow.output is not None:
        flow.piped.save(flow.output, overwrite=flow.overwrite)


STEPS: tuple[tuple[str, Callable[[_Flow, Progress], None]], ...] = (
    ("capture", _capture),
    ("profile", _profile),
    ("partition", _partition),
    ("generate", _generate),
    ("save", _save),
)
