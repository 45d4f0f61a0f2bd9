"""Generated stages of transformers equal the model and are short."""

from __future__ import annotations

import os
import random

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="these models need transformers: pip install 'gemini-instrumenter[hf]'")

import torch
import transformers

from conformance.zoo import discovery
from gemini.capture import capture
from gemini.codegen import generate_stages
from gemini.ir.interpreter import GuardBroken
from tests.codegen.cutting import even_cut, random_cut
from tests.codegen.test_stage_equivalence import differences

SPECIES = {one.model_type: one for one in discovery.species()}
FAST = ("bert", "gpt2", "vit")
SLOW = (
    "llama", "t5", "mixtral", "mamba", "convnextv2", "clip", "bart", "deberta-v2", "whisper", "albert", "xlnet",
    "funnel", "switch_transformers", "donut-swin", "perceiver",
)  # fmt: skip
# Gradients that are zero but for rounding, and change with the order in which they are summed.
ROUNDING = ("k_proj.bias", "key.bias", "k_head.bias")


def check(name: str, cuts: int) -> None:
    transformers.logging.set_verbosity_error()
    specimen = discovery.build(SPECIES[name])
    graph = capture(specimen.model, (), specimen.kwargs)
    rng = random.Random(name)
    for partition in (even_cut(graph, 2), even_cut(graph, 4), *(random_cut(graph, rng) for _ in range(cuts))):
        try:
            found = differences(graph, partition, (), specimen.kwargs)
        except GuardBroken:
            continue  # layers dropped at random
        assert [line for line in found if not any(name in line for name in ROUNDING)] == []


@pytest.mark.parametrize("name", [name for name in FAST if name in SPECIES])
def test_a_few_architectures(name):
    check(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SLOW if name in SPECIES])
def test_many_architectures(name):
    check(name, 4)


def test_a_deep_encoder_is_generated_in_a_few_hundred_lines():
    config = transformers.BertConfig(hidden_size=64, num_hidden_layers=24, num_attention_heads=4, intermediate_size=64)
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config).train()
        tokens = torch.zeros(4, 16, dtype=torch.long)
    graph = capture(model, (), {"input_ids": tokens, "labels": tokens})
    for nstages in (1, 4):
        codes = generate_stages(graph, even_cut(graph, nstages))
        assert max(len(code.source.splitlines()) for code in codes) < 150
        assert sum("for " in code.source for code in codes) == nstages
