"""Plans written by rule, independent of the library and the composer."""

from __future__ import annotations

from itertools import pairwise

from gemini.schedule import Block, SchedPlan
from gemini.schedule.block import Number
from gemini.schedule.device_orders import plan_from_orders


def pipeline_placement(
    ndevs: int, nstages: int | None = None, *, split: bool = False, v: bool = False, spans: tuple[Number, ...] = ()
) -> SchedPlan:
    """Stages in a row, looped over the devices (or in a V); backward whole, or split in input and weight gradient."""
    nstages = nstages or ndevs
    forward, backward, weight = spans or ((1, 1, 1) if split else (1, 2, 0))
    placement = SchedPlan(ndevs)
    devices = [_device(stage, ndevs, v) for stage in range(nstages)]
    chain: list[Block] = []
    step: Number = 0
    for stage in range(nstages):
        chain.append(placement.add_block(Block(0, forward, 1, "forward", stage=stage), devices[stage], step))
        step += forward
    for stage in reversed(range(nstages)):
        kind, memory = ("input_gradient", 0) if split else ("backward", -1)
        block = placement.add_block(Block(0, backward, memory, kind, stage=stage), devices[stage], step)
        chain.append(block)
        step += backward
        if split:
            late = placement.add_block(Block(0, weight, -1, "weight_gradient", stage=stage), devices[stage], step)
            Block.make_dependency(block, late)
            step += weight
    for prev, later in pairwise(chain):
        Block.make_dependency(prev, later)
    return placement


def _device(stage: int, ndevs: int, v: bool) -> int:
    lap, place = divmod(stage, ndevs)
    return ndevs - 1 - place if v and lap % 2 else place


def one_f_one_b(ndevs: int, nmicros: int, *, split: bool = False, spans: tuple[Number, ...] = ()) -> SchedPlan:
    """1F1B; with `split`, weight gradients follow one step behind the input gradients."""
    orders = []
    for stage in range(ndevs):
        warm = min(ndevs - stage, nmicros)
        row = [f"{stage}F{mid}" for mid in range(warm)]
        for mid in range(nmicros):
            row.append(f"{stage}{'I' if split else 'B'}{mid}")
            if mid + warm < nmicros:
                row.append(f"{stage}F{mid + warm}")
            if split and mid:
                row.append(f"{stage}W{mid - 1}")
        orders.append([*row, *([f"{stage}W{nmicros - 1}"] if split else [])])
    return plan_from_orders(pipeline_placement(ndevs, split=split, spans=spans), orders)


def interleaved(ndevs: int, nmicros: int, *, split: bool = False, v: bool = False) -> SchedPlan:
    """Two chunks per device: all forwards in groups of `ndevs` micro-batches, then all backwards (looped BFS)."""
    placement = pipeline_placement(ndevs, 2 * ndevs, split=split, v=v)
    orders = []
    for device in range(ndevs):
        first, second = device, (2 * ndevs - 1 - device if v else ndevs + device)
        row = [f"{stage}F{mid}" for stage in (first, second) for mid in range(nmicros)]
        for stage in (second, first):
            for mid in range(nmicros):
                row += [f"{stage}I{mid}", f"{stage}W{mid}"] if split else [f"{stage}B{mid}"]
        orders.append(row)
    return plan_from_orders(placement, orders)
