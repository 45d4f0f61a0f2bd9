"""Lowering accepts every order that keeps dependencies, refuses all others, and pairs every send with a receive."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.codegen.stage_interface import Interface, Port
from gemini.errors import InvalidPlanError
from gemini.ir.pytree import Ref
from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from gemini.step.lower_program import LOSS, Lowered, lower
from gemini.step.worker_program import Loss, StepProgram


@st.composite
def wirings(draw):
    """Stages of which each reads values of some before it; the last ones are read by the loss."""
    count = draw(st.integers(1, 5))
    reads = [draw(st.sets(st.integers(0, at - 1), min_size=min(at, 1))) if at else set() for at in range(count)]
    ports = []
    for at in range(count):
        targets = tuple(reader for reader in range(count) if at in reads[reader])
        ports.append(Port(f"v{at}", Ref(at), at, targets, not targets, None))
    interfaces = tuple(
        Interface(at, 0, tuple(ports[source] for source in sorted(reads[at])), (ports[at],)) for at in range(count)
    )
    ends = {at: port.name for at, port in enumerate(ports) if not port.targets}
    root = max(ends)
    loss = Loss((), ends, (), root, tuple(ends))
    return interfaces, loss


def plan(interfaces, seed: int) -> list[list[Action]]:
    """Random workers, and an order in which everything could be done one after the other."""
    chance = random.Random(seed)
    count, micro_batches, workers = len(interfaces), chance.randint(1, 4), chance.randint(1, 4)
    where = [chance.randrange(workers) for _ in range(count)]
    pending = []
    for mid in range(micro_batches):
        for at in range(count):
            split = chance.random() < 0.5
            forward = Action(at, FORWARD, mid)
            back = Action(at, INPUT_GRADIENT if split else BACKWARD, mid)
            pending += [forward, back] + ([Action(at, WEIGHT_GRADIENT, mid)] if split else [])
    backs = {(a.stage, a.mid): a for a in pending if a.btype in (BACKWARD, INPUT_GRADIENT)}

    def needs(a: Action) -> list[Action]:
        inputs = [port.source for port in interfaces[a.stage].inputs]
        if a.btype == FORWARD:
            return [Action(source, FORWARD, a.mid) for source in inputs]
        if a.btype == WEIGHT_GRADIENT:
            return [backs[a.stage, a.mid]]
        readers = [t for port in interfaces[a.stage].outputs for t in port.targets]
        ends = [at for at, one in enumerate(interfaces) if not one.outputs[0].targets]
        last = max(ends)
        if a.stage in ends and a.stage != last:
            readers.append(last)
        first = [Action(end, FORWARD, a.mid) for end in ends] if a.stage == last else [Action(a.stage, FORWARD, a.mid)]
        return first + [backs[reader, a.mid] for reader in readers]

    rows: list[list[Action]] = [[] for _ in range(workers)]
    done: set[Action] = set()
    while pending:
        ready = [one for one in pending if all(before in done for before in needs(one))]
        action = chance.choice(ready)
        pending.remove(action)
        done.add(action)
        rows[where[action.stage]].append(action)
    return rows


@given(wirings(), st.integers(0, 10_000))
def test_an_order_that_can_be_done_is_taken_and_all_that_is_sent_is_awaited(wiring, seed: int) -> None:
    interfaces, loss = wiring
    program = StepProgram(interfaces, tuple(map(tuple, plan(interfaces, seed))))
    lowered = lower(program, loss)
    assert lowered.loss_stage == max(loss.ports)
    values, gradients = _sent(lowered)
    for at, interface in enumerate(interfaces):
        for mid in range(program.micro_batches):
            for port in interface.inputs:
                (source,), (here,) = program.where[port.source, mid], program.where[at, mid]
                assert source == here or (port.name, mid, here) in values
                assert source == here or (port.name, mid, source) in gradients
    for name in loss.ports.values():
        for mid in range(program.micro_batches):
            (source,), (here,) = (program.where[at, mid] for at in (lowered.readers[name].source, lowered.loss_stage))
            assert source == here or ((name, mid, here) in values and (name, mid, source) in gradients)
            assert LOSS in lowered.readers[name].stages


def _sent(lowered: Lowered):
    values, gradients = set(), set()
    for row in lowered.tasks:
        for task in row:
            for peer, names in task.sends:
                found = values if task.kind == FORWARD else gradients
                keys = {(name, task.mid, peer) for name in names}
                if task.kind == FORWARD:
                    assert not keys & found  # a value goes to a worker once
                found |= keys
    return values, gradients


@given(wirings(), st.integers(0, 10_000))
def test_an_order_that_cannot_be_done_is_refused(wiring, seed: int) -> None:
    interfaces, loss = wiring
    rows = plan(interfaces, seed)
    row = max(rows, key=len)
    mid = row[0].mid
    forwards = [at for at, a in enumerate(row) if a.btype == FORWARD and a.mid == mid and a.stage == row[0].stage]
    backs = [at for at, a in enumerate(row) if a.btype != FORWARD and a.mid == mid and a.stage == row[0].stage]
    one, other = forwards[0], backs[0]
    row[one], row[other] = row[other], row[one]  # a backward before its own forward
    with pytest.raises(InvalidPlanError, match="deadlock"):
        lower(StepProgram(interfaces, tuple(map(tuple, rows))), loss)
