"""Predicted steps of any stages on any workers terminate, within the bounds of every schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.partition.step_estimate import StageWork, estimate_step
from gemini.partition.traffic import StageTransfer
from gemini.schedule.library import LIBRARY, library
from gemini.schedule.link_costs import FREE, Links


def work(worker, forward=1.0, backward=2.0, kept=1.0, has_backward=True):
    return StageWork(worker, forward, backward / 2, backward / 2, kept, has_backward)


def flow(source, target, mb=0.0, gradients=True, crosses=True):
    return StageTransfer(
        source, target, 1, int(crosses), int(crosses and gradients), mb, mb * gradients, gradients, crosses
    )


def chain(workers, **times):
    stages = [work(worker, **times) for worker in workers]
    flows = [flow(at, at + 1, crosses=workers[at] != workers[at + 1]) for at in range(len(workers) - 1)]
    return stages, flows


@pytest.mark.parametrize("nworkers", [1, 2, 4, 7])
@pytest.mark.parametrize("nmicros", [1, 3, 8, 20])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_chain_takes_what_the_library_says(nworkers, nmicros, schedule):
    stages, flows = chain(range(nworkers))
    found = estimate_step(stages, flows, nworkers, schedule=schedule, nmicros=nmicros, links=FREE)
    known = library(schedule, nworkers, nmicros, forward=1, backward=2, input_gradient=1, weight_gradient=1)
    assert found.step_ms == pytest.approx(float(known.nsteps))
    assert [float(known.peak_memory(dev)) for dev in range(nworkers)] == pytest.approx(list(found.activations_mb))


@st.composite
def pipes(draw):
    """Stages in order on any workers, each reading from earlier ones."""
    nworkers = draw(st.integers(1, 4))
    count = draw(st.integers(1, 7))
    workers = [draw(st.integers(0, nworkers - 1)) for _ in range(count)]
    times = st.floats(0, 5, allow_nan=False)
    learns = [draw(st.booleans()) or at == count - 1 for at in range(count)]
    stages = [
        work(worker, draw(times), draw(times) if learn else 0.0, draw(times), learn)
        for worker, learn in zip(workers, learns)
    ]
    flows = []
    for target in range(1, count):
        for source in sorted(draw(st.sets(st.integers(0, target - 1), min_size=1, max_size=3))):
            back = learns[source] and learns[target]
            flows.append(flow(source, target, draw(times), back, workers[source] != workers[target]))
    return stages, flows, nworkers


@settings(max_examples=150, deadline=None)
@given(
    pipe=pipes(),
    nmicros=st.integers(1, 9),
    schedule=st.sampled_from([*LIBRARY]),
    links=st.sampled_from([FREE, Links(0.5, 0), Links(0.1, 1e6)]),
)
def test_any_pipe_runs_to_its_end(pipe, nmicros, schedule, links):
    stages, flows, nworkers = pipe
    found = estimate_step(stages, flows, nworkers, schedule=schedule, nmicros=nmicros, links=links)
    loads = [0.0] * nworkers
    for one in stages:
        loads[one.worker] += (one.forward_ms + one.input_gradient_ms + one.weight_gradient_ms) * nmicros
    assert found.step_ms >= max(loads) * (1 - 1e-6)
    moved = sum(2 * (0.5 + one.mb) * nmicros for one in flows)
    assert found.step_ms <= sum(loads) + moved + 1e-3
    for at, one in enumerate(stages):
        assert found.depth[at] <= nmicros
        assert (found.depth[at] > 0) == one.has_backward
        assert found.stage_activations_mb[at] == pytest.approx(
            found.depth[at] * one.saved_mb * one.has_backward, abs=1e-6
        ) or (LIBRARY[found.schedule].split and found.stage_activations_mb[at] <= found.depth[at] * one.saved_mb + 1e-6)
        if found.schedule == "1f1b" and one.has_backward:
            assert found.depth[at] <= len(stages) - at


@settings(max_examples=40, deadline=None)
@given(pipe=pipes(), nmicros=st.integers(1, 4))
def test_any_pipe_is_composed(pipe, nmicros):
    stages, flows, nworkers = pipe
    found = estimate_step(stages, flows, nworkers, schedule="composed", nmicros=nmicros, links=FREE, time_limit=0.3)
    assert found.schedule == "composed"
    busy = sum(one.forward_ms + one.input_gradient_ms + one.weight_gradient_ms for one in stages) * nmicros
    assert found.step_ms <= busy + 1e-3


def test_a_mixed_pipe_is_better_than_stages_one_after_another():
    stages, flows = chain([0, 1, 0, 1])
    found = estimate_step(stages, flows, 2, schedule="1f1b", nmicros=8, links=FREE)
    assert 8 * 6 <= found.step_ms <= 8 * 6 + 12  # the work of a worker, and one micro-batch to fill and drain
