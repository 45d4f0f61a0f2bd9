"""A slow pass does not change the result, and host times add up to those of a step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.profiling.measured_device import NodeTimes
from gemini.profiling.node_classes import NodeClass
from gemini.profiling.node_timer import PassTimes
from gemini.profiling.reading_statistics import class_times, scale_to_steps, weighted_median

NO_OVERHEAD = NodeTimes(0.0, 0.0)


def reading(scale, times, overhead=NO_OVERHEAD):
    found = {
        id_: NodeTimes(f * scale + overhead.forward, b * scale + overhead.backward, f * scale, b * scale)
        for id_, (f, b) in times.items()
    }
    return PassTimes(found, overhead, None, {})


TIMES = st.dictionaries(
    st.integers(0, 20), st.tuples(st.floats(0.01, 100.0), st.floats(0.01, 100.0)), min_size=1, max_size=12
)


@settings(deadline=None)
@given(TIMES, st.lists(st.floats(1.0, 3.0), min_size=1, max_size=5), st.randoms())
def test_slow_passes_do_not_slow_the_result(times, slowness, random):
    passes = [reading(scale, times) for scale in (1.0, *slowness)]
    random.shuffle(passes)
    classes = [NodeClass(str(id_), [id_]) for id_ in times]
    found = class_times(passes, classes)
    for id_, (forward, backward) in times.items():
        assert found[str(id_)].forward.ms == pytest.approx(forward)
        assert found[str(id_)].backward.ms == pytest.approx(backward)
        assert found[str(id_)].forward.samples == len(passes)


@settings(deadline=None)
@given(TIMES)
def test_the_overhead_is_taken_off_and_something_is_left(times):
    overhead = NodeTimes(5.0, 7.0)
    classes = [NodeClass(str(id_), [id_]) for id_ in times]
    found = class_times([reading(1.0, times, overhead)], classes)
    for id_, (forward, _) in times.items():
        assert found[str(id_)].forward.ms == pytest.approx(max(forward, 0.05 * (forward + 5.0)))


def test_nodes_of_a_class_are_pooled_and_classes_never_timed_left_out():
    classes = [NodeClass("a", [0, 1, 2]), NodeClass("b", [3])]
    found = class_times([reading(1.0, {0: (1.0, 1.0), 1: (1.2, 1.0), 2: (9.0, 1.0)})], classes)
    assert found["a"].forward.ms == pytest.approx(1.1)
    assert found["a"].forward.rejected == 1
    assert "b" not in found


@settings(deadline=None)
@given(TIMES, st.floats(0.1, 1000.0), st.floats(0.1, 1000.0))
def test_host_times_add_up_to_a_step_and_never_grow(times, forward, backward):
    classes = [NodeClass(str(id_), [id_]) for id_ in times]
    before = class_times([reading(1.0, times)], classes)
    found = scale_to_steps(before, dict.fromkeys(before, 1), [(forward, backward), (forward * 2, backward * 2)])
    for part, step in (("forward_host", forward), ("backward_host", backward)):
        total = sum(getattr(one, part).ms for one in before.values())
        assert sum(getattr(one, part).ms for one in found.values()) == pytest.approx(min(step, total))
    assert all(found[name].forward == before[name].forward for name in found)
    limit = scale_to_steps(before, dict.fromkeys(before, 1), [(forward, backward)], is_limit=True)
    assert sum(one.forward_host.ms for one in limit.values()) == pytest.approx(forward)
    assert sum(one.backward_host.ms for one in limit.values()) == pytest.approx(backward)
    assert scale_to_steps(before, dict.fromkeys(before, 1), []) == before


@settings(deadline=None)
@given(TIMES, st.lists(st.tuples(st.floats(1.0, 3.0), st.floats(1.0, 3.0)), max_size=5))
def test_times_of_the_thread_come_from_its_own_runs_each_direction_for_itself(times, slowness):
    classes = [NodeClass(str(id_), [id_]) for id_ in times]
    runs = [
        {id_: NodeTimes(0.0, 0.0, 2 * f * slow, 3 * b * slower) for id_, (f, b) in times.items()}
        for slow, slower in ((1.0, 1.0), *slowness)
    ]
    found = class_times([reading(1.0, times)], classes, runs)
    for id_, (forward, backward) in times.items():
        assert found[str(id_)].forward.ms == pytest.approx(forward)
        assert found[str(id_)].forward_host.ms == pytest.approx(2 * forward)
        assert found[str(id_)].backward_host.ms == pytest.approx(3 * backward)


def test_the_weighted_median_is_where_half_of_the_weight_is_reached():
    assert weighted_median([(1.0, 1.0), (2.0, 10.0), (3.0, 1.0)]) == 2.0
    assert weighted_median([(5.0, 1.0)]) == 5.0
    assert weighted_median([]) == 0.0
