"""Fault sweep: random faults of hosts while a script trains on them.

    python -m conformance.hosts.fault_sweep [--faults 50] [--seed 0]

Two hosts (network namespaces), a Ray cluster, a script with stages on both. Each run has one fault at a random step.
The script must print the losses of one process to its end, with the longest pause as promised, and leave no process and
no temporary file:

    kill         the worker, its supervisor or the process that speaks to Ray is killed       1 s
    freeze       all processes of the other host are stopped                                 10 s
    cut          its link is down                                                            10 s
    slow         its link has 20 Mbit/s from now on                                          no limit
    full         its disk is full                                                            no limit
    controller   the script is killed: nothing is left after 3 s
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from conformance.hosts.host_namespaces import HostNamespaces

SCRIPT = """
import time, torch
from torch import nn
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(64, 48), *[nn.TransformerEncoderLayer(48, 4, 96, 0.1, batch_first=True)
                                               for _ in range(4)], nn.Linear(48, 64))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
data = torch.randint(64, (64, 8))
for step in range(40):
    x = data[torch.randperm(64)[:16]]
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.4f}", flush=True)
    time.sleep(0.03)
"""
_OWN = re.compile(r"gemini\.runtime|RaySupervisor|train\.py")
_TOLERANCE = 2e-3


class Sweep:
    """The hosts, the reference, and what was found."""

    def __init__(self, folder: Path) -> None:
        self.hosts, self.folder = HostNamespaces(2, folder), folder
        for host in (1, 2):
            (self.hosts.home(host) / "train.py").write_text(SCRIPT)
        disk = self.hosts.home(2) / "ray"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600m", "tmpfs", str(disk)], check=True)
        self.disk, self.failures = disk, list[str]()
        try:
            self.place = self.hosts.start_cluster()
            self.expected = self.read_losses(self.hosts.run(1, sys.executable, "train.py").stdout)
        except BaseException:  # an interrupt, too, leaves nothing
            self.close()
            raise

    def close(self) -> None:
        """End everything."""
        self.hosts.close()
        subprocess.run(["umount", "-l", str(self.disk)], check=False)

    def read_losses(self, text: str) -> list[float]:
        return [float(line.split()[1]) for line in text.splitlines() if re.fullmatch(r"\d+ [\d.]+", line)]

    def _left(self) -> list[str]:
        found = [
            f"{pid} {line[:90]}"
            for host in (1, 2)
            for pid, line in self.hosts.processes(host).items()
            if _OWN.search(line) and "ray start" not in line
        ]
        found += [str(one) for one in Path(tempfile.gettempdir()).glob("gemini-code-*")]
        return found

    def await_nothing_left(self, seconds: float) -> list[str]:
        """Return the processes and files that are left after so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _pids(self, host: int, pattern: str) -> list[int]:
        return [pid for pid, line in self.hosts.processes(host).items() if re.search(pattern, line)]

    def run(self, fault: str, step: int, *flags: str, mapping: str = "") -> str:
        """Train with one fault, or "none"; return what happened, beginning with "ok" or "FAILED"."""
        stages = {"stage_0": {"shard_0": "cpu"}, "stage_1": {"shard_0": f"{self.hosts.address(2)}/cpu"}}
        mapping = mapping or json.dumps(stages)
        process = self.hosts.start(
            1, str(Path(sys.executable).parent / "gemini_python"), "--cluster", self.place, "--device-mapping", mapping,
            "--accum-degree", "4", *flags, "train.py", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        lines, longest, mend = [], 0.0, None
        try:
            if fault == "full":
                mend = self._inflict(fault, process)
            last = time.monotonic()
            for line in process.stdout:
                now = time.monotonic()
                longest = max(longest, now - last) if len(lines) > step else 0.0
                last = now
                lines.append(line)
                if len(lines) == step + 1 and fault != "full":
                    began = time.monotonic()
                    mend = self._inflict(fault, process)
                    last = time.monotonic()
                    if fault == "controller":
                        break
            if fault == "controller":
                process.wait(10)
                time.sleep(max(0.0, 3.0 - (time.monotonic() - began)))
                left = self._left()
                return f"FAILED: left after 3 s: {left}" if left else "ok: nothing left after 3 s"
            text = process.stderr.read() if process.stderr is not None else ""
            code = process.wait(30)
        finally:
            if process.poll() is None:
                process.kill()
            if mend is not None:
                mend()
        return self._judge(fault, code, "".join(lines), longest, text)

    def _judge(self, fault: str, code: int, out: str, longest: float, text: str) -> str:
        left = self.await_nothing_left(12.0 if fault in ("cut", "freeze") else 3.0)
        losses = self.read_losses(out)
        told = next((line for line in text.splitlines() if "worker" in line and "gemini" in line.lower()), "")
        if left:
            return f"FAILED: left: {left}"
        if fault == "full" and code:
            return (
                f"ok: refused: {text.strip().splitlines()[-1]:.150}"
                if not losses
                else f"FAILED: rc {code} {text[-400:]}"
            )
        if code or len(losses) != len(self.expected):
            return f"FAILED: exit code {code}, {len(losses)} losses: {text[-600:]}"
        if any(abs(a - b) > _TOLERANCE for a, b in zip(losses, self.expected, strict=True)):
            return f"FAILED: other losses: {text[-300:]}"
        limit = {"freeze": 10.5, "cut": 10.5}.get(fault, 1e9 if fault in ("slow", "full") else 2.0)
        if longest > limit:
            return f"FAILED: {longest:.1f} s without a step: {told:.200}"
        return f"ok: longest step {longest:.1f} s; {told:.160}"

    def _inflict(self, fault: str, process: subprocess.Popen[str]) -> Callable[[], None] | None:
        """Inflict a fault; return the function that mends it."""
        if fault == "controller":
            for pid in self._pids(1, r"train\.py"):
                os.kill(pid, signal.SIGKILL)
            process.kill()
        elif fault.startswith("kill"):
            host, pattern = {
                "kill worker": (2, "host_session"), "kill local worker": (1, "worker_process"),
                "kill supervisor": (2, "RaySupervisor"), "kill driver": (1, "ray_driver"),
            }[fault]  # fmt: skip
            for pid in self._pids(host, pattern):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif fault == "freeze":
            stopped = list(self.hosts.processes(2))
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)

            def go_on() -> None:
                for pid in stopped:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)

            return go_on
        elif fault == "cut":
            self.hosts.set_link(2, is_up=False)
            return lambda: self.hosts.set_link(2, is_up=True)
        elif fault == "slow":
            self.hosts.shape(2, "20mbit")
            return lambda: self.hosts.shape(2, "10gbit")
        elif fault == "full":
            blob = self.disk / "blob"
            with contextlib.suppress(OSError), blob.open("wb") as file:
                while True:
                    file.write(bytes(1 << 20))
            return lambda: blob.unlink(missing_ok=True)
        return None


FAULTS = (
    "kill worker", "kill worker", "kill local worker", "kill supervisor", "kill driver", "freeze", "cut", "slow",
    "full", "controller",
)  # fmt: skip


def main() -> int:
    """Run the sweep; return the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=FAULTS)
    args = parser.parse_args()
    choose, failed = random.Random(args.seed), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts end in any case
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(Path(folder))
        try:
            for number in range(args.faults):
                fault, step = choose.choice(args.only), choose.randrange(1, 30)
                began = time.monotonic()
                try:
                    found = sweep.run(fault, step)
                except (subprocess.SubprocessError, OSError) as error:
                    found = f"FAILED: {error}"
                failed += found.startswith("FAILED")
                print(f"{number:3} {fault:18} step {step:2} {time.monotonic() - began:5.1f} s  {found}", flush=True)
        finally:
            sweep.close()
    print(f"{args.faults - failed} of {args.faults} as promised")
    return failed


if __name__ == "__main__":
    sys.exit(main())
