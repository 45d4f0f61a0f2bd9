"""Placements by name equal the reference shapes and exist wherever the shape does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.errors import ArtifactError, PlacementError
from gemini.schedule import SchedPlan
from gemini.schedule.placement_file import load_placement
from gemini.schedule.placements import PLACEMENTS, placement
from gemini.schedule.plan_files import to_dict

FILE = Path(__file__).with_name("placements.json")
REFERENCE = json.loads(FILE.read_text())
SHAPES = sorted(PLACEMENTS)


def listed(plan: SchedPlan) -> dict[str, object]:
    """A placement in the short form of the reference."""
    ids = {block: index for index, block in enumerate(plan)}
    blocks = [
        {
            "id": ids[block],
            "type": block.btype,
            "span": block.span,
            "memory": block.memory,
            "devices": list(plan.device(block)),
            "after": sorted(ids[prev] for prev in block.before),
        }
        for block in plan
    ]
    return {"ndevs": plan.ndevs, "blocks": blocks}


@pytest.mark.parametrize("key", sorted(REFERENCE))
def test_named_placements_equal_the_reference(key):
    name, ndevs, mode = key.split("/")
    assert listed(placement(name, int(ndevs), mode == "train")) == REFERENCE[key]


@pytest.mark.parametrize("key", sorted(REFERENCE))
def test_the_reference_file_loads(key):
    assert listed(load_placement(FILE, key)) == REFERENCE[key]


@given(st.sampled_from(SHAPES), st.integers(1, 12), st.booleans(), st.booleans(), st.integers(1, 4))
def test_every_shape_is_valid_for_every_count_it_admits(name, ndevs, train, split, chunks):
    shape = PLACEMENTS[name]
    options = {"chunks": chunks} if shape.chunked else {}
    if not shape.admits(ndevs):
        with pytest.raises(
            PlacementError, match=f"does not exist for {ndevs} devices\n    → it does for {shape.counts}"
        ):
            placement(name, ndevs, train, split=split, **options)
        return
    plan = placement(name, ndevs, train, split=split, **options).validate()
    assert [block.gid for block in plan] == list(range(len(plan)))
    assert all(prev.gid < block.gid for block in plan for prev in block.before)
    if train:
        for dev in range(ndevs):
            assert sum(block.memory for block in plan.device_blocks(dev)) == 0
    kinds = {block.btype for block in plan}
    gradients = {"input_gradient", "weight_gradient"} if split else {"backward"}
    assert kinds == {"forward", *(gradients if train else ())}
    actions = {str(block) for block in plan}
    assert len(actions) == len(plan)


def test_split_backward_waits_only_for_input_gradients():
    plan = placement("vshape", 3, split=True, input_gradient=2, weight_gradient=1.5, memory=4, input_release=0.25)
    weights = [block for block in plan if block.btype == "weight_gradient"]
    assert len(weights) == 3
    assert all(not block.after and block.memory == -3 and block.span == 1.5 for block in weights)
    assert all(block.memory == -1 and block.span == 2 for block in plan if block.btype == "input_gradient")


def test_spans_and_memory_one_for_all_or_one_a_stage():
    plan = placement("mshape", 2, forward=[1, 2, 3], backward=0.5, memory=7, nbytes=64)
    assert [block.span for block in plan if block.btype == "forward"] == [1, 2, 3]
    assert {block.span for block in plan if block.btype == "backward"} == {0.5}
    assert [block.memory for block in plan if block.btype == "forward"] == [0, 7, 7]
    assert {size for block in plan for size in block.nbytes.values()} == {64}


def test_chunks_go_round_or_back_and_forth():
    def homes(plan: SchedPlan) -> list[int]:
        return [plan.device(block)[0] for block in plan if block.btype == "forward"]

    assert homes(placement("interleaved", 2, chunks=3)) == [0, 1, 0, 1, 0, 1]
    assert homes(placement("vchunks", 2, chunks=3)) == [0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: placement("vshap", 4), r"did you mean 'vshape'\? choose from vshape, xshape"),
        (lambda: placement("NN-shape", 4), "did you mean 'nnshape'?"),
        (lambda: placement("kshape", 5), "kshape does not exist for 5 devices\n    → it does for 2, 4, 6, …"),
        (lambda: placement("vshape", 0), "does not exist for 0 devices"),
        (lambda: placement("vshape", 2.0), "does not exist for 2.0 devices"),
        (lambda: placement("vshape", 4, chunks=2), "only for interleaved, vchunks"),
        (lambda: placement("interleaved", 4, chunks=0), "0 chunks for interleaved"),
        (lambda: placement("vshape", 4, forward=[1, 2]), "2 values of forward for 4 stages"),
        (lambda: placement("vshape", 4, forward=-1), "span -1 of a forward block"),
        (lambda: placement("vshape", 4, input_release=2), "share from 0 to 1"),
        (lambda: placement("finetune", 2, memory=[1, 1, 1]), r"stages \[0\] take memory but have no backward"),
    ],
)
def test_odd_input_is_refused_with_a_way_out(call, text):
    with pytest.raises(PlacementError, match=text):
        call()


# ------------------------------------------------------------------------ files


def test_a_saved_plan_is_a_placement_file_too(tmp_path):
    plan = placement("kshape", 4)
    assert to_dict(load_placement(plan.save(tmp_path / "k.json"))) == to_dict(plan)
    schedule = plan.copy()
    schedule.placement = plan
    assert to_dict(load_placement(schedule.save(tmp_path / "s.json"))) == to_dict(plan)


def write(tmp_path: Path, document: object) -> Path:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(document))
    return path


def one(**changes: object) -> dict[str, object]:
    block = {"id": 0, "type": "forward", "span": 1, "memory": 1, "devices": [0], "after": [], **changes}
    return {"ndevs": 2, "blocks": [block, {"id": 1, "type": "loss", "span": 2.5, "devices": [0, 1], "after": [0]}]}


def test_the_short_form_with_links_and_bytes(tmp_path):
    document = one()
    document["links"] = {"latency": 1, "bandwidth": 2}
    document["blocks"][1] |= {"bytes": [4], "stage": 7}
    plan = load_placement(write(tmp_path, document))
    assert [str(block) for block in plan] == ["0F0", "7(loss)0"]
    assert [plan.step(block) for block in plan] == [0, 1 + 1 + 4 / 2]


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"ndevs": 2}, "no placement|which placement|is not an object"),
        (one(span=0), r"blocks\[0\]: span 0 of a forward block"),
        (one(span="x"), r'blocks\[0\].span: "x" is not a finite number'),
        (one(devices=[5]), r"on devices \[5\] of a plan with 2"),
        (one(devices=[]), r"on devices \[\] of a plan with 2"),
        (one(after=[9]), r"blocks\[0\].after\[0\]: there is no block with id 9"),
        (one(after=[1]), "depend on each other in a cycle"),
        (one(after=[0]), "cannot depend on itself"),
        (one(id=1), "id 1 stands twice"),
        (one(spam=1), "did you mean 'span'?"),
        ([], "is not an object with names"),
        ({"ndevs": 2, "blocks": []}, "blocks: there are no blocks"),
        (one(span=10**400), "is not a finite number"),
        (3, "is not an object with names"),
        ({"a": one(), "b": one()}, "which placement\\?\n    → choose one of a, b"),
    ],
)
def test_faults_in_files_say_where(tmp_path, document, text):
    path = write(tmp_path, document)
    with pytest.raises(ArtifactError, match=text) as caught:
        load_placement(path)
    assert str(path) in str(caught.value)
