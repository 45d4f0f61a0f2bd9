"""Trials are timed by the CPU time of the calling thread."""

from __future__ import annotations

import threading
import time

from gemini.launcher.auto import TrialClock


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_other_threads_and_waiting_do_not_count() -> None:
    other = threading.Thread(target=spin, args=(0.1,))
    clock = TrialClock()
    other.start()
    spin(0.02)
    other.join()
    assert 20 <= clock.ms() < 90
