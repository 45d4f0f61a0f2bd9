"""Exported CSV schedules run under torch.distributed.pipelining and read back."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from handmade import interleaved, one_f_one_b, pipeline_placement
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.errors import ArtifactError, InvalidPlanError, PlacementError
from gemini.schedule import Block, SchedPlan
from gemini.schedule.composer import Composer
from gemini.schedule.device_orders import plan_from_orders
from gemini.schedule.export import dumps_csv, load_csv, loads_csv, save_csv
from gemini.schedule.library import LIBRARY, library
from gemini.schedule.placements import placement

RANKS = Path(__file__).with_name("torch_ranks.py")
SECONDS = 150


@cache
def two_rank_plans() -> dict[str, SchedPlan]:
    return {
        "one_f_one_b": one_f_one_b(2, 4),
        "one_micro_batch": one_f_one_b(2, 1),
        "split_backward": one_f_one_b(2, 5, split=True),
        "two_chunks_looped": interleaved(2, 4),
        "two_chunks_v_split": interleaved(2, 3, split=True, v=True),
        "real_spans": one_f_one_b(2, 4, spans=(1.3, 2.1, 0)),
        "composed": Composer.compose(placement("vshape", 2), memory=2, nmicros=6),
        "composed_v_split": Composer.compose(placement("vchunks", 2, split=True), memory=4, nmicros=6),
        "composed_interleaved": Composer.compose(placement("interleaved", 2, backward=2.5), memory=5, nmicros=5),
        **{name: library(name, 2, 6) for name in LIBRARY if name != "chimera"},
    }


def torch_can(plan: SchedPlan) -> bool:
    """Older releases (2.11 is one) start by sending to the neighbours of every stage, which gloo refuses where the
    neighbour is the rank itself, before the schedule has any say."""
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    home = {block.stage: plan.device(block) for block in plan}
    folds = any(home.get(stage + 1) == device for stage, device in home.items() if stage is not None)
    return not folds or hasattr(_PipelineSchedule, "_warmup_p2p")


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every plan through torch's run time on two gloo processes; the folder with the gradients they saved."""
    folder = tmp_path_factory.mktemp("torch_csv")
    plans = {name: plan for name, plan in two_rank_plans().items() if torch_can(plan)}
    for name, plan in plans.items():
        save_csv(plan, folder / f"{name}.csv")
    job = {"folder": str(folder), "ranks": 2, "schedules": {name: plan.nmicros for name, plan in plans.items()}}
    (folder / "job.json").write_text(json.dumps(job))
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(folder / "job.json"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return folder


@pytest.mark.parametrize("name", two_rank_plans())
def test_torch_runs_the_plan_with_the_gradients_of_one_process(torch_run: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    from torch_ranks import gradients, make_batch, make_stage

    plan = two_rank_plans()[name]
    if not torch_can(plan):
        pytest.skip("this torch cannot run neighbouring stages on one rank over gloo")
    nstages = 1 + max(block.action.stage for block in plan.all_blocks())
    stages = {index: make_stage(index) for index in range(nstages)}
    inputs, target = make_batch(plan.nmicros)
    outputs = inputs
    for stage in stages.values():
        outputs = stage(outputs)
    torch.nn.functional.mse_loss(outputs, target).backward()
    expected = gradients(stages)
    found = {}
    for rank in range(2):
        found |= torch.load(torch_run / f"{name}.{rank}.pt")
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- round trips


plans = st.builds(
    one_f_one_b,
    st.integers(1, 5),
    st.integers(1, 7),
    split=st.booleans(),
    spans=st.sampled_from([(), (1, 3, 2), (2.5, 4.25, 1.75), (1000, 2000, 500)]),
) | st.builds(interleaved, st.integers(1, 4), st.integers(1, 5), split=st.booleans(), v=st.booleans())


def timetable(plan: SchedPlan) -> dict[str, tuple[object, ...]]:
    return {
        str(block): (plan.step(block), plan.device(block), block.span, block.memory, sorted(map(str, block.before)))
        for block in plan.all_blocks()
    }


@given(plans)
@settings(max_examples=60, deadline=None)
def test_with_its_placement_a_plan_comes_back_equal(plan: SchedPlan) -> None:
    assert timetable(loads_csv(dumps_csv(plan), plan.placement)) == timetable(plan)


@given(plans)
@settings(max_examples=60, deadline=None)
def test_without_a_placement_the_order_comes_back(plan: SchedPlan) -> None:
    text = dumps_csv(plan)
    read = loads_csv(text)
    assert dumps_csv(read) == text
    for device in range(plan.ndevs):
        assert list(map(str, read.device_blocks(device))) == list(map(str, plan.device_blocks(device)))


def test_deliberate_idle_time_survives() -> None:
    plan = one_f_one_b(2, 2)
    late = plan.retimed({block: plan.step(block) + 10 * block.mid for block in plan})
    assert timetable(loads_csv(dumps_csv(late), plan.placement)) == timetable(late)


def test_spans_of_thousands_do_not_make_thousands_of_columns() -> None:
    text = dumps_csv(one_f_one_b(4, 8, spans=(1013, 2027, 0)))
    assert max(line.count(",") for line in text.splitlines()) < 64


def test_communication_cells_are_passed_over_and_overlapped_ones_opened() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,0F1,0RECV_B0,0B0,0B1,0REDUCE_GRAD\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    plan = loads_csv(text)
    assert list(map(str, plan.device_blocks(0))) == ["0F0", "0F1", "0B0", "0B1"]
    assert list(map(str, plan.device_blocks(1))) == ["1F0", "1F1", "1B0", "1B1"]


def test_a_stage_may_have_whole_and_split_backwards_side_by_side() -> None:
    text = "0F0,0F1,,0B0,0I1,0W1\n,1F0,1B0,1F1,1I1,1W1\n"
    assert loads_csv(text).nmicros == 2


# ---------------------------------------------------------------- what cannot be


def test_a_block_on_two_devices_is_refused_by_name() -> None:
    plan = SchedPlan(2)
    plan.add_block_seq([Block(0, 1, 1, "forward"), Block(0, 2, -1, "backward")], [(0, 1), (0, 1)])
    with pytest.raises(PlacementError, match=r"0F0 runs on devices 0, 1 together"):
        dumps_csv(plan)


def test_a_skip_over_a_stage_is_refused_by_name() -> None:
    placement = pipeline_placement(3)
    blocks = {str(block): block for block in placement.all_blocks()}
    Block.make_dependency(blocks["0F0"], blocks["2F0"])
    with pytest.raises(PlacementError, match=r"2F0 depends on 0F0\n.*neighbouring stages"):
        dumps_csv(placement)


def test_two_chains_side_by_side_are_refused() -> None:
    plan = SchedPlan(2)
    for device in range(2):
        plan.add_block_seq([Block(0, 1, 1, "forward"), Block(0, 2, -1, "backward")], [device, device])
    with pytest.raises(PlacementError, match=r"1F0 does not depend on 0F0"):
        dumps_csv(plan)


def test_the_two_directions_of_chimera_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"torch\.distributed\.pipelining cannot run this plan"):
        dumps_csv(library("chimera", 2, 4))


def test_a_user_defined_type_is_refused_by_name() -> None:
    plan = SchedPlan(1)
    plan.add_block_seq([Block(0, 1, 1, "forward"), Block(0, 1, 0, "loss"), Block(0, 2, -1, "backward")], [0, 0, 0])
    with pytest.raises(PlacementError, match=r"0\(loss\)0 has the type 'loss'"):
        dumps_csv(plan)


def test_inference_is_refused_since_torch_wants_a_backward() -> None:
    plan = SchedPlan(2)
    plan.add_block_seq([Block(0, 1, 0, "forward"), Block(0, 1, 0, "forward")], [0, 1])
    with pytest.raises(PlacementError, match=r"stage 0, micro-batch 0: found 0F0"):
        dumps_csv(plan)


def test_a_weight_gradient_in_the_chain_is_refused_with_what_to_do() -> None:
    plan = SchedPlan(2)
    kinds = [("F", 0), ("F", 1), ("I", 1), ("W", 1), ("I", 0), ("W", 0)]
    plan.add_block_seq([Block(0, 1, 0, kind, stage=stage) for kind, stage in kinds], [stage for _, stage in kinds])
    with pytest.raises(PlacementError, match=r"0I0 depends on 1W0\n.*depend on 1I0 instead"):
        dumps_csv(plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no actions in it"),
        (",,\n,,\n", "no actions in it"),
        ("0F0,0X1\n", r"rank 0, column 1: '0X1' is not an action"),
        ("0F0,0B0\n0F1,0B1\n", r"0F1 is on rank 1, other micro-batches of it on rank 0"),
        ("0F0,0F1,0B0\n", r"1 actions are missing: 0B1"),
        ("0F0,0F0,0B0\n", r"0F0 comes twice"),
        ("0B0,0F0\n", "deadlock"),
    ],
)
def test_a_bad_file_says_where(text: str, message: str) -> None:
    with pytest.raises((ArtifactError, PlacementError, InvalidPlanError), match=message):
        loads_csv(text)


def test_a_missing_or_binary_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot read"):
        load_csv(tmp_path / "nowhere.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match="cannot read"):
        load_csv(tmp_path / "binary.csv")


def test_an_order_for_another_placement_names_what_differs() -> None:
    with pytest.raises(PlacementError, match=r"device 0: 1F0 is placed on 1"):
        plan_from_orders(pipeline_placement(2), [["1F0"], ["0F0"]])
    with pytest.raises(PlacementError, match=r"5F0 is no block of the placement"):
        plan_from_orders(pipeline_placement(2), [["5F0"], []])


def test_a_refused_export_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_text("old")
    plan = SchedPlan(2)
    plan.add_block_seq([Block(0, 1, 1, "forward")], [(0, 1)])
    with pytest.raises(PlacementError):
        save_csv(plan, path)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["plan.csv"]


def test_overlapping_blocks_are_refused_by_name() -> None:
    plan = one_f_one_b(2, 2)
    with pytest.raises(PlacementError, match=r"exclusivity: .*0B0"):
        dumps_csv(plan.retimed({block: plan.step(block) + 3 * block.mid for block in plan}))
