"""Progress messages of the overlap benchmark, and stacks where it hangs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable


class Progress:
    """The current activity, and the stacks of a hang."""

    def __init__(self) -> None:
        self.begin, self.last = time.perf_counter(), ""

    def tell(self, what: str) -> None:
        """Report the next activity."""
        self.last = what
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {what}", file=sys.stderr, flush=True)

    def end_after(self, seconds: float, write: Callable[[], None]) -> None:
        """End the run after this time: `write` the results and print the current activity."""

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
