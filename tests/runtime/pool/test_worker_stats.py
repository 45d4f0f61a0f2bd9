"""The speed of each worker is measured once."""

from __future__ import annotations

from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.pool.worker_stats import measure_speeds


def test_all_workers_are_asked_once() -> None:
    pool = WorkerPool(2, 1)
    try:
        found = measure_speeds(pool)
        assert found is not None
        alone, workers = found
        assert len(workers) == 2
        assert all(speed.products > 0 and speed.moved_mb > 0 for speed in (alone, *workers))
        assert measure_speeds(pool) is found
    finally:
        pool.stop()
