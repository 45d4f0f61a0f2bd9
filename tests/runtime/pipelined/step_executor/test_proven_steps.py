"""A step built from a recorded loss and its splitting proof equals the step of one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from recorded_step import step_of
from steps import Bench, compare, cut, outputs_of
from torch import nn

from gemini.batch_analysis.batch_kinds import Shard
from gemini.batch_analysis.graph_analysis import prove_graph
from gemini.batch_analysis.loss_analysis import prove
from gemini.codegen import generate_stages
from gemini.ir.autograd_modes import Region
from gemini.pipe import Piped
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.schedule.library import library
from gemini.step.worker_program import program_of
from tests.batch_analysis.recorder import Recorder


class Tagger(nn.Module):
    """Computes its loss itself where it is given labels."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(9, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(width, 5)

    def forward(self, ids, labels=None):
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def flat(outputs, labels):
    return F.cross_entropy(outputs[0].view(-1, 5), labels.view(-1), ignore_index=-100)


def smooth(outputs, labels):
    kept = labels.clamp(min=0)
    return F.cross_entropy(outputs[0].transpose(1, 2), kept, label_smoothing=0.1) / 4 + outputs[0].square().sum() / 100


def masked(outputs, labels):
    mask = (labels >= 0).double()
    each = F.cross_entropy(outputs[0].transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


def own(outputs, labels):
    return outputs[0] * 2 + outputs[1].mean()


@pytest.mark.parametrize(("loss", "given"), [(flat, False), (smooth, False), (masked, False), (own, True)])
def test_equal_to_one_device(pool: WorkerPool, loss, given: bool) -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    ids, labels = torch.randint(0, 9, (7, 4)), torch.randint(0, 5, (7, 4))
    labels[0], labels[3, :3], labels[6] = -100, -100, -100
    args = (ids, labels) if given else (ids,)
    outputs = outputs_of(model(*args))
    with Recorder(outputs) as recorder:
        value = loss(outputs, labels)
    value.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    tape, root = recorder.tape, recorder.numbers[id(value)]
    piece = tuple(one[:3] for one in args)
    piped = cut(model, piece, stages=3)
    splitting = prove(prove_graph(piped.graph, piece, {}), tape, root)
    assert splitting, splitting.reason
    if splitting.node_shares:
        shares = {node: at for at, node in enumerate(sorted(splitting.node_shares))}
        codes = generate_stages(piped.graph, piped.partition, shares=shares)
        piped = Piped(model, piped.graph, piped.profile, piped.partition, codes)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library("1f1b", 3, 3)))
    keep = range(len(outputs))
    request, names = step_of(
        piped, (args, {}), tape, root, splitting, (3, 3, 1), region=Region.current(), keep=[*keep, root]
    )
    result = executor.run(request)
    compare(result, model, value.detach(), wanted)
    for number in keep:
        kind = splitting.outputs[number]
        if isinstance(kind, Shard):
            torch.testing.assert_close(result.outputs[names[number]].join(kind), outputs[number].detach())
    torch.testing.assert_close(result.outputs[names[root]].sum(), value.detach())
