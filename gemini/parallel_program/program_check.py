"""Program check: every file of a parallel program, without workers.

files       unchanged since they were compiled, but for the stages
plan        the rules of schedules; the stages and workers of the partition; a simulation without deadlock
partition   every operation of the graph in one stage, none before its inputs
stages      each is built from the model and runs on the shapes of the manifest, without memory (device "meta")
state       the parameters and buffers of all stages are those of the model, by name
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.ir.serialize import load_graph
from gemini.parallel_program.program_files import PlannedStages
from gemini.pipe.live_stages import load_module
from gemini.pipe.manifest import GRAPH
from gemini.quiet_warnings import mute_warnings
from gemini.schedule.simulate import simulate
from gemini.schedule.user_plan import replicas
from gemini.schedule.validate import find_faults
from gemini.snapshot.rng_snapshot import preserve_rng_state

_MOST = 8  # faults of one kind


@dataclass(frozen=True)
class CheckLine:
    """One result: what was checked, what was found, and whether that is a fault."""

    what: str
    found: str
    is_fault: bool = False

    def __str__(self) -> str:
        return f"{'FAULT' if self.is_fault else 'ok':<6}{self.what}: {self.found}"


# ── without the model ──────────────────────────────────────────────────────────────────────────────────────────────
def check_planned_files(one: PlannedStages) -> Iterator[CheckLine]:
    """Check plan and partition of a folder, which has been read without a fault."""
    edited = f"edited: {', '.join(one.edited)}" if one.edited else "as compiled"
    yield CheckLine(f"{one.name}: files", f"{len(one.stage_files)} stages, {edited}")
    try:
        one.partition.validate(load_graph(one.folder / GRAPH))
        yield CheckLine(f"{one.name}: partition", f"{one.partition.nstages} stages on {one.partition.nparts} workers")
    except GeminiError as error:
        yield CheckLine(f"{one.name}: partition", str(error), is_fault=True)
    try:
        faults = [str(fault) for fault in find_faults(one.plan)] or list(_misfits(one))
    except GeminiError as error:
        faults = [str(error)]
    if faults:
        yield from (CheckLine(f"{one.name}: plan.json", fault, is_fault=True) for fault in faults[:_MOST])
        return
    result = simulate(one.plan)
    text = f"{one.facts.micro_batches} micro-batches, {float(result.makespan):.1f} ms, {result.idle_share:.0%} idle"
    yield CheckLine(f"{one.name}: plan.json", text if result.completed else str(result), not result.completed)


def _misfits(one: PlannedStages) -> Iterator[str]:
    """Yield what in the plan does not fit the partition and the call."""
    partition, plan = one.partition, one.plan
    ran = partition.nstages - bool(one.facts.tail)
    copies = replicas(plan)
    stages = {(block.stage or 0) % ran for block in plan.all_blocks()} if ran else set()
    if stages != set(range(ran)):
        yield f"it runs stages {sorted(stages)}, the partition has {ran}"
    if plan.ndevs > partition.nparts:
        yield f"it is for {plan.ndevs} workers, the partition for {partition.nparts}"
    count = copies * (1 + max((block.mid for block in plan.all_blocks()), default=-1))
    if count != one.facts.micro_batches:
        yield f"it has {count} micro-batches, the call has {one.facts.micro_batches}"
    if copies == 1:
        moved = {
            f"stage {stage} runs on worker {device}, the partition has it on {partition.workers[stage]}"
            for block in plan.all_blocks()
            for stage in [block.stage or 0]
            for device in plan.device(block)
            if stage < ran and device != partition.workers[stage]
        }
        yield from sorted(moved)


# ── with the model ─────────────────────────────────────────────────────────────────────────────────────────────────
def check_stages(one: PlannedStages, model: nn.Module) -> Iterator[CheckLine]:
    """Build every stage from a model, run it on the saved shapes, and compare the names of parameters and buffers."""
    if one.facts.shards > 1:
        what = f"the code of each of {one.facts.shards} shards; not run, since it exchanges values with the others"
        yield CheckLine(f"{one.name}: stages", what)
        wanted = {name for name, _ in _named_tensors(model)}
        held = {name for stage in one.contents.manifest["stages"] for name in (*stage["parameters"], *stage["buffers"])}
        yield _compare_names(one.name, held, wanted)
        return
    bare = _without_memory(model)
    found: set[str] = set()
    for stage in one.contents.manifest["stages"]:
        what = f"{one.name}/{stage['file']}"
        path = one.folder / stage["file"]
        try:
            module = load_module(path.read_text(encoding="utf-8"), str(path))
            made: nn.Module = getattr(module, stage["class"])(bare)
        except Exception as error:
            yield CheckLine(what, f"{type(error).__name__}: {error}", is_fault=True)
            continue
        found |= {name for name, _ in _named_tensors(made)}
        yield _run_stage(what, made, stage, one.contents.manifest["values"])
    yield _compare_names(one.name, found, {name for name, _ in _named_tensors(model)})


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose tensors have no memory."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _run_stage(what: str, stage: nn.Module, facts: dict[str, Any], values: dict[str, Any]) -> CheckLine:
    """Run a stage on the saved shapes and compare the shapes of its outputs."""
    numbers = [name for name in facts["inputs"] if values[name]["kind"] != "tensor"]
    if numbers:
        return CheckLine(what, f"built; not run, since its input {numbers[0]} is a number that depends on the call")
    inputs = [_empty(values[name]) for name in facts["inputs"]]
    try:
        with mute_warnings(), preserve_rng_state(), torch.no_grad():
            made = stage(*inputs)
    except NotImplementedError as error:
        return CheckLine(what, f"built; not run, since it reads values: {str(error).partition(chr(10))[0]:.100}")
    except Exception as error:
        if "meta" in str(error):
            return CheckLine(what, f"built; not run, since it reads values: {str(error).partition(chr(10))[0]:.100}")
        return CheckLine(what, f"{type(error).__name__}: {error}", is_fault=True)
    outputs = [made] if len(facts["outputs"]) == 1 else list(made or ())
    if len(outputs) != len(facts["outputs"]):
        return CheckLine(what, f"it returns {len(outputs)} values, not {len(facts['outputs'])}", is_fault=True)
    for name, output in zip(facts["outputs"], outputs, strict=True):
        if fault := _output_fault(name, output, values[name]):
            return CheckLine(what, fault, is_fault=True)
    return CheckLine(
        what, f"runs on {_shapes(facts['inputs'], values)} and returns {_shapes(facts['outputs'], values)}"
    )


def _empty(value: dict[str, Any]) -> torch.Tensor:
    return torch.empty(value["shape"], dtype=_dtype(value), device="meta")


def _dtype(value: dict[str, Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, value["dtype"].removeprefix("torch."))
    return found


def _output_fault(name: str, output: Any, value: dict[str, Any]) -> str:
    if value["kind"] != "tensor":
        return ""
    if not isinstance(output, torch.Tensor):
        return f"{name} is a {type(output).__name__}, not a tensor"
    if list(output.shape) != value["shape"] or output.dtype != _dtype(value):
        return f"{name} is {output.dtype} {list(output.shape)}, not {_dtype(value)} {value['shape']}"
    return ""


def _shapes(names: list[str], values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {values[name].get('shape', 'a number')}" for name in names) or "nothing"


def _compare_names(name: str, found: set[str], wanted: set[str]) -> CheckLine:
    missing, strange = sorted(wanted - found), sorted(found - wanted)
    if not missing and not strange:
        return CheckLine(f"{name}: state", f"the {len(wanted)} parameters and buffers of the model")
    texts = [f"not in any stage: {', '.join(missing[:_MOST])}"] if missing else []
    texts += [f"not in the model: {', '.join(strange[:_MOST])}"] if strange else []
    return CheckLine(f"{name}: state", "; ".join(texts), is_fault=True)


def write_lines(path: Path, lines: list[CheckLine]) -> None:
    """Write results for another process."""
    path.write_text(json.dumps([asdict(line) for line in lines]), encoding="utf-8")


def read_lines(path: Path) -> list[CheckLine]:
    """Read results of another process."""
    return [CheckLine(**line) for line in json.loads(path.read_text(encoding="utf-8"))]
