"""The host time of every node, measured on runs of the whole graph.

A processor that works at once stands for a device that keeps up with any thread: all time is the thread's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.profiling import profile
from gemini.profiling.cpu_device import CpuDevice, CpuStopwatch
from gemini.profiling.host_time import HostTimeRun
from gemini.profiling.measured_device import CallTime, Result, Stopwatch
from gemini.profiling.profile_inputs import input_tensors
from gemini.profiling.whole_step import run_backward
from gemini.snapshot.model_state import ModelSnapshot

from . import models


class QuickDevice(CpuDevice):
    """A device that takes next to no time."""

    is_asynchronous = True

    def stopwatch(self, earlier: Stopwatch | None = None) -> Stopwatch:
        del earlier
        return QuickStopwatch(self.now_ms)


class QuickStopwatch(CpuStopwatch):
    def time(self, key: Hashable, call: Callable[[], Result], launches: int = 1) -> Result:
        result: Result = super().time(key, call, launches)
        self.spans[key] = CallTime(1e-6, self.spans[key].ms)
        return result


class Wide(nn.Module):
    """One layer that is far dearer than the others, a view, something in place, and a value that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dear, self.last = nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).view(-1, 512)
        y = self.dear(x.repeat(8, 1))[: len(x)].clone()
        y[:, 0] = 0
        return self.last(y.add_(x).relu_() + x.view(x.shape)).sum()


def measured(model: nn.Module, args: tuple[Any, ...]) -> tuple[Any, dict[int, Any]]:
    graph = capture(model, args)
    return graph, HostTimeRun(graph, input_tensors(graph, args, {}), torch.device("cpu")).measure()


def test_every_node_has_a_time_and_the_dearest_is_found() -> None:
    torch.manual_seed(0)
    graph, found = measured(Wide().train(), (torch.randn(64, 8),))
    assert set(found) == {node.id for node in graph.compute_nodes}
    assert all(times.forward_host > 0 for times in found.values())
    dear = next(node.id for node in graph.nodes if node.target == "dear")
    assert max(found, key=lambda id_: found[id_].backward_host) == dear
    assert sum(times.backward_host > 0 for times in found.values()) >= len(found) - 2  # all but what is never in it


@pytest.mark.parametrize("name", models.CASES)
def test_gradients_are_those_of_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs = models.CASES[name]()
    graph = capture(model, args, kwargs)
    run = HostTimeRun(graph, input_tensors(graph, args, kwargs), torch.device("cpu"))
    state = ModelSnapshot(model)
    found = run.measure()
    assert set(found) == {node.id for node in graph.compute_nodes}
    grads = _taken(model)
    state.restore()
    run_backward(model(*args, **kwargs))
    expected = _taken(model)
    assert grads.keys() == expected.keys()
    for key, grad in expected.items():
        torch.testing.assert_close(grads[key], grad)


def _taken(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def test_a_model_without_a_backward_has_forward_times() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)
    _, found = measured(model, (torch.randn(4, 4),))
    assert all(times.forward_host > 0 and times.backward_host == 0 for times in found.values())
    costs = profile(capture(model, (x := torch.randn(4, 4),)), (x,), device=QuickDevice(), cache=False)
    assert costs.backward_ms == 0


def test_a_graph_that_does_not_run_in_one_piece_is_read_by_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: HostTimeRun) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(HostTimeRun, "measure", fails)
    model, args = Wide().train(), (torch.randn(64, 8),)
    costs = profile(capture(model, args), args, device=QuickDevice(), cache=False)
    assert all(node.source == "measured" and node.ms > 0 for node in costs if node.name in ("first", "dear", "last"))


def test_where_the_thread_is_the_limit_its_times_add_up_to_a_step() -> None:
    torch.manual_seed(0)
    model, args = Wide().train(), (torch.randn(64, 8),)
    costs = profile(capture(model, args), args, device=QuickDevice(), cache=False)
    assert costs.limit == "host"
    assert costs.check is not None
    assert costs.check.steps >= 10
    assert abs(costs.check.error) < 0.1  # by its making: what is left is the thread's wait at the end
    assert max(costs, key=lambda node: node.ms).name == "dear"
    assert all(parameter.grad is None for parameter in model.parameters())
