"""Granularity of a graph: depth, basic blocks, batch dimensions, repeated structure, pictures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformance.zoo.classics import CLASSICS
from conformance.zoo.graph_checks import differences
from gemini.capture import capture
from gemini.errors import CaptureError


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depth_keeps_modules_whole(depth):
    model, args, kwargs = CLASSICS["tied_language_model"]()
    graph = capture(model, args, kwargs, depth=depth)
    assert all(len(node.scope) <= depth for node in graph.compute_nodes)
    assert differences(graph, model, args, kwargs) == []


@pytest.mark.parametrize(
    "blocks", [(nn.TransformerEncoderLayer,), ("TransformerEncoderLayer",), ("layers.1",), "layers.0"]
)
def test_basic_blocks_by_class_class_name_or_scope(blocks):
    model, args, kwargs = CLASSICS["tied_language_model"]()
    graph = capture(model, args, kwargs, basic_blocks=blocks)
    whole = [node for node in graph.nodes if node.kind == "block"]
    assert len(whole) == (1 if "layers" in str(blocks) else 3)
    assert {node.reason for node in whole} == {"requested"}
    assert differences(graph, model, args, kwargs) == []


def test_wrong_requests_are_all_reported_at_once():
    model, args, kwargs = CLASSICS["mlp"]()
    with pytest.raises(CaptureError) as caught:
        capture(model, args, kwargs, depth=0, basic_blocks=("Linaer", nn.LSTM))
    assert "depth=0" in str(caught.value)
    assert "'Linaer' does not occur" in str(caught.value)
    assert "did you mean 'Linear'" in str(caught.value)
    assert "'LSTM' does not occur" in str(caught.value)
    with pytest.raises(CaptureError, match=r"needs an nn\.Module"):
        capture("mlp")


def dims(name):
    model, args, kwargs = CLASSICS[name]()
    graph = capture(model, args, kwargs)
    inputs = {node.target: node.outputs["ret", ()].batch_dim for node in graph.nodes if node.kind == "input"}
    outputs = [(graph.meta(ref).batch_dim, graph.meta(ref).batch_factor) for ref in graph.outputs()]
    return graph, inputs, outputs


def test_batch_dimension_zero_one_flattened_absent_and_coupled():
    assert dims("vision_transformer")[1:] == ({"images": 0}, [(0, 1)])
    assert dims("batch_in_dimension_one")[1:] == ({"x": 1}, [(1, 1)])
    assert dims("flattened_batch")[2] == [(None, 1), (0, 5)]
    assert dims("gru")[1] == {"state": 1, "tokens": 0}
    graph, _, _ = dims("graph_network")
    assert graph.batch_size is None
    graph, _, _ = dims("contrastive")
    logits = next(node for node in graph.nodes if node.target.endswith("matmul"))
    assert next(iter(logits.outputs.values())).batch_factor == 0


def test_one_sample_is_doubled_to_find_the_batch():
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.randn(1, 4),))
    assert graph.batch_size == 1
    assert graph.run(torch.randn(6, 4)).shape == (6, 2)
    assert graph.variants.captured == 0


def test_equal_layers_are_one_class():
    model, args, kwargs = CLASSICS["rotary_language_model"]()
    graph = capture(model, args, kwargs)
    assert graph.layers()[0] == [f"layers.{index}" for index in range(4)]
    assert max(len(ids) for ids in graph.classes().values()) >= 4
    assert "4 equivalent layers" in graph.summary()


def test_in_place_writes_order_the_readers_of_other_views():
    model, args, kwargs = CLASSICS["in_place_and_views"]()
    graph = capture(model, args, kwargs)
    writers = [node for node in graph.nodes if node.mutates]
    assert len(writers) >= 5
    for node in graph.nodes:
        assert all(earlier < node.id for earlier in node.dependencies)
    read = next(node for node in graph.nodes if node.target.endswith("clone"))
    assert writers[0].id in read.after or writers[1].id in read.after


@pytest.mark.parametrize("suffix", ["svg", "dot"])
def test_pictures_are_written_folded_and_coloured(suffix, tmp_path):
    pytest.importorskip("pygraphviz")
    model, args, kwargs = CLASSICS["tied_language_model"]()
    graph = capture(model, args, kwargs)
    stages = {node.id: 4 * node.id // len(graph) for node in graph}
    graph.draw(tmp_path / f"all.{suffix}", stages=stages)
    graph.draw(tmp_path / f"folded.{suffix}", fold=1)
    full, folded = ((tmp_path / f"{name}.{suffix}").read_text() for name in ("all", "folded"))
    assert "self_attn" in full
    assert "layers.1" in folded
    assert len(folded) < len(full)
    assert "#cfe8ff" in full
    assert "#f4d3e8" in full


def test_models_on_the_meta_device():
    with torch.device("meta"):
        model, args, _ = CLASSICS["vision_transformer"]()
    graph = capture(model, args)
    assert graph.batch_size == 4
    assert len(graph.layers()[0]) == 4
    assert graph.meta(graph.outputs()[0]).shape == (4, 5)
    assert {meta.device for node in graph for meta in node.outputs.values()} == {"meta"}


def test_a_square_mask_of_the_batch_size_is_no_batch():
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    graph = capture(model, (torch.randn(5, 5, 16), torch.randn(5, 5, 16)), {"tgt_mask": mask})
    inputs = {node.target: node.outputs["ret", ()].batch_dim for node in graph.nodes if node.kind == "input"}
    assert inputs == {"src": 0, "tgt": 0, "tgt_mask": None}
    assert graph.run(torch.randn(3, 5, 16), torch.randn(3, 5, 16), tgt_mask=mask).shape == (3, 5, 16)
    assert graph.variants.captured == 0
