"""What the overlap benchmark is doing, for whoever waits for it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable


class Progress:
    """What is being done, for whoever waits; and where it hangs, if it does."""

    def __init__(self) -> None:
        self.begin, self.last = time.perf_counter(), ""

    def tell(self, what: str) -> None:
        """Something else begins."""
        self.last = what
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {what}", file=sys.stderr, flush=True)

    def end_after(self, seconds: float, write: Callable[[], None]) -> None:
        """End the run if it is not over by then: `write` what was found, and say where it was."""

        def end() -> None:
            print(f"not over after {seconds:.0f} s, in {self.last}:", file=sys.stderr)
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
            write()
            sys.stdout.flush()
            for process in multiprocessing.active_children():
                process.kill()
            os._exit(3)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()


PROGRESS = Progress()
