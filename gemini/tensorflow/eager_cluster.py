"""Eager cluster: joins the servers to the eager runtime of the script's process, so that `tf.function`s use them.

    import tensorflow as tf      the engine is installed
    x = tf.constant(1.0)         the first eager operation: TensorFlow initialises its runtime
                                 ─→ the servers are ready, this process becomes task 0 of their cluster
    train_step(x)                a function of TensorFlow: operations with a server's device run there

A runtime that is initialised cannot join: its variables would be lost. A program of graphs and sessions does not
initialise it; there the process of the script has a server of its own, see `servers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from gemini.tensorflow.servers import Servers

_undo: list[tuple[Any, str, Callable[..., Any]]] = []


def join_on_first_use(servers: Servers) -> None:
    """Join the servers, or configure the logical devices, when the eager runtime is first used."""
    from tensorflow.python.eager import context
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

    leave()
    initialise, call = context.Context.ensure_initialized, Function.__call__
    _undo.extend([(context.Context, "ensure_initialized", initialise), (Function, "__call__", call)])

    def ensure_initialized(self: Any) -> None:
        if not self._initialized and self._is_global_context and _is_eager(context):
            _prepare(self, servers)
        initialise(self)

    @wraps(call)
    def call_explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not servers.is_remote:
            return call(self, *args, **kwargs)
        with servers.explained():
            return call(self, *args, **kwargs)

    context.Context.ensure_initialized, Function.__call__ = ensure_initialized, call_explained


def leave() -> None:
    """Undo `join_on_first_use`; a runtime that has joined stays."""
    while _undo:
        owner, name, function = _undo.pop()
        setattr(owner, name, function)


def has_devices(servers: Servers) -> bool:
    """Return whether functions of TensorFlow in this process can use the devices of a configuration."""
    import tensorflow as tf

    present = {_short(device.name) for device in tf.config.list_logical_devices()}
    return all(_short(str(device)) in present for device in servers.devices)


def _short(name: str) -> str:
    return name.replace("/job:localhost/replica:0/task:0", "")


def _is_eager(context: Any) -> bool:
    return bool(context.default_execution_mode == context.EAGER_MODE)


def _prepare(runtime: Any, servers: Servers) -> None:
    if servers.is_remote:
        if servers.has_own_server or runtime._server_def is not None:
            return
        servers.wait_until_ready()
        servers.eager_runtime_joins()
        runtime._server_def = _server_def(servers)
        return
    count = servers.devices.cpus()
    cpus = runtime.list_physical_devices("CPU")
    if count > 1 and cpus and runtime.get_logical_device_configuration(cpus[0]) is None:
        from tensorflow.python.eager.context import LogicalDeviceConfiguration

        runtime.set_logical_device_configuration(cpus[0], [LogicalDeviceConfiguration() for _ in range(count)])


def _server_def(servers: Servers) -> Any:
    """Return the description of this process as task 0 of the servers' cluster."""
    import tensorflow.compat.v1 as tf

    cluster = tf.train.ClusterSpec(servers.cluster)
    made = tf.train.ServerDef(
        cluster=cluster.as_cluster_def(), job_name=servers.devices.job, task_index=0, protocol="grpc"
    )
    made.default_session_config.device_count["CPU"] = servers.devices.cpus(0)
    return made
