"""Step program: the actions of every worker, in order.

    worker 0    0F0 0F1 0B0 0F2 0B1 0B2          F forward of a stage on a micro-batch
    worker 1    1F0 1B0 1F1 1B1 1F2 1B2          B backward; I and W its two halves, input and weight gradients

The orders determine where a stage runs: usually on one worker. A plan with replicas (Chimera) has the same stage on
several workers, each for some of the micro-batches. Weights exist once, in memory that all workers share, so replicas
need no exchange, and their gradients are summed.

A stage on several shards runs on a group of workers: each of them has the same actions of that stage, in the same
order, and its place in the group is the number of its shard.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from gemini.batch_analysis.microbatch_join import Tail
from gemini.batch_analysis.split_result import Splitting
from gemini.errors import Fault, InvalidPlanError
from gemini.ir.node import MODULES
from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action

if TYPE_CHECKING:
    from gemini.batch_analysis.loss_tape import Op
    from gemini.codegen.stage_interface import Interface
    from gemini.ir.graph import Graph
    from gemini.schedule.schedplan import SchedPlan

GRADIENTS = (BACKWARD, INPUT_GRADIENT)  # actions that send gradients to earlier stages
_KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
_MOST = 12  # faults listed at most

Orders = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Loss:
    """The ops on the model's outputs inside the step, and the value that is differentiated.

    `ports` maps values to outputs of stages; `operands` are sent with the step; other values are results of `ops`.
    Values in `keep` stay on the worker, to be fetched. `sizes` are those of `Splitting`: numbers in ops that count
    samples, and are smaller for a micro-batch.
    """

    ops: tuple[Op, ...]
    ports: dict[int, str]
    operands: tuple[int, ...]
    root: int
    keep: tuple[int, ...] = ()
    sizes: dict[int, dict[tuple[int, ...], int]] = field(default_factory=dict)

    def signature(self) -> Hashable:
        """Return a key that is equal for losses that workers execute identically."""
        ops = tuple(op.kind for op in self.ops)
        sizes = tuple((at, tuple(found.items())) for at, found in self.sizes.items())
        return ops, tuple(self.ports.items()), self.operands, self.root, self.keep, sizes

    def ops_for(self, samples: int) -> tuple[Op, ...]:
        """Return the ops for a micro-batch of this number of samples."""
        if not self.sizes:
            return self.ops
        splitting = Splitting(sizes=self.sizes)
        return tuple(splitting.op(at, op, samples) for at, op in enumerate(self.ops))

    def reads(self) -> set[int]:
        """The numbers of the values that ops or root read."""
        return {self.root, *self.keep, *(one for op in self.ops for one in op.reads())}

    def port_names(self) -> tuple[str, ...]:
        """The outputs of stages among them, in the order of their numbers."""
        read = self.reads()
        return tuple(name for number, name in sorted(self.ports.items()) if number in read)


@dataclass(frozen=True)
class StepProgram:
    """Stages, the values between them, and the order of actions of every worker; checked on construction."""

    interfaces: tuple[Interface, ...]
    orders: Orders
    recompute: frozenset[int] = frozenset()
    rng_patterns: tuple[Any, ...] = field(default=(), compare=False)  # of each stage: patterns of its random numbers
    called: frozenset[str] | None = field(default=None, compare=False)  # modules that stages call; None: maybe all
    # Per stage: positions of the buffers that every micro-batch reads with their value before the step.
    once: tuple[tuple[int, ...], ...] = ()
    detached: frozenset[int] = frozenset()  # stages in which no value has a gradient
    tail: Tail | None = None  # runs once on all micro-batches; its stage is the last, and in no order
    shards: tuple[int, ...] = ()  # of every stage: the workers that run it together; (): one each
    # Of stages with several: forward, backward; None where they depend on sizes.
    collectives: Sequence[tuple[dict[str, int], dict[str, int]] | None] = ()
    written: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # of stages with several: buffers they write

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            more = len(faults) - _MOST
            lines = [f"  - {fault}" for fault in faults[:_MOST]] + ([f"  … and {more} more"] if more > 0 else [])
            raise InvalidPlanError("the plan does not fit this model:\n" + "\n".join(lines))

    @property
    def nstages(self) -> int:
        """The number of stages in the orders: all but the tail's."""
        return len(self.interfaces) - (self.tail is not None and self.tail.stage is not None)

    @cached_property
    def tail_workers(self) -> tuple[int, ...]:
        """The workers that run the tail, by shard: those of the last stage."""
        return self.where[self.nstages - 1, 0]

    @property
    def nworkers(self) -> int:
        """The number of workers of the plan."""
        return len(self.orders)

    @cached_property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step."""
        return 1 + max((action.mid for row in self.orders for action in row), default=-1)

    @cached_property
    def is_training(self) -> bool:
        """Whether it has backward actions."""
        return any(action.btype != FORWARD for row in self.orders for action in row)

    @cached_property
    def frozen(self) -> frozenset[int]:
        """Stages without a backward in a program that has some: neither they nor earlier stages train."""
        trained = {action.stage for row in self.orders for action in row if action.btype in GRADIENTS}
        return frozenset(range(self.nstages)) - trained if self.is_training else frozenset()

    @cached_property
    def where(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The workers of each stage and micro-batch, by shard."""
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for worker, row in enumerate(self.orders):
            for action in row:
                if action.btype == FORWARD:
                    key = action.stage, action.mid
                    found[key] = (*found.get(key, ()), worker)
        if self.tail is not None and self.tail.stage is not None:
            found[self.tail.stage, 0] = found[self.nstages - 1, 0]
        return found

    def stages_of(self, worker: int) -> list[int]:
        """Return the stages that a worker runs."""
        found = {action.stage for action in self.orders[worker]}
        if self.tail is not None and self.tail.stage is not None and worker in self.tail_workers:
            found.add(self.tail.stage)
        return sorted(found)

    def shards_of(self, stage: int) -> int:
        """Return the number of shards of a stage."""
        return self.shards[stage] if self.shards else 1

    def groups_of(self, worker: int) -> dict[int, tuple[int, ...]]:
        """Return the workers, by shard, that run each stage of a worker together."""
        return {stage: workers for (stage, _), workers in self.where.items() if worker in workers}

    def random_stages(self) -> list[int]:
        """Return the stages with random ops, in the order of execution on one device."""
        return [stage for stage, patterns in enumerate(self.rng_patterns) if patterns]

    def with_backward(self, stage: int) -> StepProgram:
        """Return the program with a backward added for a stage that has none.

        It follows the last forward of a micro-batch on its worker, because the loss may read the results.
        """
        if any(action.stage == stage and action.btype in GRADIENTS for row in self.orders for action in row):
            return self
        return replace(self, orders=tuple(tuple(_with_backward(row, stage)) for row in self.orders))

    def forward_only(self) -> StepProgram:
        """Return the program without backward actions: evaluation."""
        rows = tuple(tuple(action for action in row if action.btype == FORWARD) for row in self.orders)
        return replace(self, orders=rows, recompute=frozenset())


def _with_backward(row: Sequence[Action], stage: int) -> Iterator[Action]:
    mids = {action.mid for action in row if action.stage == stage}
    last = {action.mid: at for at, action in enumerate(row) if action.btype == FORWARD}
    for at, action in enumerate(row):
        yield action
        if action.btype == FORWARD and action.mid in mids and last[action.mid] == at:
            yield Action(stage, BACKWARD, action.mid)


class StagedModel(Protocol):
    """A model cut into stages."""

    @property
    def interfaces(self) -> Sequence[Interface]:
        """The ports of every stage."""

    @property
    def graph(self) -> Graph:
        """The graph that was cut."""


def program_of(
    piped: StagedModel,
    plan: SchedPlan | Sequence[Iterable[Action | str]],
    *,
    memory: float | Sequence[float] | None = None,
    recompute: Iterable[int] = (),
    rng_patterns: tuple[Any, ...] = (),
    tail: Tail | None = None,
    shards: int = 1,
) -> StepProgram:
    """Return the program for a model in stages by a plan, or by the actions of each worker.

    `memory` limits the memory of a plan on each worker; a plan made for a limit uses that one. With `shards`, every
    device of a plan is a group of as many workers.
    """
    made = make_program(
        piped.interfaces, plan, memory=memory, recompute=recompute, rng_patterns=rng_patterns, tail=tail, shards=shards
    )
    return replace(made, called=frozenset(node.target for node in piped.graph.nodes if node.kind in MODULES))


def make_program(
    interfaces: Sequence[Interface],
    plan: SchedPlan | Sequence[Iterable[Action | str]],
    *,
    memory: float | Sequence[float] | None = None,
    recompute: Iterable[int] = (),
    rng_patterns: tuple[Any, ...] = (),
    tail: Tail | None = None,
    shards: int = 1,
) -> StepProgram:
    """Return the program for stages with these interfaces."""
    orders, count = _orders(plan, memory, shards), len(interfaces) - (tail is not None and tail.stage is not None)
    rows = _unfold_replicas(orders, count)
    sizes = _group_sizes(plan, len(interfaces)) if shards == 1 else (shards,) * len(interfaces)
    rows = tuple(row for row in rows for _ in range(shards))
    return StepProgram(tuple(interfaces), rows, frozenset(recompute), rng_patterns, tail=tail, shards=sizes)


def _group_sizes(plan: SchedPlan | Sequence[Iterable[Action | str]], count: int) -> tuple[int, ...]:
    """Return the number of workers of each stage in a plan with blocks on several workers; (): there are none."""
    from gemini.schedule.schedplan import SchedPlan

    if not isinstance(plan, SchedPlan) or all(len(plan.device(block)) == 1 for block in plan):
        return ()
    found = {block.stage or 0: len(plan.device(block)) for block in plan}
    return tuple(found.get(stage, 1) for stage in range(count))


def _orders(plan: SchedPlan | Sequence[Iterable[Action | str]], memory: Any, shards: int) -> Orders:
    from gemini.schedule.schedplan import SchedPlan

    if not isinstance(plan, SchedPlan):
        return tuple(tuple(Action.parse(one) if isinstance(one, str) else one for one in row) for row in plan)
    plan.validate(memory)
    together = [block for block in plan if len(plan.device(block)) > 1]
    if together and shards > 1:
        raise InvalidPlanError(
            f"{together[0]} is on devices {list(plan.device(together[0]))} at once\n"
            "    → leave sharding_size out, or give one device per block"
        )
    return tuple(tuple(block.action for block in plan.device_blocks(dev)) for dev in range(plan.ndevs))


def _unfold_replicas(orders: Orders, nstages: int) -> Orders:
    """Map replicas of the whole model to the model itself on other micro-batches.

    A plan with k times the stages has k replicas; its micro-batch m is k micro-batches of the program, one per replica.
    """
    found = 1 + max((action.stage for row in orders for action in row), default=-1)
    if not nstages or found % nstages or found == nstages:
        return orders
    copies = found // nstages
    return tuple(
        tuple(Action(a.stage % nstages, a.btype, a.mid * copies + a.stage // nstages) for a in row) for row in orders
    )


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _faults(program: StepProgram) -> Iterator[Fault]:
    actions = [(worker, action) for worker, row in enumerate(program.orders) for action in row]
    if not actions:
        yield Fault("it has no actions", "give every stage a forward for every micro-batch")
        return
    stages = {action.stage for _, action in actions}
    if len(stages) != program.nstages or max(stages) >= program.nstages:
        yield Fault(
            f"it has {1 + max(stages)} stages, the model has {program.nstages}",
            f"cut the model into {1 + max(stages)} stages, or make a plan for {program.nstages}",
        )
        return
    for stage in sorted(program.recompute - set(range(program.nstages))):
        yield Fault(f"stage {stage!r} is marked for recomputation", f"stages are 0 to {program.nstages - 1}")
    if program.rng_patterns and len(program.rng_patterns) != len(program.interfaces):
        yield Fault(f"random numbers of {len(program.rng_patterns)} stages", f"the model has {len(program.interfaces)}")
    unknown = sorted({str(action) for _, action in actions if action.btype not in _KINDS})
    if unknown:
        yield Fault(f"{', '.join(unknown[:5])} is neither forward nor backward", "use F, B, I and W actions only")
        return
    yield from _action_faults(program, actions)
    if program.tail is not None:
        yield from _tail_faults(program)


def _tail_faults(program: StepProgram) -> Iterator[Fault]:
    """Yield faults of a program with a tail: all forwards come first, and each stage is on one worker."""
    for worker, row in enumerate(program.orders):
        first = next((at for at, action in enumerate(row) if action.btype != FORWARD), len(row))
        late = next((action for action in row[first:] if action.btype == FORWARD), None)
        if late is not None:
            yield Fault(
                f"{late} comes after {row[first]} on worker {worker}, which waits for it: the loss needs all samples",
                "put all forwards first",
            )
    workers: dict[int, set[tuple[int, ...]]] = {}
    for (stage, _), found in program.where.items():
        workers.setdefault(stage, set()).add(found)
    several = sorted(stage for stage, groups in workers.items() if len(groups) > 1)
    if several:
        yield Fault(f"stages {several} are on several workers, and the loss needs all samples", "put each on one")


def _action_faults(program: StepProgram, actions: list[tuple[int, Action]]) -> Iterator[Fault]:
    place: dict[Action, tuple[int, ...]] = {}
    for worker, action in actions:
        place[action] = (*place.get(action, ()), worker)
    for action, workers in place.items():
        wanted = program.shards_of(action.stage)
        if wanted == 1 and len(workers) > 1:
            yield Fault(f"{action} comes twice, on workers {workers[0]} and {workers[1]}", "keep one of them")
        elif len(set(workers)) != wanted:
            yield Fault(f"{action} is on workers {list(workers)}, its stage has {wanted} shards", "put it on as many")
    trained = {action.stage for _, action in actions if action.btype != FORWARD}
    for mid in range(program.micro_batches):
        for stage in range(program.nstages):
            named = {kind: Action(stage, kind, mid) for kind in _KINDS}
            has = {kind for kind, action in named.items() if action in place}
            yield from _missing_action_faults(named, has, stage in trained)
            if len({place[named[kind]] for kind in has}) > 1:
                where = ", ".join(f"{named[kind]} on {', '.join(map(str, place[named[kind]]))}" for kind in has)
                yield Fault(f"actions of one stage and micro-batch on several workers: {where}", "put them on one")


def _missing_action_faults(named: dict[str, Action], has: set[str], trained: bool) -> Iterator[Fault]:
    if FORWARD not in has:
        yield Fault(f"{named[FORWARD]} is missing", "give every stage a forward for every micro-batch")
    if not trained:
        return
    if BACKWARD in has and has & {INPUT_GRADIENT, WEIGHT_GRADIENT}:
        yield Fault(f"{named[BACKWARD]} and its halves are both there", "keep B, or I and W")
    elif BACKWARD not in has:
        for kind in (INPUT_GRADIENT, WEIGHT_GRADIENT):
            if kind not in has:
                yield Fault(
                    f"{named[kind]} is missing", "a forward of a stage that is trained has a B, or an I and a W"
                )
