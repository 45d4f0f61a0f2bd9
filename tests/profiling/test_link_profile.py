"""The link profile fits a line through measured transfers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.errors import ArtifactError, ProfileError
from gemini.profiling.link_profile import SIZES, LinkProfile, fit_link, profile_link


@settings(deadline=None)
@given(st.floats(0.001, 10.0), st.floats(1e3, 1e8))
def test_the_line_is_found(latency, bandwidth):
    times = tuple(latency + (size - SIZES[0]) / bandwidth for size in SIZES)
    found = fit_link(SIZES, times)
    assert found.latency_ms == pytest.approx(latency)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert found.links().cost(0, 1, 1 << 20) == pytest.approx(found.cost_ms(1 << 20))
    assert found.links().cost(1, 1, 1 << 20) == 0


def test_times_that_do_not_grow_have_no_bandwidth_limit():
    found = fit_link(SIZES, (1.0,) * len(SIZES))
    assert found.bandwidth == 0
    assert found.cost_ms(1 << 30) == 1.0


def test_wrong_readings():
    with pytest.raises(ProfileError, match="one time per size"):
        fit_link(SIZES, (1.0,))
    with pytest.raises(ProfileError, match="latency_ms nan"):
        LinkProfile("gloo", float("nan"), 1.0)


def test_two_real_processes(tmp_path):
    found = profile_link(sizes=SIZES[:4])
    assert found.backend == "gloo"
    assert found.latency_ms > 0
    assert len(found.times_ms) == 4
    found.save(tmp_path / "link.json")
    assert LinkProfile.load(tmp_path / "link.json") == found


def test_files_that_are_no_link_profiles(tmp_path):
    with pytest.raises(ArtifactError):
        LinkProfile.load(tmp_path / "missing.json")
    for text in ("{}", "[]", '{"format": 1}', '{"format": 1, "sizes": [], "times_ms": [], "bandwidth": 3}'):
        (tmp_path / "link.json").write_text(text)
        with pytest.raises(ProfileError):
            LinkProfile.load(tmp_path / "link.json")


def test_a_backend_that_does_not_exist():
    with pytest.raises(ProfileError, match="cannot be measured"):
        profile_link(backend="carrier-pigeon", sizes=SIZES[:1])
