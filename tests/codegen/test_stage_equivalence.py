"""Generated stages run in sequence equal the model: outputs, gradients, buffers, mutated inputs."""

from __future__ import annotations

import random

import pytest
import torch

from conformance.zoo.classics import CLASSICS
from gemini.capture import Graph, capture
from gemini.capture.verify.step_observation import compare, observe
from gemini.codegen import generate_stages
from gemini.ir.call_binding import ModelCall
from gemini.ir.interpreter import GuardBroken
from gemini.partition import Partition
from gemini.snapshot.model_state import ModelSnapshot
from tests.codegen.cutting import Sequential, captured, copied, even_cut, random_cut

SEED = 5
# Weights used twice under autocast, in two stages: each stage casts them, and gradients are summed in full precision.
CAST_TWICE = {"grad_and_autocast_regions"}
# The model's own hooks run around the stages.
HOOKED = {"root_hooks"}


def differences(graph: Graph, partition: Partition, args, kwargs, wire=lambda value: value) -> list[str]:
    """Where one training step of the stages and of the model differ."""
    model, call = graph.bound_model(), ModelCall(args, kwargs)
    stages = Sequential(graph, generate_stages(graph, partition), wire)
    saved = ModelSnapshot(model)
    seen = []
    for run in (lambda a, k: model(*a, **k), lambda a, k: stages(*a, **k)):
        torch.manual_seed(SEED)
        seen.append(observe(run, model, call, call.tensors, gradients=True))
        saved.restore()
    return compare(*seen).lines


@pytest.mark.parametrize("name", sorted(set(CLASSICS) - HOOKED))
def test_classics_cut_at_random_places(name):
    graph, args, kwargs = captured(name)
    rng = random.Random(name)
    cuts = [even_cut(graph, 1)]
    cuts += [] if name in CAST_TWICE else [even_cut(graph, 2), even_cut(graph, 4)]
    cuts += [] if name in CAST_TWICE else [random_cut(graph, rng) for _ in range(4)]
    for at, partition in enumerate(cuts):
        try:
            found = differences(graph, partition, args, kwargs, copied if at % 2 else lambda value: value)
        except GuardBroken:
            torch.manual_seed(SEED)
            with pytest.raises(GuardBroken):  # the graph itself does not fit this draw of random numbers
                graph.execute(args, kwargs)
            continue
        assert found == [], partition.stages


def test_another_batch_size_runs_by_the_same_code():
    graph, args, kwargs = captured("flattened_batch")
    smaller = tuple(value[:2] if isinstance(value, torch.Tensor) else value for value in args)
    assert graph.batch_size is not None
    for nstages in (1, 2, 3):
        assert differences(graph, even_cut(graph, nstages), smaller, kwargs) == []


def test_evaluation_mode_of_a_captured_evaluation():
    model, args, kwargs = CLASSICS["vision_transformer"]()
    model.eval()
    graph = capture(model, args, kwargs)
    stages = Sequential(graph, generate_stages(graph, even_cut(graph, 3)))
    torch.testing.assert_close(stages(*args, **kwargs), model(*args, **kwargs), rtol=0, atol=0)
