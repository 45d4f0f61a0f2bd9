"""Predictions add up, are monotone in speed, bandwidth and memory, and refuse what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.cluster import Cluster, load_cluster, read_cluster
from gemini.errors import ConfigError
from gemini.tune import ParallelConfig, Transformer, TransformerCosts, find_transformer, simulate
from gemini.tune.step_report import step_json, step_text
from gemini.tune.step_simulation import estimate
from gemini.tune.step_timeline import stage_of

SMALL = TransformerCosts(Transformer(layers=16, hidden=2048, heads=16, vocab=32000, sequence=2048, gated=True))
SPARSE = TransformerCosts(
    Transformer(layers=16, hidden=2048, heads=16, vocab=32000, sequence=2048, gated=True, experts=8, active_experts=2)
)
H100 = load_cluster("h100").resized(32)


@st.composite
def configurations(draw):
    tensor, context, pipeline = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    data = max(1, 32 // (tensor * context * pipeline))
    devices = tensor * context * pipeline * data
    return ParallelConfig(
        devices=devices,
        batch=data * 8,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        chunks=draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
        micro_batch=draw(st.sampled_from([1, 2])),
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        recompute=draw(st.sampled_from(["none", "attention", "selective", "full"])),
        kernels=draw(st.sampled_from(["eager", "fused", "compiled"])),
        sequence_parallel=draw(st.booleans()),
        overlap_data=draw(st.booleans()),
    )


def faster(cluster: Cluster, factor: float) -> Cluster:
    device = cluster.device
    rates = {name: rate * factor for name, rate in device.tflops.items()}
    return cluster.with_device(replace(device, tflops=rates, bandwidth_gb=device.bandwidth_gb * factor))


def wider(cluster: Cluster, factor: float) -> Cluster:
    return replace(cluster, tiers=tuple(replace(t, bandwidth_gb=t.bandwidth_gb * factor) for t in cluster.tiers))


@given(configurations())
@settings(max_examples=30, deadline=None)
def test_the_parts_add_up_and_faster_hardware_is_never_slower(config):
    cluster = H100.resized(config.devices)
    found = simulate(SMALL, cluster, config)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert min(found.parts.values()) >= 0
    assert 0 < found.mfu <= found.hfu < 1
    for better in (faster(cluster, 1.5), wider(cluster, 2.0)):
        assert simulate(SMALL, better, config).seconds <= found.seconds * (1 + 1e-9)
        assert estimate(SMALL, better, config).seconds <= estimate(SMALL, cluster, config).seconds * (1 + 1e-9)


@given(configurations(), st.floats(1.0, 4.0))
@settings(max_examples=20, deadline=None)
def test_what_fits_also_fits_into_more_memory(config, factor):
    cluster = H100.resized(config.devices)
    larger = cluster.with_device(replace(cluster.device, memory_gib=cluster.device.memory_gib * factor))
    assert simulate(SMALL, larger, config).fits >= simulate(SMALL, cluster, config).fits


@given(configurations())
@settings(max_examples=25, deadline=None)
def test_the_closed_form_is_near_the_schedule(config):
    cluster = H100.resized(config.devices)
    assert estimate(SMALL, cluster, config).seconds == pytest.approx(simulate(SMALL, cluster, config).seconds, rel=0.12)


def test_zero_levels_hold_less_and_less():
    held = []
    for zero in range(4):
        config = ParallelConfig(devices=8, batch=8, zero=zero)
        held.append(simulate(SMALL, H100.resized(8), config).memory.total)
    assert held == sorted(held, reverse=True)
    assert held[3] < held[0] / 1.5


def test_recomputation_trades_memory_for_time():
    found = {
        name: simulate(SMALL, H100.resized(8), ParallelConfig(devices=8, batch=64, micro_batch=8, recompute=name))
        for name in ("none", "selective", "full")
    }
    assert found["none"].seconds < found["selective"].seconds < found["full"].seconds
    memory = [dict(found[name].memory.rows)["activations"] for name in ("none", "selective", "full")]
    assert memory == sorted(memory, reverse=True)
    assert found["full"].hfu / found["full"].mfu == pytest.approx(4 / 3, rel=0.1)


def test_recomputation_of_some_layers_lies_between():
    def step(layers):
        config = ParallelConfig(devices=8, batch=64, micro_batch=8, recompute="full", recompute_layers=layers)
        found = simulate(SMALL, H100.resized(8), config)
        return found.seconds, dict(found.memory.rows)["activations"]

    times, sizes = zip(*(step(layers) for layers in (0, 8, 16)))
    assert times[0] < times[1] < times[2]
    assert sizes[0] > sizes[1] > sizes[2]


def test_experts_are_spread_and_exchange_tokens():
    whole = simulate(SPARSE, H100.resized(8), ParallelConfig(devices=8, batch=8))
    spread = simulate(SPARSE, H100.resized(8), ParallelConfig(devices=8, batch=8, expert=8))
    assert whole.parts["expert"] == 0 < spread.parts["expert"]
    assert spread.memory.total < whole.memory.total


def test_sixteen_thousand_devices_are_one_pipeline():
    model = TransformerCosts(find_transformer("llama3-405b"))
    config = ParallelConfig(devices=16384, batch=2048, tensor=8, pipeline=16, chunks=8, zero=1, kernels="compiled")
    found = simulate(model, load_cluster("h100").resized(16384), config)
    assert found.run.plan.ndevs == 16
    assert 0.3 < found.mfu < 0.55
    assert stage_of(config, 16383) == 15
    assert stage_of(config, 1023) == 0


def test_prices_and_energy():
    cluster = H100.resized(8)
    assert simulate(SMALL, cluster, ParallelConfig(devices=8, batch=8)).money == 0
    priced = cluster.with_device(replace(cluster.device, price_per_hour=3.6))
    found = simulate(SMALL, priced, ParallelConfig(devices=8, batch=8))
    assert found.money == pytest.approx(found.seconds * 8 * 3.6 / 3600)
    assert found.joules == pytest.approx(found.seconds * 8 * 700)
    text = step_text(found)
    assert "price" in text
    assert "fits" in text
    assert step_json(found)["money_per_step"] == found.money


def test_equal_work_on_unequal_devices_waits_for_the_slowest_and_fits_the_smallest():
    groups = [{"device": name, "hosts": 1, "devices_per_host": 4} for name in ("a100", "l40s")]
    tiers = [tier.to_dict() for tier in H100.tiers]
    mixed = read_cluster({"groups": groups, "tiers": tiers})
    config = ParallelConfig(devices=8, batch=8)
    found = simulate(SMALL, mixed, config)
    alone = [simulate(SMALL, replace(mixed, groups=(replace(one, hosts=2),)), config) for one in mixed.groups]
    assert found.seconds >= max(one.seconds for one in alone) * (1 - 1e-9)
    assert found.memory.capacity == min(one.memory.capacity for one in alone)
    with pytest.raises(ConfigError, match="v100 has no rate for precision 'bf16'"):
        simulate(SMALL, read_cluster({"groups": [groups[0], {**groups[1], "device": "v100"}], "tiers": tiers}), config)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"devices": 12, "batch": 8, "tensor": 8}, ["12 devices for tensor 8", "multiple of 8"]),
        ({"devices": 8, "batch": 9, "micro_batch": 2}, ["batch 9 over 8 replicas", "multiple of 16"]),
        ({"devices": 8, "batch": 8, "expert": 3}, ["expert 3"]),
        ({"devices": 8, "batch": 8, "chunks": 2}, ["chunks = 2 without a pipeline"]),
        ({"devices": 8, "batch": 8, "zero": 4, "recompute": "ful"}, ["zero = 4", "did you mean 'full'"]),
        ({"devices": 0, "batch": 1.5}, ["devices = 0", "batch = 1.5"]),
        ({"devices": 8, "batch": 8, "order": ("tensor", "data")}, ["innermost first"]),
        ({"devices": 8, "batch": 8, "tensor_overlap": 2}, ["share from 0 to 1"]),
    ],
)
def test_contradictory_configurations(values, words):
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**values)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"devices": 8, "batch": 8, "tensor": 8, "precision": "fp4"}, "no rate for precision 'fp4'"),
        ({"devices": 4, "batch": 4}, "4 devices in the configuration, 8 in cluster"),
        ({"devices": 8, "batch": 8, "pipeline": 4, "chunks": 8}, "32 stages"),
        ({"devices": 8, "batch": 8, "expert": 2}, "without experts"),
    ],
)
def test_configurations_that_do_not_fit_the_model_or_the_cluster(values, words):
    with pytest.raises(ConfigError, match=words):
        simulate(SMALL, H100.resized(8), ParallelConfig(**values))
