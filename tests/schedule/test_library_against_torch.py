"""A library schedule is never longer and never needs more memory than torch's of the same class."""

from __future__ import annotations

import pytest

from gemini.schedule import SchedPlan
from gemini.schedule.block import INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from gemini.schedule.device_orders import plan_from_orders
from gemini.schedule.library import LIBRARY, library

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

PEERS = [
    ("GPipe", "gpipe", 1),
    ("Interleaved1F1B", "interleaved_1f1b", 2),
    ("Interleaved1F1B", "interleaved_1f1b", 3),
    ("LoopedBFS", "looped_bfs", 2),
    ("InterleavedZeroBubble", "interleaved_zb", 2),
    ("InterleavedZeroBubble", "interleaved_zb", 3),
    ("ZBVZeroBubble", "zb_v", 2),
    ("DualPipeV", "dualpipe_v", 2),
]


def torch_orders(kind: str, ndevs: int, nmicros: int, chunks: int) -> list[list[str]]:
    """What torch's schedule has every rank do; a fake process group is enough to ask."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    last = 2 * ndevs - 1
    mine = [0, last] if kind in ("ZBVZeroBubble", "DualPipeV") else [lap * ndevs for lap in range(chunks)]
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=ndevs)
    try:
        device = torch.device("cpu")
        stages = [PipelineStage(torch.nn.Identity(), index, ndevs * chunks, device) for index in mine]
        schedule = get_schedule_class(kind)(stages if chunks > 1 else stages[0], nmicros, loss_fn=lambda *_: None)
    finally:
        dist.destroy_process_group()
    return [[text for action in schedule.pipeline_order[rank] for text in _texts(action)] for rank in range(ndevs)]


def _texts(action: object) -> list[str]:
    if action is None or "REDUCE_GRAD" in str(action):
        return []
    parts = getattr(action, "sub_actions", None)
    return [text for part in parts for text in _texts(part)] if parts else [str(action)]


def torch_plan(kind: str, placement: SchedPlan, nmicros: int, chunks: int, split: bool) -> SchedPlan:
    """Torch's order on our placement; a whole backward is both gradients at once where they are split."""
    rows = []
    for row in torch_orders(kind, placement.ndevs, nmicros, chunks):
        actions = [Action.parse(text) for text in row]
        rows.append([part for action in actions for part in (_halves(action) if split else [action])])
    return plan_from_orders(placement, rows).validate()


def _halves(action: Action) -> list[Action]:
    if action.btype != "backward":
        return [action]
    return [Action(action.stage, kind, action.mid) for kind in (INPUT_GRADIENT, WEIGHT_GRADIENT)]


@pytest.mark.parametrize(("kind", "name", "chunks"), PEERS)
@pytest.mark.parametrize("ndevs", [2, 3, 4, 8])
@pytest.mark.parametrize("spans", [(1, 2, 1, 1), (1.0, 2.2, 1.3, 0.9)])
def test_never_longer_than_torch_at_the_same_memory(kind, name, chunks, ndevs, spans):
    options = dict(zip(("forward", "backward", "input_gradient", "weight_gradient"), spans))
    compared = 0
    for nmicros in (1, 2, 4, 6, 8, 12, 16, 24):
        if not LIBRARY[name].admits(ndevs, nmicros, chunks):
            continue
        ours = library(name, ndevs, nmicros, chunks=chunks if chunks > 1 else None, **options)
        try:
            theirs = torch_plan(kind, ours.placement, nmicros, chunks, LIBRARY[name].split)
        except ValueError:  # a size that torch does not do
            continue
        compared += 1
        assert ours.nsteps <= theirs.nsteps * (1 + 1e-9)
        for dev in range(ndevs):
            assert ours.peak_memory(dev) <= theirs.peak_memory(dev)
    assert compared


def test_facts_about_the_work_of_two_chunks():
    assert library("interleaved_1f1b", 4, 8).nsteps == 57
    assert library("zb_v", 4, 8).nsteps == 51
    assert library("interleaved_1f1b", 8, 32).nsteps == 213
    assert library("zb_v", 8, 32).nsteps == 199
