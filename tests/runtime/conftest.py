"""Two workers shared by all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemini.runtime.pool.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Two real workers, for all tests of a session."""
    made = WorkerPool(2, 1)
    yield made
    made.stop()
