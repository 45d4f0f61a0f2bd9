"""The BERT-Large sample in two workers against one process: memory of the largest process, and the predicted step.

    python benchmarks/bench_bert_sample.py [--only memory time] [--steps 7] [--batch-size 4] [--length 64]

memory   in both runs, the peak of every process's proportional set size (its own pages and its share of shared ones),
         sampled five times per second. Limit: the largest worker 0.6 times the single process
time     the summary's expected step against the median measured: from the end of one optimizer step to the clipping of
         the next gradients, which is forward and backward. Limit: 15 % apart
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAMPLE = Path(__file__).parents[1] / "samples" / "bert" / "train.py"
PIPELINE = ("--mode", "pipeline", "--pipeline-degree", "2", "--accum-degree", "4")
MEMORY, TIME = 0.6, 0.15
WARM = 3  # steps: watched, planned for, the first by the plan
_LOOK = 0.2  # seconds

# Runs a program and notes when optimizer steps end and gradients are clipped.
TIMED = """
import json, os, runpy, sys, time
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

clip, begins, times = torch.nn.utils.clip_grad_norm_, [], []

def clipped(*args, **kwargs):
    if begins:
        times.append(time.perf_counter() - begins[-1])
    return clip(*args, **kwargs)

torch.nn.utils.clip_grad_norm_ = clipped
register_optimizer_step_post_hook(lambda *_: begins.append(time.perf_counter()))
sys.argv[:] = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
with open(os.environ["TIMES"], "w") as file:
    json.dump(times, file)
"""


def launcher(parallel: bool) -> list[str]:
    return [str(Path(sys.executable).with_name("gemini_python")), *PIPELINE] if parallel else [sys.executable]


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def family(root: int) -> set[int]:
    """A process and those that it has started, and they."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def proportional_mb(pid: int) -> float:
    """The proportional set size of a process now; 0 where it is gone."""
    try:
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def peaks(command: list[str], folder: str) -> tuple[float, list[float]]:
    """The peak of the program's process and those of its children's that trained, in MB."""
    peak: dict[int, float] = {}
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for pid in family(process.pid):
                peak[pid] = max(peak.get(pid, 0.0), proportional_mb(pid))
            time.sleep(_LOOK)
    if process.returncode:
        sys.exit(process.returncode)
    own = peak.pop(process.pid)
    return own, sorted((mb for mb in peak.values() if mb > 100), reverse=True)


def memory(words: list[str], folder: str) -> bool:
    """Both ways; whether the limit is kept."""
    single, _ = peaks([*launcher(False), *words], folder)
    program, workers = peaks([*launcher(True), *words], folder)
    ratio = max(workers) / single
    print(f"memory: one process {single:.0f} MB; two workers {' and '.join(f'{mb:.0f}' for mb in workers)} MB")
    print(f"    the program's own process beside them (the optimizer's state is there): {program:.0f} MB")
    print(f"    the largest worker takes {ratio:.2f} of the single process; limit {MEMORY}: {_word(ratio <= MEMORY)}")
    return ratio <= MEMORY


# ── time ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def timed(words: list[str], folder: str, parallel: bool) -> tuple[list[float], str]:
    """Seconds of every step, and what was said on standard error."""
    program, times = Path(folder, "timed.py"), Path(folder, "times.json")
    program.write_text(TIMED)
    command = [*launcher(parallel), str(program), *words]
    environment = {**os.environ, "TIMES": str(times), "COLUMNS": "200"}
    ended = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=environment)
    return json.loads(times.read_text())[WARM - 1 :], ended.stderr


def step_time(words: list[str], folder: str) -> bool:
    """The step foretold and the step measured; whether they are close."""
    single, _ = timed(words, folder, parallel=False)
    parallel, said = timed(words, folder, parallel=True)
    found = re.search(r"expected\s+([\d.]+) (m?s) a step", said)
    if found is None:
        print(said)
        return False
    expected = float(found[1]) / (1e3 if found[2] == "ms" else 1)
    measured, alone = statistics.median(parallel), statistics.median(single)
    off = expected / measured - 1
    print(
        f"time: a step of one process takes {alone:.2f} s, by two workers {measured:.2f} s, {expected:.2f} s expected"
    )
    print(f"    the expected step is {off:+.1%} off; limit {TIME:.0%}: {_word(abs(off) <= TIME)}")
    print(
        f"    steps: {' '.join(f'{one:.2f}' for one in parallel)}; one process {' '.join(f'{s:.2f}' for s in single)}"
    )
    return abs(off) <= TIME


def _word(kept: bool) -> str:
    return "kept" if kept else "BROKEN"


def main() -> int:
    """Print both; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["memory", "time"], default=["memory", "time"])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    given = parser.parse_args()
    words = [str(SAMPLE), "--size", "large", "--steps", str(given.steps)]
    words += ["--batch-size", str(given.batch_size), "--length", str(given.length)]
    parts = {"memory": memory, "time": step_time}
    kept = []
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            kept.append(parts[name](words, folder))
    return int(not all(kept))


if __name__ == "__main__":
    raise SystemExit(main())
