"""What Gemini costs and gains on whole scripts: start, planning, changing sizes, evaluation and auto's decision.

    python benchmarks/bench_start.py [NAME …] [--mode auto pipeline] [--steps N] [--warm]

Each script of `start_scripts.py` runs under `python`, then under `gemini_python` in each mode, in one sitting. CPU time
is that of all processes of a run, and the ratio of two runs is what counts: it holds on a busy machine, too, where wall
time tells more about the other programs. The cache is empty before a run; with `--warm` the modes run twice, and the
second run counts. Losses of all runs are compared.

Limits: auto ≤ 1.05 × python + 2 s of CPU time on every script; for pipeline see `LIMITS`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).with_name("start_scripts.py")
GEMINI = str(Path(sys.executable).with_name("gemini_python"))
NAMES = ("fixed", "lengths", "batches", "evaluation", "lstm_loop", "mlp", "bert", "gpt")
AUTO_SHARE, AUTO_SECONDS = 1.05, 2.0
LIMITS = {"lengths": 1.5, "bert": 1.8, "evaluation": 1.5, "lstm_loop": 1.3}  # forced: CPU time relative to python
OVERLAPPED = {"lengths": 150}  # calls of the full script, forced
TOLERANCE = 1e-3  # of losses, which rounding drives apart over many steps
_COUNTS = re.compile(r"(\d+|none) of (\d+) calls overlapped")


class Run(NamedTuple):
    """One run of a script."""

    cpu: float  # seconds, of all its processes
    wall: float
    loss: float
    steps: int
    overlapped: int
    first_s: float  # until the first step that is followed by a usual one
    text: str  # what Gemini printed last


def run(command: list[str], steps: list[str], cache: str) -> Run:
    """Run a script; raises where it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    given = {**os.environ, "XDG_CACHE_HOME": cache, "BEGAN": str(time.time())}
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run([*command, *steps], cwd=folder, env=given, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stderr[-2000:]}")
    data = json.loads(ended.stdout.splitlines()[-1])
    lines = [line for line in ended.stderr.splitlines() if line.startswith("gemini: ")]
    found = _COUNTS.search(ended.stderr)
    overlapped = 0 if found is None or found[1] == "none" else int(found[1])
    cpu = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    return Run(cpu, wall, data["loss"], len(data["ends"]), overlapped, _first(data["ends"]), lines[-1] if lines else "")


def _first(ends: list[float]) -> float:
    """Return when the last step ended that took more than three times the median of the rest of the run."""
    took = [late - early for early, late in zip([0.0, *ends], ends, strict=False)]
    usual = sorted(took)[len(took) // 2]
    return max((end for end, one in zip(ends, took, strict=True) if one > 3 * usual), default=ends[0])


def compare(name: str, modes: list[str], steps: list[str], *, warm: bool) -> bool:
    """Run one script in all ways; print a line each, and whether the limits hold."""
    script, is_kept = [str(SCRIPTS), name], True
    with tempfile.TemporaryDirectory() as empty:
        plain = run([sys.executable, *script], steps, empty)
    print(f"{name:<11}{'python':<10}{plain.cpu:>8.1f} s CPU{plain.wall:>8.1f} s wall  {plain.steps} steps")
    for mode in modes:
        command = [GEMINI, *(() if mode == "auto" else ("--mode", mode)), *script]
        with tempfile.TemporaryDirectory() as cache:
            if warm:
                run(command, steps, cache)
            found = run(command, steps, cache)
        faults = list(find_faults(name, mode, plain, found, is_full=not steps))
        is_kept &= not faults
        print(f"{'':<11}{mode:<10}{found.cpu:>8.1f} s CPU{found.wall:>8.1f} s wall  {found.cpu / plain.cpu:.2f} × CPU, "
              f"{found.cpu - plain.cpu:+.1f} s; {found.overlapped} overlapped; settled after {found.first_s:.1f} s"
              f"{''.join(f'; BROKEN: {fault}' for fault in faults)}")  # fmt: skip
        print(f"{'':<21}{found.text}", flush=True)
    return is_kept


def find_faults(name: str, mode: str, plain: Run, found: Run, *, is_full: bool) -> list[str]:
    """Return the limits that a run breaks; those of forced modes hold for scripts of full length."""
    faults = []
    if abs(found.loss - plain.loss) > TOLERANCE * max(1.0, abs(plain.loss)):
        faults.append(f"the loss is {found.loss:.6g}, not {plain.loss:.6g}")
    if mode == "auto" and found.cpu > AUTO_SHARE * plain.cpu + AUTO_SECONDS:
        faults.append(f"at most {AUTO_SHARE} × python + {AUTO_SECONDS:.0f} s")
    if mode == "auto" or not is_full:
        return faults
    if name in LIMITS and found.cpu > LIMITS[name] * plain.cpu:
        faults.append(f"at most {LIMITS[name]} × python")
    if found.overlapped < OVERLAPPED.get(name, 0):
        faults.append(f"at least {OVERLAPPED[name]} overlapped")
    return faults


def main() -> int:
    """Print the table; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--mode", nargs="+", choices=["auto", "pipeline"], default=["auto", "pipeline"])
    parser.add_argument("--steps", type=int, help="steps of each script (default: its own number)")
    parser.add_argument("--warm", action="store_true", help="count the second run, which finds the first one's cache")
    options = parser.parse_args()
    steps = [] if options.steps is None else ["--steps", str(options.steps)]
    kept = [compare(name, options.mode, steps, warm=options.warm) for name in options.names]
    return int(not all(kept))


if __name__ == "__main__":
    raise SystemExit(main())
