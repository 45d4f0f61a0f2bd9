"""Stages hold the model's parameters and buffers under their original names, and together all of them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from conformance.zoo.classics import CLASSICS
from gemini.capture import capture
from gemini.codegen import generate_stages
from tests.codegen.cutting import captured, even_cut, load, random_cut


def check_state(graph, partition):
    model = graph.bound_model()
    codes = generate_stages(graph, partition)
    stages = [load(code, model) for code in codes]
    state = model.state_dict()
    assert set().union(*(stage.state_dict() for stage in stages)) == set(state)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for code, stage in zip(codes, stages, strict=True):
        held = dict(stage.named_parameters(remove_duplicate=False))
        assert set(held) == set(code.parameters)
        assert all(parameter is parameters[name] for name, parameter in held.items())
        kept = dict(stage.named_buffers(remove_duplicate=False))
        assert set(kept) == set(code.buffers)
        assert all(buffer is buffers[name] for name, buffer in kept.items())
    assert set().union(*(code.parameters for code in codes)) == set(parameters)
    assert set().union(*(code.buffers for code in codes)) == set(buffers)
    return stages


@pytest.mark.parametrize("name", sorted(CLASSICS))
def test_names_and_objects_are_the_models(name):
    graph, _, _ = captured(name)
    check_state(graph, even_cut(graph, 3))
    check_state(graph, random_cut(graph, random.Random(name)))


class Corners(nn.Module):
    """Unused parameters, tied weights, one module under two names, odd names, buffers that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.alias = self.first
        self.parts = nn.ModuleDict({"a-b": nn.Linear(4, 4), "c": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})
        self.lists = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(4))
        self.never = nn.Parameter(torch.ones(2))
        self.register_buffer("saved", torch.ones(4))
        self.register_buffer("derived", torch.ones(4), persistent=False)
        self.register_buffer("empty", None)
        self.table = [torch.ones(4), torch.zeros(4)]

    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        self.version = state["version"]

    def forward(self, x):
        x = self.first(x) * self.scale + self.saved
        x = self.parts["a-b"](x) + self.derived * self.lists[1]
        x = self.parts["c"](x) + self.table[0] + self.lists[0]
        return self.second(x)


@pytest.mark.parametrize("nstages", [1, 2, 4, 7])
def test_corners_of_state(nstages):
    model = Corners()
    x = torch.randn(5, 4)
    graph = capture(model, (x,))
    stages = check_state(graph, even_cut(graph, nstages))
    states = [stage.state_dict() for stage in stages]
    assert sum("_extra_state" in state for state in states) == 1
    assert not any("derived" in state for state in states)
    other = Corners()
    merged = {key: value for state in states for key, value in state.items()}
    other.load_state_dict(merged)
    assert other.version == 3
    assert torch.equal(other(x), model(x))


def test_a_checkpoint_moves_between_partitions():
    model, args, kwargs = CLASSICS["tied_language_model"]()
    graph = capture(model, args, kwargs)
    two, four = (check_state(graph, even_cut(graph, count)) for count in (2, 4))
    saved = {key: value.clone() for stage in two for key, value in stage.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for stage in four:
        stage.load_state_dict({key: saved[key] for key in stage.state_dict()})
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())


def test_modes_reach_the_modules():
    model, args, kwargs = CLASSICS["vision_transformer"]()
    graph = capture(model, args, kwargs)
    for stage in check_state(graph, even_cut(graph, 3)):
        stage.eval()
    assert not any(module.training for module in model.modules() if isinstance(module, (nn.Dropout, nn.LayerNorm)))
