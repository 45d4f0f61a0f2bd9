"""Requested schedules run, from the library or from a file; impossible ones are refused first."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from gemini.errors import ScheduleError
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal
from gemini.schedule import Composer, placement
from gemini.schedule.library import library
from tests.programs.pipelined_runs import PIECES, STEPS, made, manage, train
from tests.programs.training_steps import PROGRAMS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "chimera", "composed"])
def test_trains_by_a_schedule_of_the_library(schedule: str, pool: WorkerPool) -> None:
    program = PROGRAMS["loss_inside_with_dropout"]
    reference = made(program)
    model = copy.deepcopy(reference)
    expected = train(reference, program)
    story = manage(model, pool, schedule)
    for one, other in zip(train(model, program), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert story.steps["overlapped"] == STEPS - 2, str(story)
    assert schedule in story.plan


def trains_by(path: Path, name: str, pool: WorkerPool) -> ModelJournal:
    """A program trains by a plan's file as in one process."""
    program = PROGRAMS[name]
    reference = made(program)
    model = copy.deepcopy(reference)
    expected = train(reference, program)
    story = manage(model, pool, str(path))
    for one, other in zip(train(model, program), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert story.steps["overlapped"] == STEPS - 2, str(story)
    return story


def test_trains_by_a_plan_from_a_file(pool: WorkerPool, tmp_path: Path) -> None:
    path = library("zb_v", 2, PIECES).save(tmp_path / "plan.json")
    assert "plan.json with 4 micro-batches" in trains_by(path, "cross_entropy", pool).plan


def test_trains_by_a_plan_of_two_replicas(pool: WorkerPool, tmp_path: Path) -> None:
    """Of `xshape`: stage s of each is the same one of the model, in another worker."""
    plan = Composer.compose(placement("xshape", ndevs=2), memory=4).unroll(PIECES // 2)
    story = trains_by(plan.save(tmp_path / "plan.json"), "loss_inside_with_dropout", pool)
    assert "2 stages on 2 workers" in story.plan


@pytest.mark.parametrize("schedule", ["dualpipe_v", "chimera"])
def test_a_batch_for_which_there_is_no_such_schedule_takes_another(pool: WorkerPool, schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)))
    story = manage(model, pool, schedule)
    for samples in (8, 8, 8, 3, 3, 3, 8):
        model(torch.randn(samples, 6)).square().mean().backward()
    assert story.steps["overlapped"] == 5, str(story)


def test_what_cannot_run_says_why(pool: WorkerPool) -> None:
    program = PROGRAMS["cross_entropy"]
    model = made(program)
    manage(model, WorkerPool(3, 1), "chimera")
    with pytest.raises(ScheduleError, match="chimera needs even numbers of workers and micro-batches, not 3 and 4"):
        train(model, program)


def test_a_plan_that_leaves_out_a_backward_is_an_error(pool: WorkerPool, tmp_path: Path) -> None:
    plan = library("1f1b", 2, PIECES)
    starts = {block: plan.step(block) for block in plan if block.stage or block.btype == "forward"}
    edited = plan.retimed(starts)
    edited.placement = None  # which has it
    edited.save(tmp_path / "plan.json")
    program = PROGRAMS["cross_entropy"]
    model = made(program)
    manage(model, pool, str(tmp_path / "plan.json"))
    with pytest.raises(ScheduleError, match=r"plan\.json has no backward for stages \[0\], which train parameters"):
        train(model, program)


def test_a_batch_of_fewer_samples_takes_the_first_micro_batches_of_a_file(pool: WorkerPool, tmp_path: Path) -> None:
    library("1f1b", 2, PIECES).save(tmp_path / "plan.json")
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))).double()
    model = copy.deepcopy(reference)
    story = manage(model, pool, str(tmp_path / "plan.json"))
    for samples in (8, 8, 8, 8, 3, 3, 3, 1, 8, 8):
        x = torch.randn(samples, 6, dtype=torch.float64)
        found = []
        for one in (reference, model):
            one.zero_grad()
            one(x).square().mean().backward()
            found.append([parameter.grad for parameter in one.parameters()])
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    assert story.steps["overlapped"] == 7, str(story)
    assert f"with {PIECES} micro-batches" in story.plan  # the one of most steps


@pytest.mark.parametrize(
    ("plan", "text"),
    [(library("1f1b", 3, PIECES), "for 3 workers, there are 2"), (library("1f1b", 2, 6), "for 6 micro-batches")],
)
def test_a_plan_for_something_else_is_an_error(plan: object, text: str, pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)  # type: ignore[attr-defined]
    program = PROGRAMS["cross_entropy"]
    model = made(program)
    manage(model, pool, str(path))
    with pytest.raises(ScheduleError, match=text):
        train(model, program)
