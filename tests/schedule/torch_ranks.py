"""One rank of a pipeline under torch's own run time: `python torch_ranks.py JOB.json RANK`.

The job names CSV schedules; for each of them this builds the stages of its row, runs one step over gloo and saves the
gradients of its stages. The model is the same in every process, since each stage is seeded by its number.
"""

from __future__ import annotations

import csv
import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, ROWS_A_MICRO = 6, 2


def make_stage(index: int) -> nn.Module:
    torch.manual_seed(100 + index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def make_batch(nmicros: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(7)
    inputs = torch.randn(nmicros * ROWS_A_MICRO, WIDTH, dtype=torch.float64)
    return inputs, torch.randn(nmicros * ROWS_A_MICRO, WIDTH, dtype=torch.float64)


def gradients(stages: dict[int, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": parameter.grad
        for index, stage in stages.items()
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    }


def run_schedule(path: Path, rank: int, nmicros: int) -> dict[str, torch.Tensor]:
    rows = list(csv.reader(path.open()))
    stages_of = [sorted({int(cell.split(kind)[0]) for cell in row for kind in "FIBW" if kind in cell}) for row in rows]
    modules = {index: make_stage(index) for index in stages_of[rank]}
    count = sum(map(len, stages_of))
    stages = [PipelineStage(module, index, count, torch.device("cpu")) for index, module in modules.items()]
    runtime = _PipelineScheduleRuntime(stages, nmicros, loss_fn=nn.functional.mse_loss)
    runtime._load_csv(str(path), format="compute_only")
    inputs, target = make_batch(nmicros)
    holds_last = count - 1 in modules
    arguments = (inputs,) if 0 in modules else ()
    runtime.step(*arguments, target=target if holds_last else None, losses=[] if holds_last else None)
    return gradients(modules)


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.set_num_threads(1)
    store = Path(job["folder"], "store")
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job["ranks"], timeout=limit)
    for name, nmicros in job["schedules"].items():
        torch.save(run_schedule(Path(job["folder"], f"{name}.csv"), rank, nmicros), f"{job['folder']}/{name}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
