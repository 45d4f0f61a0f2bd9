"""Placement problem: the numeric form of a placement, the input of every search method.

Blocks become indices (their `gid`), times become integers. Integer spans stay as they are; decimals such as 0.25 are
scaled exactly; any other real is rounded *up* to a grid so fine (10⁻⁹ of the work) that the loss is below the
resolution of a clock. A schedule of the integers is therefore always a schedule of the reals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from gemini.errors import Fault, InfeasibleError, PlacementError
from gemini.schedule.block import Block, Number
from gemini.schedule.link_costs import Links
from gemini.schedule.schedplan import SchedPlan

_LARGEST_DENOMINATOR = 1_000_000
_GRID = 1 << 30
MEMORY_TOLERANCE = 1e-9


@dataclass(frozen=True)
class PlacementProblem:
    """The blocks of one micro-batch (or, after `times`, of a kernel of several) in integer time.

    `before[i]` and `after[i]` are `(block, delay)` pairs. `caps` is the memory of each device, `inf` where it has no
    limit. One unit of integer time is `unit` of the placement's time.
    """

    ndevs: int
    span: tuple[int, ...]
    memory: tuple[Number, ...]
    devices: tuple[tuple[int, ...], ...]
    before: tuple[tuple[tuple[int, int], ...], ...]
    caps: tuple[float, ...]
    unit: Fraction = Fraction(1)
    copies: int = 1

    @property
    def nblocks(self) -> int:
        """How many blocks the kernel has."""
        return len(self.span)

    @cached_property
    def after(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every block, those that depend on it and the delay to each."""
        later: list[list[tuple[int, int]]] = [[] for _ in self.span]
        for block, prevs in enumerate(self.before):
            for prev, delay in prevs:
                later[prev].append((block, delay))
        return tuple(tuple(pairs) for pairs in later)

    @cached_property
    def on_device(self) -> tuple[tuple[int, ...], ...]:
        """For every device, its blocks."""
        lists: list[list[int]] = [[] for _ in range(self.ndevs)]
        for block, where in enumerate(self.devices):
            for dev in where:
                lists[dev].append(block)
        return tuple(tuple(blocks) for blocks in lists)

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """Every block after those it depends on."""
        waiting = [len(prevs) for prevs in self.before]
        ready = [block for block, count in enumerate(waiting) if not count]
        for block in ready:
            for later, _ in self.after[block]:
                waiting[later] -= 1
                if not waiting[later]:
                    ready.append(later)
        return tuple(ready)

    @cached_property
    def load(self) -> tuple[int, ...]:
        """The work of each device."""
        return tuple(sum(self.span[block] for block in blocks) for blocks in self.on_device)

    @cached_property
    def head(self) -> tuple[int, ...]:
        """The earliest start of each block in an empty pipeline."""
        starts = [0] * self.nblocks
        for block in self.topological:
            starts[block] = max(
                (starts[prev] + self.span[prev] + delay for prev, delay in self.before[block]), default=0
            )
        return tuple(starts)

    @cached_property
    def tail(self) -> tuple[int, ...]:
        """The least time from the end of each block to the end of its micro-batch."""
        tails = [0] * self.nblocks
        for block in reversed(self.topological):
            tails[block] = max(
                (delay + self.span[later] + tails[later] for later, delay in self.after[block]), default=0
            )
        return tuple(tails)

    @cached_property
    def critical_path(self) -> int:
        """The least time for one micro-batch."""
        return max(head + span + tail for head, span, tail in zip(self.head, self.span, self.tail))

    @cached_property
    def flows(self) -> tuple[frozenset[int], ...]:
        """The blocks that dependencies connect, set by set."""
        seen: set[int] = set()
        found = []
        for block in range(self.nblocks):
            if block not in seen:
                flow = {block}
                stack = [block]
                while stack:
                    at = stack.pop()
                    for other, _ in (*self.before[at], *self.after[at]):
                        if other not in flow:
                            flow.add(other)
                            stack.append(other)
                seen |= flow
                found.append(frozenset(flow))
        return tuple(found)

    @cached_property
    def limited(self) -> bool:
        """Whether any device has a memory limit that could matter."""
        return any(math.isfinite(cap) for cap in self.caps)

    def real(self, ticks: int | Fraction) -> Number:
        """A time of the problem in the placement's own unit; whole numbers stay whole."""
        exact = ticks * self.unit
        return exact.numerator if exact.denominator == 1 else float(exact)

    def longest_paths(self, source: int) -> dict[int, int]:
        """For every block reachable from `source`, the least time from the start of `source` to its start."""
        reach = {source: 0}
        for block in self.topological:
            at = reach.get(block)
            if at is not None:
                for later, delay in self.after[block]:
                    reach[later] = max(reach.get(later, 0), at + self.span[block] + delay)
        return reach

    def with_caps(self, caps: Sequence[float]) -> PlacementProblem:
        """The same placement under other memory limits."""
        return PlacementProblem(
            self.ndevs, self.span, self.memory, self.devices, self.before, tuple(caps), self.unit, self.copies
        )

    def single(self) -> PlacementProblem:
        """The problem of one micro-batch, of which this one has `copies` copies."""
        if self.copies == 1:
            return self
        size = self.nblocks // self.copies
        return PlacementProblem(
            self.ndevs,
            self.span[:size],
            self.memory[:size],
            self.devices[:size],
            self.before[:size],
            self.caps,
            self.unit,
        )

    def times(self, copies: int) -> PlacementProblem:
        """The kernel of `copies` micro-batches: block `i` of copy `r` has index `r * nblocks + i`."""
        if copies == 1:
            return self
        size = self.nblocks
        before = tuple(
            tuple((prev + copy * size, delay) for prev, delay in self.before[block])
            for copy in range(copies)
            for block in range(size)
        )
        return PlacementProblem(
            self.ndevs,
            self.span * copies,
            self.memory * copies,
            self.devices * copies,
            before,
            self.caps,
            self.unit,
            copies,
        )


def fits(used: Number, cap: float) -> bool:
    """Whether memory `used` is within `cap`, up to the rounding of sums of reals."""
    return used <= cap + MEMORY_TOLERANCE * max(1.0, abs(cap)) if math.isfinite(cap) else True


# -------------------------------------------------------------------- making one


def number_blocks(placement: SchedPlan) -> SchedPlan:
    """A copy of the placement, checked, its blocks numbered 0, 1, 2, … by `gid` for micro-batch 0."""
    if not len(placement):
        raise PlacementError("the placement has no blocks\n    → add blocks with add_block or add_block_seq")
    blocks = list(placement)
    if len({block.mid for block in blocks}) > 1:
        raise PlacementError(
            f"the placement has blocks of {placement.nmicros} micro-batches\n"
            "    → give the blocks of one micro-batch; the composer copies them for the rest"
        )
    outside = sorted({str(prev) for block in blocks for prev in block.before if prev not in placement})
    if outside:
        raise PlacementError(
            f"blocks of the placement depend on {', '.join(outside[:12])}, not in it\n    → add those blocks too"
        )
    placement.chain_blocks()
    ordered = sorted(blocks, key=lambda block: block.gid or 0)
    if sorted(block.gid or 0 for block in blocks) != list(range(len(blocks))):
        ordered = blocks
    copy = SchedPlan(placement.ndevs)
    copy.links = placement.links
    twins = {}
    for gid, block in enumerate(ordered):
        twins[block] = Block(0, block.span, block.memory, block.btype, stage=block.stage, gid=gid)
        copy.add_block(twins[block], placement.device(block), placement.step(block))
    for block, twin in twins.items():
        for prev in block.before:
            Block.make_dependency(twins[prev], twin, block.nbytes.get(prev, 0))
    return copy


def memory_limits(memory: Number | Sequence[Number] | None, ndevs: int) -> tuple[Number, ...] | None:
    """One limit per device from one number, one per device, or none at all."""
    if memory is None:
        return None
    values: tuple[Number, ...]
    if isinstance(memory, (int, float)):
        values = (memory,) * ndevs
    else:
        values = tuple(memory)
    if len(values) != ndevs:
        raise PlacementError(
            f"{len(values)} memory limits for {ndevs} devices\n    → give one number, or one for each device"
        )
    if all(value == math.inf for value in values):
        return None
    bad = [f"{value!r} on device {dev}" for dev, value in enumerate(values) if _is_bad(value)]
    if bad:
        raise PlacementError(f"memory limit {', '.join(bad)}\n    → give 0 or more, or inf for no limit")
    return values


def make_problem(placement: SchedPlan, limits: Sequence[Number] | None, links: Links) -> PlacementProblem:
    """The numeric view of a placement that `number_blocks` returned."""
    blocks = sorted(placement, key=lambda block: block.gid or 0)
    links.check(placement.ndevs)
    delays = {
        (prev, block): links.delay(placement.device(prev), placement.device(block), block.nbytes.get(prev, 0))
        for block in blocks
        for prev in block.before
    }
    unit, ticks = _integer_times([*(block.span for block in blocks), *delays.values()])
    before = tuple(tuple((prev.gid or 0, ticks[delays[prev, block]]) for prev in block.before) for block in blocks)
    devices = tuple(placement.device(block) for block in blocks)
    caps = tuple(math.inf if limits is None else float(limits[dev]) for dev in range(placement.ndevs))
    memory = tuple(block.memory for block in blocks)
    if any(taken < 0 for taken in memory):
        _check_balance(blocks, devices, caps)
    else:
        # Forward only: nothing is ever released, so a limit applies to the memory of a single block.
        _check_blocks_fit(blocks, devices, caps)
        caps = (math.inf,) * placement.ndevs
    return PlacementProblem(
        placement.ndevs, tuple(ticks[block.span] for block in blocks), memory, devices, before, caps, unit
    )


def _is_bad(value: object) -> bool:
    return isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0


def _check_blocks_fit(blocks: Sequence[Block], devices: Sequence[tuple[int, ...]], caps: Sequence[float]) -> None:
    faults = [
        Fault(
            f"block {block} takes {block.memory} on device {dev}, which has {caps[dev]:g}",
            f"give device {dev} at least {block.memory}, or make the block smaller",
        )
        for block, where in zip(blocks, devices)
        for dev in where
        if not fits(block.memory, caps[dev])
    ]
    if faults:
        raise InfeasibleError("\n".join(str(fault) for fault in faults))


def _check_balance(blocks: Sequence[Block], devices: Sequence[tuple[int, ...]], caps: Sequence[float]) -> None:
    """Require every micro-batch to release on each limited device exactly the memory that it allocated there."""
    faults = []
    for dev, cap in enumerate(caps):
        here = [block for block, where in zip(blocks, devices) if dev in where and block.memory]
        kept = sum(block.memory for block in here)
        if math.isfinite(cap) and abs(kept) > MEMORY_TOLERANCE * max(1.0, sum(abs(block.memory) for block in here)):
            names = ", ".join(map(str, here[:12]))
            verb = f"keeps {kept:g}" if kept > 0 else f"releases {-kept:g} more than it allocates"
            faults.append(
                Fault(
                    f"each micro-batch {verb} on device {dev} (blocks {names}), so no limit such as {cap:g} is enough"
                    if kept > 0
                    else f"each micro-batch {verb} on device {dev} (blocks {names})",
                    "let the memory of the blocks on a device add up to 0, or give no memory limit",
                )
            )
    if faults:
        raise InfeasibleError("\n".join(str(fault) for fault in faults))


def _integer_times(values: Iterable[Number]) -> tuple[Fraction, dict[Number, int]]:
    """The unit of integer time, and every value in that unit (rounded up where it is not exact)."""
    listed = set(values)
    if all(isinstance(value, int) or float(value).is_integer() for value in listed):
        return Fraction(1), {value: int(value) for value in listed}
    fractions = {value: Fraction(value).limit_denominator(_LARGEST_DENOMINATOR) for value in listed}
    denominator = math.lcm(*(fraction.denominator for fraction in fractions.values()))
    if denominator <= _LARGEST_DENOMINATOR and all(float(fraction) == value for value, fraction in fractions.items()):
        return Fraction(1, denominator), {value: int(fraction * denominator) for value, fraction in fractions.items()}
    unit = Fraction(sum(float(value) for value in listed)) / _GRID
    return unit, {value: math.ceil(Fraction(value) / unit) for value in listed}
