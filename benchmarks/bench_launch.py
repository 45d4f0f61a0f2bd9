"""The overhead of `gemini_python` for a program whose models stay local: at the start, and per step.

    python benchmarks/bench_launch.py [--repeat N] [--only start train plan]

start    programs that end before they compute anything: starting, importing, instrumenting
train    programs that train models which auto does not parallelise: the time up to the tenth step beyond that of
         `python`, and the time of each later step
plan     planning time in the first run of a model and in the second, including the import of the planner

Each program runs under `python` and under `gemini_python` in turn. Processor time of all its processes and wall time
are measured. For starts the minimum over the runs counts; for steps the tenth percentile of a run, which other programs
disturb least, and the median over the runs. On a busy machine use the processor time.

Limits: 0.5 s at the start (0.3 s for a script that ends at once), 1 % per step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
START, TRAINING, STEP = 0.3, 0.5, 0.01  # limits: seconds, seconds, share
GEMINI = str(Path(sys.executable).with_name("gemini_python"))

TRAINS = """
import json, os, resource, sys, time
import torch
from torch import nn

def spent():
    return [sum(resource.getrusage(who)[0] + resource.getrusage(who)[1]
                for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)), time.time() - float(os.environ["BEGAN"])]

width, batch, layers, steps = map(int, sys.argv[1:])
torch.manual_seed(0)
body = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(*body, nn.Linear(width, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(batch, width), torch.randint(0, 10, (batch,))
times = []
for step in range(steps):
    began = time.process_time(), time.perf_counter()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    times.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    if step == 9:
        tenth = spent()
quiet = [sorted(one)[len(one) // 10] for one in zip(*times[10:])]
print(json.dumps({"tenth": tenth, "step": quiet, "loss": loss.item()}))
"""
SIZES = {  # width, batch, layers, steps
    "a step of 0.3 ms": (8, 8, 2, 2000),
    "a step of some ms": (256, 256, 6, 300),
    "a step that is worth a look": (1024, 512, 8, 25),
}
PLANS = """
import json, resource, sys, time
import torch
from torch import nn

def spent():
    return [sum(resource.getrusage(who)[0] + resource.getrusage(who)[1]
                for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)), time.perf_counter()]

torch.manual_seed(0)
torch.set_num_threads(1)
layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, int(sys.argv[1])), nn.Linear(128, 10))
torch.optim.SGD(model.parameters(), lr=0.1)  # imports of torch's own
began = spent()
from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
made = plan_step(model, (torch.randn(8, 32, 128),), {}, PlanRequest(2, 4, cache=sys.argv[2]))
taken = [now - before for now, before in zip(spent(), began)]
print(json.dumps({"spent": taken, "is_kept": made.is_cached}))
"""
LAYERS = {"a transformer of 4 layers": 4, "a transformer of 16 layers": 16}


class Spent(NamedTuple):
    """Seconds of the processor and of the clock."""

    cpu: float
    wall: float


def least(runs: list[Spent]) -> Spent:
    return Spent(*map(min, zip(*runs)))


def middle(runs: list[Spent]) -> Spent:
    return Spent(*map(statistics.median, zip(*runs)))


def run(command: list[str], folder: str, **environment: str) -> tuple[Spent, subprocess.CompletedProcess[str]]:
    """One run, and what it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    given = {**os.environ, "XDG_CACHE_HOME": folder, "BEGAN": str(time.time()), **environment}
    ended = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=given)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall), ended


# ── start ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def programs(folder: Path) -> dict[str, list[str]]:
    """Programs by name, each as the arguments of an interpreter."""
    (folder / "empty.py").write_text("")
    (folder / "torch_only.py").write_text("import torch\ntorch.ones(3).sum()\n")
    for number in range(50):
        (folder / f"module_{number}.py").write_text("".join(f"def f{n}(x):\n    return x\n\n" for n in range(100)))
    (folder / "modules.py").write_text("".join(f"import module_{number}\n" for number in range(50)))
    return {
        "an empty script": ["empty.py"],
        "50 modules of its own": ["modules.py"],
        "torch, nothing trained": ["torch_only.py"],
        "the mnist script": [str(ROOT / "samples" / "mnist" / "train.py"), "--help"],
    }


def start(repeat: int, folder: str) -> bool:
    """Starting; whether the limit is kept."""
    print(f"{'start':<30}{'python':>16}{'gemini_python':>16}{'beyond':>12}   (processor seconds; clock in brackets)")
    kept = True
    for title, words in programs(Path(folder)).items():
        runs: dict[str, list[Spent]] = {sys.executable: [], GEMINI: []}
        for _ in range(repeat):
            for command, taken in runs.items():
                taken.append(run([command, *words], folder)[0])
        plain, launched = map(least, runs.values())
        kept &= launched.cpu - plain.cpu <= START
        print(f"{title:<30}{_pair(plain):>16}{_pair(launched):>16}{launched.cpu - plain.cpu:>10.3f} s")
    return _verdict(kept, f"{START} s beyond python's own")


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────
def train(repeat: int, folder: str) -> bool:
    """Programs that train; whether both limits are kept."""
    program = Path(folder, "train.py")
    program.write_text(TRAINS)
    print(f"{'ten steps, and each later one':<30}{'python':>16}{'gemini_python':>16}{'beyond':>12}")
    kept = True
    for title, size in SIZES.items():
        found: dict[str, list[tuple[Spent, Spent]]] = {sys.executable: [], GEMINI: []}
        losses, said = set(), ""
        for turn in range(repeat):
            for command, taken in found.items():
                cache = str(Path(folder, f"{size}-{turn}"))  # nothing is known from an earlier run
                _, ended = run([command, str(program), *map(str, size)], folder, XDG_CACHE_HOME=cache)
                data = json.loads(ended.stdout)
                losses.add(data["loss"])
                said = ended.stderr.strip() or said
                taken.append((Spent(*data["tenth"]), Spent(*data["step"])))
        plain, launched = ([least([t for t, _ in taken]), middle([s for _, s in taken])] for taken in found.values())
        late, slower = launched[0].cpu - plain[0].cpu, launched[1].cpu / plain[1].cpu - 1
        kept &= late <= TRAINING and slower <= STEP
        print(f"{title:<30}{_pair(plain[0]):>16}{_pair(launched[0]):>16}{late:>10.3f} s")
        print(f"{'':<30}{_pair(plain[1], 1e3):>16}{_pair(launched[1], 1e3):>16}{slower:>10.2%} a step (ms)")
        print(f"{'':<6}{said}; losses {'differ' if len(losses) > 1 else 'equal to the bit'}")
    return _verdict(kept, f"{TRAINING} s at the start, {STEP:.0%} a step")


# ── plans ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def plan(repeat: int, folder: str) -> bool:
    """Planning a model with nothing kept, and with what the first run has kept; whether the second is the kept plan."""
    print(f"{'a plan':<30}{'first run':>16}{'second run':>16}")
    is_right = True
    for title, layers in LAYERS.items():
        found: list[list[Spent]] = [[], []]
        for turn in range(repeat):
            cache = str(Path(folder, f"{layers}-{turn}"))
            for at, taken in enumerate(found):
                _, ended = run([sys.executable, "-c", PLANS, str(layers), cache], folder)
                data = json.loads(ended.stdout)
                is_right &= data["is_kept"] == bool(at)
                taken.append(Spent(*data["spent"]))
        first, second = map(least, found)
        print(f"{title:<30}{_pair(first):>16}{_pair(second):>16}   {second.cpu / first.cpu:.0%}")
    return _verdict(is_right, "the second run has the first one's plan")


def _pair(spent: Spent, unit: float = 1.0) -> str:
    return f"{spent.cpu * unit:.3f} ({spent.wall * unit:.2f})"


def _verdict(kept: bool, limit: str) -> bool:
    print(f"    limit: {limit}: {'kept' if kept else 'BROKEN'}\n")
    return kept


def main() -> int:
    """Print the tables; 1 where a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7, help="runs of each (default 7)")
    parser.add_argument("--only", nargs="+", choices=["start", "train", "plan"], default=["start", "train", "plan"])
    options = parser.parse_args()
    parts = {"start": start, "train": train, "plan": plan}
    kept = []
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            kept.append(parts[name](options.repeat, folder))
    return int(not all(kept))


if __name__ == "__main__":
    raise SystemExit(main())
