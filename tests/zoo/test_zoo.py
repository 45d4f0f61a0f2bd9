"""The zoo: a sample of architectures on every run, all of them under the slow marker."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="the zoo needs transformers: pip install 'gemini-parallel[hf]'")

import torch
import transformers

from gemini.capture import Graph, capture
from tests.zoo import discovery
from tests.zoo.checking import BALANCE, balance, differences, weights

# One of each kind: decoder, encoder, encoder–decoder, mixture, state space, vision, speech, two towers, odd glue.
SAMPLE = (
    "llama", "bert", "t5", "mixtral", "mamba", "vit", "wav2vec2", "convnextv2", "clip", "bart", "deberta-v2", "gpt2",
    "whisper",
)  # fmt: skip
SPECIES = {one.model_type: one for one in discovery.species()}


@pytest.fixture(autouse=True)
def _quiet_and_single():
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", [name for name in SAMPLE if name in SPECIES])
def test_a_sample_equals_eager_and_can_be_cut_in_four(name):
    specimen = discovery.build(SPECIES[name])
    graph = capture(specimen.model, (), specimen.kwargs)
    assert differences(graph, specimen.model, (), specimen.kwargs) == []
    assert not graph.is_whole
    assert balance(weights(graph, specimen.model)) <= BALANCE


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


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", sorted(SPECIES))
def test_every_architecture_equals_eager_or_runs_whole(name):
    try:
        specimen = discovery.build(SPECIES[name])
    except discovery.NotBuildable as reason:
        pytest.skip(f"no recipe builds it small: {reason}")
    graph = capture(specimen.model, (), specimen.kwargs)
    assert differences(graph, specimen.model, (), specimen.kwargs) == []
