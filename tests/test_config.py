"""A configuration is checked as a whole, comes from four places, and survives every round trip."""

import ast
import json
import pickle
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gemini
from gemini import GeminiConfig, Mode, auto, hybrid, pipeline, sharding, sharding_and_pipeline
from gemini.config.gemini_config import setting_names
from gemini.errors import ConfigError

MAPPING = {"stage_0": {"shard_0": "cuda:0", "shard_1": "cuda:0"}, "stage_1": {"shard_0": "cuda:1", "shard_1": "cpu"}}


def faults(**given) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        GeminiConfig(**given)
    return [str(fault) for fault in caught.value.faults]


def test_modes_are_importable_names_and_strings():
    assert GeminiConfig(mode=sharding_and_pipeline, sharding_size=4, pipeline_degree=8).mode == "sharding_and_pipeline"
    assert GeminiConfig(mode="hybrid").mode is hybrid is Mode.SHARDING_AND_PIPELINE
    assert [GeminiConfig(mode=mode).mode for mode in (auto, sharding, pipeline)] == ["auto", "sharding", "pipeline"]


def test_stage_cnt_is_another_spelling():
    assert GeminiConfig(stage_cnt=3) == GeminiConfig(pipeline_degree=3)
    assert "stage_cnt = 3 and pipeline_degree = 4 are one setting" in faults(stage_cnt=3, pipeline_degree=4)[0]
    assert "stage_cnt = 3 and pipeline_degree = 4 are one setting" in faults(pipeline_degree=4, stage_cnt=3)[0]


def test_is_frozen_hashable_and_pickles():
    config = GeminiConfig(device_mapping=MAPPING)
    with pytest.raises(AttributeError):
        config.workers = 3
    with pytest.raises(TypeError):
        config.device_mapping["stage_0"] = {}
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(GeminiConfig(device_mapping=MAPPING))


def test_all_faults_in_one_error_each_with_value_and_remedy():
    found = faults(mod="x", mode="pipline", sharding_size=0, accum_degree=True, memory_limit="12XB", seed=-1)
    assert len(found) == 6
    assert all("→" in fault for fault in found)
    assert "did you mean 'mode'?" in found[0]
    assert "did you mean 'pipeline'?" in found[1]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mode": "pipeline", "sharding_size": 2}, "mode = 'pipeline' with sharding_size = 2"),
        ({"mode": "sharding", "pipeline_degree": 2}, "mode = 'sharding' with pipeline_degree = 2"),
        ({"device_mapping": MAPPING, "pipeline_degree": 3}, "names 2 stages, pipeline_degree = 3"),
        ({"device_mapping": MAPPING, "sharding_size": 1}, "names 2 shards, sharding_size = 1"),
        ({"device_mapping": MAPPING, "workers": 3}, "4 entries, workers = 3"),
        ({"device_mapping": {"stage_1": {"shard_0": "cpu"}}}, "got stage_1"),
        ({"device_mapping": {"stage_0": {"shard_0": "cuda 0"}}}, "'cuda 0' is not a device"),
        ({"device_mapping": {"stage_0": {}}}, "must map shards to devices"),
        ({"device_mapping": []}, "a mapping from stages"),
        ({"partitioner": "metsi"}, "did you mean 'metis'?"),
        ({"schedule": "1f1c"}, "did you mean '1f1b'?"),
        ({"data_parallel": "replicate"}, "did you mean 'replicated'?"),
        ({"data_parallel": "replicated", "replicas": 1}, "data_parallel = 'replicated' with replicas = 1"),
        ({"workers": 2.5}, "not float"),
        ({"sharding_dim": "1"}, "not str"),
        ({"strict": 1}, "must be true or false"),
        ({"run_folder": " "}, "a name is needed"),
        ({"memory_limit": -1}, "must be above zero"),
        ({"watchdog": 0}, "must be above zero"),
        ({"watchdog": "1m"}, "a number of seconds"),
        ({"memory_limit": float("nan")}, "not an amount of memory"),
    ],
)
def test_wrong_and_contradictory_settings(given, text):
    assert any(text in fault for fault in faults(**given))


@pytest.mark.parametrize(
    ("written", "bytes_"), [("12GB", 12 * 10**9), ("1.5 GiB", 3 * 2**29), (4096, 4096), ("512k", 512_000), ("7", 7)]
)
def test_memory_takes_units(written, bytes_):
    assert GeminiConfig(memory_limit=written).memory_limit == bytes_


def test_precedence_keywords_flags_file_environment(tmp_path):
    file = tmp_path / "gemini.json"
    file.write_text(json.dumps({"workers": 3, "accum_degree": 3, "stage_cnt": 3}))
    environ = {"GEMINI_CONFIG": json.dumps({"workers": 4, "accum_degree": 4, "pipeline_degree": 4, "seed": 4})}
    config = GeminiConfig.load(file, flags={"workers": 2, "accum_degree": 2, "seed": None}, environ=environ, workers=1)
    assert (config.workers, config.accum_degree, config.pipeline_degree, config.seed) == (1, 2, 3, 4)


def test_environment_may_name_a_file(tmp_path):
    file = tmp_path / "machine.json"
    file.write_text('{"workers": 7}')
    assert GeminiConfig.load(environ={"GEMINI_CONFIG": str(file)}).workers == 7
    assert GeminiConfig.load(environ={}).workers is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"workers": 2,}', "line 1"),
        ("[1]", "a JSON object, not list"),
        ("", "not JSON"),
        ('mode = "pipeline"', "a configuration is JSON: write"),
        ("mode: pipeline", "a configuration is JSON: write"),
        ('{"workers": 2,\n', "not JSON"),
        ('{"workers": 2, "workers": 3}', "'workers' occurs twice"),
        ('{"wrokers": 2}', "did you mean 'workers'?"),
        ('{"workers": "2"}', "not str"),
    ],
)
def test_bad_files_name_the_file_and_the_place(tmp_path, text, message):
    file = tmp_path / "gemini.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"gemini\.json") as caught:
        GeminiConfig.load(file, environ={})
    assert message in str(caught.value)


def test_unreadable_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        GeminiConfig.load(tmp_path / "none.json", environ={})


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "mode": st.sampled_from(["auto", "hybrid"]),
            "sharding_size": st.integers(1, 64),
            "sharding_dim": st.integers(-4, 4),
            "stage_cnt": st.integers(1, 64),
            "accum_degree": st.integers(1, 64),
            "memory_limit": st.integers(1, 2**50),
            "workers": st.integers(1, 64),
            "seed": st.integers(0, 2**31),
            "strict": st.booleans(),
        },
    )
)
def test_json_round_trip(given):
    config = GeminiConfig(**given)
    assert GeminiConfig.load(environ={"GEMINI_CONFIG": config.to_json()}) == config


def test_setting_names_cover_the_fields():
    assert {"mode", "sharding_size", "pipeline_degree", "stage_cnt", "device_mapping"} <= set(setting_names())


@pytest.mark.parametrize(
    ("given", "asks"),
    [
        ({}, False),
        ({"seed": 3}, False),
        ({"mode": "pipeline"}, True),
        ({"stage_cnt": 2}, True),
        ({"workers": 1}, False),
    ],
)
def test_settings_that_ask_for_workers(given, asks):
    assert GeminiConfig(**given).asks_for_workers is asks


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"mode": "sharding", "sharding_dim": 1}, "sharding_dim = 1"),
        ({"device_mapping": {**MAPPING, "stage_1": {"shard_0": "cpu"}}}, "stage_0 has 2, stage_1 has 1"),
        ({"device_mapping": {"stage_0": {"shard_0": "cpu", "shard_1": "cuda:0"}}}, "a shard on cuda:0"),
        (
            {"mode": "pipeline", "device_mapping": {"stage_0": {"shard_0": "cpu", "shard_1": "cpu"}}},
            "use mode='hybrid'",
        ),
        ({"mode": "sharding", "device_mapping": {f"stage_{at}": {"shard_0": "cpu"} for at in (0, 1)}}, "2 stages"),
    ],
)
def test_settings_without_an_implementation_are_refused_before_anything_starts(given, text):
    with pytest.raises(ConfigError) as caught:
        GeminiConfig(**given).check_supported()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({"mode": "sharding", "sharding_size": 2}, (1, 2)),
        ({"mode": "sharding", "workers": 4}, (1, 4)),
        ({"mode": "hybrid", "sharding_size": 2, "pipeline_degree": 3}, (3, 2)),
        ({"mode": "hybrid", "sharding_size": 2, "workers": 8}, (4, 2)),
        ({"mode": "pipeline", "pipeline_degree": 2}, (2, 1)),
        ({"device_mapping": {f"stage_{at}": {"shard_0": "cpu", "shard_1": "cpu"} for at in (0, 1)}}, (2, 2)),
    ],
)
def test_stages_and_shards_of_a_configuration(given, counts):
    config = GeminiConfig(**given)
    config.check_supported()
    assert (config.stage_count, config.shard_count) == counts


def test_settings_with_an_implementation_are_supported():
    GeminiConfig().check_supported()
    GeminiConfig(mode="pipeline", pipeline_degree=2, sharding_size=1).check_supported()


def test_every_field_has_a_reader():
    package = Path(gemini.__file__).parent
    read = {
        node.attr
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    assert [entry.name for entry in fields(GeminiConfig) if entry.name not in read] == []


def test_a_device_mapping_may_be_json_or_a_file(tmp_path):
    mapping = {"stage_0": {"shard_0": "cpu"}, "stage_1": {"shard_0": "cpu"}}
    file = tmp_path / "devices.json"
    file.write_text(json.dumps(mapping))
    assert GeminiConfig(device_mapping=json.dumps(mapping)) == GeminiConfig(device_mapping=str(file))
    assert "neither JSON nor a readable JSON file" in faults(device_mapping=str(tmp_path / "none.json"))[0]
