"""Validation: a plan checked against the rules alone, independent of the search.

    times         every start is a finite time from 0 on, every device exists
    dependencies  a block starts when all it depends on has ended and its bytes have arrived
    exclusivity   a device runs one block at a time
    memory        no device ever holds more than its limit
    completeness  every micro-batch has the same blocks, of the same kind, on the same devices, with the same
                  dependencies among them, and those of the placement where the plan has one

All faults are collected. Times and memory are compared with a relative tolerance of 1e-9: real-valued sums round.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gemini.errors import InvalidPlanError, PlacementError
from gemini.schedule.block import Block, Number
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.text_grid import format_time, grid

TOLERANCE = 1e-9
_MAX_LISTED = 20


@dataclass(frozen=True)
class PlanFault:
    """One broken rule: which (`times`, `dependencies`, `exclusivity`, `memory`, `completeness`), how, which blocks."""

    rule: str
    what: str
    blocks: tuple[Block, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


def validate(plan: SchedPlan, memory: Number | Sequence[Number] | None = None) -> None:
    """Raise `InvalidPlanError` with every fault and the marked grid, unless the plan satisfies all rules.

    `memory` is one limit for all devices or one per device; the default is the limits the plan was made for.
    """
    faults = find_faults(plan, memory)
    if not faults:
        return
    lines = [f"the plan has {len(faults)} fault{'s' if len(faults) > 1 else ''}"]
    lines.extend(f"  - {fault}" for fault in faults[:_MAX_LISTED])
    if len(faults) > _MAX_LISTED:
        lines.append(f"  … and {len(faults) - _MAX_LISTED} more")
    marks = [block for fault in faults[:_MAX_LISTED] for block in fault.blocks]
    lines.append("    → blocks at fault carry a ! below; move them, or compose the plan again")
    raise InvalidPlanError("\n".join([*lines, grid(plan, marks)]))


def find_faults(plan: SchedPlan, memory: Number | Sequence[Number] | None = None) -> list[PlanFault]:
    """Return every fault of the plan; none if it is valid."""
    limits = memory_limits(plan, memory)
    plan.links.check(plan.ndevs)
    broken = list(_times(plan))
    if broken:  # nothing else can be checked for a block without a time or a device
        return broken
    return [*_dependencies(plan), *_exclusivity(plan), *_memory(plan, limits), *_completeness(plan)]


def memory_limits(plan: SchedPlan, memory: Number | Sequence[Number] | None) -> tuple[Number, ...] | None:
    """One limit per device, from one number, a sequence, or the limits of the plan."""
    memory = plan.memory if memory is None else memory
    if memory is None:
        return None
    limits = (memory,) * plan.ndevs if isinstance(memory, (int, float)) else tuple(memory)
    if len(limits) != plan.ndevs or any(math.isnan(limit) for limit in limits):
        raise PlacementError(
            f"memory limits {list(limits)} for {plan.ndevs} devices\n    → give one number, or one per device"
        )
    return limits


def _exceeds(value: Number, limit: Number, scale: Number = 0) -> bool:
    return value - limit > TOLERANCE * max(abs(limit), abs(scale), 1e-300)


# --------------------------------------------------------------------- the rules


def _times(plan: SchedPlan) -> Iterator[PlanFault]:
    for block in plan:
        start, devices = plan.step(block), plan.device(block)
        if not math.isfinite(start) or start < 0:
            yield PlanFault("times", f"{block} starts at {start}", (block,))
        outside = [dev for dev in devices if not 0 <= dev < plan.ndevs]
        if outside:
            yield PlanFault("times", f"{block} is on device {outside[0]} of a plan with {plan.ndevs}", (block,))
        elif not devices or len(set(devices)) < len(devices):
            yield PlanFault("times", f"{block} is on devices {list(devices)}", (block,))


def _dependencies(plan: SchedPlan) -> Iterator[PlanFault]:
    end = plan.nsteps
    for block in plan:
        for prev in block.before:
            if prev not in plan:
                yield PlanFault("dependencies", f"{block} depends on {prev}, which is not in the plan", (block,))
                continue
            delay = plan.delay(prev, block)
            ready = plan.step(prev) + prev.span + delay
            if _exceeds(ready, plan.step(block), end):
                travel = f" and arrives after {format_time(delay)} at {format_time(ready)}" if delay else ""
                yield PlanFault(
                    "dependencies",
                    f"{block} on {_places(plan, block)} starts at {format_time(plan.step(block))}, but {prev} on "
                    f"{_places(plan, prev)} ends at {format_time(plan.step(prev) + prev.span)}{travel}",
                    (prev, block),
                )


def _exclusivity(plan: SchedPlan) -> Iterator[PlanFault]:
    end = plan.nsteps
    for dev, blocks in enumerate(_by_device(plan)):
        latest: Block | None = None  # the block that ends last among those before
        for block in blocks:
            if latest is not None and _exceeds(plan.step(latest) + latest.span, plan.step(block), end):
                yield PlanFault(
                    "exclusivity",
                    f"device {dev} is to run {latest} ({_interval(plan, latest)}) and {block} "
                    f"({_interval(plan, block)}) at once",
                    (latest, block),
                )
            if latest is None or plan.step(block) + block.span > plan.step(latest) + latest.span:
                latest = block


def _memory(plan: SchedPlan, limits: tuple[Number, ...] | None) -> Iterator[PlanFault]:
    if limits is None:
        return
    keeps = plan.keeps_memory
    for dev, blocks in enumerate(_by_device(plan)):
        now: Number = 0
        over = False
        scale = sum(abs(block.memory) for block in blocks)  # the rounding error grows with the sum
        for block in blocks:
            now = now + block.memory if keeps else block.memory
            was_over, over = over, _exceeds(now, limits[dev], scale)
            # One fault where the limit is crossed, not one for every block above it.
            if over and not was_over:
                yield PlanFault(
                    "memory",
                    f"device {dev} holds {format_time(now)} of {format_time(limits[dev])} once {block} starts at "
                    f"{format_time(plan.step(block))}",
                    (block,),
                )


def _completeness(plan: SchedPlan) -> Iterator[PlanFault]:
    micros: defaultdict[int, dict[int | None, Block]] = defaultdict(dict)
    for block in plan:
        twin = micros[block.mid].setdefault(block.gid, block)
        if twin is not block:
            what = f"micro-batch {block.mid} has {twin} and {block} as the same block (gid {block.gid})"
            yield PlanFault("completeness", what, (twin, block))
    # One micro-batch may have any number (a copy for later use); several count from 0 without gaps.
    for mid in range(max(micros)) if len(micros) > 1 else ():
        if mid not in micros:
            yield PlanFault("completeness", f"micro-batch {mid} has no blocks")
    model, origin = _model(plan, micros)
    for mid in sorted(micros):
        yield from _copies(plan, model, micros[mid], f"micro-batch {mid}", origin)


def _model(
    plan: SchedPlan, micros: dict[int, dict[int | None, Block]]
) -> tuple[dict[int | None, tuple[Block, tuple[int, ...]]], str]:
    """The reference for every micro-batch: the placement, or the micro-batch with the most blocks."""
    if plan.placement is not None:
        placement = plan.placement
        return {block.gid: (block, placement.device(block)) for block in placement}, "the placement"
    if not micros:
        return {}, ""
    fullest = max(sorted(micros), key=lambda mid: len(micros[mid]))
    model = {gid: (block, plan.device(block)) for gid, block in micros[fullest].items()}
    return model, f"micro-batch {fullest}"


def _copies(
    plan: SchedPlan,
    model: dict[int | None, tuple[Block, tuple[int, ...]]],
    copies: dict[int | None, Block],
    name: str,
    origin: str,
) -> Iterator[PlanFault]:
    for gid, (block, _) in model.items():
        if gid not in copies:
            yield PlanFault("completeness", f"{name} lacks {block.stage}{_kind(block)}, which {origin} has")
    for gid, copy in copies.items():
        if gid not in model:
            yield PlanFault("completeness", f"{name} has {copy}, which {origin} has not", (copy,))
            continue
        block, devices = model[gid]
        if copy.btype != block.btype or copy.stage != block.stage:
            what = f"{copy} of {name} is block {gid}, which is {block.stage}{_kind(block)} in {origin}"
            yield PlanFault("completeness", what, (copy,))
        elif set(plan.device(copy)) != set(devices):
            what = f"{copy} is on {_places(plan, copy)}, but {origin} has it on {_devices(devices)}"
            yield PlanFault("completeness", what, (copy,))
        wanted, found = {prev.gid for prev in block.before}, {prev.gid for prev in copy.before}
        for other in sorted(wanted ^ found, key=str):
            if other in copies and other in model:
                verb = "does not depend" if other in wanted else "depends"
                contrast = "does" if other in wanted else "does not"
                what = f"{copy} {verb} on {copies[other]}, and in {origin} it {contrast}"
                yield PlanFault("completeness", what, (copies[other], copy))


# ------------------------------------------------------------------------- words


def _by_device(plan: SchedPlan) -> list[list[Block]]:
    rows: list[list[Block]] = [[] for _ in range(plan.ndevs)]
    for block in sorted(plan, key=plan.step):
        for dev in plan.device(block):
            rows[dev].append(block)
    return rows


def _kind(block: Block) -> str:
    return str(block.action)[len(str(block.action.stage)) :].rstrip("0123456789")


def _interval(plan: SchedPlan, block: Block) -> str:
    return f"{format_time(plan.step(block))} to {format_time(plan.step(block) + block.span)}"


def _places(plan: SchedPlan, block: Block) -> str:
    return _devices(plan.device(block))


def _devices(devices: tuple[int, ...]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"
