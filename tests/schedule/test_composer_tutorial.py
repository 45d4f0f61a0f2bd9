"""The tutorial of earlier schedule composers runs unchanged except for the package name."""

from __future__ import annotations

import subprocess
import sys

TUTORIAL = """
from gemini.schedule.schedplan import SchedPlan, Block
from gemini.schedule.composer import Composer

ndevs = 4
nmicros = 8
memory = 4

# construct the placement of one micro-batch
placement = SchedPlan(ndevs)
fblocks = [Block(0, span=1, memory=1, btype="Forward") for _ in range(ndevs)]
fdevs = [[devid] for devid in range(ndevs)]
bblocks = [Block(0, span=2, memory=-1, btype="Backward") for _ in range(ndevs)]
bdevs = [[devid] for devid in range(ndevs)][::-1]
placement.add_block_seq(fblocks + bblocks, fdevs + bdevs)
print(placement)

# search
schedule = Composer.compose_n(placement, memory, nmicros)
print(schedule)
print(schedule.unroll(12).nmicros, schedule.repetend is not None)
"""


def test_the_tutorial_runs_as_written():
    done = subprocess.run([sys.executable, "-c", TUTORIAL], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 devices, 1 micro-batch, 8 blocks, makespan 12" in done.stdout
    assert "4 devices, 8 micro-batches, 64 blocks, makespan 33" in done.stdout
    assert "period 3, lower bound 3, optimal" in done.stdout
    assert done.stdout.rstrip().endswith("12 True")
