"""Pipe request: the arguments of `pipe_model`, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.errors import PartitionError
from gemini.partition.partition_options import Options

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.profiling.device_specs import DeviceSpec
    from gemini.profiling.measured_device import Device
    from gemini.profiling.profile_result import Profile

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class PipeRequest:
    """A model, one batch, and the options of every step."""

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
    graph: Graph | None  # captured earlier
    profile: Profile | None  # measured earlier

    def check(self) -> None:
        """Raise PartitionError with every fault that is visible before capture, which may take long."""
        faults = self._find_faults()
        if faults:
            listed = "\n".join(f"  - {fault}" for fault in faults)
            raise PartitionError(f"pipe_model cannot begin:\n{listed}")
        check_request(
            nparts=self.nparts, partitioner=self.partitioner, options=self.options, device=self.device,
            analytic=self.analytic, output=self.output, overwrite=self.overwrite,
        )  # fmt: skip

    def _find_faults(self) -> list[str]:
        faults = []
        if not isinstance(self.model, nn.Module):
            faults.append(f"a model is a torch.nn.Module, not {type(self.model).__name__}")
        if not isinstance(self.nparts, int) or isinstance(self.nparts, bool) or self.nparts < 1:
            faults.append(f"nparts={self.nparts!r}; it is a whole number, 1 or more")
        for name, types, remedy in (
            ("args", (tuple, list), "it is a tuple of arguments: args=(batch,)"),
            ("kwargs", Mapping, "it is a dictionary of keyword arguments"),
            ("options", Options, "write Options(…) of gemini.partition"),
        ):
            if not isinstance(getattr(self, name), types):
                faults.append(f"{name} is a {type(getattr(self, name)).__name__}; {remedy}")
        if self.graph is not None and self.graph.model is not self.model:
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
    """Raise the faults that are visible without a model: names, numbers, the output folder."""
    from gemini.partition.registry import find_partitioner
    from gemini.partition.step_estimate import find_schedule
    from gemini.pipe.stage_folder import check_replaceable
    from gemini.profiling.device_specs import find_spec
    from gemini.profiling.measured_device import find_device

    if nparts < 1:
        raise PartitionError(f"{nparts} parts\n    → request 1 or more")
    find_partitioner(partitioner)
    options.workers_for(nparts)
    find_schedule(options.schedule)
    if device is not None:
        find_device(device)
    if isinstance(analytic, str):
        find_spec(analytic)
    if output is not None:
        check_replaceable(output, overwrite)


def check_divisible(graph: Graph, nparts: int) -> None:
    """Raise PartitionError if a model that was captured as one node must be cut."""
    if graph.is_whole and nparts > 1:
        raise PartitionError(
            f"{graph.model_name} cannot be cut into {nparts} parts: it had to be captured whole, "
            f"because {graph.blocks['']}\n    → train it on one device"
        )


class StepProgress:
    """Reports the progress of named steps as progress of the whole flow."""

    def __init__(self, report: Progress | None, names: Sequence[str]) -> None:
        self._report: Progress = report or (lambda *_: None)
        self._names = tuple(names)

    def begin(self, name: str) -> Progress:
        """Report that a step begins; returns the callback for progress inside it."""
        at, count = self._names.index(name), len(self._names)
        self._report(at, count, name)
        return lambda done, total, what: self._report(at * total + done, count * total, f"{name}: {what}")

    def finish(self) -> None:
        """Report that all steps are done."""
        self._report(len(self._names), len(self._names), "done")
