"""The search finds the best of all configurations, keeps limits, gives reasons and explains failures."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.cluster import load_cluster, read_cluster
from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError
from gemini.tune import ParallelConfig, Transformer, TransformerCosts, TuningRequest, find_transformer, tune, tuner
from gemini.tune.mixed_cluster import assign_layers, tune_mixed
from gemini.tune.run_settings import run_settings, write_run_config
from gemini.tune.step_simulation import estimate, simulate

SMALL = TransformerCosts(Transformer(layers=8, hidden=1024, heads=8, vocab=32000, sequence=2048, gated=True, name="s"))
H100 = load_cluster("h100").resized(8)
TIERS = [{"name": "nvlink", "bandwidth_gb": 300}, {"name": "network", "bandwidth_gb": 25}]


def priced(price: float = 2.0):
    return H100.with_device(replace(H100.device, price_per_hour=price))


def test_no_configuration_of_a_small_space_is_faster():
    found = tune(TuningRequest(SMALL, H100, 32))
    every = []
    for tensor, pipeline, micro, zero, recompute in product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (0, 1, 2, 3), ("none", "selective", "full")
    ):
        try:
            config = ParallelConfig(
                devices=8, batch=32, tensor=tensor, pipeline=pipeline, micro_batch=micro, zero=zero, recompute=recompute
            )
            every.append(simulate(SMALL, H100, config))
        except ConfigError:
            continue
    assert found.best.seconds <= min(one.seconds for one in every if one.fits) * 1.01
    assert list(found.ranked) == sorted(found.ranked, key=lambda one: one.seconds)


@pytest.mark.parametrize(
    ("name", "cluster", "batch", "fixed", "hand"),
    [
        (
            "gpt3-175b", "a100", 64, {"precision": "fp16", "fused_loss": True, "overlap_data": False},
            {"devices": 64, "tensor": 8, "pipeline": 8, "chunks": 3, "recompute": "attention", "zero": 0},
        ),
        (
            "llama3-8b", "a100", 64, {"kernels": "eager"},
            {"devices": 64, "zero": 3, "recompute": "selective"},
        ),
        (
            "llama3-70b", "h100", 128,
            {"precision": "fp8", "attention": "tuned", "fused_loss": True, "tensor_overlap": 0.7, "reduce_bytes": 2},
            {"devices": 64, "tensor": 4, "pipeline": 4, "context": 2, "chunks": 5, "zero": 1},
        ),
    ],
)  # fmt: skip
def test_published_configurations_rank_in_the_top_tenth(name, cluster, batch, fixed, hand):
    model = TransformerCosts(find_transformer(name))
    devices = load_cluster(cluster).resized(hand["devices"])
    found = tune(TuningRequest(model, devices, batch, fixed, composed=0, finalists=5))
    config = ParallelConfig(batch=batch, **fixed, **hand)
    assert estimate(model, devices, config).fits
    assert found.rank_of(config) <= 0.10
    assert found.best.seconds <= 1.03 * simulate(model, devices, config).seconds


def test_fixed_degrees_and_sets_are_kept():
    found = tune(TuningRequest(SMALL, H100, 32, {"tensor": 2, "schedule": "gpipe"}, {"micro_batch": (2, 4)}))
    assert {one.config.tensor for one in found.found} == {2}
    assert {one.config.micro_batch for one in found.found} <= {2, 4}
    assert {one.config.schedule for one in found.found if one.config.pipeline > 1} == {"gpipe"}


def test_a_fixed_schedule_is_kept_to_the_end():
    found = tune(TuningRequest(SMALL, H100, 32, {"pipeline": 4, "schedule": "gpipe"}))
    assert {one.config.schedule for one in found.ranked} == {"gpipe"}
    with pytest.raises(ConfigError, match="chunks = 2 with 1f1b"):
        tune(TuningRequest(SMALL, H100, 32, {"chunks": 2, "schedule": "1f1b"}))


def test_device_counts_limits_and_money():
    request = TuningRequest(SMALL, priced(), 32, max_devices=8, tokens=1e9, objective="money")
    cheapest = tune(request)
    fastest = tune(replace(request, objective="time"))
    assert cheapest.best.money <= fastest.best.money
    assert fastest.best.seconds <= cheapest.best.seconds
    assert fastest.best.config.devices == 8
    hours = 1e9 / fastest.best.tokens * fastest.best.seconds / 3600
    bounded = tune(replace(request, max_hours=hours * 1.5))
    assert 1e9 / bounded.best.tokens * bounded.best.seconds / 3600 <= hours * 1.5
    with pytest.raises(ConfigError, match="longer than"):
        tune(replace(request, max_hours=hours / 100))
    with pytest.raises(ConfigError, match="costs more than"):
        tune(replace(request, max_money=1e-9))


def test_the_frontier_has_no_configuration_that_another_one_beats():
    found = tune(TuningRequest(SMALL, H100, 32))
    line = found.frontier()
    assert line[0].seconds == min(one.seconds for one in found.found)
    for one in line:
        assert not any(
            other.seconds < one.seconds and other.memory.total < one.memory.total * 0.99 for other in found.found
        )


def test_reasons_and_explanations():
    model = TransformerCosts(find_transformer("llama3-8b"))
    found = tune(TuningRequest(model, H100, 16))
    text = found.table()
    assert "why the first" in text
    assert any("instead of" in line and ("faster" in line or "slower" in line) for line in found.reasons(found.best))
    whole = ParallelConfig(devices=8, batch=16, zero=0)
    assert "needs" in found.explain(whole)
    slow = replace(found.best.config, recompute="full")
    assert "slower than the chosen one (recomputation" in found.explain(slow)
    assert json.loads(json.dumps(found.to_json()))["fitting"] == len(found.found)


def test_a_model_that_fits_nowhere_names_the_least_devices_that_would():
    model = TransformerCosts(find_transformer("llama3-70b"))
    with pytest.raises(ConfigError, match=r"fits nowhere.*\n.*\d+ devices would do") as caught:
        tune(TuningRequest(model, H100, 8))
    least = int(str(caught.value).split("→ ")[1].split()[0])
    assert tune(TuningRequest(model, H100.resized(least), least)).best.fits


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fixed": {"tensor": 8, "pipeline": 4}}, "tensor × context × pipeline of 32 fixed, at most 8"),
        ({"fixed": {"tensr": 8}}, "did you mean 'tensor'"),
        ({"fixed": {"tensor": 8}, "among": {"tensor": (1, 2)}}, "tensor is fixed and searched"),
        ({"max_money": 5.0, "tokens": 1e9}, "devices without a price"),
        ({"max_hours": 5.0}, "without its length"),
        ({"fixed": {"pipeline": 1, "chunks": 2}}, "chunks 2 with pipeline 1"),
        ({"fixed": {"schedule": "zb_h3"}}, "did you mean 'zb_h2'"),
        ({"fixed": {"precision": "fp4"}}, "no rate for precision 'fp4'"),
        ({"fixed": {"zero": 7}, "among": {"micro_batch": (1, "x")}}, r"zero = 7[\s\S]*micro_batch = 'x'"),
        ({"fixed": {"devices": "x", "sequence_parallel": "maybe"}}, r"devices = 'x'[\s\S]*give true or false"),
        ({"max_devices": 0, "memory_share": 2}, r"max_devices = 0[\s\S]*memory_share = 2"),
    ],
)
def test_contradictory_constraints(values, words):
    with pytest.raises(ConfigError, match=words):
        TuningRequest(SMALL, H100, 32, **values)


def test_an_interrupt_keeps_the_best_so_far(monkeypatch):
    request = TuningRequest(SMALL, H100, 32)
    real, calls = tuner.simulate, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(tuner, "simulate", interrupted)
    found = tune(request)
    assert found.stopped
    assert found.best.fits
    assert "interrupted" in found.table()


def test_an_interrupt_of_the_enumeration_keeps_what_was_found(monkeypatch):
    real, calls = tuner.estimate, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(tuner, "estimate", interrupted)
    found = tune(TuningRequest(SMALL, H100, 32, {"recompute": "none"}))
    assert found.stopped
    assert len(found.found) > 5
    assert found.best.fits


def test_the_configuration_is_one_that_gemini_python_reads(tmp_path):
    found = tune(TuningRequest(SMALL, H100.resized(4), 32, {"pipeline": 4, "tensor": 1}))
    settings = GeminiConfig.load(write_run_config(found.best, tmp_path / "gemini.json"))
    assert settings.pipeline_degree == 4
    assert settings.accum_degree == found.best.config.micro_batches
    whole = GeminiConfig(**run_settings(ParallelConfig(devices=4, batch=8)))
    assert (whole.replicas, whole.accum_degree) == (4, 8)  # two micro-batches each
    hybrid = ParallelConfig(devices=4, batch=8, tensor=2, pipeline=2)
    assert GeminiConfig(**run_settings(hybrid)).sharding_size == 2


def test_composed_schedules_are_valid_and_never_slower():
    request = TuningRequest(SMALL, H100.resized(4), 16, {"pipeline": 4, "chunks": 1, "tensor": 1})
    plain = tune(replace(request, composed=0))
    found = tune(request)
    assert found.best.seconds <= plain.best.seconds * (1 + 1e-9)
    for one in found.ranked:
        if one.config.schedule == "composed":
            one.run.plan.validate()
            assert one.run.peaks[0] > 0


# ── several device classes ───────────────────────────────────────────────────────────────────────────────────────────
@given(
    st.integers(2, 12),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=3),
)
@settings(max_examples=60)
def test_layers_are_assigned_as_well_as_by_trying_all(layers, classes):
    def slowest(counts):
        return max(-(-own // stages) * seconds for own, (seconds, stages, _) in zip(counts, classes))

    choices = [range(min(layers, stages * most) + 1) for _, stages, most in classes]
    every = [counts for counts in product(*choices) if sum(counts) == layers]
    found = assign_layers(layers, classes)
    if not every:
        assert found is None
        return
    assert sum(map(sum, found)) == layers
    assert max(max(held) * one[0] for held, one in zip(found, classes)) == min(map(slowest, every))
    assert all(max(held) <= one[2] for held, one in zip(found, classes))


def test_faster_devices_take_more_layers():
    groups = [{"device": name, "hosts": 1, "devices_per_host": 8} for name in ("h100", "a100")]
    mixed = read_cluster({"name": "mixed", "groups": groups, "tiers": TIERS})
    model = TransformerCosts(find_transformer("llama3-8b"))
    found = tune_mixed(TuningRequest(model, mixed, 32))
    best = found.best
    by_class = {name: sum(n for n, where in zip(best.layout, best.places) if where == name) for name in best.places}
    assert by_class["h100"] > by_class["a100"] > 0
    assert sum(best.layout) == 32
    even = tune(TuningRequest(model, load_cluster("a100").resized(16), 32, {"pipeline": best.config.pipeline}))
    assert best.seconds < even.best.seconds
    assert "on h100" in found.table()


def test_no_pipeline_over_the_classes_is_one_error():
    groups = [{"device": name, "hosts": 1, "devices_per_host": 8} for name in ("h100", "a100")]
    mixed = read_cluster({"name": "mixed", "groups": groups, "tiers": TIERS})
    model = TransformerCosts(find_transformer("llama3-405b"))
    with pytest.raises(ConfigError, match="no pipeline over these device classes"):
        tune_mixed(TuningRequest(model, mixed, 32))


def test_slow_devices_that_delay_fast_ones_are_noted():
    groups = [
        {"device": "h100", "hosts": 2, "devices_per_host": 8},
        {"device": "v100", "hosts": 1, "devices_per_host": 2},
    ]
    mixed = read_cluster({"name": "mixed", "groups": groups, "tiers": TIERS})
    found = tune_mixed(TuningRequest(SMALL, mixed, 32, {"precision": "fp16"}))
    assert "16 × h100 alone" in found.table()
