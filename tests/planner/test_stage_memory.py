"""The predicted memory of stages equals the storage that their actions allocate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.capture import capture
from gemini.codegen import generate_stages
from gemini.partition import partition
from gemini.partition.partition_options import Options
from gemini.pipe.piped_model import Piped
from gemini.planner.malloc_model import HeapModel
from gemini.planner.stage_memory import Change, StageMemories
from gemini.profiling import profile
from gemini.profiling.measured_device import MB
from gemini.profiling.node_memory import LiveMemory
from gemini.runtime.worker.stage_state import LiveStage, MicrobatchGraph, graph_edge
from gemini.step import split_backward_ops
from gemini.step.delayed_weight_grads import STORE, DelayedGrad, run_delayed


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.inner(x))))


class Transformer(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(512, 64), *(Layer(64) for _ in range(4)), nn.LayerNorm(64), nn.Linear(64, 512))


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [(3, width), (width, 2 * width), (2 * width, 4 * width)]
        self.downs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in sizes)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in sizes[:0:-1])
        self.joins = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a, _ in sizes[:0:-1])
        self.last = nn.Conv2d(width, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for at, down in enumerate(self.downs):
            x = F.relu(down(F.max_pool2d(x, 2) if at else x))
            skips.append(x)
        for up, join, skip in zip(self.ups, self.joins, skips[-2::-1], strict=True):
            x = F.relu(join(torch.cat([up(x), skip], 1)))
        return self.last(x)


CASES = {
    "transformer": (Transformer, torch.randint(0, 512, (2, 64))),
    "unet": (UNet, torch.randn(2, 3, 64, 64)),
}


class Sums:
    """Gradients, in place of those in shared memory."""

    def __init__(self) -> None:
        self.sums: dict[int, torch.Tensor] = {}

    def into(self, parameter: torch.Tensor) -> tuple[torch.Tensor, bool]:
        if id(parameter) not in self.sums:
            self.sums[id(parameter)] = torch.zeros_like(parameter)
        return self.sums[id(parameter)], False


class Counted:
    """What the actions of a stage take, at the most and beyond what was there, and what stays of it (MB)."""

    def __init__(self, stage: LiveStage) -> None:
        self.stage, self.live, self.kept = stage, LiveMemory(), MicrobatchGraph()
        self.sums: Any = Sums()
        for parameter in stage.parameters:
            self.sums.into(parameter)
        STORE.set_parameters(stage.parameters)

    def forward(self, given: list[Any], has_loss: bool) -> tuple[list[torch.Tensor], float, float]:
        with self.live, STORE.activate():
            made = self.stage.forward(given, self.kept)
        if has_loss:
            (logits,) = made.values()
            targets = torch.zeros(logits[:, 0].shape, dtype=torch.long)
            with self.live:
                self.kept.root = graph_edge(F.cross_entropy(logits, targets))
            del logits
        outputs = [value.detach().clone().requires_grad_() for value in made.values()]
        most = self.live.most
        del made
        return outputs, most / MB, self.live.live / MB

    def input_gradient(self, outputs: list[torch.Tensor]) -> tuple[float, float, deque[DelayedGrad]]:
        queue: deque[DelayedGrad] = deque()
        before = self.live.live
        self.live.restart()
        if self.kept.root is not None:
            roots = [(self.kept.root, torch.tensor(1.0))]
        else:
            roots = [(edge, torch.ones_like(one)) for edge, one in zip(self.kept.edges.values(), outputs, strict=True)]
        with self.live, STORE.collect_into(queue):
            torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])
        most = self.live.most
        self.kept = MicrobatchGraph()
        del roots
        return (most - before) / MB, self.live.live / MB, queue

    def weight_gradient(self, queue: deque[DelayedGrad]) -> tuple[float, float]:
        before = self.live.live
        self.live.restart()
        with self.live:
            run_delayed(queue, self.sums)
        return (self.live.most - before) / MB, self.live.live / MB


def replayed(heap: HeapModel, changes: Iterable[Change]) -> tuple[float, float]:
    """What changes take at the most, beyond what was there, and what is there then (MB)."""
    before = heap.live
    heap.most_live = heap.live
    for key, mb in changes:
        if mb > 0:
            heap.allocate(key, mb)
        else:
            heap.free(key)
    return (heap.most_live - before) / MB, heap.live / MB


@pytest.fixture
def split_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the ops with a split backward for one test."""
    for name in ("linear", "embedding", "conv1d", "conv2d", "conv3d"):
        monkeypatch.setattr(F, name, getattr(F, name))  # put back afterwards
    split_backward_ops.install()


@pytest.mark.usefixtures("split_backward")
@pytest.mark.parametrize("name", CASES)
def test_what_is_foreseen_is_what_actions_take(name: str) -> None:
    make, batch = CASES[name]
    torch.manual_seed(0)
    model = make()
    graph = capture(model, (batch,))
    costs = profile(graph, (batch,), cache=False, check=False, rounds=1)
    cut = partition(graph, costs, 2, "exact", Options(mixed=False))
    known = StageMemories(graph, costs, 1)
    piped = Piped(model, graph, costs, cut, generate_stages(graph, cut))
    given: list[Any] = [batch]
    for at, module in enumerate(piped.stages):
        foreseen, heap = known.of(cut, at), HeapModel()
        counted = Counted(LiveStage(at, module, piped.interfaces[at]))
        counted.stage.written = set()
        outputs, forward, kept = counted.forward(given, at == 1)
        assert replayed(heap, foreseen.forward) == pytest.approx((forward, kept), rel=0.08)
        most, left, queue = counted.input_gradient(outputs)
        taken, stays = replayed(heap, foreseen.input_gradient)
        assert kept + taken == pytest.approx(kept + most, rel=0.35)
        assert stays == pytest.approx(left, rel=0.1)
        counted.weight_gradient(queue)
        assert replayed(heap, foreseen.weight_gradient)[1] == pytest.approx(0.0, abs=1e-6)
        assert counted.live.live / MB == pytest.approx(0.0, abs=0.02)
        given = outputs


@pytest.mark.usefixtures("split_backward")
def test_inputs_of_a_stage_and_their_gradients_go_when_they_were_sent() -> None:
    """Though weight gradients are yet to be computed, which need inputs of layers inside."""
    layer = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    STORE.set_parameters(list(layer.parameters()))
    live, queue = LiveMemory(), deque[DelayedGrad]()
    with live, STORE.activate():
        given = torch.randn(512, 64).requires_grad_()
        made = layer(given + 0)
    with live, STORE.collect_into(queue):
        made.sum().backward()
    kept = 4 * given.nbytes  # an input and a gradient for each of two layers
    assert given.grad is not None
    del given, made
    assert live.live <= kept * 1.01
