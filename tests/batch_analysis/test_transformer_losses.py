"""Transformers with their own loss are proven, and the numbers agree."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="needs transformers: pip install 'gemini-instrumenter[hf]'")

import torch

from conformance.zoo import discovery
from gemini.batch_analysis.graph_analysis import prove_graph
from gemini.batch_analysis.loss_analysis import prove
from gemini.batch_analysis.loss_tape import Meta, Tape
from gemini.batch_analysis.numeric_check import check_splitting
from gemini.capture import capture

SPECIES = {one.model_type: one for one in discovery.species()}
FEW = ("llama", "mixtral")
MORE = ("bert", "gpt2", "t5", "bart", "vit", "mamba", "deberta-v2", "bloom", "swin", "xlnet", "whisper", "qwen2_moe")


def judged(name: str) -> str:
    if name in ("mixtral", "qwen2_moe") and not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("without grouped_mm (torch 2.10) transformers uses a function that capture keeps whole")
    specimen = discovery.build(SPECIES[name])
    graph = capture(specimen.model, (), specimen.kwargs)
    forms = prove_graph(graph, (), specimen.kwargs)
    found = [graph.meta(ref) for ref in graph.outputs()]
    metas = [Meta.of(torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))) for meta in found]
    root = next(at for at, meta in enumerate(found) if meta.shape == () and meta.requires_grad)
    tape = Tape(len(metas), metas)
    splitting = prove(forms, tape, root)
    return splitting.reason or check_splitting(forms, tape, root, splitting, (), specimen.kwargs)


@pytest.mark.parametrize("name", [name for name in FEW if name in SPECIES])
def test_a_few_are_proven_and_numbers_agree(name):
    assert judged(name) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MORE if name in SPECIES])
def test_more_are_proven_and_numbers_agree(name):
    assert judged(name) == ""


@pytest.mark.slow
def test_batch_normalization_is_named():
    assert "takes statistics over the batch" in judged("resnet")
