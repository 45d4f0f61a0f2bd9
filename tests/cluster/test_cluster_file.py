"""Clusters are read from presets, JSON and YAML; wrong ones raise one error with all faults."""

from __future__ import annotations

import json

import pytest

from gemini.cluster import load_cluster, read_cluster
from gemini.cluster.cluster_file import find_device_class, presets
from gemini.errors import ConfigError
from gemini.profiling.device_specs import SPECS

TIERS = [{"name": "nvlink", "bandwidth_gb": 450}, {"name": "rail", "bandwidth_gb": 50}]


@pytest.mark.parametrize("name", presets()["clusters"])
def test_presets_round_trip(name):
    cluster = load_cluster(name)
    assert read_cluster(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert cluster.resized(cluster.devices_per_host * 4).devices == cluster.devices_per_host * 4


@pytest.mark.parametrize("name", presets()["devices"])
def test_profiling_describes_devices_by_the_figures_of_the_presets(name):
    device, spec = find_device_class(name), SPECS[name]
    assert spec.matrix_tflops["float16"] == device.tflops["fp16"]
    assert (spec.bandwidth_gb, spec.vector_tflops) == (device.bandwidth_gb, device.tflops["fp32"])


def test_memory_is_what_drivers_report():
    """80 GB of a vendor are GiB, less what the error correction takes."""
    for name, vendor in (("a100", 80), ("a100-40gb", 40), ("h100", 80), ("h200", 141), ("l4", 24)):
        assert 0.9 * vendor <= find_device_class(name).memory_gib <= vendor


def test_json_and_yaml_files_are_equal(tmp_path):
    yaml = pytest.importorskip("yaml")
    data = {"name": "ours", "device": "h100", "hosts": 2, "devices_per_host": 8, "tiers": TIERS}
    (tmp_path / "ours.json").write_text(json.dumps(data))
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(data))
    assert load_cluster(tmp_path / "ours.json") == load_cluster(tmp_path / "ours.yaml")
    assert load_cluster(tmp_path / "ours.json").devices == 16


def test_a_preset_with_changes():
    cluster = read_cluster({"preset": "h100", "hosts": 4, "device": {"preset": "h100", "price_per_hour": 2.0}})
    assert (cluster.devices, cluster.price_per_hour) == (32, 64.0)


def test_groups_of_several_kinds():
    groups = [{"device": name, "hosts": hosts, "devices_per_host": 8} for name, hosts in (("h100", 2), ("a100", 1))]
    cluster = read_cluster({"groups": groups, "tiers": TIERS})
    assert cluster.devices == 24
    assert not cluster.is_homogeneous
    with pytest.raises(ConfigError, match="several kinds"):
        cluster.resized(48)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"device": "h10", "tiers": TIERS}, "did you mean 'h100'"),
        ({"preset": "h20"}, "did you mean 'h200'"),
        ({"devices": "h100", "tiers": TIERS}, "did you mean 'device'"),
        ({"tiers": TIERS}, "no device"),
        ({"device": "h100"}, "no tiers"),
        ({"device": "h100", "hosts": 0, "tiers": TIERS}, "hosts = 0"),
        ({"device": "h100", "hosts": 2, "tiers": TIERS[:1]}, "no links between them"),
        ({"device": "h100", "hosts": 9, "tiers": [*TIERS[:1], {**TIERS[1], "units": 8}]}, "connect 8 hosts of 9"),
        ({"device": "h100", "hosts": 9, "tiers": [*TIERS, TIERS[1]]}, "has no units"),
        ({"device": "h100", "tiers": [{"name": "x", "bandwidth_gb": -1}]}, "bandwidth_gb = -1"),
        ({"device": "h100", "tiers": [{"name": "x", "bandwith_gb": 1}]}, "did you mean 'bandwidth_gb'"),
        ({"device": {"name": "x", "memory_gib": 1, "bandwidth_gb": 1, "tflops": {}}, "tiers": TIERS}, "no tflops"),
        (
            {"device": {"name": "x", "memory_gib": 0, "bandwidth_gb": 1, "tflops": {"bf16": 1}}, "tiers": TIERS},
            "memory",
        ),
        ({"groups": [{"hosts": 3}], "tiers": TIERS}, "no group of hosts"),
        ([], "a cluster is an object"),
        ("h300", "did you mean 'h"),
    ],
)
def test_wrong_clusters_name_fault_and_remedy(data, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_cluster(data)
    assert "→" in str(caught.value)


def test_wrong_files(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.yaml").write_text("a: [")
    for name in ("broken.json", "broken.yaml", "absent.json"):
        with pytest.raises(ConfigError, match=name):
            load_cluster(tmp_path / name)


def test_sizes_that_are_no_whole_hosts():
    with pytest.raises(ConfigError, match="give 8 or 16"):
        load_cluster("h100").resized(12)
    assert load_cluster("h100").resized(4).devices_per_host == 4


def test_an_unknown_precision_names_those_known():
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        find_device_class("a100").product_seconds(1e9, "bf61")
