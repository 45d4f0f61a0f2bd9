"""A plan file is read and checked to be executable, or an error names the fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini.errors import ArtifactError, GeminiError, InvalidPlanError
from gemini.schedule import Composer, SchedPlan, placement
from gemini.schedule.library import library
from gemini.schedule.user_plan import group_size, load_user_plan


def deadlocked() -> SchedPlan:
    """The backward of a micro-batch before its forward, on one of the workers."""
    plan = library("1f1b", 2, 4)
    first, *_, last = [block for block in plan.device_blocks(1) if block.mid == 0]
    starts = {block: plan.step(block) for block in plan}
    starts[first], starts[last] = starts[last], starts[first]
    return plan.retimed(starts)


def greedy() -> SchedPlan:
    """More memory than it says."""
    plan = library("gpipe", 2, 4)
    plan.memory = (1, 1)
    return plan


def spread() -> SchedPlan:
    """Blocks on several workers."""
    return Composer.compose(placement("mshape", ndevs=2), memory=8).unroll(4)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "zb_v"])
def test_what_can_run_is_read(name: str, tmp_path: Path) -> None:
    path = library(name, 2, 4).save(tmp_path / "plan.json")
    assert str(load_user_plan(path, 2, 4)) == str(library(name, 2, 4))


def test_a_composed_plan_can_run(tmp_path: Path) -> None:
    path = Composer.compose(placement("vshape", ndevs=4), memory=4).unroll(8).save(tmp_path / "plan.json")
    assert load_user_plan(path, 4, 8).nmicros == 8


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (library("1f1b", 3, 4), "is a plan for 3 workers, there are 2\n    → request as many workers"),
        (library("1f1b", 2, 6), "is a plan for 6 micro-batches, a step has 4\n    → accum_degree=6"),
        (deadlocked(), "cannot run: the plan has .*\n.*dependencies: "),
        (greedy(), "cannot run: the plan has .*\n.*memory: "),
    ],
    ids=["workers", "micro-batches", "deadlocked", "memory"],
)
def test_what_cannot_is_an_error(plan: SchedPlan, text: str, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan.json")
    with pytest.raises(InvalidPlanError, match=text):
        load_user_plan(path, 2, 4)


def test_blocks_on_several_workers_are_read_where_stages_can_be_divided(tmp_path: Path) -> None:
    path = spread().save(tmp_path / "plan.json")
    assert group_size(load_user_plan(path, 2, 4)) == 2
    with pytest.raises(InvalidPlanError, match="has blocks on several workers at once\n    → "):
        load_user_plan(path, 2, 4, groups=False)


@pytest.mark.parametrize("contents", [None, "", "{}", "[1, 2"])
def test_what_is_no_plan_is_an_error(contents: str | None, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if contents is not None:
        path.write_text(contents)
    with pytest.raises((ArtifactError, GeminiError), match=r"plan\.json"):
        load_user_plan(path, 2, 4)
