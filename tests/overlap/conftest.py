"""Workers that all tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemini.runtime.pool.worker_pool import Crew


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew(2, 1)
    yield made
    made.stop()
