"""Stages on groups of workers: shards meet in every action, and shard j sends to shard j."""

import pytest

from gemini.codegen.stage_interface import Interface, Port
from gemini.errors import InvalidPlanError
from gemini.ir.pytree import Ref
from gemini.schedule.block import Action, Block
from gemini.schedule.library import library
from gemini.schedule.schedplan import SchedPlan
from gemini.step.lower_program import lower
from gemini.step.worker_program import Loss, StepProgram, make_program


def chain(stages):
    """Interfaces of stages in a row; the last value is the model's output."""
    ports = [Port(f"v{at}", Ref(at), at, (at + 1,) if at + 1 < stages else (), at + 1 == stages, None)
             for at in range(stages)]  # fmt: skip
    return [Interface(at, at, (ports[at - 1],) if at else (), (ports[at],)) for at in range(stages)]


LOSS = Loss((), {0: "v1"}, (), 0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])
def test_every_schedule_runs_on_groups(schedule):
    plan = library(schedule, 2, 4)
    stages = 1 + max(block.stage for block in plan)
    loss = Loss((), {0: f"v{stages - 1}"}, (), 0)
    single = lower(make_program(chain(stages), plan), loss)
    program = make_program(chain(stages), plan, shards=3)
    found = lower(program, loss)
    assert program.nworkers == 6
    assert program.where[0, 0] == (0, 1, 2)
    for worker, tasks in enumerate(found.tasks):
        own = single.tasks[worker // 3]
        assert [task.action for task in tasks] == [task.action for task in own]
        for task, one in zip(tasks, own, strict=True):
            assert task.sends == tuple((peer * 3 + worker % 3, names) for peer, names in one.sends)


def rows(*texts):
    return tuple(tuple(Action.parse(one) for one in text.split()) for text in texts)


def test_groups_of_different_sizes_serve_each_other():
    program = StepProgram(tuple(chain(2)), rows("0F0 0B0", "1F0 1B0", "1F0 1B0"), shards=(1, 2))
    found = lower(program, LOSS)
    assert found.tasks[0][0].sends == ((1, ("v0",)), (2, ("v0",)))
    gradients = [tasks[1].sends for tasks in found.tasks[1:]]
    assert gradients == [((0, ("v0",)),), ()]  # equal on both: one sends it


def test_shards_in_different_orders_would_wait_for_each_other():
    program = StepProgram(tuple(chain(1)), rows("0F0 0F1 0B0 0B1", "0F1 0F0 0B0 0B1"), shards=(2,))
    with pytest.raises(InvalidPlanError, match="deadlock"):
        lower(program, Loss((), {0: "v0"}, (), 0))


def test_a_stage_with_too_few_workers_is_refused():
    with pytest.raises(InvalidPlanError, match="its stage has 3 shards"):
        StepProgram(tuple(chain(1)), rows("0F0 0B0", "0F0 0B0"), shards=(3,))


def test_blocks_on_several_devices_are_stages_on_shards():
    plan = SchedPlan(2)
    plan.add_block(Block(0, 1, 0, "forward", stage=0), [0, 1], 0)
    assert make_program(chain(1), plan).shards == (2,)
    with pytest.raises(InvalidPlanError, match="leave sharding_size out"):
        make_program(chain(1), plan, shards=2)
