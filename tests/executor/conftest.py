from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gemini.runtime.pool.worker_pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Four real workers, for all tests of a session."""
    made = WorkerPool(4, 1)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
