"""Plan files: lossless JSON.

    {"format": "gemini.schedule", "version": 1, "ndevs": 4,
     "links": {"latency": 0, "bandwidth": 0}, "memory": null, "pattern": null, "proof": null, "placement": null,
     "blocks": [
      {"mid": 0, "gid": 0, "stage": 0, "type": "forward", "span": 1, "memory": 1,
       "devices": [0], "start": 0, "after": []},
      …]}

Blocks are listed in the order they were added, `after` holds positions in that list, and `bytes` (if anything is
transferred) the size of each of those transfers. `memory` has one limit per device, `null` for none. Integers stay
integers and reals stay reals. A file is written to a temporary path and renamed at the end, so a failure leaves the
old file unchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from gemini.atomic_files import write_whole
from gemini.errors import PlacementError, ScheduleError
from gemini.schedule.block import Block, Number
from gemini.schedule.json_reader import Field, read_json
from gemini.schedule.link_costs import Links, Table
from gemini.schedule.schedplan import Pattern, Proof, SchedPlan

FORMAT = "gemini.schedule"
VERSION = 1

_PLAN_KEYS = ("ndevs", "links", "memory", "pattern", "proof", "placement", "blocks")
_PROOF_KEYS = (
    "period",
    "lower_bound",
    "optimal",
    "method",
    "seconds",
    "notes",
    "makespan",
    "makespan_bound",
)
_BLOCK_KEYS = ("mid", "gid", "stage", "type", "span", "memory", "devices", "start", "after", "bytes")


def save(plan: SchedPlan, path: Path) -> Path:
    """Write `plan` to `path` atomically."""
    document = {"format": FORMAT, "version": VERSION, **to_dict(plan)}
    path = Path(path)
    write_whole(path, _dump(document) + "\n")
    return path


def load(path: Path) -> SchedPlan:
    """Read a plan that `save` wrote."""
    root = read_json(Path(path))
    return from_field(root)


# ------------------------------------------------------------------- plan → JSON


def to_dict(plan: SchedPlan) -> dict[str, object]:
    """The plan as plain values; two plans are equal when these are."""
    return {
        "ndevs": plan.ndevs,
        "links": {"latency": plan.links.latency, "bandwidth": plan.links.bandwidth},
        "memory": None if plan.memory is None else [None if limit == math.inf else limit for limit in plan.memory],
        "pattern": _fields(plan.pattern, ("length", "nmicros", "starts", "rigid")),
        "proof": _fields(plan.proof, _PROOF_KEYS),
        "placement": None if plan.placement is None else to_dict(plan.placement),
        "blocks": _block_list(plan),
    }


def _fields(value: object, names: tuple[str, ...]) -> dict[str, object] | None:
    return None if value is None else {name: getattr(value, name) for name in names}


def _block_list(plan: SchedPlan) -> list[dict[str, object]]:
    position = {block: index for index, block in enumerate(plan)}
    entries = []
    for block in plan:
        strangers = [prev for prev in block.before if prev not in position]
        if strangers:
            raise ScheduleError(
                f"block {block} depends on {', '.join(map(str, strangers))}, not in the plan\n"
                "    → add the missing block to the plan, or remove the dependency"
            )
        entry: dict[str, object] = {
            "mid": block.mid,
            "gid": block.gid,
            "stage": block.stage,
            "type": block.btype,
            "span": block.span,
            "memory": block.memory,
            "devices": plan.device(block),
            "start": plan.step(block),
            "after": [position[prev] for prev in block.before],
        }
        if any(block.nbytes.get(prev, 0) for prev in block.before):
            entry["bytes"] = [block.nbytes.get(prev, 0) for prev in block.before]
        entries.append(entry)
    return entries


def _dump(document: Mapping[str, object], indent: str = "") -> str:
    """JSON with one line per key and one line per block: readable, with small diffs."""
    lines = []
    for key, value in document.items():
        if key == "blocks" and isinstance(value, list) and value:
            rows = f",\n{indent}  ".join(json.dumps(entry, allow_nan=False) for entry in value)
            text = f"[\n{indent}  {rows}\n{indent} ]"
        elif key == "placement" and isinstance(value, dict):
            text = _dump(value, indent + " ")
        else:
            text = json.dumps(value, allow_nan=False)
        lines.append(f"{indent} {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


# ------------------------------------------------------------------- JSON → plan


def from_field(root: Field) -> SchedPlan:
    """The plan in a document read by `read_json`; errors name the file and the position."""
    form = root.get("format", None)
    if form.value != FORMAT:
        raise root.error(
            f"not a gemini schedule (format {form.value!r})"
            if form.value is not None
            else "not a gemini schedule (no format)",
            "give a file that SchedPlan.save wrote; placements in the short form load with load_placement",
        )
    version = root["version"].integer()
    if version != VERSION:
        raise root["version"].error(
            f"version {version}, and this release reads version {VERSION}",
            "save the plan again with this release, or install the one that wrote it",
        )
    root.only("format", "version", *_PLAN_KEYS)
    return _plan(root)


def _plan(field: Field) -> SchedPlan:
    field.only("format", "version", *_PLAN_KEYS)
    try:
        plan = SchedPlan(field["ndevs"].integer(at_least=1))
        plan.links = links_from_field(field["links"], plan.ndevs)
        memory = field["memory"]
        if memory.value is not None:
            plan.memory = tuple(math.inf if item.value is None else item.number() for item in memory.items())
        if plan.memory is not None and len(plan.memory) != plan.ndevs:
            raise memory.error(f"{len(plan.memory)} limits for {plan.ndevs} devices", "give one limit a device")
        _read_blocks(field["blocks"], plan)
        plan.pattern = _pattern(field["pattern"])
        plan.proof = _proof(field["proof"])
        placement = field["placement"]
        plan.placement = None if placement.value is None else _plan(placement)
        plan.chain_blocks()
    except PlacementError as error:
        raise field.error(str(error)) from error
    return plan


def links_from_field(field: Field, ndevs: int) -> Links:
    """Latency and bandwidth, one for all pairs or a matrix."""
    field.only("latency", "bandwidth")
    try:
        return Links(_table(field["latency"]), _table(field["bandwidth"])).check(ndevs)
    except PlacementError as error:
        raise field.error(str(error)) from error


def _table(field: Field) -> Table:
    if isinstance(field.value, list):
        return tuple(tuple(cell.number() for cell in row.items()) for row in field.items())
    return field.number()


def _read_blocks(field: Field, plan: SchedPlan) -> None:
    entries = field.items()
    blocks: list[Block] = []
    for entry in entries:
        entry.only(*_BLOCK_KEYS)
        blocks.append(_block(entry))
        devices = [device.integer() for device in entry["devices"].items()]
        try:
            plan.add_block(blocks[-1], devices, entry["start"].number())
        except PlacementError as error:
            raise entry.error(str(error)) from error
    for entry, block in zip(entries, blocks):
        _read_edges(entry, block, blocks)


def _block(entry: Field) -> Block:
    try:
        return Block(
            entry["mid"].integer(),
            entry["span"].number(),
            entry["memory"].number(),
            entry["type"].text(),
            stage=entry["stage"].integer(at_least=0),
            gid=entry["gid"].integer(at_least=0),
        )
    except PlacementError as error:
        raise entry.error(str(error)) from error


def _read_edges(entry: Field, block: Block, blocks: list[Block]) -> None:
    after = entry["after"].items()
    nbytes: list[Number] = [0] * len(after)
    if "bytes" in entry:
        nbytes = [item.number() for item in entry["bytes"].items()]
        if len(nbytes) != len(after):
            raise entry["bytes"].error(f"{len(nbytes)} numbers for {len(after)} edges", "give one number an edge")
    for item, size in zip(after, nbytes):
        index = item.integer(at_least=0)
        if index >= len(blocks):
            raise item.error(f"there is no block {index}", f"give a position from 0 to {len(blocks) - 1}")
        try:
            Block.make_dependency(blocks[index], block, size)
        except PlacementError as error:
            raise item.error(str(error)) from error


def _pattern(field: Field) -> Pattern | None:
    if field.value is None:
        return None
    field.only("length", "nmicros", "starts", "rigid")
    nmicros = field["nmicros"].integer(at_least=1)
    starts = tuple(tuple(cell.number() for cell in row.items()) for row in field["starts"].items())
    if len(starts) != nmicros:
        raise field["starts"].error(f"{len(starts)} rows for {nmicros} micro-batches", "give one row per micro-batch")
    length = field["length"].number()
    if length <= 0:
        raise field["length"].error(f"{length} is not above zero", "write the plan again")
    return Pattern(length, nmicros, starts, "rigid" in field and field["rigid"].boolean())


def _proof(field: Field) -> Proof | None:
    if field.value is None:
        return None
    field.only(*_PROOF_KEYS)
    return Proof(
        field["period"].number(),
        field["lower_bound"].number(),
        field["optimal"].boolean(),
        field["method"].text(),
        field["seconds"].number(),
        tuple(note.text() for note in field["notes"].items()),
        _number_or_none(field, "makespan"),
        _number_or_none(field, "makespan_bound"),
    )


def _number_or_none(field: Field, name: str) -> Number | None:
    return field[name].number() if name in field and field[name].value is not None else None
