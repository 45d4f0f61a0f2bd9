"""The summary of readings lies between the extremes and is robust to outliers, order and scale."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.profiling.reading_statistics import Reading, summarize

times = st.lists(st.floats(0.001, 1e4), min_size=1, max_size=40)


def test_nothing_measured_is_zero():
    assert summarize([]) == Reading()


@settings(deadline=None)
@given(times)
def test_between_the_extremes(readings):
    found = summarize(readings)
    assert min(readings) <= found.ms <= max(readings)
    assert found.samples == len(readings)
    assert 0 <= found.rejected < len(readings)
    assert found.noise >= 0


@settings(deadline=None)
@given(times, st.randoms())
def test_order_does_not_matter(readings, random):
    shuffled = list(readings)
    random.shuffle(shuffled)
    assert summarize(readings) == summarize(shuffled)


@settings(deadline=None)
@given(times, st.sampled_from([0.25, 2.0, 64.0]))
def test_units_do_not_matter(readings, unit):
    one, other = summarize(readings), summarize([value * unit for value in readings])
    assert other.ms == pytest.approx(one.ms * unit)
    assert (one.samples, one.rejected) == (other.samples, other.rejected)


@settings(deadline=None)
@given(st.floats(1.0, 100.0), st.integers(5, 20), st.integers(1, 2), st.floats(3.0, 1000.0))
def test_disturbed_readings_are_rejected(ms, calm, disturbed, factor):
    readings = [ms * (1 + 0.001 * (index % 3)) for index in range(calm)] + [ms * factor] * disturbed
    found = summarize(readings)
    assert found.ms == pytest.approx(ms, rel=0.01)
    assert found.rejected == disturbed


def test_more_readings_are_less_noisy():
    pattern = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert summarize(pattern * 8).noise < summarize(pattern).noise
