"""A host for tests: `gemini worker` in its own process, at the loopback address."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
SECRET = b"the secret of these tests, sixteen bytes and more"


class Host:
    """A listener; ended with `close`."""

    def __init__(self, folder: Path, *options: str, secret: bytes = SECRET, begin: str = "") -> None:
        self.secret_file = folder / "secret"
        self.secret_file.write_bytes(secret)
        self.secret_file.chmod(0o600)
        code = f"{begin}\nfrom gemini.cli.main import main; raise SystemExit(main())"
        arguments = ["worker", "--listen", "127.0.0.1:0", "--threads", "1", "--secret-file", str(self.secret_file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments, *options],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.place = self.wait_for(r"listening at (\S+)")[1]
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line)

    def wait_for(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """The first line it says, from now on, that matches."""
        ends = time.monotonic() + seconds
        while True:
            self.said.append(self._lines.get(timeout=max(0.0, ends - time.monotonic())))
            if found := re.search(pattern, self.said[-1]):
                return found

    @property
    def cpu(self) -> str:
        """As in a device mapping."""
        return f"{self.place}/cpu"

    def close(self) -> None:
        """End it, whatever it does; its sessions end with it."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)


def children(pid: int) -> list[int]:
    """Living processes that a process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(folder.name)] if parent == pid else []
    return found
