"""Zoo models train in workers as on one device: a sample of families, all of them with the slow marker."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")

from conformance.zoo import results
from conformance.zoo.verdict import Animal, zoo
from conformance.zoo.workers_verdict import judge
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool

# One of each kind: encoder, decoder with a cache, both, mixture of experts, vision, convolution, speech, detection, …
FAMILIES = ("bert", "llama", "t5", "mixtral", "vit", "resnet", "wav2vec2", "detr", "mamba", "clip", "albert", "gpt2")
QUICK = ("llama", "t5", "mixtral", "resnet", "wav2vec2", "clip")
SHARE = 0.9


@pytest.fixture(scope="module")
def animals() -> dict[str, Animal]:
    return {animal.name: animal for animal in zoo()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_a_family_trains_in_two_workers_as_on_one_device(
    name: str, pool: WorkerPool, animals: dict[str, Animal]
) -> None:
    if name not in animals:
        pytest.skip(f"this transformers has no {name}")
    row = judge(animals[name], pool, build=45, limit=90)
    if row["status"] in ("not buildable", "not trainable"):
        pytest.skip(row["reason"])
    assert row["status"] in ("equal", "noise"), row["reason"]
    assert row["bits"] or row["order"] is True, "not equal in every bit, nor for the order of sums alone"
    assert row["used"] == 2, row["reason"]
    assert not row["demoted"], "something of ours failed"


def test_what_a_model_collects_by_hooks_is_collected(pool: WorkerPool) -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=50,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaModel(config)
    model = copy.deepcopy(plain)
    managed = ManagedModel(model, pool, quiet=True)
    dispatch.manage(model, managed)
    tokens = torch.arange(12).view(2, 6)
    for wanted in (False, False, True, True, False, True):
        flags = {"output_hidden_states": wanted, "output_attentions": wanted, "use_cache": False}
        expected, found = plain(tokens, **flags), model(tokens, **flags)
        assert expected.keys() == found.keys()
        for key in ("hidden_states", "attentions") if wanted else ():
            assert len(expected[key]) == len(found[key])
            assert all(torch.equal(a, b) for a, b in zip(expected[key], found[key], strict=True))
    assert managed.calls


@pytest.mark.slow
def test_the_zoo_trains_in_two_workers(tmp_path: Path) -> None:
    """Every model; takes about an hour on two cores."""
    file = tmp_path / "zoo.jsonl"
    subprocess.run([sys.executable, "-m", "conformance.zoo.workers", "--results", str(file)], check=True)
    rows = [row for row in results.read(file).values() if row["status"] not in ("not buildable", "not trainable")]
    wrong = {row["model"]: row["reason"] for row in rows if row["status"] not in ("equal", "noise")}
    assert not wrong
    assert sum(row["used"] >= 2 for row in rows) >= SHARE * len(rows)
