"""No predicted schedule deadlocks its workers, for a loss on any of the model's outputs."""

from __future__ import annotations

import random
from itertools import chain, combinations, pairwise

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.codegen import generate_stages
from gemini.errors import ScheduleError
from gemini.partition import Options, Partition, analyse
from gemini.pipe.piped_model import Piped
from gemini.profiling import profile
from gemini.schedule.library import LIBRARY
from gemini.step.lower_program import lower
from gemini.step.worker_program import Loss, program_of


class Towers(nn.Module):
    """Layers that read any earlier ones; some draw random numbers, some are outputs."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        count = rng.randint(2, 6)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.reads = [rng.sample(range(-1, at), rng.randint(1, min(2, at + 1))) for at in range(count)]
        self.outs = rng.sample(range(count), rng.randint(1, min(3, count)))
        self.draws = [rng.random() < 0.3 for _ in range(count)]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = {-1: x}
        for at, layer in enumerate(self.layers):
            values[at] = layer(torch.stack([values[one] for one in self.reads[at]]).sum(0))
            if self.draws[at]:
                values[at] = torch.dropout(values[at], 0.1, True)
        return tuple(values[at] for at in self.outs)


@pytest.mark.parametrize("seed", range(30))
def test_no_loss_makes_workers_wait_for_each_other(seed: int) -> None:
    rng, inputs = random.Random(seed), (torch.randn(8, 8),)
    model = Towers(rng)
    graph = capture(model, inputs)
    costs = profile(graph, inputs, {}, analytic="cpu")
    nodes = [node.id for node in graph.compute_nodes]
    cuts = sorted(rng.sample(range(1, len(nodes)), min(len(nodes) - 1, rng.randint(1, 4))))
    stages = tuple(tuple(nodes[a:b]) for a, b in pairwise([0, *cuts, len(nodes)]))
    workers = rng.choice([2, 3])
    made = Partition(graph.model_name, "random", workers, stages, tuple(rng.randrange(workers) for _ in stages))
    piped = Piped(model, graph, costs, made, generate_stages(graph, made))
    outputs = [port.name for one in piped.interfaces for port in one.outputs if port.is_result]
    losses = list(chain.from_iterable(combinations(outputs, count) for count in range(1, len(outputs) + 1)))
    drawing = tuple(any(graph.nodes[node].random for node in one) for one in stages)
    for schedule in ("composed", "1f1b", "gpipe", rng.choice(sorted(LIBRARY))):
        options = Options(schedule=schedule, micro_batches=rng.choice([1, 2, 4]), time_limit=1.0)
        try:
            found = analyse(graph, costs, made, options)
        except ScheduleError:
            continue
        program = program_of(piped, found.plan, rng_patterns=tuple(("some",) if one else () for one in drawing))
        for names in losses:
            ports = dict(enumerate(names))
            lowered = lower(program, Loss((), ports, (), root=0, keep=tuple(ports)))  # raises where nobody can go on
            assert sum(task.has_loss for row in lowered.tasks for task in row) == program.micro_batches
            planned = {action for row in program.orders for action in row}
            assert planned <= {task.action for row in lowered.tasks for task in row}
