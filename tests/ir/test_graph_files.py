"""Graphs round-trip through JSON and safetensors; files that do not fit the model are refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from conformance.zoo.classics import CLASSICS
from conformance.zoo.graph_checks import differences
from gemini.capture import Graph, capture
from gemini.errors import ArtifactError, CaptureError


@pytest.mark.parametrize(
    "name",
    ["mlp", "in_place_and_views", "custom_function", "mutable_cache", "nested_dict", "dataclass_in_and_out",
     "grad_and_autocast_regions", "packed_input", "checkpointing", "mixture_of_experts", "early_exit"],
)  # fmt: skip
def test_a_loaded_graph_equals_the_model(name, tmp_path):
    model, args, kwargs = CLASSICS[name]()
    graph = capture(model, args, kwargs)
    graph.save(tmp_path / "graph.json")
    loaded = Graph.load(tmp_path / "graph.json", model)
    assert [node.__dict__ for node in loaded] == [node.__dict__ for node in graph]
    assert loaded.guards == graph.guards
    assert differences(loaded, model, args, kwargs) == []
    assert loaded.variants.captured == 0


def test_a_graph_without_its_model_can_be_looked_at(tmp_path):
    model, args, kwargs = CLASSICS["tied_language_model"]()
    graph = capture(model, args, kwargs)
    graph.save(tmp_path / "graph.json")
    loaded = Graph.load(tmp_path / "graph.json")
    assert "TiedLM" in loaded.summary()
    with pytest.raises(CaptureError, match="no model to run with"):
        loaded.run(*args, **kwargs)


def test_another_model_or_another_state_is_refused(tmp_path):
    model, args, kwargs = CLASSICS["layer_drop"]()
    path = tmp_path / "graph.json"
    capture(model, args, kwargs).save(path)
    with pytest.raises(CaptureError, match="captured from a LayerDrop, this is a Sequential"):
        Graph.load(path, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(CaptureError, match="training"):
        Graph.load(path, model.eval())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"gemini graph": 99}', '{"gemini graph": 1}'])
def test_a_broken_file_is_refused(text, tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(ArtifactError):
        Graph.load(path)
    with pytest.raises(ArtifactError, match="does not exist"):
        Graph.load(tmp_path / "none.json")


def test_every_truncation_and_wrong_value_is_refused(tmp_path):
    model, args, kwargs = CLASSICS["mlp"]()
    path = tmp_path / "graph.json"
    capture(model, args, kwargs).save(path)
    data = json.loads(path.read_text())
    for key in data:
        if key in ("torch",):
            continue
        path.write_text(json.dumps({name: value for name, value in data.items() if name != key}))
        with pytest.raises(ArtifactError):
            Graph.load(path)


class Local:
    """A holder for a class that cannot be imported by name."""


def test_a_local_class_is_named_on_saving(tmp_path):
    class Inside:
        def __init__(self, x):
            self.x = x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return Inside(self.a(x))

    graph = capture(Model(), (torch.randn(2, 4),))
    assert graph.run(torch.randn(2, 4)).x.shape == (2, 4)
    with pytest.raises(CaptureError, match="Inside is local"):
        graph.save(tmp_path / "graph.json")
