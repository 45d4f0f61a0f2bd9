"""Two workers shared by all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemini.runtime.pool.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2, 1)
    yield made
    made.stop()
