"""Blocks: types in any spelling, names that parse back, dependencies within a micro-batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.errors import PlacementError
from gemini.schedule import Action, Block, Links
from gemini.schedule.block import LETTERS, canonical_type


@pytest.mark.parametrize(
    ("spelling", "btype"),
    [
        ("Forward", "forward"),
        ("FORWARD", "forward"),
        (" f ", "forward"),
        ("B", "backward"),
        ("Input-Gradient", "input_gradient"),
        ("input gradient", "input_gradient"),
        ("w", "weight_gradient"),
        ("Optimizer Step", "optimizer_step"),
    ],
)
def test_types_in_any_spelling(spelling, btype):
    assert Block(0, 1, 0, spelling).btype == btype
    assert canonical_type(btype) == btype


kinds = st.one_of(st.sampled_from(list(LETTERS)), st.text("abcxyz_019", min_size=1).map(canonical_type))


@given(st.builds(Action, st.integers(0, 999), kinds, st.integers(0, 9999)))
def test_action_names_parse_back(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "-1F0", "2F-1", "2()0", "2F0 3", "two"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(PlacementError, match="is not an action\n    → write stage, type and micro-batch"):
        Action.parse(text)


def test_short_names():
    names = [str(Block(3, 1, 0, kind, stage=1)) for kind in ("forward", "backward", "I", "W", "loss")]
    assert names == ["1F3", "1B3", "1I3", "1W3", "1(loss)3"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((-1, 1, 0, "f"), "micro-batch -1"),
        ((True, 1, 0, "f"), "micro-batch True"),
        ((0.5, 1, 0, "f"), "micro-batch 0.5"),
        ((0, 0, 0, "f"), "span 0 of a f block"),
        ((0, -2, 0, "f"), "span -2"),
        ((0, float("nan"), 0, "f"), "span nan"),
        ((0, float("inf"), 0, "f"), "span inf"),
        ((0, "1", 0, "f"), "span '1'"),
        ((0, 10**400, 0, "f"), "span 1000"),
        ((0, 1, float("nan"), "f"), "memory nan"),
        ((0, 1, None, "f"), "memory None"),
        ((0, 1, 0, ""), "block type ''"),
        ((0, 1, 0, "a(b)"), "has a parenthesis"),
        ((0, 1, 0, None), "block type None is no name"),
        ((0, 1, 0, 7), "block type 7 is no name"),
    ],
)
def test_odd_values_are_refused(values, text):
    with pytest.raises(PlacementError, match=text.replace("(", "[(]")):
        Block(*values)


def test_all_faults_at_once():
    with pytest.raises(PlacementError) as caught:
        Block(-1, -1, float("inf"), "forward")
    assert all(word in str(caught.value) for word in ("micro-batch", "span", "memory"))


def test_numbers_of_other_libraries_become_plain():
    numpy = pytest.importorskip("numpy")
    block = Block(numpy.int64(1), numpy.float32(0.5), numpy.int32(2), "forward")
    assert [type(value) for value in (block.mid, block.span, block.memory)] == [int, float, int]


def test_dependencies():
    one, two, other = Block(0, 1, 0, "f"), Block(0, 1, 0, "f"), Block(1, 1, 0, "f")
    Block.make_dependency(one, two, 5)
    Block.make_dependency(one, two, 5)
    assert (list(one.after), list(two.before), two.nbytes) == ([two], [one], {one: 5})
    with pytest.raises(PlacementError, match="cannot depend on itself"):
        Block.make_dependency(one, one)
    with pytest.raises(PlacementError, match="different micro-batches"):
        Block.make_dependency(one, other)
    for nbytes in (-1, float("nan"), "x"):
        with pytest.raises(PlacementError, match="give a number of bytes"):
            Block.make_dependency(one, two, nbytes)


# ------------------------------------------------------------------------ links


def test_links_cost_latency_and_bytes_between_devices_only():
    links = Links(latency=0.5, bandwidth=4)
    assert links.cost(1, 1, 100) == 0
    assert links.cost(0, 1, 8) == 0.5 + 2
    assert Links(latency=3).cost(0, 1, 10**9) == 3
    assert Links().free
    assert not links.free


def test_a_delay_is_the_slowest_target_from_its_nearest_source():
    links = Links([[0, 1, 9], [1, 0, 2], [9, 2, 0]])
    assert links.delay([0], [2]) == 9
    assert links.delay([0, 1], [2]) == 2
    assert links.delay([0, 1], [1]) == 0
    assert links.delay([0], [0, 1]) == 1


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ((-1, 0), "latency -1"),
        ((0, float("nan")), "bandwidth nan"),
        ((((0, 1), (1,)), 0), r"latency has rows of \[1, 2\] entries for 2 devices"),
    ],
)
def test_odd_links_are_refused(tables, text):
    with pytest.raises(PlacementError, match=text):
        Links(*tables)


def test_links_for_another_number_of_devices_are_refused():
    with pytest.raises(PlacementError, match="latency between 2 devices for a plan on 3"):
        Links(((0, 1), (1, 0))).check(3)
