"""Plans round-trip through files; damaged files are refused, and writes are atomic."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import plans

from gemini.errors import ArtifactError, ScheduleError
from gemini.schedule import Block, Links, Pattern, Proof, SchedPlan
from gemini.schedule.placements import placement
from gemini.schedule.plan_files import FORMAT, to_dict


def plain(plan: SchedPlan) -> str:
    """Everything in a plan as text that tells 1 from 1.0."""
    return json.dumps(to_dict(plan))


def composed() -> SchedPlan:
    """A plan with all that a plan can carry."""
    plan = placement("vshape", 2, nbytes=8)
    plan.placement = placement("vshape", 2)
    plan.links = Links(((0, 0.5), (0.25, 0)), 100)
    plan.memory = (2, 1.5)
    plan.pattern = Pattern(4, 1, ((0, 1, 2.0, 5),))
    plan.proof = Proof(4.0, 4.0, True, "dynamic programming", 0.01, ("solver not installed",), 33, 30.5)
    return plan


@settings(max_examples=60)
@given(plans(reals=True, links=True), st.booleans())
def test_round_trip_loses_nothing(tmp_path_factory, plan, bare):
    if bare:
        plan.placement = None
    path = plan.save(tmp_path_factory.mktemp("plans") / "plan.json")
    back = SchedPlan.load(path)
    assert plain(back) == plain(plan)
    assert [str(block) for block in back] == [str(block) for block in plan]
    assert back.links == plan.links
    assert not list(path.parent.glob(".*"))


def test_round_trip_of_all_that_a_plan_carries(tmp_path):
    plan = composed()
    back = SchedPlan.load(plan.save(tmp_path / "plan.json"))
    assert plain(back) == plain(plan)
    assert (back.pattern, back.proof, back.links, back.memory) == (plan.pattern, plan.proof, plan.links, plan.memory)
    assert back.placement is not None
    assert back.placement.placement is None


def test_no_field_of_what_a_plan_carries_is_forgotten():
    saved = to_dict(composed())
    for name, value in (("pattern", Pattern), ("proof", Proof), ("links", Links)):
        assert set(saved[name]) == {field.name for field in dataclasses.fields(value)}


def test_one_block_a_line(tmp_path):
    lines = composed().save(tmp_path / "plan.json").read_text().splitlines()
    assert sum('"span"' in line for line in lines) == 8


def test_whole_and_real_numbers_stay_what_they_are(tmp_path):
    plan = SchedPlan(1)
    plan.add_block(Block(0, 1.0, 2, "forward"), 0, 0)
    plan.add_block(Block(0, 10**18, -2.0, "My Type"), 0, 0.1)
    back = list(SchedPlan.load(plan.save(tmp_path / "p.json")))
    assert [repr(block.span) for block in back] == ["1.0", str(10**18)]
    assert [repr(block.memory) for block in back] == ["2", "-2.0"]
    assert [block.btype for block in back] == ["forward", "my_type"]


@given(st.data())
@settings(max_examples=60)
def test_a_truncated_file_says_where_it_breaks_off(tmp_path_factory, data):
    path = composed().save(tmp_path_factory.mktemp("plans") / "plan.json")
    text = path.read_text()
    path.write_text(text[: data.draw(st.integers(0, len(text) - 3))])
    with pytest.raises(ArtifactError, match=r"line .*, column .*: the file (breaks off|is not JSON)") as caught:
        SchedPlan.load(path)
    assert str(path) in str(caught.value)


def edited(tmp_path, change):
    path = composed().save(tmp_path / "plan.json")
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.pop("format"), "not a gemini schedule"),
        (lambda d: d.update(format="other"), "not a gemini schedule"),
        (lambda d: d.update(version=99), "version: version 99, and this release reads version 1"),
        (lambda d: d.pop("ndevs"), "'ndevs' is missing"),
        (lambda d: d.update(ndevs=True), "ndevs: true is not an integer"),
        (lambda d: d.update(ndevs=1), r"blocks\[1\].*on devices \[1\] of a plan with 1|links"),
        (lambda d: d.update(memory=[1]), "memory: 1 limits for 2 devices"),
        (lambda d: d.update(blocs=[]), "unknown name 'blocs'\n    → did you mean 'blocks'?"),
        (lambda d: d["links"].update(latency=[[0]]), "links: latency between 1 devices for a plan on 2"),
        (lambda d: d["links"].update(latency=-1), "links: latency -1"),
        (lambda d: d["blocks"][2].pop("span"), r"blocks\[2\]: 'span' is missing"),
        (lambda d: d["blocks"][2].update(span=-3), r"blocks\[2\]: span -3"),
        (lambda d: d["blocks"][2].update(start=-3), r"blocks\[2\]: block .* at time -3"),
        (lambda d: d["blocks"][2].update(mid=5), "belong to different micro-batches"),
        (lambda d: d["blocks"][2].update(after=[77]), r"blocks\[2\].after\[0\]: there is no block 77"),
        (lambda d: d["blocks"][2].update(after=["a"]), r'blocks\[2\].after\[0\]: "a" is not an integer'),
        (lambda d: d["blocks"][1].update(bytes=[1, 2]), r"blocks\[1\].bytes: 2 numbers for 1 edges"),
        (lambda d: d["blocks"][0].update(after=[3], bytes=[0]), "depend on each other in a cycle"),
        (lambda d: d["blocks"].__setitem__(0, 7), r"blocks\[0\]: 7 is not an object"),
        (lambda d: d["pattern"].update(length=0), "pattern.length: 0 is not above zero"),
        (lambda d: d["pattern"].update(nmicros=2), "pattern.starts: 1 rows for 2 micro-batches"),
        (lambda d: d["proof"].update(optimal=1), "proof.optimal: 1 is not true or false"),
        (lambda d: d["placement"].update(ndevs="2"), 'placement.ndevs: "2" is not an integer'),
    ],
)
def test_an_edited_file_says_what_is_wrong_and_where(tmp_path, change, text):
    path = edited(tmp_path, change)
    with pytest.raises(ArtifactError, match=text) as caught:
        SchedPlan.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "breaks off"),
        (b"hello", "is not JSON"),
        (b"[]", "is not an object with names"),
        (b"null", "is not an object with names"),
        (b"\xff\xfe\x00", "not a text file"),
        (b'{"format": 1, "format": 2}', "'format' occurs twice"),
        (b'{"format": "gemini.schedule", "version": 1, "ndevs": NaN}', "NaN is not an integer"),
        (b"[" * 100_000, "recursion|nested"),
        (b"1" * 10_000, "integer string conversion|is not an object"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, text):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=text):
        SchedPlan.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"cannot read .*nothing.json: No such file"):
        SchedPlan.load(tmp_path / "nothing.json")
    with pytest.raises(ArtifactError, match="cannot read"):
        SchedPlan.load(tmp_path)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = composed().save(tmp_path / "plan.json")
    before = path.read_bytes()
    broken = composed()
    Block.make_dependency(Block(0, 1, 0, "forward", stage=9), next(iter(broken)))
    with pytest.raises(ScheduleError, match="0F0 depends on 9F0, not in the plan"):
        broken.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["plan.json"]


def test_saving_where_it_cannot_be_says_so(tmp_path):
    with pytest.raises(ArtifactError, match=r"cannot write .*No such file.*\n    → give a path in a folder"):
        composed().save(tmp_path / "no" / "folder" / "plan.json")
    with pytest.raises(ArtifactError, match=r"cannot write .*folder"):
        composed().save(tmp_path)
    assert os.listdir(tmp_path) == []


def test_links_to_files_are_followed_and_devices_written_to(tmp_path):
    target = tmp_path / "target.json"
    target.write_text("old")
    (tmp_path / "link.json").symlink_to(target)
    composed().save(tmp_path / "link.json")
    assert FORMAT in target.read_text()
    assert (tmp_path / "link.json").is_symlink()
    composed().save("/dev/null")
    assert not os.path.isfile("/dev/null")


def test_a_plan_without_blocks_round_trips(tmp_path):
    plan = SchedPlan(3)
    assert plain(SchedPlan.load(plan.save(tmp_path / "p.json"))) == plain(plan)
