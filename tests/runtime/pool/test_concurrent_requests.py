"""Threads that request replies of the same worker concurrently all make progress."""

from __future__ import annotations

import os
import signal
import threading

from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import Forget


def test_a_thread_that_wants_to_read_is_told_when_another_has_done() -> None:
    pool = WorkerPool(1, 1)
    worker = pool.workers[0]
    entered = threading.Event()

    def ask() -> None:
        worker.ask(Forget(worker.next_number(), [], []), "forget nothing")

    def read() -> None:
        worker.mailbox.acquire_reader()
        entered.set()
        worker.mailbox.release_reader()

    os.kill(worker.process.pid, signal.SIGSTOP)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while not worker.mailbox.has_reader:
        entered.wait(0.01)
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    for _ in range(1000):
        if worker.mailbox.waiting:
            break
        entered.wait(0.01)
    os.kill(worker.process.pid, signal.SIGCONT)
    assert entered.wait(30)
    asking.join(30)
    pool.stop()
