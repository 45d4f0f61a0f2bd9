"""A plan: which block starts when, on which devices.

The same class is a *placement* (the blocks of one micro-batch, in any feasible order) and a *schedule* (all
micro-batches). A composed schedule also has its `pattern`, the steady state it repeats, so that it
unrolls to any number of micro-batches:

    device 0   F0 F1 F2 F3 │B0 . F4│B1 . F5│ B2 …
    device 1      F0 F1 F2 │F3 B0 .│F4 B1 .│ F5 …
                 warm-up    repetend          cool-down
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from operator import index
from pathlib import Path

from gemini.errors import PlacementError, ScheduleError
from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Block, Number, is_number
from gemini.schedule.link_costs import FREE, Links

__all__ = ["Block", "Pattern", "Proof", "SchedPlan"]


@dataclass(frozen=True)
class Pattern:
    """A steady state: block `gid` of micro-batch `q * nmicros + r` starts at `starts[r][gid] + q * length`.

    `nmicros` micro-batches make one kernel of `length`; the period (time per micro-batch) is their quotient. A `rigid`
    pattern is unrolled with its exact times; otherwise blocks start earlier where warm-up and cool-down allow.
    """

    length: Number
    nmicros: int
    starts: tuple[tuple[Number, ...], ...]
    rigid: bool = False

    @property
    def period(self) -> float:
        """Time per micro-batch in the steady state."""
        return self.length / self.nmicros

    def start(self, gid: int, mid: int) -> Number:
        """When block `gid` of micro-batch `mid` starts."""
        kernel, position = divmod(mid, self.nmicros)
        return self.starts[position][gid] + kernel * self.length


@dataclass(frozen=True)
class Proof:
    """The proof of a composed plan: bounds, and how it was found."""

    period: float
    lower_bound: float
    optimal: bool
    method: str
    seconds: float
    notes: tuple[str, ...] = ()
    makespan: Number | None = None
    makespan_bound: Number | None = None

    @property
    def gap(self) -> float:
        """The gap between the period and its lower bound, as a share of the bound."""
        return self.period / self.lower_bound - 1 if self.lower_bound else 0.0

    def __str__(self) -> str:
        state = "optimal" if self.optimal else f"within {self.gap:.2%} of the lower bound"
        span = ""
        if self.makespan is not None and self.makespan_bound is not None:
            span = f"makespan {self.makespan:g}, lower bound {self.makespan_bound:g}; "
        return (
            f"period {self.period:g}, lower bound {self.lower_bound:g}, {state}; {span}"
            f"found by {self.method} in {self.seconds:.3g} s" + "".join(f"; {note}" for note in self.notes)
        )


class SchedPlan:
    """Blocks on `ndevs` devices with their start times."""

    def __init__(self, ndevs: int) -> None:
        if isinstance(ndevs, bool) or not isinstance(ndevs, int) or ndevs < 1:
            raise PlacementError(f"a plan for {ndevs!r} devices\n    → give a number of devices, 1 or more")
        self.ndevs = ndevs
        self.links: Links = FREE
        self.memory: tuple[Number, ...] | None = None
        self.placement: SchedPlan | None = None
        self.pattern: Pattern | None = None
        self.proof: Proof | None = None
        self._starts: dict[Block, Number] = {}
        self._devices: dict[Block, tuple[int, ...]] = {}
        self._rows: tuple[list[Block], list[list[Block]]] | None = None  # all by time, and by device; cached

    # ---------------------------------------------------------------- building

    def add_block(self, block: Block, device: int | Sequence[int], step: Number) -> Block:
        """Put `block` on one device, or on several at once (tensor parallel), starting at `step`."""
        devices = self._check_devices(block, device)
        if block in self._starts:
            raise PlacementError(f"block {block} is already in the plan at {self._starts[block]}\n    → add it once")
        if not is_number(step) or step < 0:
            raise PlacementError(f"block {block} at time {step!r}\n    → give a finite time, 0 or more")
        self._starts[block] = step
        self._devices[block] = devices
        self._rows = None
        if block.gid is None:
            taken = {other.gid for other in self._starts if other.mid == block.mid}
            block.gid = next(gid for gid in count(len(taken) - 1) if gid not in taken)
        if block.stage is None:
            block.stage = self._guess_stage(block, devices)
        return block

    def add_block_seq(self, blocks: Sequence[Block | None], devices: Sequence[int | Sequence[int]]) -> None:
        """Add a chain: each block after the one before it, which it depends on; `None` is one idle step.

        A block that is in the plan already, on the same devices, joins the chain where it is: that is how branches
        meet.
        """
        if len(blocks) != len(devices):
            raise PlacementError(
                f"{len(blocks)} blocks for {len(devices)} device entries\n    → give one entry per block (any for None)"
            )
        step: Number = 0
        chain: list[tuple[Block, tuple[int, ...], Number]] = []
        for block, where in zip(blocks, devices):
            if block is None:
                step += 1
                continue
            chain.append((block, self._check_devices(block, where), self._join_start(block, step)))
            step = chain[-1][2] + block.span
        # All checks precede all additions: an error in the middle of the chain leaves the plan unchanged.
        for block, where, step in chain:
            if block not in self._starts:
                self.add_block(block, where, step)
        for (previous, *_), (block, *_) in pairwise(chain):
            Block.make_dependency(previous, block)

    def _check_devices(self, block: Block, device: int | Sequence[int]) -> tuple[int, ...]:
        given = (device,) if isinstance(device, int) or not isinstance(device, Iterable) else tuple(device)
        try:
            devices = tuple(index(dev) for dev in given)
        except TypeError:
            devices = ()
        if not devices or len(set(devices)) != len(devices) or not all(0 <= dev < self.ndevs for dev in devices):
            raise PlacementError(
                f"block {block} on devices {list(given)} of a plan with {self.ndevs}\n"
                f"    → name one or more different devices from 0 to {self.ndevs - 1}"
            )
        if self._devices.get(block, devices) != devices:
            raise PlacementError(
                f"block {block} on devices {list(devices)} is already on {list(self._devices[block])}\n"
                "    → add it once"
            )
        return devices

    def _join_start(self, block: Block, step: Number) -> Number:
        """When `block` starts in a chain that reaches it at `step`."""
        at = self._starts.get(block, step)
        if at < step:
            raise PlacementError(
                f"block {block} is already in the plan at {at}, and this chain reaches it only at {step}\n"
                "    → add the longer chain first"
            )
        return at

    def _guess_stage(self, block: Block, devices: tuple[int, ...]) -> int:
        """Forward blocks are stages in the order of adding; a gradient belongs to the latest forward on its
        devices that has no such gradient yet (backward runs the stages in reverse)."""
        same_micro = [other for other in self._starts if other.mid == block.mid and other is not block]
        taken = [other.stage for other in same_micro if other.btype == block.btype]
        if block.btype in (BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT):
            for other in reversed(same_micro):
                if other.btype == FORWARD and self._devices[other] == devices and other.stage not in taken:
                    return other.stage or 0
        return max((stage for stage in taken if stage is not None), default=-1) + 1

    # ---------------------------------------------------------------- looking

    @property
    def nsteps(self) -> Number:
        """When the last block ends (the makespan)."""
        return max((start + block.span for block, start in self._starts.items()), default=0)

    @property
    def nmicros(self) -> int:
        """How many micro-batches the plan has blocks of."""
        return len({block.mid for block in self._starts})

    def __contains__(self, block: Block) -> bool:
        return block in self._starts

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Block]:
        """Every block, in the order they were added."""
        return iter(self._starts)

    def all_blocks(self) -> list[Block]:
        """Every block, by start time, then device and micro-batch."""
        return list(self._by_time()[0])

    def blocks(self, step: Number) -> list[Block]:
        """The blocks that start at `step`."""
        return [block for block, start in self._starts.items() if start == step]

    def step(self, block: Block) -> Number:
        """When `block` starts."""
        return self._starts[block]

    def device(self, block: Block) -> tuple[int, ...]:
        """The devices `block` runs on."""
        return self._devices[block]

    def device_blocks(self, devid: int) -> list[Block]:
        """The blocks of a device, in order."""
        if not 0 <= devid < self.ndevs:
            raise PlacementError(f"device {devid} of a plan with {self.ndevs}\n    → devices are 0 to {self.ndevs - 1}")
        return list(self._by_time()[1][devid])

    def _by_time(self) -> tuple[list[Block], list[list[Block]]]:
        if self._rows is None:
            starts, devices = self._starts, self._devices
            blocks = sorted(starts, key=lambda b: (starts[b], devices[b], b.mid, b.gid or 0))
            rows: list[list[Block]] = [[] for _ in range(self.ndevs)]
            for block in blocks:
                for dev in devices[block]:
                    rows[dev].append(block)
            self._rows = (blocks, rows)
        return self._rows

    def chain_blocks(self) -> list[Block]:
        """Every block after all those it depends on (ties: order of adding); a cycle is an error."""
        order = {block: index for index, block in enumerate(self._starts)}
        waiting = {block: sum(1 for prev in block.before if prev in order) for block in order}
        ready = [index for block, index in order.items() if not waiting[block]]
        heapq.heapify(ready)
        listed = list(order)
        chain = []
        while ready:
            block = listed[heapq.heappop(ready)]
            chain.append(block)
            for later in block.after:
                if later in waiting:
                    waiting[later] -= 1
                    if not waiting[later]:
                        heapq.heappush(ready, order[later])
        if len(chain) < len(order):
            stuck = [str(block) for block in order if block not in set(chain)]
            raise PlacementError(
                f"these blocks depend on each other in a cycle: {', '.join(stuck[:12])}\n"
                "    → remove one of the dependencies between them"
            )
        return chain

    @property
    def keeps_memory(self) -> bool:
        """Whether the memory of a block stays allocated until another block releases it.

        If the placement never releases memory (inference), a block has its memory only while it runs.
        """
        return self.placement is None or any(block.memory < 0 for block in self.placement)

    def memory_curve(self, devid: int) -> list[tuple[Number, Number]]:
        """The memory of a device: `(time, amount)` at every time at which one of its blocks changes it."""
        keeps = self.keeps_memory
        curve: list[tuple[Number, Number]] = []
        held: Number = 0
        for block in self.device_blocks(devid):
            held = held + block.memory if keeps else block.memory
            if not keeps and curve and curve[-1][0] == self._starts[block]:  # the block before ends just now
                curve.pop()
            curve.append((self._starts[block], held))
            if not keeps:
                curve.append((self._starts[block] + block.span, 0))
        return curve

    def peak_memory(self, devid: int) -> Number:
        """The most memory that device holds at any time."""
        return max([0, *(held for _, held in self.memory_curve(devid))])

    def delay(self, prev: Block, next: Block) -> Number:
        """The delay from the end of `prev` until its result is available to `next`."""
        return self.links.delay(self._devices[prev], self._devices[next], next.nbytes.get(prev, 0))

    @property
    def repetend(self) -> tuple[Number, Number] | None:
        """The window `[start, end)` in which the first whole kernel of the steady state runs.

        `None` for plans that were not composed, and for so few micro-batches that warm-up meets cool-down.
        """
        if self.pattern is None:
            return None
        from gemini.schedule.phases import find_phases

        phases = find_phases(self)
        return None if phases is None else (phases.begin, phases.begin + phases.length)

    # ---------------------------------------------------------------- deriving

    def copy(self, mid: int | None = None) -> SchedPlan:
        """A copy of the plan with its own blocks; `mid` renumbers a one-micro-batch plan."""
        if mid is not None and self.nmicros > 1:
            raise PlacementError(
                f"a plan of {self.nmicros} micro-batches cannot all be micro-batch {mid}\n"
                "    → copy a placement, or leave mid out"
            )
        return self._rebuilt(self._starts, mid=mid)

    def extract(self, start: Number, end: Number) -> SchedPlan:
        """The blocks that start in `[start, end)`, moved to begin at 0, with the dependencies among them.

        Pattern and proof hold for the whole plan only, so a part has none.
        """
        part = self._rebuilt({block: at - start for block, at in self._starts.items() if start <= at < end})
        part.pattern, part.proof = None, None
        return part

    def first(self, nmicros: int) -> SchedPlan:
        """The plan of the first micro-batches alone: the same orders, every block as early as these allow."""
        if not 1 <= nmicros <= self.nmicros:
            raise PlacementError(
                f"the first {nmicros} of {self.nmicros} micro-batches\n    → give a number from 1 to {self.nmicros}"
            )
        if nmicros == self.nmicros:
            return self
        kept = sorted({block.mid for block in self._starts})[:nmicros]
        part = self._rebuilt({block: at for block, at in self._starts.items() if block.mid in kept})
        part.pattern, part.proof = None, None
        return part.tighten()

    def shift(self, distance: Number) -> SchedPlan:
        """The same plan, every block `distance` later (earlier where negative)."""
        moved = self._rebuilt({block: at + distance for block, at in self._starts.items()})
        if self.pattern is not None:
            starts = tuple(tuple(at + distance for at in row) for row in self.pattern.starts)
            moved.pattern = Pattern(self.pattern.length, self.pattern.nmicros, starts)
        return moved

    def retimed(self, starts: dict[Block, Number]) -> SchedPlan:
        """The same blocks at other times (`starts` names this plan's blocks)."""
        return self._rebuilt(starts)

    def tighten(self) -> SchedPlan:
        """Every block as early as the order on its devices and its dependencies allow."""
        from gemini.schedule.earliest_times import earliest_starts

        return self.retimed(earliest_starts(self))

    def unroll(self, nmicros: int) -> SchedPlan:
        """This composed schedule for `nmicros` micro-batches."""
        if self.pattern is None or self.placement is None:
            raise ScheduleError(
                "this plan has no steady state to repeat\n    → compose one: Composer.compose(placement, memory)"
            )
        from gemini.schedule.unroll import unroll

        return unroll(self, nmicros)

    def validate(self, memory: Number | Sequence[Number] | None = None) -> SchedPlan:
        """Check every rule and return the plan itself; on a fault raise `InvalidPlanError` with the marked grid."""
        from gemini.schedule.validate import validate

        validate(self, memory)
        return self

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON that `load` reads back without loss."""
        from gemini.schedule.plan_files import save

        return save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> SchedPlan:
        """Read a plan that `save` wrote."""
        from gemini.schedule.plan_files import load

        return load(Path(path))

    def _rebuilt(self, starts: dict[Block, Number], mid: int | None = None) -> SchedPlan:
        plan = SchedPlan(self.ndevs)
        plan.links, plan.memory, plan.placement = self.links, self.memory, self.placement
        plan.pattern, plan.proof = self.pattern, self.proof
        # In the order of this plan, not of `starts`: copies list their blocks as the original does.
        twins = {block: block.like(block.mid if mid is None else mid) for block in self._starts if block in starts}
        for block, twin in twins.items():
            plan.add_block(twin, self._devices[block], starts[block])
        connect(twins)
        return plan

    def __repr__(self) -> str:
        from gemini.schedule.text_grid import grid

        return grid(self)


def connect(twins: dict[Block, Block]) -> None:
    """Copy the dependencies among the originals to their copies."""
    for block, twin in twins.items():
        for prev in block.before:
            if prev in twins:
                Block.make_dependency(twins[prev], twin, block.nbytes.get(prev, 0))
