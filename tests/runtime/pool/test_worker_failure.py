"""The error for a lost worker names its memory, the available memory and the remedy."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from gemini.errors import WorkerError
from gemini.runtime.devices import host_memory
from gemini.runtime.devices.cpu import MappedSegment
from gemini.runtime.pool import worker_failure
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import Preload


def test_a_kill_for_want_of_memory_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    holds = {"Net": "stages 0, 2 of Net (1.2 GB planned)"}
    monkeypatch.setattr(host_memory, "count_oom_kills", lambda: [4, 1])
    monkeypatch.setattr(host_memory, "available_memory", lambda: (3_000_000, "of the 8.0 GB of its control group"))
    monkeypatch.setattr(host_memory, "peak_child_memory", lambda: 2_500_000_000)
    facts, remedy = worker_failure.explain_kill(holds, [4, 0])
    assert facts == (
        "it held stages 0, 2 of Net (1.2 GB planned), 2.5 GB of memory at its peak; the kernel has killed a process "
        "for lack of memory since it started; 3.0 MB of the 8.0 GB of its control group available now"
    )
    assert remedy == worker_failure.LESS_MEMORY
    facts, remedy = worker_failure.explain_kill(holds, [4, 1])
    assert "has killed no process" in facts
    assert remedy.startswith("find out who sent the signal")


def test_the_machine_says_what_memory_it_has() -> None:
    left = host_memory.available_memory()
    assert left is not None
    assert left[0] > 0
    assert host_memory.format_bytes(1_500_000_000) == "1.5 GB"
    assert host_memory.format_bytes(150_000) == "0.1 MB"
    assert all(count >= 0 for count in host_memory.count_oom_kills())


def test_a_worker_without_memory_for_ours_says_so_in_the_error_alone(capfd: Any) -> None:
    pool = WorkerPool(2, 1)
    try:
        worker = pool.workers[0]
        worker.contents["Net"] = "stage 0 of Net (1.0 MB planned)"
        resource.prlimit(worker.process.pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
        with pytest.raises(WorkerError) as caught:
            worker.ask(Preload(["x" * 300_000_000]), "import a module")
        assert "out of memory: MemoryError; it held stage 0 of Net (1.0 MB planned); " in str(caught.value)
        assert str(caught.value).endswith(worker_failure.LESS_MEMORY)
    finally:
        pool.stop()
    assert "Traceback" not in capfd.readouterr().err


def test_shared_memory_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr("gemini.runtime.devices.cpu.os.ftruncate", fails)
    with pytest.raises(OSError, match=r"File too large: 2\.0 MB of shared memory \(see ulimit"):
        MappedSegment(2_000_000)
