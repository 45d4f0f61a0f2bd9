"""Host namespaces: machines for tests, as network namespaces that a bridge joins.

    namespace …-1   10.24.N.1 ──┐
    namespace …-2   10.24.N.2 ──┤ bridge (in a namespace of its own)
    …                           ┘

Each has a home, a folder for the files of Ray, and an interface whose rate and state can be changed. It needs root and
iproute2. Nothing reaches the network of this machine. `close` ends every process inside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_START = """
mkdir -p /tmp/ray "$0/ray" "$0/home" && mount --bind "$0/ray" /tmp/ray
export HOME="$0/home"; cd "$0"; exec "$@"
"""


def is_supported() -> bool:
    """Return whether this user can make network namespaces."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    name = f"gemini{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return made


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class HostNamespaces:
    """So many hosts, numbered from 1."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder, self.count, self.net = folder, count, os.getpid() % 250
        self._name = f"gemini{os.getpid()}"
        self._bridge = f"{self._name}-0"
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge0", "up")
        for host in range(1, count + 1):
            name, end = self.name(host), f"port{host}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", end, "netns", self._bridge)
            _ip("-n", self._bridge, "link", "set", end, "master", "bridge0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def name(self, host: int) -> str:
        """Return the namespace of a host."""
        return f"{self._name}-{host}"

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return f"10.24.{self.net}.{host}"

    def home(self, host: int) -> Path:
        """Return the folder in which the processes of a host start."""
        found = self.folder / f"host{host}"
        found.mkdir(parents=True, exist_ok=True)
        return found

    def start(self, host: int, *words: str, **settings: Any) -> subprocess.Popen[str]:
        """Start a program on a host."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TORCH_CPP_LOG_LEVEL": "ERROR",
            **settings.pop("env", {}),
        }  # fmt: skip
        if "RAY_AUTH_TOKEN" in environment:
            environment.pop("RAY_AUTH_TOKEN_PATH")
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name(host), "bash", "-c", _START, str(self.home(host)), *words],
            env=environment, text=True, stdin=subprocess.DEVNULL, **settings,
        )  # fmt: skip

    def run(self, host: int, *words: str, timeout: float = 120.0, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Run a program on a host to its end, and return its output."""
        process = self.start(host, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def start_cluster(self, cpus: int = 4) -> str:
        """Start Ray on all hosts; return the address of the cluster."""
        gemini = str(Path(sys.executable).parent / "gemini")
        place = f"{self.address(1)}:6380"
        for host in range(1, self.count + 1):
            where = ["--address", self.address(1)] if host == 1 else ["--join", place]
            found = self.run(host, gemini, "cluster", "up", *where, "--cpus", str(cpus))
            if found.returncode:
                raise RuntimeError(found.stderr)
        return place

    def shape(self, host: int, rate: str) -> None:
        """Limit the rate of a host's interface, as `10gbit`, in both directions."""
        for name, device in ((self.name(host), "eth0"), (self._bridge, f"port{host}")):
            command = ["tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate]
            subprocess.run([*command, "burst", "4mb", "latency", "100ms"], check=True, capture_output=True)

    def set_link(self, host: int, *, is_up: bool) -> None:
        """Cut the link of a host, or mend it."""
        _ip("-n", self._bridge, "link", "set", f"port{host}", "up" if is_up else "down")

    def processes(self, host: int) -> dict[int, str]:
        """Return the processes of a host with their command lines."""
        found = {}
        for word in _ip("netns", "pids", self.name(host)).split():
            with contextlib.suppress(OSError):
                found[int(word)] = Path(f"/proc/{word}/cmdline").read_text().replace("\0", " ").strip()
        return {pid: line for pid, line in found.items() if line}  # others have ended

    def close(self) -> None:
        """End all processes, and remove the namespaces."""
        for host in range(1, self.count + 1):
            for pid in self.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for host in range(self.count + 1):
            subprocess.run(["ip", "netns", "del", self.name(host)], check=False, capture_output=True)
