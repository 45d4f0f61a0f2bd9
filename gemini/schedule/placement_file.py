"""Placement files: JSON as written by `save`, or a short form that is easy to write by hand.

    {"ndevs": 2, "blocks": [
      {"id": 0, "type": "forward",  "span": 1, "memory": 1,  "devices": [0], "after": []},
      {"id": 1, "type": "backward", "span": 2, "memory": -1, "devices": [0, 1], "after": [0]}]}

A block may also have its `stage` and `bytes` (one number for each entry of `after`), the file `links` with a latency
and a bandwidth, and a file may hold several placements by name: {"vshape/4/train": {"ndevs": …}, …}.
"""

from __future__ import annotations

from pathlib import Path

from gemini.errors import PlacementError
from gemini.schedule.asap_times import asap
from gemini.schedule.block import Block
from gemini.schedule.json_reader import Field, read_json
from gemini.schedule.plan_files import FORMAT, from_field, links_from_field
from gemini.schedule.schedplan import SchedPlan

_KEYS = ("id", "type", "span", "memory", "devices", "after", "stage", "bytes")


def load_placement(path: str | Path, name: str | None = None) -> SchedPlan:
    """Return the placement in a file; `name` selects one of several.

    For a schedule saved with its placement, return that placement.
    """
    root = read_json(Path(path))
    if "format" in root and root["format"].value == FORMAT:
        if name is not None:
            raise root.error("holds one plan without a name", f"leave {name!r} out")
        plan = from_field(root)
        if plan.placement is None and plan.nmicros > 1:
            raise root.error(
                f"a schedule of {plan.nmicros} micro-batches, saved without its placement",
                "give a file with the blocks of one micro-batch",
            )
        return plan.placement or plan
    if "blocks" not in root and root.keys():
        root = _select_placement(root, name)
    elif name is not None:
        raise root.error("holds one placement without a name", f"leave {name!r} out")
    return _read_placement(root)


def _select_placement(root: Field, name: str | None) -> Field:
    names = root.keys()
    if name is not None and name in root:
        return root[name]
    if name is None and len(names) == 1:
        return root[names[0]]
    listed = ", ".join(names[:40]) + (", …" if len(names) > 40 else "")
    raise root.error("which placement?" if name is None else f"no placement {name!r}", f"choose one of {listed}")


def _read_placement(field: Field) -> SchedPlan:
    field.only("ndevs", "blocks", "links")
    homes: dict[Block, tuple[int, ...]] = {}
    by_id: dict[int, Block] = {}
    entries = field["blocks"].items()
    if not entries:
        raise field["blocks"].error("there are no blocks", "list the blocks of one micro-batch")
    for entry in entries:
        entry.only(*_KEYS)
        block = _block(entry)
        identity = entry["id"].integer()
        if identity in by_id:
            raise entry["id"].error(f"id {identity} stands twice", "give every block an id of its own")
        by_id[identity] = block
        homes[block] = tuple(device.integer() for device in entry["devices"].items())
    for entry in entries:
        _connect(entry, by_id)
    try:
        plan = SchedPlan(field["ndevs"].integer())
        if "links" in field:
            plan.links = links_from_field(field["links"], plan.ndevs)
        starts = asap(homes, plan.links)
        for block, devices in homes.items():
            plan.add_block(block, devices, starts[block])
    except PlacementError as error:
        raise field.error(str(error)) from error
    return plan


def _block(entry: Field) -> Block:
    try:
        return Block(
            0,
            entry["span"].number(),
            entry.get("memory", 0).number(),
            entry["type"].text(),
            stage=entry["stage"].integer(at_least=0) if "stage" in entry else None,
        )
    except PlacementError as error:
        raise entry.error(str(error)) from error


def _connect(entry: Field, by_id: dict[int, Block]) -> None:
    after = entry.get("after", []).items()
    sizes = [size.number() for size in entry["bytes"].items()] if "bytes" in entry else [0] * len(after)
    if len(sizes) != len(after):
        raise entry["bytes"].error(f"{len(sizes)} numbers for {len(after)} edges", "give one number an edge")
    for item, size in zip(after, sizes):
        prev = by_id.get(item.integer())
        if prev is None:
            raise item.error(f"there is no block with id {item.value}", f"ids are {', '.join(map(str, by_id))}")
        try:
            Block.make_dependency(prev, by_id[entry["id"].integer()], size)
        except PlacementError as error:
            raise item.error(str(error)) from error
