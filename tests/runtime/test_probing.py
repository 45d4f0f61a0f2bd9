"""Probing: what workers say of their speed."""

from __future__ import annotations

from gemini.runtime.pool.speed_probe import speeds_of
from gemini.runtime.pool.worker_pool import Crew


def test_all_workers_are_asked_once() -> None:
    crew = Crew(2, 1)
    try:
        found = speeds_of(crew)
        assert found is not None
        alone, workers = found
        assert len(workers) == 2
        assert all(speed.products > 0 and speed.moved_mb > 0 for speed in (alone, *workers))
        assert speeds_of(crew) is found
    finally:
        crew.stop()
