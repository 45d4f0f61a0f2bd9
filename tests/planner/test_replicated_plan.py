"""A schedule next to itself serves the stages of one model, every micro-batch once."""

from __future__ import annotations

import pytest

from gemini.planner.replicated_plan import replicate
from gemini.schedule.block import FORWARD
from gemini.schedule.library import library
from gemini.step.worker_program import _unfold_replicas


@pytest.mark.parametrize(("name", "nstages", "micro_batches"), [("1f1b", 2, 4), ("chimera", 2, 8), ("zb_v", 4, 4)])
def test_every_stage_has_a_forward_of_every_micro_batch(name: str, nstages: int, micro_batches: int) -> None:
    one = library(name, 2, 2)
    both = replicate(one, 2)
    rows = _unfold_replicas(
        tuple(tuple(b.action for b in both.device_blocks(dev)) for dev in range(both.ndevs)), nstages
    )
    found = sorted((a.stage, a.mid) for row in rows for a in row if a.btype == FORWARD)
    assert found == [(stage, mid) for stage in range(nstages) for mid in range(micro_batches)]
