"""Lowering: from the orders of a program to the transfers of each worker around every action.

    1F0     receives hidden of 0 from worker 0      sends logits to worker 2
    1B0     receives the gradients of logits from   sends the gradient of hidden to worker 0
            all stages that read them

A value is sent once to each worker that needs it. Every reader sends its gradient to the producer, which sums them,
last reader first. The dependencies between actions are acyclic, or the plan is refused before it runs: a sender never
waits for the receiver, so an acyclic plan cannot deadlock.

The shards of a stage run an action together: it is ready when all of them have come to it. Shard j of a stage sends to
shard j of the next; where these have different numbers of shards, whose values between them are whole, shard j of the
reader is served by shard j modulo the number of those of the sender. A worker of both stages has the value already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gemini.batch_analysis.microbatch_join import Tail
from gemini.errors import InvalidPlanError
from gemini.schedule.block import FORWARD, WEIGHT_GRADIENT, Action
from gemini.step.worker_program import GRADIENTS, Loss, StepProgram

LOSS = -1  # the loss, with the tail that it follows, as a reader of values
TAIL = "tail"  # the kind of the task that runs both


class Task(NamedTuple):
    """One action of a worker; values without a transfer stay in the worker."""

    kind: str
    stage: int
    mid: int
    sends: tuple[tuple[int, tuple[str, ...]], ...] = ()  # worker, ports: values after F, gradients after B or I
    has_loss: bool = False  # the loss follows this forward
    state_to: tuple[int, ...] = ()  # F: the workers that wait for the state of the generator

    @property
    def action(self) -> Action:
        """The schedule action."""
        return Action(self.stage, self.kind, self.mid)


class Readers(NamedTuple):
    """The readers of a value: stages, in order, and the loss as the last."""

    source: int | None
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Lowered:
    """A program as the workers run it."""

    tasks: tuple[tuple[Task, ...], ...]  # by worker
    readers: dict[str, Readers]
    loss: Loss | None
    loss_stage: int
    frozen: frozenset[int]
    tail: Tail | None = None

    def edges(self) -> set[tuple[int, int]]:
        """Return the pairs of workers that exchange values, lower number first."""
        pairs = {(min(w, p), max(w, p)) for w, row in enumerate(self.tasks) for t in row for p, _ in t.sends}
        pairs |= {(min(w, p), max(w, p)) for w, row in enumerate(self.tasks) for t in row for p in t.state_to}
        return {pair for pair in pairs if pair[0] != pair[1]}


def lower(program: StepProgram, loss: Loss | None) -> Lowered:
    """Return the tasks of every worker; raises InvalidPlanError where the orders would deadlock."""
    names = set(loss.port_names()) if loss is not None else set()
    readers: dict[str, Readers] = {}
    tail, last = program.tail, None if program.tail is None else program.tail.stage
    for interface in program.interfaces:
        for port in (*interface.inputs, *interface.outputs):
            at_end = (port.name in names and port.source != last) or (last is not None and last in port.targets)
            ends = (LOSS,) if at_end and port.source is not None else ()
            readers[port.name] = Readers(port.source, (*sorted(one for one in port.targets if one != last), *ends))
    missing = names - set(readers)
    if missing:
        raise InvalidPlanError(f"the loss reads {', '.join(sorted(missing))}, which no stage makes")
    sources = [readers[name].source for name in names]
    loss_stage = max((stage for stage in sources if stage is not None), default=program.nstages - 1)
    if tail is not None:
        loss_stage = program.nstages - 1
    elif loss is not None:  # it may have trained weights although its stage has none
        program = program.with_backward(loss_stage)
    lowering = _Lowering(program, readers, loss_stage if loss is not None else LOSS)
    lowering.check()
    tasks = tuple(tuple(lowering.task(worker, action) for action in row) for worker, row in enumerate(lowering.rows))
    return Lowered(tasks, readers, loss, lowering.loss_stage, program.frozen, tail)


class _Lowering:
    def __init__(self, program: StepProgram, readers: dict[str, Readers], loss_stage: int) -> None:
        self.program, self.readers, self.loss_stage = program, readers, loss_stage
        self.drawing = program.random_stages()
        self.rows = [list(row) for row in program.orders]
        self.tail = self._add_tail() if program.tail is not None else None

    def _add_tail(self) -> Action:
        """Insert the tail in the orders of its workers: after all forwards, before any gradient."""
        program = self.program
        stage = program.tail.stage if program.tail is not None else None
        tail = Action(program.nstages - 1 if stage is None else stage, TAIL, 0)
        for row in (self.rows[worker] for worker in program.tail_workers):
            row.insert(next((at for at, action in enumerate(row) if action.btype != FORWARD), len(row)), tail)
        return tail

    def _workers(self, stage: int, mid: int) -> tuple[int, ...]:
        """Return the workers of a stage, by shard."""
        if stage == LOSS and self.tail is not None:
            return self.program.tail_workers
        return self.program.where[self.loss_stage if stage == LOSS else stage, mid]

    def _peers(self, stage: int, mid: int, me: tuple[int, int]) -> list[int]:
        """Return the workers of a stage that are served by one shard, of so many, of another stage."""
        shard, count = me
        return [worker for at, worker in enumerate(self._workers(stage, mid)) if at % count == shard]

    # ── transfers ──────────────────────────────────────────────────────────────────────────────────────────────
    def task(self, worker: int, action: Action) -> Task:
        """Return an action with its transfers."""
        sends: dict[int, list[str]] = {}
        interface, own = self.program.interfaces[action.stage], self._workers(action.stage, action.mid)
        me = own.index(worker), len(own)
        if action.btype == FORWARD:
            for port in interface.outputs:
                readers = self.readers[port.name].stages
                for peer in sorted({peer for one in readers for peer in self._peers(one, action.mid, me)}):
                    if peer not in own:
                        sends.setdefault(peer, []).append(port.name)
        elif action.btype == TAIL:
            for name, one in self.readers.items():
                for peer in self._peers(one.source or 0, 0, me) if LOSS in one.stages else ():
                    if peer not in own:
                        sends.setdefault(peer, []).append(name)
        elif action.btype in GRADIENTS:
            taken = [port.name for port in interface.inputs]
            if action.stage == self.loss_stage and self.tail is None:
                taken += [name for name, one in self.readers.items() if LOSS in one.stages and name not in taken]
            for name in taken:
                source = self.readers[name].source
                for peer in self._peers(source, action.mid, me) if source is not None else ():
                    if peer not in own:
                        sends.setdefault(peer, []).append(name)
        is_forward = action.btype == FORWARD
        has_loss = is_forward and action.stage == self.loss_stage and self.tail is None
        return Task(
            action.btype, action.stage, action.mid,
            tuple((peer, tuple(names)) for peer, names in sorted(sends.items())),
            has_loss, self._state_to(action, me) if is_forward else (),
        )  # fmt: skip

    def _state_to(self, action: Action, me: tuple[int, int]) -> tuple[int, ...]:
        """Return the workers of the next stage with random ops: they wait for the generator state after a forward."""
        if action.mid or action.stage not in self.drawing[:-1]:
            return ()
        following = self.drawing[self.drawing.index(action.stage) + 1]
        mids = [mid for stage, mid in self.program.where if stage == following]
        return tuple(sorted({peer for mid in mids for peer in self._peers(following, mid, me)}))

    # ── dependencies ────────────────────────────────────────────────────────────────────────────────────────────
    def needs(self, action: Action) -> Iterator[Action]:
        """Return the actions that must have run before an action, on any worker."""
        program, mid = self.program, action.mid
        if action.btype == FORWARD:
            for port in program.interfaces[action.stage].inputs:
                if port.source is not None:
                    yield Action(port.source, FORWARD, mid)
            if action.stage in self.drawing[1:]:
                yield Action(self.drawing[self.drawing.index(action.stage) - 1], FORWARD, 0)
        elif action.btype == WEIGHT_GRADIENT:
            yield Action(action.stage, GRADIENTS[1], mid)
        elif action.btype == TAIL:
            for one in self.readers.values():
                if LOSS in one.stages and one.source is not None:
                    yield from (Action(one.source, FORWARD, each) for each in range(program.micro_batches))
        else:
            yield Action(action.stage, FORWARD, mid)
            if action.stage == self.loss_stage and self.tail is None:
                for one in self.readers.values():
                    if LOSS in one.stages and one.source is not None:
                        yield Action(one.source, FORWARD, mid)
            for port in program.interfaces[action.stage].outputs:
                for reader in self.readers[port.name].stages:
                    if reader == LOSS and self.tail is not None:
                        yield self.tail
                        continue
                    stage = self.loss_stage if reader == LOSS else reader
                    if stage != action.stage and stage not in program.frozen:
                        yield self._backward[stage, mid]

    def check(self) -> None:
        """Simulate the orders; raises where no worker can proceed."""
        rows = self.rows
        self._backward = {(a.stage, a.mid): a for row in rows for a in row if a.btype in GRADIENTS}
        members = self._count_members()
        position = [0] * len(rows)
        done: set[Action] = set()
        arrived: dict[Action, int] = {}  # workers that have come to an action of several
        waiting: dict[Action, list[int]] = {}
        ready = list(range(len(rows)))
        while ready:
            worker = ready.pop()
            while position[worker] < len(rows[worker]):
                action = rows[worker][position[worker]]
                missing = next((one for one in self.needs(action) if one not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(worker)
                    break
                arrived[action] = arrived.get(action, 0) + 1
                position[worker] += 1
                if arrived[action] < members[action]:
                    waiting.setdefault(action, []).append(worker)
                    break
                done.add(action)
                ready += waiting.pop(action, [])
        if any(at < len(row) for at, row in zip(position, rows, strict=True)) or any(
            found < members[action] for action, found in arrived.items()
        ):
            raise InvalidPlanError(self._deadlock(position, done))

    def _count_members(self) -> dict[Action, int]:
        """Return the number of workers that run each action together."""
        found: dict[Action, int] = {}
        for row in self.rows:
            for action in row:
                found[action] = found.get(action, 0) + 1
        return found

    def _deadlock(self, position: list[int], done: set[Action]) -> str:
        lines = ["deadlock: with this order the workers wait for each other"]
        for worker, (row, at) in enumerate(zip(self.rows, position, strict=True)):
            if at < len(row):
                missing = [str(one) for one in self.needs(row[at]) if one not in done]
                lines.append(f"  worker {worker} is at {row[at]}, which needs {', '.join(missing)}")
        return "\n".join(
            [*lines[:20], "    → move the missing actions to an earlier place in the orders of their workers"]
        )
