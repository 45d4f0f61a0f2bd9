"""Schedules as the CSV of torch.distributed.pipelining: export and import.

One row per rank, one cell per action, blank = idle:

    0F0,0F1,,,0B0,,0B1
    ,1F0,1B0,,1F1,1B1

`_PipelineScheduleRuntime._load_csv(path, format="compute_only")` reads such a file. It reads the order on
each rank and the rank of each stage (so looped and V-shaped chunks both work), and adds the communication
itself: activations go to the next stage, gradients to the previous one, nothing else is transferred. Plans that need
more (a stage on two devices, a skip over a stage, two chains side by side) are refused, naming the blocks.

Columns are time steps where starts and spans are whole numbers; otherwise a column is one step in which each rank
takes one action. Only the order matters to torch.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from gemini.atomic_files import write_whole
from gemini.errors import ArtifactError, PlacementError
from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Block, Number
from gemini.schedule.device_orders import plan_from_orders
from gemini.schedule.export.torch_rules import check_exportable
from gemini.schedule.schedplan import SchedPlan

# Wider than this many cells for each action, a time axis hides the order that it should show.
WIDEST = 16

_NO_COMPUTE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_OVERLAPPED = re.compile(r"\((?P<parts>[^()]*)\)OVERLAP_F_B")
_DEFAULT_MEMORY = {FORWARD: 1, BACKWARD: -1, INPUT_GRADIENT: 0, WEIGHT_GRADIENT: -1}


def dumps_csv(plan: SchedPlan) -> str:
    """The CSV text of `plan`; raises `PlacementError` where torch cannot run it."""
    check_exportable(plan)
    columns = _columns(plan)
    width = 1 + max(columns.values())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for device in range(plan.ndevs):
        cells = [""] * width
        for block in plan.device_blocks(device):
            cells[columns[block]] = str(block)
        writer.writerow(cells)
    return text.getvalue()


def save_csv(plan: SchedPlan, path: str | Path) -> Path:
    """Write `plan` for `_PipelineScheduleRuntime._load_csv(path, format="compute_only")`."""
    write_whole(Path(path), dumps_csv(plan))
    return Path(path)


def loads_csv(text: str, placement: SchedPlan | None = None, source: str = "CSV") -> SchedPlan:
    """Read a schedule from CSV text.

    `placement` supplies spans, memory and dependencies, which the CSV lacks. Without one every action takes one step, a
    forward holds one unit of memory until its last gradient, and dependencies are those of torch.
    Communication cells of a `compute_comms` file are skipped. Blocks start at the time of their column if possible,
    otherwise at the earliest time that their order allows.
    """
    rows, aligned = _read_rows(text, source)
    if placement is None:
        placement = _placement_of(rows, source)
    plan = plan_from_orders(placement, [[action for _, action in row] for row in rows])
    _check_complete(plan, placement, source)
    return _at_columns(plan, rows) if aligned else plan


def load_csv(path: str | Path, placement: SchedPlan | None = None) -> SchedPlan:
    """Read a schedule from a CSV file; see `loads_csv`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # spreadsheets prepend a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"cannot read {path}: {error}\n    → give a CSV file with one row per rank") from error
    return loads_csv(text, placement, source=str(path))


# ---------------------------------------------------------------- writing


def _columns(plan: SchedPlan) -> dict[Block, int]:
    blocks = plan.all_blocks()
    steps = _order_columns(plan, blocks)
    times: list[Number] = [plan.step(block) for block in blocks] + [block.span for block in blocks]
    whole = all(float(time).is_integer() for time in times)
    if whole and plan.nsteps <= WIDEST * (1 + max(steps.values())):
        return {block: int(plan.step(block)) for block in blocks}
    return steps


def _order_columns(plan: SchedPlan, blocks: Iterable[Block]) -> dict[Block, int]:
    """Place each block one column after all blocks that it waits for, on any device."""
    columns: dict[Block, int] = {}
    taken = [-1] * plan.ndevs
    for block in blocks:
        (device,) = plan.device(block)
        needed = [columns[prev] for prev in block.before if prev in columns]
        columns[block] = taken[device] = 1 + max([taken[device], *needed])
    return columns


# ---------------------------------------------------------------- reading


def _read_rows(text: str, source: str) -> tuple[list[list[tuple[int, Action]]], bool]:
    """The actions of each rank with their columns, and whether columns can be times (one action in each)."""
    rows: list[list[tuple[int, Action]]] = []
    aligned = True
    for rank, cells in enumerate(csv.reader(io.StringIO(text))):
        row: list[tuple[int, Action]] = []
        for column, cell in enumerate(cells):
            actions = _read_cell(cell.strip(), rank, column, source)
            aligned = aligned and (len(actions) == 1 or not cell.strip())
            row.extend((column, action) for action in actions)
        rows.append(row)
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ArtifactError(f"{source}: no actions in it\n    → give one row per rank, with cells such as 0F0 and 0B0")
    return rows, aligned


def _read_cell(cell: str, rank: int, column: int, source: str) -> list[Action]:
    if not cell or _NO_COMPUTE.fullmatch(cell):
        return []
    overlapped = _OVERLAPPED.fullmatch(cell)
    try:
        return [Action.parse(part) for part in (overlapped["parts"].split(";") if overlapped else [cell])]
    except PlacementError as error:
        raise ArtifactError(f"{source}: rank {rank}, column {column}: {error}") from error


def _placement_of(rows: list[list[tuple[int, Action]]], source: str) -> SchedPlan:
    """Return the placement of one micro-batch of the rows, with the dependencies of torch."""
    ranks: dict[tuple[int, str], int] = {}
    for rank, row in enumerate(rows):
        for _, action in row:
            other = ranks.setdefault((action.stage, action.btype), rank)
            if other != rank:
                raise ArtifactError(
                    f"{source}: {action} is on rank {rank}, other micro-batches of it on rank {other}\n"
                    "    → keep every stage on one rank"
                )
    placement = SchedPlan(len(rows))
    last = max(stage for stage, _ in ranks)
    blocks: dict[tuple[int, str], Block] = {}
    for key in sorted(ranks, key=lambda item: _backward_last(item, last)):
        block = Block(0, 1, _DEFAULT_MEMORY.get(key[1], 0), key[1], stage=key[0])
        blocks[key] = placement.add_block(block, ranks[key], len(blocks))
    for (stage, btype), block in blocks.items():
        for key in _torch_needs(stage, btype):
            if key in blocks:
                Block.make_dependency(blocks[key], block)
    return placement


def _backward_last(item: tuple[int, str], last: int) -> tuple[int, int, str]:
    stage, btype = item
    return (0, stage, btype) if btype == FORWARD else (1, last - stage, btype)


def _torch_needs(stage: int, btype: str) -> list[tuple[int, str]]:
    """The actions that torch completes before it runs this type at this stage."""
    if btype == FORWARD:
        return [(stage - 1, FORWARD)]
    if btype in (BACKWARD, INPUT_GRADIENT):
        return [(stage, FORWARD), (stage + 1, BACKWARD), (stage + 1, INPUT_GRADIENT)]
    return [(stage, INPUT_GRADIENT)] if btype == WEIGHT_GRADIENT else []


def _check_complete(plan: SchedPlan, placement: SchedPlan, source: str) -> None:
    there = {(block.stage, block.btype, block.mid) for block in plan.all_blocks()}
    kinds = [(block.stage, block.btype) for block in placement.all_blocks()]
    nmicros = 1 + max(block.mid for block in plan.all_blocks())
    whole_backward = {stage for stage, btype in kinds if btype == BACKWARD} & {
        stage for stage, btype in kinds if btype in (INPUT_GRADIENT, WEIGHT_GRADIENT)
    }
    missing = [
        str(Action(stage or 0, btype, mid))
        for mid in range(nmicros)
        for stage, btype in kinds
        if (stage, btype, mid) not in there and not (btype != FORWARD and stage in whole_backward)
    ]
    if missing:
        raise ArtifactError(
            f"{source}: {len(missing)} actions are missing: {', '.join(missing[:12])}\n"
            "    → every micro-batch passes every stage once; the file may be cut short"
        )


def _at_columns(plan: SchedPlan, rows: list[list[tuple[int, Action]]]) -> SchedPlan:
    """The plan with every block at the time of its column, if spans and dependencies allow that."""
    column = {action: at for row in rows for at, action in row}
    starts: dict[Block, Number] = {block: column[block.action] for block in plan}
    ready = {block: start + block.span for block, start in starts.items()}
    for device in range(plan.ndevs):
        row = plan.device_blocks(device)
        if any(ready[block] > starts[later] for block, later in pairwise(row)):
            return plan
    late = any(
        ready[prev] + plan.delay(prev, block) > starts[block]
        for block in starts
        for prev in block.before
        if prev in plan
    )
    return plan if late else plan.retimed(starts)
