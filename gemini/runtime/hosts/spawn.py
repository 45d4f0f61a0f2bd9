"""Spawn: the thread that starts all worker processes of this host.

The kernel ends a worker when the thread that started it ends (PDEATHSIG). One daemon thread therefore starts them all
and lives as long as the process: a thread of the script might end earlier.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from gemini.errors import WorkerError

# Large blocks are returned to the system when freed: idle heap memory of one process is missing in the others.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "4194304"}
_ROOT = str(Path(__file__).resolve().parents[3])
# The same Gemini as in this process, and no imports from the current folder; the full path comes with `Hello`.
_BEGIN = "import sys; sys.path[:] = [{root!r}, *filter(None, sys.path)]; from {entry} import main; main()"

Process = subprocess.Popen[bytes]
Order = tuple["Future[Process]", tuple[int, ...], int, str, Mapping[str, str]]
ENTRY = "gemini.runtime.worker.worker_process"  # for workers on this host
_orders: dict[int, queue.SimpleQueue[Order]] = {}  # by process: threads do not survive a fork


def start_process(
    descriptors: tuple[int, ...], threads: int, entry: str = ENTRY, environment: Mapping[str, str] | None = None
) -> Process:
    """Start a worker process that inherits these descriptors; `environment` are further variables."""
    orders = _orders.get(os.getpid())
    if orders is None:
        orders = _orders[os.getpid()] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(orders,), name="gemini-starter", daemon=True).start()
    future: Future[Process] = Future()
    orders.put((future, descriptors, threads, entry, environment or {}))
    return future.result()


def _serve(orders: queue.SimpleQueue[Order]) -> None:
    while True:
        future, descriptors, threads, entry, environment = orders.get()
        try:
            future.set_result(_start(descriptors, threads, entry, environment))
        except BaseException as error:
            future.set_exception(error)
        del future


def _start(descriptors: tuple[int, ...], threads: int, entry: str, more: Mapping[str, str]) -> Process:
    counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment = {**os.environ, **counts, **_ALLOCATOR, **more}
    arguments = [*map(str, descriptors), str(os.getpid())]
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _BEGIN.format(root=_ROOT, entry=entry), *arguments],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise WorkerError(
            f"a worker cannot be started: {error}\n    → free memory or processes, or use fewer workers"
        ) from error
