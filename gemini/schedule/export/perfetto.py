"""Schedules as Chrome traces, for https://ui.perfetto.dev and chrome://tracing: export and import.

    process "pipeline"   thread "phases"      warm-up │ steady state … │ cool-down
                         thread "device 0"    a slice per block, with its data; arrows along dependencies
                         …
                         counter "memory of device 0" …

A slice carries the whole block in its `args` and the trace the data of the plan, so that `load_trace` returns an
equal plan. One unit of time is shown as one millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from gemini.atomic_files import write_whole
from gemini.schedule.block import Block, Number
from gemini.schedule.json_reader import Field, read_json
from gemini.schedule.phases import find_phases
from gemini.schedule.plan_files import FORMAT, VERSION, from_field, to_dict
from gemini.schedule.schedplan import SchedPlan

MICROSECONDS_A_UNIT = 1000
_PROCESS = 1
_PLAN_KEY = "gemini"
_BLOCK_KEY = "block"

Event = dict[str, object]


def trace(plan: SchedPlan) -> dict[str, object]:
    """The plan as a trace document, ready for `json.dumps`."""
    document = to_dict(plan)
    entries = document.pop("blocks")
    assert isinstance(entries, list)
    events = [*_names(plan), *_phases(plan), *_slices(plan, entries), *_arrows(plan), *_memory(plan)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        _PLAN_KEY: {"format": FORMAT, "version": VERSION, **document},
    }


def save_trace(plan: SchedPlan, path: str | Path) -> Path:
    """Write a trace that Perfetto opens and `load_trace` reads back."""
    document = trace(plan)
    events = document["traceEvents"]
    assert isinstance(events, list)
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
    rest = json.dumps({key: value for key, value in document.items() if key != "traceEvents"}, allow_nan=False)
    write_whole(Path(path), f'{{"traceEvents": [\n{lines}\n],\n{rest[1:]}\n')
    return Path(path)


def load_trace(path: str | Path) -> SchedPlan:
    """Read the plan out of a trace that `save_trace` wrote."""
    root = read_json(Path(path))
    if _PLAN_KEY not in root:
        raise root.error("not a trace of a gemini schedule", "give a file that save_trace wrote")
    found: dict[int, object] = {}
    for event in root["traceEvents"].items():
        if "args" in event and _BLOCK_KEY in event["args"]:
            entry = _values(event["args"])
            entry.pop("name", None)
            found[Field(root.source, event.place, entry.pop(_BLOCK_KEY)).integer(at_least=0)] = entry
    if sorted(found) != list(range(len(found))):
        absent = sorted(set(range(max(found) + 1)) - set(found))
        raise root["traceEvents"].error(f"blocks {absent[:12]} are missing", "the trace was edited: write it again")
    blocks = [found[index] for index in sorted(found)]
    return from_field(Field(root.source, "", {**_values(root[_PLAN_KEY]), "blocks": blocks}))


def _values(field: Field) -> dict[str, object]:
    return {key: field[key].value for key in field.keys()}  # noqa: SIM118 (a Field is no mapping)


# ---------------------------------------------------------------- the parts of a trace


def _microseconds(time: Number) -> Number:
    return time * MICROSECONDS_A_UNIT


def _names(plan: SchedPlan) -> Iterator[Event]:
    """Names and order of the tracks; thread 0 has the phases, thread d + 1 is device d."""
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "pipeline"}}
    for thread in range(plan.ndevs + 1):
        name = f"device {thread - 1}" if thread else "phases"
        yield {"ph": "M", "pid": _PROCESS, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": _PROCESS, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _phases(plan: SchedPlan) -> Iterator[Event]:
    phases = find_phases(plan)
    if phases is None:
        return
    marks: list[tuple[str, Number, Number]] = [("warm-up", 0, phases.begin)]
    marks += [
        (f"repetend {kernel}", phases.begin + kernel * phases.length, phases.begin + (kernel + 1) * phases.length)
        for kernel in range(phases.kernels)
    ]
    marks += [("cool-down", phases.end, plan.nsteps)]
    for name, begin, end in marks:
        if end > begin:
            yield _slice(name, "phase", 0, begin, end - begin)


def _slices(plan: SchedPlan, entries: list[dict[str, object]]) -> Iterator[Event]:
    """One slice for every block and device; a block on several devices is the same `block` in all of them."""
    for index, (block, entry) in enumerate(zip(plan, entries)):
        for device in plan.device(block):
            args = {"name": str(block), _BLOCK_KEY: index, **entry}
            yield {**_slice(str(block), block.btype, device + 1, plan.step(block), block.span), "args": args}


def _slice(name: str, category: str, thread: int, start: Number, span: Number) -> Event:
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": _microseconds(start),
        "dur": _microseconds(span),
    }


def _arrows(plan: SchedPlan) -> Iterator[Event]:
    """A flow for every dependency between blocks that have no device in common."""
    number = 0
    for block in plan:
        for prev in block.before:
            source, target = plan.device(prev), plan.device(block)
            if prev in plan and not set(source) & set(target):
                number += 1
                yield _flow("s", number, source[0], plan.step(prev), prev)
                yield {**_flow("f", number, target[0], plan.step(block), prev), "bp": "e"}


def _flow(phase: str, number: int, device: int, time: Number, prev: Block) -> Event:
    return {
        "ph": phase,
        "pid": _PROCESS,
        "tid": device + 1,
        "id": number,
        "name": str(prev),
        "cat": "dependency",
        "ts": _microseconds(time),
    }


def _memory(plan: SchedPlan) -> Iterator[Event]:
    """A counter per device: its memory, at each time at which it changes."""
    for device in range(plan.ndevs):
        for time, held in plan.memory_curve(device):
            yield {
                "ph": "C",
                "pid": _PROCESS,
                "tid": device + 1,
                "name": f"memory of device {device}",
                "ts": _microseconds(time),
                "args": {"held": held},
            }
