"""Graph devices: the device of every shard of every stage, for every form of a configuration."""

from __future__ import annotations

import pytest

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError
from gemini.tensorflow.graph_devices import graph_devices


def _mapped(*names: str) -> GeminiConfig:
    return GeminiConfig(device_mapping={f"stage_{at}": {"shard_0": name} for at, name in enumerate(names)})


def test_every_shard_of_a_stage_has_a_server_without_a_mapping() -> None:
    devices = graph_devices(GeminiConfig(mode="hybrid", pipeline_degree=2, sharding_size=2))
    job = "/job:worker/replica:0"
    assert devices.names == (
        (f"{job}/task:0/device:CPU:0", f"{job}/task:1/device:CPU:0"),
        (f"{job}/task:2/device:CPU:0", f"{job}/task:3/device:CPU:0"),
    )
    assert devices.tasks == 4


@pytest.mark.parametrize("config", [GeminiConfig(), GeminiConfig(mode="pipeline", pipeline_degree=1)])
def test_a_single_device_needs_no_server(config: GeminiConfig) -> None:
    devices = graph_devices(config)
    assert devices.names == (("/device:CPU:0",),)
    assert devices.tasks == 0


@pytest.mark.parametrize(
    ("given", "names", "tasks", "cpus"),
    [
        (("/device:CPU:0", "/cpu:3"), ("/device:CPU:0", "/device:CPU:3"), 0, 4),
        (("/device:GPU:0", "cuda:1", "gpu:2"), ("/device:GPU:0", "/device:GPU:1", "/device:GPU:2"), 0, 1),
        (("/device:TPU:0", "tpu:1"), ("/device:TPU:0", "/device:TPU:1"), 0, 1),
        (
            ("cpu", "cpu"),
            ("/job:worker/replica:0/task:0/device:CPU:0", "/job:worker/replica:0/task:1/device:CPU:0"),
            2,
            1,
        ),
        (
            ("/gpu:0", "/job:trainer/task:1/cpu:2"),
            ("/job:trainer/replica:0/task:0/device:GPU:0", "/job:trainer/replica:0/task:1/device:CPU:2"),
            2,
            1,
        ),
        (("/job:worker/task:0/cpu:0", "/job:worker/task:0/cpu:1"), ("/device:CPU:0", "/device:CPU:1"), 0, 2),
    ],
)  # fmt: skip
def test_names_of_tensorflow_pass_through(
    given: tuple[str, ...], names: tuple[str, ...], tasks: int, cpus: int
) -> None:
    devices = graph_devices(_mapped(*given))
    assert tuple(name for (name,) in devices.names) == names
    assert (devices.tasks, devices.cpus()) == (tasks, cpus)


def test_a_server_has_the_logical_devices_that_the_mapping_names() -> None:
    devices = graph_devices(_mapped("cpu", "/job:worker/task:1/cpu:2"))
    assert [devices.cpus(task) for task in (0, 1)] == [1, 3]


def test_all_unknown_devices_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        graph_devices(_mapped("node2/cpu", "/device:CPU:0", "vulkan:0"))
    text = str(raised.value)
    assert "device_mapping['stage_0']['shard_0'] = 'node2/cpu' is not a device of TensorFlow" in text
    assert "'vulkan:0'" in text
    assert "/job:worker/task:1/cpu:0" in text


def test_servers_of_two_jobs_are_refused() -> None:
    with pytest.raises(ConfigError, match="several jobs"):
        graph_devices(_mapped("/job:a/task:0/cpu:0", "/job:b/task:1/cpu:0"))


def test_pytorch_refuses_device_names_of_tensorflow() -> None:
    from torch import nn

    from gemini.runtime.devices.worker_devices import assign_devices

    with pytest.raises(ConfigError, match="/device:GPU:0, a device of TensorFlow, for a model of PyTorch"):
        assign_devices(nn.Linear(2, 2), _mapped("cpu", "/device:GPU:0"), 2)
