"""The model zoo: a sample of architectures in every run, all of them with the slow marker."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="the zoo needs transformers: pip install 'gemini-instrumenter[hf]'")

import torch
import transformers

from conformance.zoo import discovery, results
from conformance.zoo.classics import CLASSICS
from conformance.zoo.graph_checks import BALANCE, balance, differences, weights
from conformance.zoo.pipe_checks import judge_cuts
from conformance.zoo.table import write_table
from conformance.zoo.verdict import judge, zoo
from gemini.capture import Graph, capture

# One of each kind: decoder, encoder, encoder–decoder, mixture, state space, vision, speech, two towers, odd glue.
SAMPLE = ("llama", "t5", "mixtral", "mamba", "vit", "clip", "deberta-v2")
MORE = ("bert", "convnextv2", "bart", "gpt2", "whisper", "wav2vec2")
# One of each kind of value or flow that is hard at a cut.
CLASSIC_SAMPLE = tuple(CLASSICS)[::5]
SPECIES = {one.model_type: one for one in discovery.species()}


@pytest.fixture(autouse=True)
def _quiet_and_single():
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in (*SAMPLE, *MORE) if name in SPECIES],
)
def test_a_sample_equals_eager_and_so_do_its_stages_by_every_partitioner(name):
    specimen = discovery.build(SPECIES[name])
    graph = capture(specimen.model, (), specimen.kwargs)
    assert differences(graph, specimen.model, (), specimen.kwargs) == []
    assert not graph.is_whole
    assert balance(weights(graph, specimen.model)) <= BALANCE
    assert unequal(judge_cuts(graph, specimen.model, (), specimen.kwargs)) == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CLASSIC_SAMPLE)
def test_stages_of_classics_equal_the_model(name):
    model, args, kwargs = CLASSICS[name]()
    graph = capture(model, args, kwargs)
    assert unequal(judge_cuts(graph, model, args, kwargs)) == {}


def test_the_zoo_is_large():
    assert len(SPECIES) > 200


def test_padding_takes_its_own_variant_and_other_lengths_too(tmp_path):
    specimen = discovery.build(SPECIES["llama"])
    model, kwargs = specimen.model, dict(specimen.kwargs)
    graph = capture(model, (), kwargs)
    graph.save(tmp_path / "llama.json")
    loaded = Graph.load(tmp_path / "llama.json", model)
    mask = kwargs["attention_mask"].clone()
    mask[:, -3:] = 0
    short = {key: value[:, :7] for key, value in kwargs.items()}
    for call in ({**kwargs, "attention_mask": mask}, short, kwargs, {k: v[:3] for k, v in kwargs.items()}):
        for one in (graph, loaded):
            assert differences(one, model, (), call) == []
    assert graph.variants.captured == loaded.variants.captured == 2


def test_collected_outputs_and_checkpointing():
    specimen = discovery.build(SPECIES["llama"])
    model, kwargs = specimen.model, {**specimen.kwargs, "use_cache": False, "output_hidden_states": True}
    graph = capture(model, (), kwargs)
    assert differences(graph, model, (), kwargs) == []
    model.gradient_checkpointing_enable()
    graph = capture(model, (), kwargs)
    assert sum(node.checkpoint != "" for node in graph.nodes) == model.config.num_hidden_layers
    assert differences(graph, model, (), kwargs) == []


def test_a_large_model_without_weights():
    config = transformers.LlamaConfig(num_hidden_layers=8)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(4, 128, dtype=torch.long)
    graph = capture(
        model, (), {"input_ids": tokens, "labels": tokens, "use_cache": False}, basic_blocks=("LlamaDecoderLayer",)
    )
    assert sum(p.numel() for p in model.parameters()) > 1_000_000_000
    assert len(graph.layers()[0]) == 8
    assert graph.batch_size == 4


def test_a_shard_is_a_share_and_all_shards_are_all():
    names = [animal.name for animal in zoo()]
    shards = [names[at::14] for at in range(14)]
    assert sorted(name for shard in shards for name in shard) == sorted(names)
    assert len(set(names)) == len(names)


def test_results_are_merged_and_tabled(tmp_path):
    row = judge(next(zoo()), build=30, limit=60, cuts=True)
    lost = {**row, "name": "lost", "status": "not buildable", "reason": "needs a library"}
    results.append(tmp_path / "a.jsonl", {**row, "status": "failed"})
    results.append(tmp_path / "a.jsonl", row)
    results.append(tmp_path / "b.jsonl", lost)
    rows = {**results.read(tmp_path / "a.jsonl"), **results.read(tmp_path / "b.jsonl")}
    results.write(tmp_path / "all.jsonl", rows.values())
    assert results.read(tmp_path / "all.jsonl") == {row["name"]: row, "lost": lost}
    write_table(tmp_path / "zoo.md", list(rows.values()))
    page = (tmp_path / "zoo.md").read_text()
    assert "capture: equal | 1" in page
    assert "all rows by one version of the code" in page
    assert "| lost |" in page.split("## Not built")[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [animal.name for animal in zoo()])
def test_every_model_and_its_stages_equal_eager_or_run_whole(name):
    animal = next(animal for animal in zoo() if animal.name == name)
    row = judge(animal, build=60, limit=120, cuts=True)
    if row["status"] == "not buildable":
        pytest.skip(f"no recipe builds it small: {row['reason']}")
    assert row["status"] in ("equal", "whole"), row["reason"]
    assert unequal(row["cuts"]) == {}


def unequal(cuts):
    """What is not as it should be: a model may be uncuttable, and says so; an engine may be missing."""
    return {key: cut for key, cut in cuts.items() if cut[0] not in ("equal", "uncut", "no engine")}
