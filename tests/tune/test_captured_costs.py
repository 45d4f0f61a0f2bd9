"""Captured models have the layers of their scopes and the times, parameters and memory of their profile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemini.cluster import load_cluster
from gemini.errors import ConfigError
from gemini.tune import ParallelConfig, TuningRequest, simulate, tune
from gemini.tune.captured_costs import _layer_keys
from gemini.tune.local_machine import local_cluster
from gemini.tune.model_capture import capture_model


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def costs():
    with torch.device("meta"):
        model = Blocks()
        return capture_model(model, (torch.randn(32, 16),), cluster=load_cluster("a100"))


def test_layers_parameters_and_operations(costs):
    own = sum(one.numel() for one in Blocks().parameters())
    assert costs.layers == 6
    assert costs.samples == 32
    assert costs.parameters == pytest.approx(own, rel=1e-3)
    assert costs.model_flops(32) == pytest.approx(6 * 32 * own, rel=0.05)
    config = ParallelConfig(devices=1, batch=32, micro_batch=32)
    parts = [(costs.embedding(config, None), 1), *costs.layer_kinds(config, None), (costs.head(config, None), 1)]
    assert sum(count for _, count in parts) == 8
    assert sum(layer.parameters * count for layer, count in parts) == pytest.approx(own, rel=1e-3)


def test_a_pipeline_of_it_simulates_and_tunes(costs):
    cluster = load_cluster("a100").resized(4)
    one = simulate(costs, cluster, ParallelConfig(devices=4, batch=32, pipeline=4, precision="tf32"))
    assert len(one.stages) == 4
    assert one.tokens == 32
    found = tune(TuningRequest(costs, cluster, 32, {"precision": "tf32"}))
    assert found.best.fits
    with pytest.raises(ConfigError, match="captured model"):
        simulate(costs, cluster, ParallelConfig(devices=4, batch=32, context=2, precision="tf32"))


def test_layers_by_their_names():
    names = ["embed", "enc.layer.0.att", "enc.layer.0.experts.0", "enc.layer.0.experts.1", "enc.layer.1.att", "head"]
    assert _layer_keys(names) == [None, "enc.layer.0", "enc.layer.0", "enc.layer.0", "enc.layer.1", None]
    stages = ["conv", "layer1.0.a", "layer1.1.a", "layer2.0.a", "layer2.1.a", "layer3.0.a", "fc"]
    assert _layer_keys(stages) == [None, "layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", None]
    assert _layer_keys(["a", "b"]) == [None, None]


def test_this_machine_divides_its_memory():
    two, four = local_cluster(2), local_cluster(4)
    assert two.device.memory_gib == pytest.approx(2 * four.device.memory_gib)
    assert two.devices == 2
