"""Chrome/Perfetto traces contain the whole plan and read back to an equal one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from handmade import interleaved, one_f_one_b
from hypothesis import given, settings
from strategies import plans

from gemini.errors import ArtifactError
from gemini.schedule import Block, Composer, Links, Pattern, Proof, SchedPlan, placement
from gemini.schedule.export import load_trace, save_trace, trace
from gemini.schedule.plan_files import to_dict


def full_plan() -> SchedPlan:
    """A plan that uses every field a plan has."""
    plan = one_f_one_b(3, 4, spans=(1.5, 2, 0))
    plan.links = Links(latency=0.25, bandwidth=((0, 1, 2), (1, 0, 3), (2, 3, 0)))
    plan.memory = (4, 3.5, math.inf)
    plan.pattern = Pattern(3.5, 1, ((0, 1.5, 3, 4.5, 6.5, 8.5),))
    plan.proof = Proof(3.5, 3.5, True, "hand", 0.0, ("a note",))
    first, second = plan.device_blocks(0)[0], plan.device_blocks(1)[0]
    second.nbytes[first] = 1024
    return plan


@given(plans())
@settings(max_examples=40, deadline=None)
def test_any_plan_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, plan: SchedPlan) -> None:
    path = save_trace(plan, tmp_path_factory.mktemp("trace") / "plan.json")
    assert to_dict(load_trace(path)) == to_dict(plan)


def test_every_field_of_a_plan_comes_back(tmp_path: Path) -> None:
    plan = full_plan()
    assert to_dict(load_trace(save_trace(plan, tmp_path / "plan.json"))) == to_dict(plan)


def test_a_composed_plan_comes_back_with_pattern_and_proof(tmp_path: Path) -> None:
    for shape in (placement("kshape", 4), placement("vchunks", 2, split=True), placement("xshape", 4, False)):
        plan = Composer.compose(shape, memory=6)
        again = load_trace(save_trace(plan, tmp_path / "plan.json"))
        assert to_dict(again) == to_dict(plan)
        assert again.unroll(9).nsteps == plan.unroll(9).nsteps


def test_slices_are_where_the_blocks_are() -> None:
    plan = interleaved(2, 3, split=True, v=True)
    slices = [event for event in trace(plan)["traceEvents"] if event["ph"] == "X" and event["cat"] != "phase"]
    found = {(event["name"], event["tid"] - 1, event["ts"], event["dur"]) for event in slices}
    assert found == {
        (str(block), device, 1000 * plan.step(block), 1000 * block.span)
        for block in plan
        for device in plan.device(block)
    }


def test_counters_peak_where_the_devices_do() -> None:
    plan = one_f_one_b(4, 8)
    counters = [event for event in trace(plan)["traceEvents"] if event["ph"] == "C"]
    for device in range(4):
        held = [event["args"]["held"] for event in counters if event["tid"] == device + 1]
        assert max(held) == plan.peak_memory(device)
        assert held[-1] == 0


def test_phases_and_tracks_are_named() -> None:
    events = trace(one_f_one_b(4, 8))["traceEvents"]
    phases = [event["name"] for event in events if event.get("cat") == "phase"]
    assert phases[0] == "warm-up"
    assert phases[-1] == "cool-down"
    assert "repetend 0" in phases
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["phases", "device 0", "device 1", "device 2", "device 3"]


def test_every_arrow_has_two_ends() -> None:
    events = trace(one_f_one_b(3, 2))["traceEvents"]
    starts = [event["id"] for event in events if event["ph"] == "s"]
    ends = [event["id"] for event in events if event["ph"] == "f"]
    assert starts == ends
    assert len(set(starts)) == len(starts) == 2 * (2 + 2)


def test_a_block_on_several_devices_is_one_block(tmp_path: Path) -> None:
    plan = SchedPlan(3)
    plan.add_block_seq([Block(0, 1, 1, "forward"), Block(0, 1, 0, "loss")], [(0, 2), 1])
    again = load_trace(save_trace(plan, tmp_path / "plan.json"))
    assert [again.device(block) for block in again] == [(0, 2), (1,)]


def test_an_empty_plan_comes_back(tmp_path: Path) -> None:
    assert to_dict(load_trace(save_trace(SchedPlan(2), tmp_path / "plan.json"))) == to_dict(SchedPlan(2))


def test_bad_files_say_what_is_wrong(tmp_path: Path) -> None:
    path = save_trace(one_f_one_b(2, 2), tmp_path / "plan.json")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ArtifactError, match=r"plan\.json: line \d+"):
        load_trace(path)
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ArtifactError, match="not a trace of a gemini schedule"):
        load_trace(path)
    document = json.loads(text)
    document["traceEvents"] = [
        event for event in document["traceEvents"] if event.get("args", {}).get("block") not in (1, 2)
    ]
    path.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match=r"blocks \[1, 2\] are missing"):
        load_trace(path)
