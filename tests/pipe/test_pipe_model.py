"""`pipe_model`: its artifacts, and the requests it refuses early and in full."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import gemini
from gemini import pipe_model
from gemini.capture import capture
from gemini.errors import CaptureError, GeminiError, PartitionError, ProfileError
from gemini.partition import Options, Worker
from gemini.pipe import Piped
from gemini.profiling import profile
from tests.pipe.models import Layer, make


def test_every_step_leaves_its_artifact(pipe):
    model, args, kwargs = make("bert")
    told = []
    piped = pipe(model, args, kwargs, nparts=3, progress=lambda *step: told.append(step))
    assert isinstance(piped, Piped)
    assert piped.graph.model is model
    assert piped.profile.model == piped.partition.model == piped.analysis.model == "Bert"
    assert len(piped.stages) == len(piped.sources) == len(piped.interfaces) == 3
    assert [type(stage).__name__ for stage in piped.stages] == ["Stage0", "Stage1", "Stage2"]
    assert repr(piped) == "Piped(Bert, 3 stages on 3 workers, by exact)"
    steps = list(dict.fromkeys(what.partition(":")[0] for _, _, what in told))
    assert steps == ["capture", "profile", "partition", "generate", "save", "done"]
    assert all(0 <= done <= total for done, total, _ in told)


def test_it_is_a_public_name():
    assert gemini.pipe_model is pipe_model


def test_measured_costs():
    model, args, kwargs = make("sequential")
    piped = pipe_model(model, args, kwargs, nparts=2, cache=False, rounds=1)
    assert piped.profile.mode == "measured"
    assert piped.check(args, kwargs).is_exact


def test_a_graph_and_a_profile_made_before_are_used(pipe):
    model, args, kwargs = make("bert")
    graph = capture(model, args, kwargs)
    costs = profile(graph, args, kwargs, analytic="cpu")
    piped = pipe(model, args, kwargs, nparts=2, graph=graph, profile=costs)
    assert piped.graph is graph
    assert piped.profile is costs
    other, *_ = make("bert")
    with pytest.raises(PartitionError, match="another model object"):
        pipe(other, args, kwargs, nparts=2, graph=graph)
    with pytest.raises(PartitionError, match=r"does not match this graph"):
        pipe(model, args, kwargs, nparts=2, depth=1, profile=costs)


def test_one_part(pipe):
    model, args, kwargs = make("bert")
    piped = pipe(model, args, kwargs, nparts=1)
    assert len(piped.stages) == 1
    assert piped.check(args, kwargs).is_exact


def test_the_model_is_as_before(pipe):
    model, args, kwargs = make("unet")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    pipe(model, args, kwargs, nparts=2).check(args, kwargs)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())
    assert model.training


# ── refused ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Never(nn.Module):
    def forward(self, x):
        raise AssertionError("it ran")


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"nparts": 0}, PartitionError, "nparts=0"),
        ({"nparts": "2"}, PartitionError, "nparts='2'"),
        ({"nparts": True}, PartitionError, "nparts=True"),
        ({"args": torch.ones(2)}, PartitionError, r"args is a Tensor.*args=\(batch,\)"),
        ({"kwargs": 3}, PartitionError, "kwargs is a int"),
        ({"options": {"slack": 1}}, PartitionError, r"options is a dict; write Options"),
        ({"partitioner": "exat"}, PartitionError, r"(?s)unknown partitioner 'exat'.*did you mean 'exact'.*metis"),
        ({"options": Options(workers=(Worker(),) * 3)}, PartitionError, "3 workers are described for 4 parts"),
        ({"device": "tpu"}, ProfileError, "tpu"),
        ({"analytic": "h1000"}, ProfileError, "h100"),
        ({"options": Options(schedule="1f2b")}, GeminiError, "1f1b"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_runs(settings, error, text):
    with pytest.raises(error, match=text):
        pipe_model(Never(), **{"args": (torch.ones(2),), **settings})


def test_all_faults_at_once():
    with pytest.raises(PartitionError) as told:
        pipe_model("model", 3, nparts=-1)
    assert str(told.value).count("  - ") == 3


def test_more_parts_than_can_be_cut(pipe):
    model, args, kwargs = make("sequential")
    with pytest.raises(PartitionError, match=r"Sequential cannot be cut into 40 parts: \d+ is the most"):
        pipe(model, args, kwargs, nparts=40)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if float(x.sum()) * random.random() < 1e6 else x
        return x


def test_a_model_that_cannot_be_cut(pipe):
    with pytest.raises(PartitionError, match=r"(?s)cannot be cut into 2 parts.*captured whole.*because"):
        pipe(Whole(), (torch.ones(2, 4),), nparts=2)


def test_contradicting_pins(pipe):
    model, args, kwargs = make("bert")
    options = Options(pins={"layers.0": 0, "layers.0.up": 1}, uncut=("layers.0",))
    with pytest.raises(PartitionError, match=r"(?s)pins contradict.*layers.0"):
        pipe(model, args, kwargs, nparts=2, options=options)
    with pytest.raises(PartitionError, match=r"no scope 'layer.0'.*did you mean"):
        pipe(model, args, kwargs, nparts=2, options=Options(pins={"layer.0": 0}))


def test_pins_are_kept(pipe):
    model, args, kwargs = make("bert")
    piped = pipe(model, args, kwargs, nparts=2, options=Options(pins={"layers.1": 0, "layers.4": 1}))
    homes = {name: stage["worker"] for stage in _stages(piped) for name in stage["parameters"]}
    assert homes["layers.1.up.weight"] == 0
    assert homes["layers.4.up.weight"] == 1
    assert piped.check(args, kwargs).is_right


def _stages(piped):
    return [{"worker": code.interface.worker, "parameters": code.parameters} for code in piped.codes]


def test_memory_that_cannot_be_met(pipe):
    model, args, kwargs = make("bert")
    options = Options(workers=(Worker(memory_mb=0.001),) * 2)
    with pytest.raises(PartitionError, match=r"(?i)memory|MB"):
        pipe(model, args, kwargs, nparts=2, options=options)


def test_a_batch_that_the_model_rejects(pipe):
    model, args, _ = make("bert")
    wrong = (torch.full((4, 6), 99),)
    with pytest.raises(IndexError) as expected:
        model(*wrong)
    with pytest.raises(IndexError) as found:
        pipe(model, wrong, nparts=2)
    assert str(found.value) == str(expected.value)
    with pytest.raises(TypeError, match="colour"):
        pipe(model, args, {"colour": 1}, nparts=2)


@pytest.mark.parametrize("depth", [0, -1, 1.5, "deep"])
def test_a_wrong_depth(pipe, depth):
    model, args, kwargs = make("bert")
    with pytest.raises(CaptureError, match="depth"):
        pipe(model, args, kwargs, nparts=2, depth=depth)


def test_a_basic_block_that_does_not_occur(pipe):
    model, args, kwargs = make("bert")
    with pytest.raises(CaptureError, match=r"(?s)'Lair' does not occur in Bert.*Layer"):
        pipe(model, args, kwargs, nparts=2, basic_blocks=("Lair",))


def test_granularity_is_kept(pipe):
    model, args, kwargs = make("bert")
    piped = pipe(model, args, kwargs, nparts=3, basic_blocks=(Layer,))
    assert {node.target for node in piped.graph.nodes if node.kind == "block"} == {f"layers.{i}" for i in range(6)}
    assert piped.check(args, kwargs).is_exact
