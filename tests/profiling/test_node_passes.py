"""A step run node by node has the same gradients and little more memory, and leaves no trace."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from gemini.capture import capture
from gemini.profiling import profile
from gemini.profiling.cpu_device import CpuDevice, CpuStopwatch
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.measured_device import MB, CallTime
from gemini.profiling.node_classes import NodeClass
from gemini.profiling.node_memory import LiveMemory
from gemini.profiling.node_timer import NodePass, StepPass
from gemini.profiling.profile_inputs import input_tensors
from tests.profiling.models import CASES


def made(name):
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    graph = capture(model, args, kwargs)
    classes = {node.id: NodeClass(str(node.id), [node.id]) for node in graph.compute_nodes}
    return model, args, kwargs, GradientFlow(graph), input_tensors(graph, args, kwargs), classes


@pytest.mark.parametrize("name", [name for name in CASES if name != "writer"])  # no two steps of that one are equal
def test_gradients_of_a_pass_are_those_of_a_step(name):
    model, args, kwargs, flow, inputs, classes = made(name)
    torch.manual_seed(1)
    reading = StepPass(flow, inputs, CpuDevice(), classes, None).measure()
    assert {one.failure for one in classes.values()} == {""}
    assert set(reading.times) == {node.id for node in flow.graph.compute_nodes}

    torch.manual_seed(1)
    output = model(*args, **kwargs)
    tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if t.requires_grad]
    scalars = [t for t in tensors if t.numel() == 1] or tensors
    torch.autograd.backward(scalars, [torch.ones_like(t) for t in scalars])
    for parameter in model.parameters():
        found = reading.gradients.get(id(parameter))
        if parameter.grad is None:
            assert found is None or not found.any()
        else:
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)
            parameter.grad = None


@pytest.mark.parametrize("name", ["tied", "images", "odd", "recurrent"])
def test_single_nodes_are_timed_with_their_values_intact(name):
    *_, flow, inputs, classes = made(name)
    before = {id_: tensor.clone() for id_, tensor in inputs.items()}
    reading = NodePass(flow, inputs, CpuDevice(), classes, None, turn=0).measure()
    assert set(reading.times) == set(classes)
    assert all(torch.equal(before[id_], tensor) for id_, tensor in inputs.items())


class Wide(nn.Module):
    """Parameters outweigh everything else; one node has most of them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (64, 512, 512, 2048, 64)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x):
        for layer in self.layers:
            x = functional.relu(layer(x))
        return x.sum()


def test_memory_is_one_node_and_one_set_of_gradients_more_than_the_model_has():
    model, batch = Wide(), torch.randn(2, 64)
    graph = capture(model, (batch,))
    parameters = sum(p.numel() * 4 for p in model.parameters()) / MB
    largest = max(sum(p.numel() * 4 for p in layer.parameters()) for layer in model.layers) / MB
    gc.collect()
    with LiveMemory() as memory:
        profile(graph, (batch,), cache=False)
    assert parameters <= memory.peak_mb() <= parameters + largest + 0.5  # and the values of a batch of two


def test_on_another_device_only_the_parameters_of_one_node_are_copied(monkeypatch):
    from gemini.profiling import graph_walk, profiler

    # There is one device here: say that tensors are elsewhere, and they are copied all the same.
    model, batch = Wide(), torch.randn(2, 64)
    graph = capture(model, (batch,))
    largest = max(sum(p.numel() * 4 for p in layer.parameters()) for layer in model.layers) / MB
    monkeypatch.setattr(profiler, "is_on_other_device", lambda *_: True)
    monkeypatch.setattr(graph_walk, "is_on_other_device", lambda *_: True)
    gc.collect()
    with LiveMemory() as memory:
        found = profile(graph, (batch,), cache=False, rounds=1)
    # A copy to be there, a copy to be put back should the node write to it, its gradients.
    assert memory.peak_mb() <= 3 * largest + 0.5
    assert found.check is None
    assert found.unchecked == "the model is on cpu, not on cpu"
    assert all(cost.source == "measured" for cost in found)


class Piece:
    """A piece of a memory that has room for two."""

    room: int | None = None

    def __init__(self) -> None:
        if Piece.room is not None:
            if not Piece.room:
                raise torch.OutOfMemoryError("out of memory")
            Piece.room -= 1

    def __del__(self) -> None:
        if Piece.room is not None:
            Piece.room += 1


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.piece = Piece()
        return x * 1.5

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Full(nn.Module):
    """Keeps a piece until its backward: one fits, a step of several does not."""

    def forward(self, x):
        return Kept.apply(x) if x.requires_grad and not x.is_meta else x * 1.5


def test_where_a_step_does_not_fit_nodes_are_measured_one_at_a_time(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), *(Full() for _ in range(4)))
    batch = torch.randn(2, 4)
    graph = capture(model, (batch,), basic_blocks=("Full",))
    gc.collect()
    monkeypatch.setattr(Piece, "room", 2)
    found = profile(graph, (batch,), cache=False, rounds=2)
    assert {cost.source for cost in found} == {"measured"}
    assert found.check is None
    assert found.unchecked == "a whole step does not fit on cpu"
    assert found.notes == ("nodes were measured one at a time, since a whole step does not fit",)
    assert all(cost.forward_ms > 0 for cost in found)


class Behind(CpuDevice):
    """A device whose work takes half as long as starting it, as that of a GPU on small batches."""

    is_asynchronous = True

    def stopwatch(self, earlier=None):
        watch = CpuStopwatch(self.now_ms)
        read = watch.read
        watch.read = lambda: {key: CallTime(span.ms / 2, span.ms) for key, span in read().items()}
        return watch


@pytest.mark.parametrize("name", CASES)
def test_a_device_that_runs_behind_has_times_of_both_sides(name):
    model, args, kwargs = CASES[name]()
    found = profile(capture(model, args, kwargs), args, kwargs, device=Behind(), cache=False, rounds=1)
    assert {cost.source for cost in found} == {"measured"}
    assert all(cost.host_ms > 0 and cost.device_ms > 0 and cost.ms > 0 for cost in found)
    assert sum(cost.ms for cost in found) >= max(sum(c.device_ms for c in found), sum(c.host_ms for c in found)) * 0.999
